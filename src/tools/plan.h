// What the options of `turnout bench` mean, checked before a rank starts: what is wrong is told once, in the option's words.
#pragma once
#include "tools/bench.h"
#include "tools/problem.h"

namespace turnout::tools {

/// The same on all ranks.
struct Plan {
  ProblemSpec spec;
  Mode mode = Mode::automatic;
  Wire wire = Wire::payload;
  ResultKind result = ResultKind::lease;
  CombineWeights apply = CombineWeights::none;
  bool dispatch = true, combine = true, construct = false;
  bool graph = false;  ///< calls are captured and replayed
};

/// Throws: InvalidArgument naming the option.
Plan plan_of(const BenchOptions& options, int num_ranks);

/// What only a run needs: an arena for the limit, a report that can be written, memory for the rows of `num_local` ranks on this machine.
/// Throws: InvalidArgument.
void check_resources(const BenchOptions& options, const Plan& plan, int num_local);

/// Throws: InvalidArgument if this machine has not `wanted` bytes left for `what`; `instead` says what to use then.
void check_memory(double wanted, const std::string& what, const std::string& instead);

/// Throws: InvalidArgument if a report cannot be written to `path` ("-" is standard output). Leaves an existing file as it is.
void check_writable(const std::optional<std::string>& path);

/// Throws: InvalidArgument if --transport is no transport, or is one that --placement does not have.
void check_transport(const std::string& transport, const std::string& placement, int num_ranks);

}  // namespace turnout::tools
