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

/// The terms of a received row, spread over the lanes of a warp: lane l holds entries l and l + 32.
struct Terms {
  uint64_t mask;  ///< the k's that are in the sum
  int32_t row[2];
  float weight[2];
};
__device__ __forceinline__ float weight_at(const CombineArgs& a, int64_t row) {
  return a.weights_are_bf16 ? core::bf16_to_float(static_cast<const uint16_t*>(a.weights)[row]) : static_cast<const float*>(a.weights)[row];
}
/// Asked for first and looked at later: `row` and source weights of received row `n`, if n >= 0.
__device__ __forceinline__ Terms ask_terms(const CombineArgs& a, int n) {
  Terms t{0, {-1, -1}, {}};
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int k = h * 32 + lane_id();
    const int64_t i = static_cast<int64_t>(n) * a.num_topk + k;
    if (n < 0 || k >= a.num_topk) continue;
    t.row[h] = a.layout == Layout::rank_major ? a.routing.recv_idx[i] : a.routing.position[i];
    if (a.apply == CombineWeights::source) t.weight[h] = a.routing.recv_weights[i];
  }
  return t;
}
__device__ __forceinline__ Terms terms_of(const CombineArgs& a, int n, Terms t) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    if (h * 32 >= a.num_topk) break;
    if (a.layout == Layout::rank_major && t.row[h] >= 0) t.row[h] = n;
    if (t.row[h] >= 0 && a.apply == CombineWeights::rows) t.weight[h] = weight_at(a, t.row[h]);
    t.mask |= static_cast<uint64_t>(__ballot_sync(kFull, t.row[h] >= 0)) << (h * 32);
  }
  return t;
}

/// Sum of the terms of a row, a unit of it, rounded. The whole warp calls it. All loads of a batch come before their first use.
/// -0 + x is x for every x, so a sum may start there.
template <DType kType, bool kFast>
__device__ __forceinline__ void sum_terms(const Work& w, const Terms& t, const Place& place, uint32_t* out) {
  constexpr int kBatch = !kFast ? 1 : kType == DType::fp32 ? 3 : 6;
  const CombineArgs& a = w.a;
  const bool weighted = a.apply != CombineWeights::none;
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
      const int64_t row = __shfl_sync(kFull, k < 32 ? t.row[0] : t.row[1], k % 32);
      load_unit<kType, kFast>(rest != 0, a.y + row * a.y_stride, place, raw[j]);
      rest &= rest - 1;
    }
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      if (!left) continue;
      const int k = __ffsll(static_cast<long long>(left)) - 1;
      left &= left - 1;
      if (weighted) {
        const float weight = __shfl_sync(kFull, k < 32 ? t.weight[0] : t.weight[1], k % 32);
#pragma unroll
        for (int i = 0; i < kUnit; ++i) sum[i] += value_of<kType>(raw[j], i) * weight;
      } else {
#pragma unroll
        for (int i = 0; i < kUnit; ++i) sum[i] += value_of<kType>(raw[j], i);
      }
    }
  }
  round_unit<kType>(sum, out);
}

}  // namespace turnout::engine::cuda::low_latency
