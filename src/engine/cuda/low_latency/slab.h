// The short kernel for most low_latency dispatches, beside the general ones: a choice of each rank alone, by its own arguments.
#pragma once
#include <cuda_runtime_api.h>

#include "engine/cuda/args.h"

namespace turnout::engine::cuda::low_latency {

bool can_dispatch_slab(const DispatchArgs& a, int blocks);
/// REQUIRES: is_plain() and can_dispatch_slab().
cudaError_t launch_dispatch_slab(const DispatchArgs& a, int blocks, cudaStream_t stream);
cudaError_t prepare_dispatch_slab();

}  // namespace turnout::engine::cuda::low_latency
