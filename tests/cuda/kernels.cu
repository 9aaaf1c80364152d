// The kernels: plain loops over words.
#include <stdexcept>
#include <string>

#include "kernels.h"

namespace turnout::testing {

namespace {

void check(cudaError_t result) {
  if (result != cudaSuccess) throw std::runtime_error(std::string("test kernel: ") + cudaGetErrorString(result));
}

__global__ void store_kernel(uint64_t* to, size_t num_words, uint64_t seed) {
  for (size_t i = blockIdx.x * size_t{blockDim.x} + threadIdx.x; i < num_words; i += size_t{gridDim.x} * blockDim.x) to[i] = seed + i;
}

/// Words differ from `seed` + i times `step`.
__global__ void compare_kernel(const uint64_t* at, size_t num_words, uint64_t seed, uint64_t step, unsigned long long* wrong) {
  for (size_t i = blockIdx.x * size_t{blockDim.x} + threadIdx.x; i < num_words; i += size_t{gridDim.x} * blockDim.x) {
    if (static_cast<const volatile uint64_t*>(at)[i] != seed + i * step) atomicAdd(wrong, 1ULL);
  }
}

uint64_t compare(const std::byte* at, size_t num_words, uint64_t seed, uint64_t step) {
  unsigned long long *wrong = nullptr, found = 0;
  check(cudaMalloc(reinterpret_cast<void**>(&wrong), sizeof *wrong));
  check(cudaMemset(wrong, 0, sizeof *wrong));
  compare_kernel<<<32, 256>>>(reinterpret_cast<const uint64_t*>(at), num_words, seed, step, wrong);
  check(cudaGetLastError());
  check(cudaMemcpy(&found, wrong, sizeof found, cudaMemcpyDeviceToHost));
  check(cudaFree(wrong));
  return found;
}

}  // namespace

void store_words(std::byte* to, size_t num_words, uint64_t seed) {
  store_kernel<<<32, 256>>>(reinterpret_cast<uint64_t*>(to), num_words, seed);
  check(cudaGetLastError());
  check(cudaDeviceSynchronize());
}

uint64_t wrong_words(const std::byte* at, size_t num_words, uint64_t seed) { return compare(at, num_words, seed, 1); }
uint64_t nonzero_words(const std::byte* at, size_t num_words) { return compare(at, num_words, 0, 0); }

}  // namespace turnout::testing
