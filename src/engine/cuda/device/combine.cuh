// What the kernels of a combine have in common.
#pragma once
#include "engine/cuda/device/chunk.cuh"
#include "engine/cuda/device/header.cuh"

namespace turnout::engine::cuda {

/// Weight of a row of y.
__device__ __forceinline__ float weight_at(const CombineArgs& a, int64_t row) {
  return a.weights_are_bf16 ? core::bf16_to_float(static_cast<const uint16_t*>(a.weights)[row]) : static_cast<const float*>(a.weights)[row];
}

/// Row of y and weight of entry k of received row `n`; false if there is none.
struct Term {
  int64_t row;
  float weight;
};
__device__ __forceinline__ bool term_of(const CombineArgs& a, int64_t n, int k, Term* t) {
  const int e = a.routing.recv_idx[n * a.num_topk + k];
  if (e < 0) return false;
  t->row = a.routing.position[n * a.num_topk + k];
  if (t->row < 0) return false;
  t->weight = a.apply == CombineWeights::source ? a.routing.recv_weights[n * a.num_topk + k]
              : a.apply == CombineWeights::rows ? weight_at(a, t->row)
                                                : 1.0f;
  return true;
}

/// The k's of received row `n` that are in its partial sum. Every lane gets the mask.
__device__ inline uint64_t mask_of(const CombineArgs& a, int64_t n) {
  uint64_t mask = 0;
  for (int k0 = 0; k0 < a.num_topk; k0 += 32) {
    const int k = k0 + lane_id();
    bool in = false;
    if (k < a.num_topk) {
      Term t;
      in = a.layout == Layout::rank_major ? a.routing.recv_idx[n * a.num_topk + k] >= 0 : term_of(a, n, k, &t);
    }
    mask |= static_cast<uint64_t>(__ballot_sync(kFull, in)) << k0;
  }
  return mask;
}

__device__ __forceinline__ size_t block_of(const CombineArgs& a, Call call) { return a.block + call.copy * a.block_stride; }

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
      send_offer(c, call, d, block_of(a, call), a.block_rows, 0);
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
