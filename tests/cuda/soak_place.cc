// The ranks of a soak on GPUs.
#include "engine/soak_place.h"

#include "cuda/cuda_place.h"

namespace turnout::testing {

std::unique_ptr<Place> gpu_place(int rank, int num_gpus) {
  keep_memory(rank % num_gpus);
  return std::make_unique<CudaPlace>(rank % num_gpus);
}

}  // namespace turnout::testing
