// The ranks of a soak on GPUs.
#include "engine/soak_place.h"

#include <stdexcept>
#include <string>

#include "cuda/cuda_place.h"

namespace turnout::testing {

std::unique_ptr<Place> gpu_place(int rank, int num_gpus) {
  int there = 0;
  cuda_ok(cudaGetDeviceCount(&there), "cudaGetDeviceCount");
  // On all ranks alike: nobody waits for one that found none.
  if (there < num_gpus) throw std::runtime_error("--gpus is " + std::to_string(num_gpus) + ", but this machine has " + std::to_string(there));
  keep_memory(rank % num_gpus);
  return std::make_unique<CudaPlace>(rank % num_gpus);
}

}  // namespace turnout::testing
