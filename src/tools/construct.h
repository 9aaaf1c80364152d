// How long making a Buffer takes once the ranks know each other: `turnout bench --op construct`.
#pragma once
#include "tools/plan.h"
#include "tools/report.h"

namespace turnout::tools {

/// A Buffer of `arena_mib` MiB for the shape: what it needs, and the rest as its receive region.
/// Throws: InvalidArgument if the shape needs more than that.
BufferConfig construct_config(const Plan& plan, const BenchOptions& options, int num_ranks, Device device);

/// Buffers of exactly `arena_mib` MiB of symmetric memory per rank, made by all ranks together; a time is that of the slowest rank.
/// Collective. Throws: as construct_config().
ReportCase time_construct(Communicator& communicator, const Plan& plan, const BenchOptions& options, Device device);

}  // namespace turnout::tools
