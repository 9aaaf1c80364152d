// Local memory of threads: a context has as much of it as the kernels that ran so far needed, and to get more is to wait for all that run.
#include "engine/cuda/kernels.h"
#include "engine/cuda/launch.h"

namespace turnout::engine::cuda {

namespace {

constexpr int kWords = 256;  ///< more than any kernel here has (kernels.txt of a build: stack)

/// Finds nothing, in an array that does not fit into registers.
__global__ void use_local_memory_kernel(int seed, int* found) {
  volatile int words[kWords];
#pragma unroll 1
  for (int i = 0; i < kWords; ++i) words[(i * seed) % kWords] = i;
  if (words[seed % kWords] < 0) *found = seed;
}

}  // namespace

cudaError_t prepare_local_memory(cudaStream_t stream) {
  use_local_memory_kernel<<<1, 1, 0, stream>>>(1, nullptr);
  return cudaGetLastError();
}

}  // namespace turnout::engine::cuda
