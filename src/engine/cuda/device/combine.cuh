// What the kernels of a combine have in common.
#pragma once
#include "engine/cuda/device/chunk.cuh"
#include "engine/cuda/device/header.cuh"

namespace turnout::engine::cuda {

/// Weight of a row of y.
__device__ __forceinline__ float weight_at(const CombineArgs& a, int64_t row) {
  return a.weights_are_bf16 ? core::bf16_to_float(static_cast<const uint16_t*>(a.weights)[row]) : static_cast<const float*>(a.weights)[row];
}

/// Facts and offers of a combine; the block of role 0 exchanges them. Nobody writes into a block of a rank that may mean another call.
/// A routing whose dispatch failed is refused here. The whole block calls it; false: given up.
__device__ inline bool start_call(const CombineArgs& a, Call call, int role, Offer* offers, FactWords* facts) {
  const Common& c = a.common;
  if (role == 0 && threadIdx.x < LaneControl::kNumTickets) c.lane_control->tickets[(call.copy + 1) % c.arena.depth][threadIdx.x] = 0;
  if (threadIdx.x == 0 && role == 0) fill_facts(c, call.epoch, is_broken(a.routing), 0, facts);
  __syncthreads();
  bool good = true;
  if (role == 0) {
    send_header(c, call, HeaderInts::kRows, [&](int, int i) { return facts->words[i]; });
    for (int d = static_cast<int>(threadIdx.x); d < c.team.num_ranks; d += static_cast<int>(blockDim.x))
      send_offer(c, call, d, a.block, a.block_rows, 0);
    good = receive_headers(c, call, HeaderInts::kRows, facts, [](int, int, uint32_t) {});
  }
  // Through the host the offers are noted only once the headers agree.
  return __syncthreads_and(good) && (role == 0 || c.through_host || headers_agree(c, call)) && gather_offers(c, call, offers, role == 0);
}

/// What a failed call leaves: NaN, or 0 for scalars. `first` and `step` count warps.
__device__ inline void poison(const CombineArgs& a, int64_t first, int64_t step) {
  for (int64_t t = first; t < a.num_tokens; t += step) {
    for (int64_t i = lane_id(); i < a.hidden; i += 32) {
      store_value(a.dtype, a.out + t * a.out_stride, i,
                  a.dtype == DType::fp64 ? __longlong_as_double(0x7ff8000000000000ll) : static_cast<double>(NAN));
    }
    if (lane_id() == 0) a.num_lost[t] = 0;
    for (int k = lane_id(); a.out_side && k < a.num_topk; k += 32) a.out_side[t * a.num_topk + k] = 0;
  }
}

}  // namespace turnout::engine::cuda
