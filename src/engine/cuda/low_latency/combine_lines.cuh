// Partial sums in lines of 128 bytes: eight threads store a line in one instruction and load it in one, and between GPUs joined by NVLink
// such a line is never seen in part (tests/cuda has the litmus test that this rests on). So one epoch stands for eight words, in the
// last four bytes of the line; what was there comes in a flagged word of its own, which is whole anyway.
#pragma once
#include "engine/cuda/low_latency/parts.cuh"

namespace turnout::engine::cuda::low_latency {

/// Words of 16 bytes of a unit, and those that hold what the epochs of its lines have taken.
template <DType kType>
inline constexpr uint32_t kUnitWords = kPayload<kType> / 4;
template <DType kType>
inline constexpr uint32_t kUnitRest = kUnitWords<kType> / kWordPayload;

/// Code for older GPUs has no lines, and no Buffer that has one of them has any.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
inline constexpr bool kMayHaveLines = false;
#else
inline constexpr bool kMayHaveLines = true;
#endif

/// Whether partial sums come in lines: a constant where Args say so, else the same for all calls of a Buffer.
template <class Args>
__device__ __forceinline__ bool has_lines(const Work<Args>& w) {
  if constexpr (requires { Args::kHasLines; }) return Args::kHasLines;
  else return kMayHaveLines && w.f.lines != 0;
}
__device__ __forceinline__ bool ends_line() { return lane_id() % PartialFormat::kLineUnits == PartialFormat::kLineUnits - 1; }

/// Word `q` of a unit, in a line. Offsets are few bits and have no sign, so that they take few registers.
template <class Word>
__device__ __forceinline__ Word* line_word(const auto& w, Word* row, uint32_t unit, uint32_t q) {
  return row + w.a.common.arena.ll_combine_lines / sizeof(Word) + (unit + q * static_cast<uint32_t>(w.f.units));
}
/// What the epochs of the unit's lines have taken.
template <DType kType, class Word>
__device__ __forceinline__ Word* rest_word(const auto& w, Word* row, uint32_t unit, uint32_t e) {
  return row + (static_cast<uint32_t>(w.f.rest) + unit / PartialFormat::kLineUnits * kUnitRest<kType> + e);
}
/// Words of a unit that come: where the third chunks of a whole line are behind the end of the row, those do not.
template <DType kType>
__device__ __forceinline__ uint32_t num_line_words(const auto& w, uint32_t unit) {
  const uint32_t third = unit / PartialFormat::kLineUnits * PartialFormat::kLineUnits + 2 * static_cast<uint32_t>(w.f.units);
  return third * kUnitChunk < static_cast<uint32_t>(w.a.hidden) ? kUnitWords<kType> : kUnitWords<kType> / 3 * 2;
}

/// The whole warp calls it. What some threads do alone comes first, and is over for all before the first line: then no compiler has the
/// threads of a line take two ways.
template <DType kType>
__device__ __forceinline__ void send_lines(const auto& w, uint4* to, int unit, const uint32_t* p) {
  const uint32_t epoch = w.call.epoch;
  const auto mine = static_cast<uint32_t>(unit);
  if (unit < w.f.units && ends_line()) {
#pragma unroll
    for (uint32_t e = 0; e < kUnitRest<kType>; ++e) {
      store_word(rest_word<kType>(w, to, mine, e), uint4{p[12 * e + 3], p[12 * e + 7], p[12 * e + 11], epoch});
    }
  }
  __syncwarp();
  if (unit >= w.f.units) return;  // so are all of its line
  const uint32_t num = num_line_words<kType>(w, mine);
#pragma unroll
  for (uint32_t q = 0; q < kUnitWords<kType>; ++q) {
    if (q < num) store_word(line_word(w, to, mine, q), uint4{p[4 * q], p[4 * q + 1], p[4 * q + 2], ends_line() ? epoch : p[4 * q + 3]});
  }
}

/// wait_for() of a whole warp: its threads see and decide the same.
template <class Ready, class Seen>
__device__ __forceinline__ bool wait_together(const Common& c, Phase phase, int peer, uint32_t epoch, Ready ready, Seen seen) {
  if constexpr (kBareWaits) return wait_bare(ready);
  Waited waited = 0;
  bool last = false;
#pragma unroll 1
  for (uint32_t i = 0;; ++i) {
    if (ready()) return true;
    if (last) {
      const uint32_t found = seen();
      if (looks_once_more(waited)) note_expired(phase, peer, found, said_in(waited));
      return false;
    }
    if (i % 64 != 63) continue;
    waited = keep_waiting(c, peer, epoch, true, waited);
    if (__any_sync(kFull, waited == kGivenUp)) return false;
    last = __any_sync(kFull, looks_once_more(waited));
  }
}

/// receive_words() of lines. The whole warp calls it, and all of it gets the same answer.
template <DType kType>
__device__ __forceinline__ bool receive_lines(const auto& w, int rank, const uint4* from, int unit, bool active, bool* some, uint32_t* out) {
  constexpr uint32_t kNum = kUnitWords<kType>, kRest = kUnitRest<kType>;
  const uint32_t epoch = w.call.epoch;
  const auto mine = static_cast<uint32_t>(active ? unit : unit % PartialFormat::kLineUnits);  // those behind the last line look at the first
  const uint32_t num = num_line_words<kType>(w, mine);
  uint4 words[kNum], rest[kRest], m{};
#pragma unroll
  for (uint32_t e = 0; e < kRest; ++e) rest[e] = uint4{0, 0, 0, epoch};
  const bool good = wait_together(
      w.a.common, Phase::low_latency_partials, rank, epoch,
      [&] {
        m = load_word(from + w.f.mask);
        if (ends_line()) {
#pragma unroll
          for (uint32_t e = 0; e < kRest; ++e) rest[e] = load_word(rest_word<kType>(w, from, mine, e));
        }
        __syncwarp();
#pragma unroll
        for (uint32_t q = 0; q < kNum; ++q) {
          words[q] = load_word(line_word(w, from, mine, q < num ? q : 0));
        }
        bool fits = true;
#pragma unroll
        for (uint32_t q = 0; q < kNum; ++q) fits = fits && words[q].w == epoch;
#pragma unroll
        for (uint32_t e = 0; e < kRest; ++e) fits = fits && rest[e].w == epoch;
        *some = __all_sync(kFull, fits || !ends_line());
        return *some || __any_sync(kFull, m.w == epoch && (m.x | m.y) == 0);
      },
      [&] {
        const uint32_t shown = __shfl_sync(kFull, words[0].w, PartialFormat::kLineUnits - 1);
        return shown != epoch ? shown : m.w;
      });
#pragma unroll
  for (uint32_t q = 0; q < kNum; ++q) {
    const uint4 r = rest[q / kWordPayload];
    const uint32_t taken = q % kWordPayload == 0 ? r.x : q % kWordPayload == 1 ? r.y : r.z;
    out[4 * q] = words[q].x, out[4 * q + 1] = words[q].y, out[4 * q + 2] = words[q].z;
    out[4 * q + 3] = ends_line() ? taken : words[q].w;
  }
  return good;
}

}  // namespace turnout::engine::cuda::low_latency
