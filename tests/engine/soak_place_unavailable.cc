// A soak of a build without CUDA.
#include <stdexcept>

#include "engine/soak_place.h"

namespace turnout::testing {

std::unique_ptr<Place> gpu_place(int, int) { throw std::runtime_error("this soak was built without CUDA: configure with TURNOUT_CUDA=ON"); }

}  // namespace turnout::testing
