// The terms of a partial sum: which rows of y a received row stands for, and their sum in k order.
#pragma once
#include "engine/cuda/low_latency/start.cuh"
#include "engine/cuda/low_latency/unit.cuh"

namespace turnout::engine::cuda::low_latency {

/// What the warps of a combine share.
template <class Args>
struct Work {
  const Args& a;
  Call call;
  PartialFormat f;
  const int32_t* begins;       ///< [R + 1] received rows of each source
  const int32_t* records;      ///< [R] where this rank's records begin in the staging of each source
  const int32_t* sent;         ///< [R]
  const int32_t* send_offset;  ///< [R + 1]

  /// For what is there once, whatever is known of the arguments.
  __device__ __forceinline__ Work<CombineArgs> general() const { return {a, call, f, begins, records, sent, send_offset}; }
};

/// The terms of a received row, spread over the lanes of a warp: lane l holds entry l and, of more than 32, l + 32.
template <int kHalves>
struct Terms {
  uint64_t mask;  ///< the k's that are in the sum
  int32_t row[kHalves];
  float weight[kHalves];
};
__device__ __forceinline__ float weight_at(const AnyCombine auto& a, int64_t row) {
  return a.weights_are_bf16 ? core::bf16_to_float(static_cast<const uint16_t*>(a.weights)[row]) : static_cast<const float*>(a.weights)[row];
}
/// Asked for first and looked at later: `row` and source weights of received row `n`, if n >= 0.
template <int kHalves>
__device__ __forceinline__ Terms<kHalves> ask_terms(const AnyCombine auto& a, int n) {
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
__device__ __forceinline__ Terms<kHalves> terms_of(const AnyCombine auto& a, int n, Terms<kHalves> t) {
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

/// Terms that are added. A row of rank_major is its rank's partial already.
template <int kHalves>
__device__ __forceinline__ uint64_t terms_to_add(const AnyCombine auto& a, const Terms<kHalves>& t) {
  return a.layout == Layout::rank_major ? t.mask & (~t.mask + 1) : t.mask;
}

/// Whether rows of y may come to shared memory. Those of fp32 are long, and the code of adding them has no registers to spare.
template <DType kType, bool kFast>
inline constexpr bool kFetches = kFast&& kType != DType::fp32;

/// Rows of y in shared memory: those of the first row that a block sends, and those of its first token. All are asked for before the
/// first is needed; stores to other ranks hold up loads that come after them, but not these.
struct Fetched {
  static constexpr int kMost = 8;  ///< rows of a set
  std::byte* rows;
  uint64_t* barriers;
  int32_t row_bytes, num;  ///< num: rows that a set has room for

  __device__ Fetched second() const { return {rows + num * row_bytes, barriers + kMost, row_bytes, num}; }
};
/// Asks for the terms of a row; false: they are too many, or there are none. Every warp of units calls it.
template <int kHalves>
__device__ __forceinline__ bool fetch(const auto& w, const Terms<kHalves>& t, const Fetched& to, int num_fetching) {
  if constexpr (!kHasBulk) return false;
  const uint64_t all = terms_to_add(w.a, t);
  if (all == 0 || __popcll(static_cast<long long>(all)) > to.num) return false;
  int i = 0;
#pragma unroll 1
  for (uint64_t left = all; left; left &= left - 1, ++i) {
    if (i % num_fetching != warp_id()) continue;
    const int64_t row = entry_of(t.row, __ffsll(static_cast<long long>(left)) - 1);
    if (lane_id() == 0) fetch_row(to.rows + i * to.row_bytes, w.a.y + row * w.a.y_stride, static_cast<uint32_t>(to.row_bytes), to.barriers + i);
  }
  return true;
}

/// Sum of the terms of a row, a unit of it, rounded. `fetched`: where they are, if fetch() has said so. The whole warp calls it. All loads of a batch
/// come before their first use. -0 + x is x for every x, so a sum may start there.
template <DType kType, bool kFast, int kHalves>
__device__ __forceinline__ void sum_terms(const auto& w, const Terms<kHalves>& t, bool is_fetched, const Fetched& fetched, const Place& place,
                                          uint32_t* out) {
  // What can be fetched need not be in registers; ptxas needs more of them for sm_100.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
  constexpr int kWithBulk = 2;
#else
  constexpr int kWithBulk = 3;
#endif
  constexpr int kBatch = !kFast || kType == DType::fp32 ? 1 : kHasBulk ? kWithBulk : 6;
  const auto& a = w.a;
  float sum[kUnit];
#pragma unroll
  for (int i = 0; i < kUnit; ++i) sum[i] = -0.0f;
  uint64_t left = terms_to_add(a, t);
  int first = 0;
#pragma unroll 1
  while (left) {
    uint32_t raw[kBatch][kPayload<kType>];
    uint64_t rest = left;
    if (kFetches<kType, kFast> && kHasBulk && is_fetched) {
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
        if (!rest) continue;
        rest &= rest - 1;
        wait_for_fetched(fetched.barriers + first);
        copy_unit<kType>(fetched.rows + first * fetched.row_bytes, place, raw[j]);
        ++first;
      }
    } else {
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
        const int k = rest ? __ffsll(static_cast<long long>(rest)) - 1 : 0;
        const int64_t row = entry_of(t.row, k);
        load_unit<kType, kFast>(rest != 0, a.y + row * a.y_stride, place, raw[j]);
        rest &= rest - 1;
      }
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
