// Which calls the bulk kernels (TMA, sm_90 and newer) serve. The rest goes to the general ones, with the same results.
#pragma once
#include <cuda_runtime.h>

#include "engine/cuda/args.h"

namespace turnout::engine::cuda {

/// Whether the current device has bulk copies and this library code for it that uses them.
bool has_bulk();

bool can_move_bulk(const DispatchArgs& args);
/// Whether it could, if x were quantised first.
bool can_quantize_ahead(const DispatchArgs& args);
bool can_combine_bulk(const CombineArgs& args);

}  // namespace turnout::engine::cuda
