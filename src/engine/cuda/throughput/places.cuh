// Where rows go in layouts by experts, found by the warps that lay them out: a pair's place is the begin of its expert, the pairs of
// earlier sources and those of its own source before it. The first two are tables of the admit kernel, made from the headers alone; the
// last comes with the row's ids. So own rows wait for nobody's ids, and no kernel goes over all pairs before rows can be laid out.
#pragma once
#include "engine/cuda/device/dispatch.cuh"
#include "engine/cuda/specialize.h"

namespace turnout::engine::cuda::move {

#ifdef TURNOUT_HAS_BULK
/// Entries k and k + 32 of a row, k being the lane: local expert (-1: none here), and the pairs of its source with that expert before it. A
/// row's are asked for while the row before it is laid out, and nothing looks at what comes before it is needed.
struct Pairs {
  int expert[2], nth[2];
};

/// Of a token whose row stays, as the plan has left them.
struct OwnPairs {
  int dest[2], id[2], nth[2];

  __device__ __forceinline__ void ask(const DispatchArgs& a, int token) {
    const Routing& r = a.routing;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int k = h * 32 + lane_id();
      const int64_t pair = static_cast<int64_t>(token) * a.num_topk + k;
      const bool is_there = k < a.num_topk;
      dest[h] = is_there ? __ldcg(r.dest + pair) : -1;
      id[h] = is_there ? __ldcg(r.topk_idx + pair) : -1;
      nth[h] = is_there ? __ldcg(r.pair_index + pair) : 0;
    }
  }
  __device__ __forceinline__ Pairs get(const DispatchArgs& a) const {
    Pairs pairs;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      pairs.expert[h] = dest[h] == a.common.team.rank ? __ldg(a.common.local + id[h]) : -1;
      pairs.nth[h] = nth[h];
    }
    return pairs;
  }
};

/// What the source has put into this rank's block.
template <class T>
__device__ __forceinline__ const T* received(const DispatchArgs& a, int64_t offset) {
  return reinterpret_cast<const T*>(a.common.team.base[a.common.team.rank] + a.block + offset);
}
/// Of a row that another rank sends.
__device__ __forceinline__ Pairs received_pairs(const DispatchArgs& a, const MoveShape& p, int row) {
  const auto *idx = received<int32_t>(a, p.block_idx), *nth = received<int32_t>(a, p.block_pair);
  Pairs pairs;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int k = h * 32 + lane_id();
    const int64_t pair = static_cast<int64_t>(row) * a.num_topk + k;
    const bool is_there = k < a.num_topk;
    pairs.expert[h] = is_there ? __ldcg(idx + pair) : -1;
    pairs.nth[h] = is_there ? __ldcg(nth + pair) : 0;
  }
  return pairs;
}

/// Of a row's entries (`from`), asked for before the row is laid out.
struct PairWeights {
  float of[2];

  __device__ __forceinline__ PairWeights(const DispatchArgs& a, const float* from) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int k = h * 32 + lane_id();
      of[h] = move_places(a) && a.has_weights && k < a.num_topk ? __ldcg(from + k) : 0.0f;
    }
  }
};

/// Rows of the result, -1: none. No SM has looked at the tables before kCounted, so what lies in its L1 is good for all rows.
__device__ __forceinline__ void places_of(const DispatchArgs& a, int source, int row, const Pairs& pairs, int (&to)[2]) {
  const Routing& r = a.routing;
  const int cut_row = r.cut[0], cut_k = r.cut[1];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int e = pairs.expert[h], k = h * 32 + lane_id();
    to[h] = -1;
    if (e < 0) continue;
    const int64_t offset = r.expert_offsets[e], nth = static_cast<int64_t>(r.expert_base[source * a.num_local + e]) + pairs.nth[h];
    if (is_admitted(a, nth, row, k, cut_row, cut_k)) to[h] = static_cast<int>(offset + nth);
  }
}

/// For the handle and the result: what the admit kernel notes where it finds the places.
__device__ __forceinline__ void note_places(const DispatchArgs& a, int row, const Pairs& pairs, const int (&to)[2], const PairWeights& weights) {
  const Routing& r = a.routing;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int k = h * 32 + lane_id();
    if (k >= a.num_topk) continue;
    const int64_t pair = static_cast<int64_t>(row) * a.num_topk + k;
    r.recv_idx[pair] = pairs.expert[h];
    r.position[pair] = to[h];
    if (!a.has_weights) continue;
    const float weight = pairs.expert[h] >= 0 ? weights.of[h] : 0.0f;
    r.recv_weights[pair] = weight;
    if (to[h] >= 0) r.row_weights[to[h]] = weight;
  }
}
#endif

}  // namespace turnout::engine::cuda::move
