// The terms of a partial sum: which rows of y a received row stands for, and their sum in k order.
#pragma once
#include "engine/cuda/low_latency/start.cuh"
#include "engine/cuda/low_latency/unit.cuh"

namespace turnout::engine::cuda::low_latency {

/// What the warps of a combine share.
struct Work {
  const CombineArgs& a;
  Call call;
  PartialFormat f;
  const int32_t* begins;       ///< [R + 1] received rows of each source
  const int32_t* records;      ///< [R] where this rank's records begin in the staging of each source
  const int32_t* sent;         ///< [R]
  const int32_t* send_offset;  ///< [R + 1]
};

/// The terms of a received row, spread over the lanes of a warp: lane l holds entry l and, of more than 32, l + 32.
template <int kHalves>
struct Terms {
  uint64_t mask;  ///< the k's that are in the sum
  int32_t row[kHalves];
  float weight[kHalves];
};
__device__ __forceinline__ float weight_at(const CombineArgs& a, int64_t row) {
  return a.weights_are_bf16 ? core::bf16_to_float(static_cast<const uint16_t*>(a.weights)[row]) : static_cast<const float*>(a.weights)[row];
}
/// Asked for first and looked at later: `row` and source weights of received row `n`, if n >= 0.
template <int kHalves>
__device__ __forceinline__ Terms<kHalves> ask_terms(const CombineArgs& a, int n) {
  Terms<kHalves> t;
  t.mask = 0;
#pragma unroll
  for (int h = 0; h < kHalves; ++h) {
    t.row[h] = -1;
    t.weight[h] = 1.0f;
    const int k = h * 32 + lane_id();
    const int64_t i = static_cast<int64_t>(n) * a.num_topk + k;
    if (n < 0 || k >= a.num_topk) continue;
    t.row[h] = a.layout == Layout::rank_major ? a.routing.recv_idx[i] : a.routing.position[i];
    if (a.apply == CombineWeights::source) t.weight[h] = a.routing.recv_weights[i];
  }
  return t;
}
template <int kHalves>
__device__ __forceinline__ Terms<kHalves> terms_of(const CombineArgs& a, int n, Terms<kHalves> t) {
#pragma unroll
  for (int h = 0; h < kHalves; ++h) {
    if (h * 32 >= a.num_topk) break;
    if (a.layout == Layout::rank_major && t.row[h] >= 0) t.row[h] = n;
    if (t.row[h] >= 0 && a.apply == CombineWeights::rows) t.weight[h] = weight_at(a, t.row[h]);
    t.mask |= static_cast<uint64_t>(__ballot_sync(kFull, t.row[h] >= 0)) << (h * 32);
  }
  return t;
}

/// Entry k of a row, whose holder is a lane.
template <class T, int kHalves>
__device__ __forceinline__ T entry_of(const T (&v)[kHalves], int k) {
  if constexpr (kHalves == 1) return __shfl_sync(kFull, v[0], k);
  else return __shfl_sync(kFull, k < 32 ? v[0] : v[1], k % 32);
}

/// Sum of the terms of a row, a unit of it, rounded. The whole warp calls it. All loads of a batch come before their first use.
/// -0 + x is x for every x, so a sum may start there.
template <DType kType, bool kFast, int kHalves>
__device__ __forceinline__ void sum_terms(const Work& w, const Terms<kHalves>& t, const Place& place, uint32_t* out) {
  constexpr int kBatch = !kFast ? 1 : kType == DType::fp32 ? 1 : 6;
  const CombineArgs& a = w.a;
  float sum[kUnit];
#pragma unroll
  for (int i = 0; i < kUnit; ++i) sum[i] = -0.0f;
  // A row of rank_major is its rank's partial already.
  uint64_t left = a.layout == Layout::rank_major ? t.mask & (~t.mask + 1) : t.mask;
  while (left) {
    uint32_t raw[kBatch][kPayload<kType>];
    uint64_t rest = left;
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      const int k = rest ? __ffsll(static_cast<long long>(rest)) - 1 : 0;
      const int64_t row = entry_of(t.row, k);
      load_unit<kType, kFast>(rest != 0, a.y + row * a.y_stride, place, raw[j]);
      rest &= rest - 1;
    }
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      if (!left) continue;
      const int k = __ffsll(static_cast<long long>(left)) - 1;
      left &= left - 1;
      // What is not weighted is multiplied by 1, which changes nothing.
      const float weight = entry_of(t.weight, k);
#pragma unroll
      for (int i = 0; i < kUnit; ++i) sum[i] += value_of<kType>(raw[j], i) * weight;
    }
  }
  round_unit<kType>(sum, out);
}

}  // namespace turnout::engine::cuda::low_latency
