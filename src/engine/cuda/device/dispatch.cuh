// What the kernels that move the rows of a dispatch have in common.
#pragma once
#include "engine/cuda/device/header.cuh"
#include "engine/cuda/device/rows.cuh"

namespace turnout::engine::cuda {

/// A call that failed says that it brought nothing.
__device__ inline void clear_counts(const DispatchArgs& a) {
  for (int e = static_cast<int>(threadIdx.x); e <= a.num_local; e += static_cast<int>(blockDim.x)) {
    if (e < a.num_local) a.routing.expert_counts[e] = 0;
    a.routing.expert_offsets[e] = 0;
  }
  if (threadIdx.x == 0) *a.routing.num_rows = *a.routing.num_dropped = 0, break_routing(a.routing);
}

/// Layouts by experts: whether the nth pair of an expert, entry k of received row `row`, is in the result.
__device__ __forceinline__ bool is_admitted(const DispatchArgs& a, int64_t nth, int64_t row, int64_t k, int64_t cut_row, int64_t cut_k) {
  return a.layout == Layout::expert_slab ? nth < a.capacity : row < cut_row || (row == cut_row && k < cut_k);
}

/// rank_major: tells every rank that this block has written all it will. The whole block calls it, once its rows are visible to its
/// own threads.
__device__ inline void signal_channel(const Common& c, Call call) {
  __syncthreads();
  if (threadIdx.x != 0) return;
  fence_system();  // one for all ranks: what waits for the stores of a whole SM takes a microsecond
  for (int d = 0; d < c.team.num_ranks; ++d) {
    std::byte* p = c.team.base[d] + c.arena.channel_at(c.lane, call.copy, c.team.rank, kRowChannels + static_cast<int>(blockIdx.x));
    store_relaxed(reinterpret_cast<uint64_t*>(p), signal_of(call.epoch, 0));
  }
}

/// Straight: until every sending block of every rank has announced.
__device__ inline bool wait_channels(const DispatchArgs& a, const Offer* offers, const int32_t* begins, Call call) {
  const Common& c = a.common;
  constexpr int kMost = kMaxChannels - kRowChannels;
  bool good = true;
  for (int i = static_cast<int>(threadIdx.x); good && i < c.team.num_ranks * kMost; i += static_cast<int>(blockDim.x)) {
    const int s = i / kMost, channel = i % kMost;
    if (channel >= offers[s].num_channels()) continue;
    const std::byte* p = c.team.base[c.team.rank] + c.arena.channel_at(c.lane, call.copy, s, kRowChannels + channel);
    good = wait_signal(c, Phase::rows, s, call.epoch, true, reinterpret_cast<const uint64_t*>(p), nullptr);
  }
  good = __syncthreads_and(good);
  if (good && a.arrived) {
    for (int s = static_cast<int>(threadIdx.x); s < c.team.num_ranks; s += static_cast<int>(blockDim.x)) {
      store_release(reinterpret_cast<uint64_t*>(&a.arrived[s]), static_cast<uint64_t>(begins[s + 1] - begins[s]));
    }
  }
  return good;
}

/// Whether this block is the last of the grid to start: it may wait for the others.
__device__ __forceinline__ bool is_last_to_start(const Common& c, Call call) {
  const int role = take_role(c, call, kReceiveRoleTicket), blocks = static_cast<int>(gridDim.x);
  return role % blocks == blocks - 1;
}

}  // namespace turnout::engine::cuda
