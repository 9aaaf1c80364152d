// Stands in for src/engine/cpu/mutation.h where the engine is built to be watched: one mutation at a time is switched on, before any rank
// runs.
#pragma once
#include "engine/cpu/mutation_list.h"

namespace turnout::engine {

inline Mutation active_mutation = Mutation::none;
inline bool mutated(Mutation mutation) { return mutation == active_mutation; }

}  // namespace turnout::engine
