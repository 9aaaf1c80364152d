// Rows on their way through shared memory.
#pragma once
#include "engine/cuda/args.h"
#include "engine/cuda/device/rows.cuh"
#include "engine/cuda/specialize.h"

namespace turnout::engine::cuda {

#ifdef TURNOUT_HAS_BULK
/// bulk_wait_read for a number that only the launch knows.
__device__ __forceinline__ void bulk_wait_read_at_most(int n) {
  switch (n) {
    case 0: bulk_wait_read<0>(); return;
    case 1: bulk_wait_read<1>(); return;
    case 2: bulk_wait_read<2>(); return;
    case 3: bulk_wait_read<3>(); return;
    case 4: bulk_wait_read<4>(); return;
    default: bulk_wait_read<5>(); return;
  }
}

/// Copies 16-byte words from global to shared memory by ordinary loads: a bulk load would need a fence that waits for all bulk stores
/// of the SM, because an ordinary load has seen the signal. The whole warp calls it. Its own function: copies of it inside each other's
/// loops take more registers than there are.
__device__ __noinline__ inline void fetch(std::byte* to, const std::byte* from, int bytes) {
  constexpr int kEach = 8;
  const int words = bytes / 16;
#pragma unroll 1
  for (int i0 = lane_id(); i0 < words; i0 += 32 * kEach) {
    uint4 v[kEach];
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
      if (i0 + j * 32 < words) v[j] = load_stream(reinterpret_cast<const uint4*>(from) + i0 + j * 32);
    }
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
      if (i0 + j * 32 < words) reinterpret_cast<uint4*>(to)[i0 + j * 32] = v[j];
    }
  }
}
/// The same for a row and what lies beside it, up to 512 bytes of which come together with the row.
__device__ __forceinline__ void fetch_both(std::byte* to, const std::byte* from, int bytes, std::byte* to_side, const std::byte* side,
                                           int side_bytes) {
  const bool mine = lane_id() < side_bytes / 16;
  uint4 w;
  if (mine) w = load_stream(reinterpret_cast<const uint4*>(side) + lane_id());
  fetch(to, from, bytes);
  if (mine) reinterpret_cast<uint4*>(to_side)[lane_id()] = w;
  if (side_bytes > 512) fetch(to_side + 512, side + 512, side_bytes - 512);
}

/// A row of the block that has arrived.
__device__ __forceinline__ void fetch_arrived(const DispatchArgs& a, const MoveShape& p, int64_t row, std::byte* stage) {
  const std::byte* block = a.common.team.base[a.common.team.rank] + a.block;
  const std::byte *x = block + row * a.x_block_stride, *scales = block + p.block_scales + row * a.scale_bytes;
  int s = 0;
  if (a.scale_bytes || a.num_side == 0) {
    fetch_both(stage, x, static_cast<int>(a.x_bytes), stage + p.scales_at, scales, static_cast<int>(a.scale_bytes));
  } else {
    fetch_both(stage, x, static_cast<int>(a.x_bytes), stage + p.side_at[0], block + p.block_side[0] + row * a.side[0].bytes, a.side[0].bytes);
    s = 1;
  }
#pragma unroll 1
  for (; s < a.num_side; ++s) fetch(stage + p.side_at[s], block + p.block_side[s] + row * a.side[s].bytes, a.side[s].bytes);
}

#endif

}  // namespace turnout::engine::cuda
