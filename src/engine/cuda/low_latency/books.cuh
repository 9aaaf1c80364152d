// What the kernels of a low-latency combine have in common: the words of a partial sum, the work of blocks that have not started, the
// end of a token, and the books (masks, scalars, num_lost), which the last warp of a block keeps.
#pragma once
#include <cmath>

#include "engine/cuda/device/chunk.cuh"
#include "engine/cuda/low_latency/combine_lines.cuh"

namespace turnout::engine::cuda::low_latency {

/// Entries of a token that a lane holds: 32 or 64 a warp.
template <bool kFast>
inline constexpr int kHalvesOf = kFast ? 1 : 2;

__device__ __forceinline__ int num_unit_threads() { return num_threads() - 32; }
__device__ __forceinline__ bool is_clerk() { return warp_id() == num_warps() - 1; }

/// The scalar of entry `k` of received row `n`, where there is one.
template <int kHalves>
__device__ __forceinline__ float scalar_of(const AnyCombine auto& a, const Terms<kHalves>& t, int n, int h) {
  const int k = h * 32 + lane_id();
  if (k >= a.num_topk || t.row[h] < 0) return 0.0f;
  return a.layout == Layout::rank_major ? a.side[static_cast<int64_t>(n) * a.num_topk + k] : a.side[t.row[h]];
}

/// The mask of a partial sum, and its scalars. One warp.
template <int kHalves>
__device__ __forceinline__ void send_books(const auto& w, const Terms<kHalves>& t, int n, uint4* to) {
  const auto& a = w.a;
  if (lane_id() == 0) store_word(to + w.f.mask, uint4{static_cast<uint32_t>(t.mask), static_cast<uint32_t>(t.mask >> 32), 0, w.call.epoch});
  if (!a.has_side) return;
  float scalar[kHalves];
#pragma unroll
  for (int h = 0; h < kHalves; ++h) scalar[h] = scalar_of(a, t, n, h);
  for (int first = 0; first < a.num_topk; first += kWordPayload) {
    uint32_t p[kWordPayload];
    for (int x = 0; x < kWordPayload; ++x) {
      const int k = first + x;
      p[x] = __float_as_uint(entry_of(scalar, k));
    }
    if (lane_id() == 0) store_word(to + w.f.mask + 1 + first / kWordPayload, uint4{p[0], p[1], p[2], w.call.epoch});
  }
}

template <DType kType>
__device__ __forceinline__ void send_unit(const auto& w, uint4* to, int unit, const uint32_t* p) {
  if (has_lines(w)) return send_lines<kType>(w, to, unit, p);
  if (unit >= w.f.units) return;
#pragma unroll
  for (int j = 0; j < kWords<kType>; ++j) store_word(to + j * w.f.units + unit, uint4{p[3 * j], p[3 * j + 1], p[3 * j + 2], w.call.epoch});
}

/// All that worker `worker` owes, by one warp: for a block that has not started. Slow, but it hardly ever happens.
template <DType kType, bool kFast>
__device__ __forceinline__ void send_for(const Work<CombineArgs>& w, int worker) {
  int n = 0;
  uint4* to = nullptr;
#pragma unroll 1
  for (Owed owed(w, worker); owed.next(w, &n, &to);) {
    const Terms<kHalvesOf<kFast>> t = terms_of(w.a, n, ask_terms<kHalvesOf<kFast>>(w.a, n));
    send_books(w, t, n, to);
    if (t.mask == 0) continue;
#pragma unroll 1
    for (int base = 0; base < w.f.units; base += 32) {
      const int unit = base + lane_id();
      uint32_t p[kPayload<kType>];
      sum_terms<kType, kFast>(w, t, false, {}, place_of<kType>(w.a, unit, w.f.units, unit < w.f.units), p);
      send_unit<kType>(w, to, unit, p);
    }
  }
}

/// The work of all blocks that have not started, by the clerk.
template <DType kType, bool kFast>
__device__ __noinline__ void send_for_rest(Work<CombineArgs> w, FactWords* facts) {
  const Common& c = w.a.common;
#pragma unroll 1
  for (int b = next_unstarted(c, w.call.epoch, 0, true); b >= 0; b = next_unstarted(c, w.call.epoch, b + 1, false)) {
    if (!__any_sync(kFull, lane_id() == 0 && take_over(c, b, w.call.epoch))) continue;
    if (b == 0) send_facts(c, w.call, false, facts);
    if (worker_of(b) >= 0) send_for<kType, kFast>(w, worker_of(b));
  }
}

template <DType kType>
__device__ __forceinline__ bool receive_unit(const auto& w, int rank, const uint4* from, int unit, bool active, bool* some, uint32_t* out) {
  return has_lines(w) ? receive_lines<kType>(w, rank, from, unit, active, some, out) : receive_words<kType>(w, rank, from, unit, active, some, out);
}

/// Adds a unit of a token: `mine` (if `own`) and what comes back, ranks ascending. False for a thread that gave up.
template <DType kType, bool kFast, int kHalves>
__device__ __forceinline__ bool add_unit(const auto& w, int64_t token, const Parts<kHalves>& parts, uint64_t own, const Place& place, int unit,
                                         const uint32_t* mine) {
  const auto& a = w.a;
  const int me = a.common.team.rank;
  const bool active = unit < w.f.units;
  uint32_t part[kPayload<kType>];
  float sum[kUnit];
#pragma unroll
  for (int i = 0; i < kUnit; ++i) sum[i] = -0.0f;
  bool some = false;
#pragma unroll 1
  for (int rank = -1, at = 0; (rank = next_part(parts, rank, &at)) >= 0;) {
    bool comes = own != 0;
    if (rank != me && !__all_sync(kFull, receive_unit<kType>(w, rank, staged(w, rank, at), unit, active, &comes, part))) return false;
    if (!comes) continue;
    some = true;
#pragma unroll
    for (int i = 0; i < kPayload<kType>; ++i) part[i] = rank == me ? mine[i] : part[i];
#pragma unroll
    for (int i = 0; i < kUnit; ++i) sum[i] += value_of<kType>(part, i);
  }
#pragma unroll
  for (int i = 0; i < kUnit; ++i) sum[i] = some ? sum[i] : 0.0f;
  round_unit<kType>(sum, part);
  store_unit<kType, kFast>(a.out + token * a.out_stride, place, part);
  return true;
}

/// The masks of a token's parts as they are now, each in the lane that holds the part.
__device__ __forceinline__ uint4 ask_masks(const auto& w, const Parts<1>& parts) {
  const int rank = parts.rank[0];
  return rank >= 0 && rank != w.a.common.team.rank ? load_word(staged(w, rank, parts.at[0]) + w.f.mask) : uint4{};
}
/// The books of a token: what was lost of it, and its scalars. What the clerk does. False for a thread that gave up. `seen`: of ask_masks(), or
/// zeros. Of a mask that is seen all 32-bit words are looked at: ptxas makes two accesses of a load whose middle nobody wants, and then the
/// epoch may be newer than the mask.
template <int kHalves>
__device__ __forceinline__ bool keep_books(const auto& w, int64_t token, const Parts<kHalves>& parts, int own_row, const Terms<kHalves>& asked,
                                           uint4 seen = {}) {
  const auto& a = w.a;
  const int me = a.common.team.rank;
  const Terms<kHalves> own = terms_of(a, own_row, asked);
  uint64_t present = own.mask;
  float scalar[kHalves];
#pragma unroll
  for (int h = 0; h < kHalves; ++h) scalar[h] = a.has_side && own_row >= 0 ? scalar_of(a, own, own_row, h) : 0.0f;
  for (int rank = -1, at = 0; (rank = next_part(parts, rank, &at)) >= 0;) {
    if (rank == me) continue;
    const uint4* from = staged(w, rank, at);
    uint4 word{};
    bool good = false;
    if (kHalves == 1) {
      const int holder = __ffs(static_cast<int>(__ballot_sync(kFull, parts.rank[0] == rank))) - 1;
      word = {__shfl_sync(kFull, seen.x, holder), __shfl_sync(kFull, seen.y, holder), __shfl_sync(kFull, seen.z, holder),
              __shfl_sync(kFull, seen.w, holder)};
      good = word.w == w.call.epoch && (word.y | word.z) == 0;
    }
    if (!good) good = wait_for_word(a.common, Phase::low_latency_partials, rank, w.call.epoch, true, from + w.f.mask, &word);
    const uint64_t mask = word.x | static_cast<uint64_t>(word.y) << 32;
    if (good && a.has_side) good = receive_scalars(w, rank, from, mask, scalar);
    if (!__all_sync(kFull, good)) return false;
    present |= mask;
  }
  int lost = 0;
#pragma unroll
  for (int h = 0; h < kHalves; ++h) {
    const int k = h * 32 + lane_id();
    lost += __popc(__ballot_sync(kFull, (parts.asked >> h & 1) && !(present >> k & 1)));
    if (a.out_side && k < a.num_topk) a.out_side[token * a.num_topk + k] = scalar[h];
  }
  if (lane_id() == 0) a.num_lost[token] = lost;
  return true;
}

/// What a failed call leaves: NaN, or 0 for scalars.
__device__ __noinline__ inline void poison(const CombineArgs& a, int worker) {
  for (int64_t t = worker; t < a.num_tokens; t += num_workers()) {
    for (int64_t i = thread(); i < a.hidden; i += num_threads()) store_value(a.dtype, a.out + t * a.out_stride, i, NAN);
    if (thread() == 0) a.num_lost[t] = 0;
    for (int k = thread(); a.out_side && k < a.num_topk; k += num_threads()) a.out_side[t * a.num_topk + k] = 0.0f;
  }
}

/// Whether all ranks take part alike, and a record if they do not.
__device__ __noinline__ inline bool hear_all(const Common& c, Call call, const FactWords* facts) {
  return receive_headers(c, call, HeaderInts::kRows, facts, [](int, int, uint32_t) {});
}

}  // namespace turnout::engine::cuda::low_latency
