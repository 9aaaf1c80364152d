// Places where a test build makes the protocol of calls wrong, to prove that the seeded schedules notice: there
// tests/engine/probed/engine/cpu/mutation.h stands in for this file. Here nothing is ever wrong, and the compiler drops the wrong branches.
#pragma once
#include "engine/cpu/mutation_list.h"

namespace turnout::engine {

constexpr bool mutated(Mutation) { return false; }

}  // namespace turnout::engine
