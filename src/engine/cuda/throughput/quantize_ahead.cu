// Quantises x before a dispatch by bulk copies moves it: first kernel of the call. The memory is idle while tokens are counted and headers
// travel, which takes about half as long as this; rows then go on as if they had been given as fp8, the first while others are still to be
// read. Nothing here waits for anybody, so any number of SMs will do, and the plan and move kernels may start beside it.
#include <algorithm>

#include "engine/cuda/device/chunk.cuh"
#include "engine/cuda/device/quantize.cuh"
#include "engine/cuda/device/wait.cuh"
#include "engine/cuda/kernels.h"
#include "engine/cuda/launch.h"
#include "engine/cuda/throughput/bulk.h"

namespace turnout::engine::cuda {
namespace {

constexpr int kThreads = 256;  ///< with 64 registers: a block of the move kernel fits beside it on an SM
constexpr int kUnit = 128;     ///< words (16 bytes of x) that a warp quantises at a time: eight blocks of a row

/// A warp goes over tokens in ascending order and tells that it is done with a part of them; the last to do so tells the move kernel.
struct Teller {
  const DispatchArgs& a;
  Call call;
  int told = 0;

  /// `next`: the token that the warp goes on with, num_tokens: with none.
  __device__ __forceinline__ void go_on(int64_t next) {
    const int part = next < a.num_tokens ? ahead_part(a.num_tokens, next) : kAheadParts;
    if (told >= part) return;
    __syncwarp();
    const uint32_t warps = gridDim.x * static_cast<uint32_t>(num_warps());
    if (lane_id() == 0) {
      __threadfence();
      for (int i = told; i < part; ++i) {
        if (atomicAdd(&a.common.lane_control->tickets[call.copy][kAheadTicket + i], 1u) + 1 != warps) continue;
        __threadfence();
        store_release_gpu(&a.flags[kQuantised + i], call.epoch);
      }
    }
    told = part;
  }
};

/// Rows of whole words. A warp loads its next unit while it quantises one. x is not read again soon: what is written stays in L2 instead.
template <bool kBf16>
__global__ void __launch_bounds__(kThreads, 4) quantize_halves_kernel(const __grid_constant__ DispatchArgs a) {
#ifdef TURNOUT_HAS_BULK
  let_next_start();
  constexpr int kEach = kUnit / 32;
  const uint64_t policy = evict_first_policy();
  const auto words = static_cast<uint32_t>(a.hidden / 8), units = (words + kUnit - 1) / kUnit;
  const uint32_t all = static_cast<uint32_t>(a.num_tokens) * units, step = gridDim.x * static_cast<uint32_t>(num_warps());
  const auto load = [&](uint4(&v)[kEach], uint32_t unit) {
    const uint32_t token = unit / units, first = (unit - token * units) * kUnit + static_cast<uint32_t>(lane_id());
    const auto* row = reinterpret_cast<const uint4*>(a.x + token * a.x_stride);
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
      const uint32_t w = first + static_cast<uint32_t>(j) * 32;
      v[j] = load_once_if(unit < all && w < words, row + w, policy);
    }
  };
  const auto quantize = [&](const uint4(&v)[kEach], uint32_t unit) {
    if (unit >= all) return;
    const uint32_t token = unit / units, first = (unit - token * units) * kUnit;
    quantize_words<kBf16>(v, static_cast<int>(first), static_cast<int>(words), a.quantize, a.fp8 + token * a.x_block_stride,
                          a.fp8_scales + token * a.scale_bytes);
  };
  uint4 now[kEach], next[kEach];
  uint32_t unit = blockIdx.x * static_cast<uint32_t>(num_warps()) + static_cast<uint32_t>(warp_id());
  Teller teller{a, call_of(a.common)};
  load(now, unit);
  teller.go_on(unit / units);
#pragma unroll 1
  for (; unit < all; unit += 2 * step) {
    load(next, unit + step);
    quantize(now, unit);
    teller.go_on((unit + step) / units);
    load(now, unit + 2 * step);
    quantize(next, unit + step);
    teller.go_on((unit + 2 * step) / units);
  }
#endif
}

/// Any type, stride and address. A warp quantises a row.
__global__ void __launch_bounds__(kThreads, 1) quantize_any_kernel(const __grid_constant__ DispatchArgs a) {
  let_next_start();
  const int64_t step = static_cast<int64_t>(gridDim.x) * num_warps();
  Teller teller{a, call_of(a.common)};
  int64_t token = static_cast<int64_t>(blockIdx.x) * num_warps() + warp_id();
  teller.go_on(token);
  for (; token < a.num_tokens; token += step) {
    quantize_row(a.dtype, a.quantize, a.x + token * a.x_stride, a.hidden, a.fp8 + token * a.x_block_stride, a.fp8_scales + token * a.scale_bytes);
    teller.go_on(token + step);
  }
}

}  // namespace

cudaError_t launch_quantize_ahead(const DispatchArgs& a, int blocks, cudaStream_t stream) {
  const int64_t units = a.num_tokens * core::ceil_div(a.hidden, kUnit * 8);
  const int grid = static_cast<int>(std::clamp<int64_t>(core::ceil_div(units, kThreads / 32), 1, blocks));
  const bool whole = reinterpret_cast<uintptr_t>(a.x) % 16 == 0 && a.x_stride % 16 == 0 && a.hidden % 8 == 0 && units < 1 << 30;
  const auto kernel = whole && a.dtype == DType::bf16   ? quantize_halves_kernel<true>
                      : whole && a.dtype == DType::fp16 ? quantize_halves_kernel<false>
                                                        : quantize_any_kernel;
  return launch_kernel(kernel, grid, kThreads, 0, stream, false, a);
}

cudaError_t prepare_quantize_ahead() {
  for (const void* kernel : {reinterpret_cast<const void*>(quantize_halves_kernel<true>),
                             reinterpret_cast<const void*>(quantize_halves_kernel<false>), reinterpret_cast<const void*>(quantize_any_kernel)}) {
    // Blocks of the move kernel, which take nearly all shared memory, start beside it.
    if (const cudaError_t bad = cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared))
      return bad;
    if (const cudaError_t bad = load_kernel(kernel)) return bad;
  }
  return cudaSuccess;
}

}  // namespace turnout::engine::cuda
