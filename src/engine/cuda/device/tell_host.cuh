// What the host waits for in calls of exact size (CountWords).
#pragma once
#include "engine/cuda/device/header.cuh"

namespace turnout::engine::cuda {

/// What was written for the host before is complete. The whole block calls it.
__device__ __forceinline__ void publish_counts(int64_t* counts_for_host, uint32_t epoch) {
  __syncthreads();
  if (threadIdx.x == 0) {
    fence_system();
    store_release(reinterpret_cast<uint64_t*>(&counts_for_host[CountWords::kEpoch]), epoch);
  }
}

/// What the headers say of each rank's region.
__device__ __forceinline__ void tell_rooms(const Common& c, Call call, int64_t* counts_for_host) {
  static_assert(HeaderInts::kRoom % kWordPayload == 1);
  for (int s = static_cast<int>(threadIdx.x); s < c.team.num_ranks; s += static_cast<int>(blockDim.x))
    counts_for_host[CountWords::kRooms + s] = load_word(header_from(c, call, s) + HeaderInts::kRoom / kWordPayload).y * kRoomUnit;
}

}  // namespace turnout::engine::cuda
