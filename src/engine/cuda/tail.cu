// Rows of a capacity that nothing came for become 0, and scales are laid out by columns, after the call, in kernels of their own: only who
// asks for it pays for it.
#include <algorithm>

#include "engine/cuda/launch.h"
#include "engine/cuda/tail.h"

namespace turnout::engine::cuda {
namespace {

constexpr int kThreads = 256;

__device__ void zero(std::byte* at, int64_t bytes) {
  const bool wide = ((reinterpret_cast<uintptr_t>(at) | static_cast<uintptr_t>(bytes)) & 15) == 0;
  if (wide) {
    for (int64_t i = threadIdx.x; i < bytes / 16; i += kThreads) reinterpret_cast<uint4*>(at)[i] = uint4{0, 0, 0, 0};
  } else {
    for (int64_t i = threadIdx.x; i < bytes; i += kThreads) at[i] = std::byte{0};
  }
}

__global__ void __launch_bounds__(kThreads) zero_tail_kernel(const __grid_constant__ TailArgs a) {
  for (int64_t row = blockIdx.x; row < a.num_groups * a.group_rows; row += gridDim.x) {
    const int64_t group = row / a.group_rows, present = a.counts ? a.counts[group] : *a.num_rows;
    if (row - group * a.group_rows < present) continue;
    for (int i = 0; i < a.num_arrays; ++i) zero(a.arrays[i].data + row * a.arrays[i].stride, a.arrays[i].bytes);
  }
}

/// Neighbouring threads write neighbours of a column.
__global__ void __launch_bounds__(kThreads) turn_scales_kernel(const __grid_constant__ TurnArgs a) {
  const int64_t num = a.num_groups * a.words * a.group_rows;
  for (int64_t i = blockIdx.x * static_cast<int64_t>(kThreads) + threadIdx.x; i < num; i += static_cast<int64_t>(gridDim.x) * kThreads) {
    const int64_t row = i % a.group_rows, word = i / a.group_rows % a.words, group = i / (a.group_rows * a.words);
    if (row >= (a.counts ? a.counts[group] : a.num_rows ? *a.num_rows : a.group_rows)) continue;
    const std::byte* from = a.rows + (group * a.group_rows + row) * a.scale_bytes + 4 * word;
    uint32_t bits = 0;
    for (int b = 0; b < 4 && 4 * word + b < a.scale_bytes; ++b) bits |= static_cast<uint32_t>(from[b]) << 8 * b;
    a.columns[(group * a.words + word) * a.length + row] = bits;
  }
}

}  // namespace

cudaError_t launch_turn_scales(const TurnArgs& args, int num_sms, cudaStream_t stream) {
  const int64_t num = args.num_groups * args.words * args.group_rows;
  if (num == 0) return cudaSuccess;
  const auto blocks = static_cast<unsigned>(std::min<int64_t>((num + kThreads - 1) / kThreads, 8 * static_cast<int64_t>(num_sms)));
  turn_scales_kernel<<<blocks, kThreads, 0, stream>>>(args);
  return cudaGetLastError();
}

cudaError_t launch_zero_tail(const TailArgs& args, int num_sms, cudaStream_t stream) {
  const int64_t rows = args.num_groups * args.group_rows;
  if (rows == 0 || args.num_arrays == 0) return cudaSuccess;
  const auto blocks = static_cast<unsigned>(std::min<int64_t>(rows, 4 * static_cast<int64_t>(num_sms)));
  zero_tail_kernel<<<blocks, kThreads, 0, stream>>>(args);
  return cudaGetLastError();
}
cudaError_t prepare_zero_tail() {
  const cudaError_t bad = load_kernel(reinterpret_cast<const void*>(zero_tail_kernel));
  return bad ? bad : load_kernel(reinterpret_cast<const void*>(turn_scales_kernel));
}

}  // namespace turnout::engine::cuda
