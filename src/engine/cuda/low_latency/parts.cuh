// The parts of a token that come back: on which ranks they are, where they land, and the wait for them; and those that are owed to others.
#pragma once
#include "engine/cuda/low_latency/terms.cuh"

namespace turnout::engine::cuda::low_latency {

/// Where the parts of a token are: lane l holds rank and place of its entries (see Terms), if they are the first of their rank.
template <int kHalves>
struct Parts {
  int32_t rank[kHalves], at[kHalves], asked;
};
/// Asked for first and looked at later.
template <int kHalves>
__device__ __forceinline__ Parts<kHalves> ask_parts(const AnyCombine auto& a, int64_t token) {
  Parts<kHalves> p;
  p.asked = 0;
#pragma unroll
  for (int h = 0; h < kHalves; ++h) {
    p.rank[h] = p.at[h] = -1;
    const int k = h * 32 + lane_id();
    if (k >= a.num_topk || token >= a.num_tokens) continue;
    p.rank[h] = a.routing.dest[token * a.num_topk + k];
    p.at[h] = a.routing.send_index[token * a.num_topk + k];
  }
  return p;
}
template <int kHalves>
__device__ __forceinline__ Parts<kHalves> parts_of(const auto& w, Parts<kHalves> p) {
#pragma unroll
  for (int h = 0; h < kHalves; ++h) {
    if (p.rank[h] >= 0) p.asked |= 1 << h;
    if (p.at[h] < 0 || p.at[h] >= w.sent[p.rank[h]]) p.rank[h] = -1;
  }
  return p;
}
/// Place of the part of `rank`, -1: none. The whole warp calls it.
template <int kHalves>
__device__ __forceinline__ int place_on(const Parts<kHalves>& p, int rank) {
  int at = -1;
#pragma unroll
  for (int h = 0; h < kHalves; ++h) {
    const unsigned holder = __ballot_sync(kFull, p.rank[h] == rank);
    if (holder) at = __shfl_sync(kFull, p.at[h], __ffs(holder) - 1);
  }
  return at;
}
/// The part of the lowest rank above `after`; -1: no more.
template <int kHalves>
__device__ __forceinline__ int next_part(const Parts<kHalves>& p, int after, int* at) {
  unsigned best = kFull;
#pragma unroll
  for (int h = 0; h < kHalves; ++h) {
    if (p.rank[h] > after && static_cast<unsigned>(p.rank[h]) < best) best = static_cast<unsigned>(p.rank[h]);
  }
  best = __reduce_min_sync(kFull, best);
  if (best == kFull) return -1;
  *at = place_on(p, static_cast<int>(best));
  return static_cast<int>(best);
}

/// The rows of other ranks that worker `worker` owes a partial sum, one after the other: row `i` of `source`, which is row n here. A worker
/// takes every num_workers()-th row of each source. Where it begins shifts from source to source, so that few rows are shared out
/// evenly, but depends on no count: the first row of the first source is known when a kernel starts.
struct Owed {
  int source, first, at;  ///< where the worker begins in this source; its next row

  __device__ Owed(const auto& w, int worker) : source((w.a.common.team.rank + 1) % w.a.common.team.num_ranks), first(worker), at(worker) {}
  __device__ bool next(const auto& w, int* n, uint4** to) {
    const Common& c = w.a.common;
#pragma unroll 1
    while (source != c.team.rank) {
      // A source with more tokens than there is staging for refuses the call, but later than this.
      const Arena& arena = c.arena;
      const int room = static_cast<int>(arena.ll_tokens) * arena.ll_combine_copies - w.records[source];
      const int rows = min(w.begins[source + 1] - w.begins[source], room), i = at;
      if (i < rows) {
        *n = w.begins[source] + i;
        *to = reinterpret_cast<uint4*>(c.team.base[source] + c.arena.ll_combine_at(c.lane, w.call.copy, 0, w.records[source] + i));
        at += num_workers();
        return true;
      }
      source = source + 1 < c.team.num_ranks ? source + 1 : 0;
      first -= num_workers() / (c.team.num_ranks - 1);
      if (first < 0) first += num_workers();
      at = first;
    }
    return false;
  }
};

/// Waits for a unit of a partial sum, or for a mask that says that nothing else comes (`some`: it is not that).
template <DType kType>
__device__ __forceinline__ bool receive_words(const auto& w, int rank, const uint4* from, int unit, bool active, bool* some, uint32_t* out) {
  const uint32_t epoch = w.call.epoch;
  uint4 words[kWords<kType>], m{};
  const int mine = active ? unit : 0;
  const bool good = wait_for(
      w.a.common, Phase::low_latency_partials, rank, epoch, true,
      [&] {
        m = load_word(from + w.f.mask);
        *some = true;
#pragma unroll
        for (int j = 0; j < kWords<kType>; ++j) words[j] = load_word(from + j * w.f.units + mine);
#pragma unroll
        for (int j = 0; j < kWords<kType>; ++j) *some = *some && words[j].w == epoch;
        return *some || (m.w == epoch && (m.x | m.y) == 0);
      },
      [&] { return words[0].w != epoch ? words[0].w : m.w; });
#pragma unroll
  for (int j = 0; j < kWords<kType>; ++j) out[3 * j] = words[j].x, out[3 * j + 1] = words[j].y, out[3 * j + 2] = words[j].z;
  return good;
}

/// Scalars of a part for the lanes that hold their k. The whole warp calls it.
template <int kHalves>
__device__ __forceinline__ bool receive_scalars(const auto& w, int rank, const uint4* from, uint64_t mask, float (&scalar)[kHalves]) {
  bool good = true;
#pragma unroll
  for (int h = 0; h < kHalves; ++h) {
    const int k = h * 32 + lane_id();
    if (k >= w.a.num_topk || !(mask >> k & 1)) continue;
    uint4 word;
    good = good && wait_for_word(w.a.common, Phase::low_latency_partials, rank, w.call.epoch, true, from + w.f.mask + 1 + k / kWordPayload, &word);
    scalar[h] = __uint_as_float(k % kWordPayload == 0 ? word.x : k % kWordPayload == 1 ? word.y : word.z);
  }
  return good;
}

/// Received row of a token that stays on this rank, -1: none.
template <int kHalves>
__device__ __forceinline__ int own_row_of(const auto& w, const Parts<kHalves>& parts) {
  const int me = w.a.common.team.rank, at = place_on(parts, me);
  return at < 0 ? -1 : w.begins[me] + at;
}
__device__ __forceinline__ const uint4* staged(const auto& w, int rank, int at) {
  const Common& c = w.a.common;
  return reinterpret_cast<const uint4*>(c.team.base[c.team.rank] + c.arena.ll_combine_at(c.lane, w.call.copy, 0, w.send_offset[rank] + at));
}

}  // namespace turnout::engine::cuda::low_latency
