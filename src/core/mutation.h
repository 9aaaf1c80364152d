// Places where a test build makes the oracle wrong, to prove that a test notices: there tests/core/mutated/core/mutation.h stands
// in for this file. Here nothing is ever wrong, and the compiler drops the wrong branches.
#pragma once
#include "core/mutation_list.h"

namespace turnout::core {

constexpr bool mutated(Mutation) { return false; }

}  // namespace turnout::core
