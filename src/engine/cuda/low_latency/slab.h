// The short kernels for most low_latency calls, beside the general ones: a choice of each rank alone, by its own arguments.
#pragma once
#include <cuda_runtime_api.h>

#include "engine/cuda/args.h"

namespace turnout::engine::cuda::low_latency {

bool can_dispatch_slab(const DispatchArgs& a, int blocks);
/// REQUIRES: is_plain() and can_dispatch_slab().
cudaError_t launch_dispatch_slab(const DispatchArgs& a, int blocks, cudaStream_t stream);
cudaError_t prepare_dispatch_slab();

bool can_sum_slab(const CombineArgs& a);
/// REQUIRES: can_sum_slab(); rows of y and of the result are aligned to 16 bytes and so many bytes wide. `shared_bytes`: what a block may have.
cudaError_t launch_slab_sums(const CombineArgs& a, int blocks, int shared_bytes, cudaStream_t stream);
cudaError_t prepare_slab_sums(int shared_bytes);

}  // namespace turnout::engine::cuda::low_latency
