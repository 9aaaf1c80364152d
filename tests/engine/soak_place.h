// Where the ranks of a soak keep their rows. Programs built without CUDA answer with a reason (soak_place_unavailable.cc).
#pragma once
#include <memory>

#include "support/place.h"

namespace turnout::testing {

/// Memory of the GPU of `rank`, ranks dealt to `num_gpus`. Throws what is wrong where there is none.
std::unique_ptr<Place> gpu_place(int rank, int num_gpus);

}  // namespace turnout::testing
