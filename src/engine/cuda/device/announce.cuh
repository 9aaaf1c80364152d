// Rows announced by a warp of their own: a system fence waits for every store in flight on its SM, so the warps that move rows must
// never execute one. They post what they have completed; the announcer fences once for all that was posted since.
#pragma once
#include "engine/cuda/device/rows.cuh"
#include "engine/cuda/device/wait.cuh"

namespace turnout::engine::cuda {

/// In shared memory. An entry: rank << 25 | position in its list.
template <int kMovers, int kRoom>
struct AnnounceQueue {
  enum : uint32_t { kDone = 1u << 31 };
  volatile uint32_t posted[kMovers];  ///< entries whose rows have been written
  volatile uint32_t told[kMovers];    ///< entries that the announcer has read
  uint32_t entries[kMovers][kRoom];

  __device__ void init() {
    for (int i = static_cast<int>(threadIdx.x); i < kMovers; i += static_cast<int>(blockDim.x)) posted[i] = 0, told[i] = 0;
  }
  /// Room for `n` entries behind the first `count`. The announcer waits for nobody, so neither does this for long.
  __device__ void wait_room(int mover, uint32_t count, uint32_t n) const {
    while (count + n - told[mover] > kRoom) {
    }
  }
  __device__ void put(int mover, uint32_t at, int rank, int position) {
    entries[mover][at % kRoom] = static_cast<uint32_t>(rank) << 25 | static_cast<uint32_t>(position);
  }
  /// By one thread, after what the warp wrote is visible to its own threads.
  __device__ void post(int mover, uint32_t count) {
    __threadfence_block();
    posted[mover] = count;
  }

  /// One warp, until all `movers` have posted that they are done.
  __device__ void announce(const Common& c, Call call, int movers) {
    const int lane = lane_id(), me = c.team.rank;
    uint32_t read = 0;
    for (;;) {
      const uint32_t seen = lane < movers ? posted[lane] : kDone, have = lane < movers ? seen & ~kDone : 0;
      if (__any_sync(kFull, have != read)) {
        __threadfence_block();
        fence_system();
        for (int m = 0; m < movers; ++m) {
          const uint32_t end = __shfl_sync(kFull, have, m);
          for (uint32_t i = __shfl_sync(kFull, read, m) + static_cast<uint32_t>(lane); i < end; i += 32) {
            const uint32_t e = entries[m][i % kRoom];
            std::byte* p = c.team.base[e >> 25] + c.arena.row_at(c.lane, call.copy, me, e & ((1u << 25) - 1));
            store_relaxed(reinterpret_cast<uint64_t*>(p), signal_of(call.epoch, 0));
          }
        }
        read = have;
        __syncwarp();
        if (lane < movers) told[lane] = read;
      }
      if (__all_sync(kFull, (seen & kDone) && read == have)) break;
    }
  }
};

}  // namespace turnout::engine::cuda
