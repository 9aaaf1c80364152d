// Stands in for src/core/mutation.h where the oracle is built to be proven: one mutation at a time is switched on.
#pragma once
#include "core/mutation_list.h"

namespace turnout::core {

inline Mutation active_mutation = Mutation::none;
inline bool mutated(Mutation mutation) { return mutation == active_mutation; }

}  // namespace turnout::core
