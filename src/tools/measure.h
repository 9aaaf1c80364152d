// The steps of a bench, which a selftest takes with shapes of its own: verify, then time.
#pragma once
#include <cstdint>
#include <string>

#include "tools/gpus.h"
#include "tools/plan.h"
#include "tools/report.h"

namespace turnout::tools {

/// Where the calls of this rank happen.
struct Where {
  Device device;
  Gpus gpus;
};

/// As plan_of(), with the capacity that the routing needs where none is given.
Plan plan_of_ranks(const BenchOptions& options, int num_ranks);

/// One dispatch and combine, of so few tokens that the reference is quick; the first difference on this rank, or empty. Collective.
std::string verify_small(Communicator& communicator, const Where& where, const Plan& plan, const BenchOptions& options, int64_t* verified_tokens);

/// Adds what was timed to the report's cases. Collective. REQUIRES: it was verified.
void time_calls(Communicator& communicator, const Where& where, const Plan& plan, const BenchOptions& options, Report& report);

}  // namespace turnout::tools
