// Rows moved by one warp: any width, any alignment.
#pragma once
#include "engine/cuda/args.h"
#include "engine/cuda/device/ptx.cuh"

namespace turnout::engine::cuda {

inline constexpr unsigned kFull = 0xffffffffu;
__device__ __forceinline__ int lane_id() { return static_cast<int>(threadIdx.x % 32); }
__device__ __forceinline__ int warp_id() { return static_cast<int>(threadIdx.x / 32); }
__device__ __forceinline__ int num_warps() { return static_cast<int>(blockDim.x / 32); }

/// Whether the dispatch that should have made this routing failed: its tables are not to be used (see break_routing).
__device__ __forceinline__ bool is_broken(const Routing& r) { return r.recv_begin[0] < 0; }
/// The host may have issued calls with the handle before it hears of the failure.
__device__ __forceinline__ void break_routing(const Routing& r) { r.recv_begin[0] = -1; }

/// Widest access that fits both addresses.
__device__ __forceinline__ int common_alignment(const void* a, const void* b) {
  const auto bits = reinterpret_cast<uintptr_t>(a) | reinterpret_cast<uintptr_t>(b);
  return bits % 16 == 0 ? 16 : bits % 4 == 0 ? 4 : 1;
}

/// Copies `n` bytes. The whole warp calls it.
__device__ inline void copy_row(std::byte* to, const std::byte* from, int64_t n) {
  const int lane = lane_id();
  const int width = common_alignment(to, from);
  int64_t done = 0;
  if (width == 16) {
    const auto* src = reinterpret_cast<const uint4*>(from);
    auto* dst = reinterpret_cast<uint4*>(to);
    const int64_t words = n / 16;
    int64_t i = lane;
    for (; i + 96 < words; i += 128) {  // four loads in flight
      const uint4 a = load_stream(src + i), b = load_stream(src + i + 32), c = load_stream(src + i + 64), d = load_stream(src + i + 96);
      store_stream(dst + i, a);
      store_stream(dst + i + 32, b);
      store_stream(dst + i + 64, c);
      store_stream(dst + i + 96, d);
    }
    for (; i < words; i += 32) store_stream(dst + i, load_stream(src + i));
    done = words * 16;
  } else if (width == 4) {
    const int64_t words = n / 4;
    for (int64_t i = lane; i < words; i += 32) reinterpret_cast<uint32_t*>(to)[i] = reinterpret_cast<const volatile uint32_t*>(from)[i];
    done = words * 4;
  }
  for (int64_t i = done + lane; i < n; i += 32) to[i] = static_cast<std::byte>(reinterpret_cast<const volatile unsigned char*>(from)[i]);
}

__device__ inline void zero_row(std::byte* to, int64_t n) {
  const int lane = lane_id();
  int64_t done = 0;
  if (reinterpret_cast<uintptr_t>(to) % 16 == 0) {
    for (int64_t i = lane; i < n / 16; i += 32) store_stream(reinterpret_cast<uint4*>(to) + i, uint4{});
    done = n / 16 * 16;
  }
  for (int64_t i = done + lane; i < n; i += 32) to[i] = std::byte{0};
}

}  // namespace turnout::engine::cuda
