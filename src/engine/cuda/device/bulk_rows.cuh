// Rows on their way through shared memory.
#pragma once
#include "engine/cuda/args.h"
#include "engine/cuda/device/quantize.cuh"
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
/// of the SM, because an ordinary load has seen the signal. The whole warp calls it.
__device__ __forceinline__ void fetch(std::byte* to, const std::byte* from, int bytes) {
  constexpr int kEach = 8;
  const int words = bytes / 16;
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

/// A row of the block that has arrived.
__device__ __forceinline__ void fetch_arrived(const DispatchArgs& a, const MoveShape& p, int64_t row, std::byte* stage) {
  const std::byte* block = a.common.team.base[a.common.team.rank] + a.block;
  fetch(stage, block + a.offsets.x + row * a.x_block_stride, static_cast<int>(a.x_bytes));
  if (a.scale_bytes) fetch(stage + p.scales_at, block + a.offsets.scales + row * a.scale_bytes, static_cast<int>(a.scale_bytes));
  for (int s = 0; s < a.num_side; ++s) {
    const SideArray& side = a.side[s];
    fetch(stage + p.side_at[s], block + static_cast<size_t>(side.block_offset_128) * 128 + row * side.bytes, side.bytes);
  }
}

/// A row of x, quantised if asked, with its side arrays.
__device__ __forceinline__ void fetch_token(const DispatchArgs& a, const MoveShape& p, int64_t token, std::byte* stage) {
  const std::byte* x = a.x + token * a.x_stride;
  if (a.quantize == Quantize::none) fetch(stage, x, static_cast<int>(a.x_bytes));
  else if (a.dtype == DType::bf16) quantize_to_shared<true>(x, static_cast<int>(a.hidden), a.quantize, stage, stage + p.scales_at);
  else quantize_to_shared<false>(x, static_cast<int>(a.hidden), a.quantize, stage, stage + p.scales_at);
  for (int s = 0; s < a.num_side; ++s) fetch(stage + p.side_at[s], a.side[s].src + token * a.side[s].src_stride, a.side[s].bytes);
}
#endif

}  // namespace turnout::engine::cuda
