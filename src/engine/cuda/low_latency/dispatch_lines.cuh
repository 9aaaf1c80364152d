// Dispatched rows in whole lines, where all GPUs are joined so that a line of 128 bytes shows as a whole (Common::lines): eight words of
// 16 bytes, stored by eight neighbouring lanes in one instruction and loaded by eight in one. The last 32 bits of a line are the epoch,
// the rest is payload: 124 bytes of 128 instead of 12 of 16. tests/cuda has the litmus test that this rests on. A staged row that has
// carried lines never carries words of 12 bytes again: their payload could look like an epoch. So all dispatches of a Buffer are alike.
#pragma once
#include "engine/cuda/low_latency/format.h"
#include "engine/cuda/low_latency/start.cuh"

namespace turnout::engine::cuda::low_latency {

/// The lane's part of a line. Rows, and what a warp does of them, begin at lanes whose number is a multiple of kLineWords.
__device__ __forceinline__ int line_lane() { return lane_id() % kLineWords; }

/// Word `w` of a row, as it travels.
__device__ __forceinline__ uint4 word_of(const auto& f, const std::byte* row, int w, uint32_t epoch) {
  if (f.lines) {
    const auto* p = reinterpret_cast<const uint32_t*>(row + line_byte(w));
    return {p[0], p[1], p[2], w % kLineWords == kLineWords - 1 ? epoch : p[3]};
  }
  const uint32_t* p = reinterpret_cast<const uint32_t*>(row) + kWordPayload * w;
  return {p[0], p[1], p[2], epoch};
}
/// Words of a row to its place: from `first` + lane on, as far as `end`, which the warp goes to in steps of `step`.
__device__ __forceinline__ void store_words(const auto& f, uint4* to, const std::byte* row, int first, int end, int step, uint32_t epoch) {
#pragma unroll 1
  for (int base = first; base < end; base += step) {
    const int w = base + lane_id();
    uint4 v{};
    if (w < end) v = word_of(f, row, w, epoch);
    if (f.lines) __syncwarp();  // those of a line store together
    if (w < end) store_word(to + w, v);
  }
}

/// wait_for() of a warp that looks at lines: all its lanes go on, or none. `look()` loads; it says whether this lane misses nothing.
template <class Look, class Seen>
__device__ __forceinline__ bool wait_for_lines(const Common& c, int peer, uint32_t epoch, Look look, Seen seen) {
  if constexpr (kBareWaits) return wait_bare([&] { return __all_sync(kFull, look()) != 0; });
  Waited waited = 0;
#pragma unroll 1
  for (uint32_t i = 0;; ++i) {
    const bool here = look();
    if (__all_sync(kFull, here)) return true;
    if (looks_once_more(waited)) {  // it has not come since either
      if (!here) note_expired(Phase::low_latency_rows, peer, seen(), said_in(waited));
      return false;
    }
    if (i % 64 != 63) continue;
    if (lane_id() == 0) waited = keep_waiting(c, peer, epoch, true, waited);
    waited = __shfl_sync(kFull, waited, 0);
    if (waited == kGivenUp) return false;
  }
}
/// Whether the lane's word says that its line is there, if it is the one that says it.
__device__ __forceinline__ bool is_no_obstacle(const uint4& word, uint32_t epoch) { return line_lane() != kLineWords - 1 || word.w == epoch; }

/// The payload of a word of a line to shared memory.
__device__ __forceinline__ void keep_line_word(std::byte* row, int w, const uint4& v) {
  auto* to = reinterpret_cast<uint32_t*>(row + line_byte(w));
  to[0] = v.x, to[1] = v.y, to[2] = v.z;
  if (line_lane() != kLineWords - 1) to[3] = v.w;
}

/// 32 bits of a staged row, at byte `at` of its payload: eight lanes ask for one of them and get it. The whole warp calls it. False: given up.
__device__ __forceinline__ bool wait_for_line_value(const Common& c, int s, uint32_t epoch, const uint4* row, int at, uint32_t* value) {
  const int inside = at % kLinePayload;
  const uint4* from = row + at / kLinePayload * kLineWords + line_lane();
  uint4 v{};
  const bool good = wait_for_lines(
      c, s, epoch,
      [&] {
        v = load_word(from);
        return is_no_obstacle(v, epoch);
      },
      [&] { return v.w; });
  const int part = inside % 16 / 4;
  const uint32_t mine = part == 0 ? v.x : part == 1 ? v.y : part == 2 ? v.z : v.w;
  *value = __shfl_sync(kFull, mine, lane_id() - line_lane() + inside / 16);
  return good;
}

}  // namespace turnout::engine::cuda::low_latency
