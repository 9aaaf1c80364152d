// What a bench is about to time, once, against the reference; and the arguments of a combine, which verifying and timing share.
#pragma once
#include <string>

#include "core/topology.h"
#include "tools/place.h"
#include "tools/plan.h"
#include "turnout/buffer.h"

namespace turnout::tools {

/// Rows `y` of expert output, already in the memory of the place, in the layout of what was dispatched.
CombineArgs combine_args(const Plan& plan, const DispatchResult& result, const TensorView& y, Stream stream);
/// Expert output in the shape of a result's rows.
TensorView rows_like(const DispatchResult& result, const std::byte* y, DType dtype, int64_t hidden);

/// Whether expert output can lie where the rows arrived, in registered memory: a lease of the same type.
bool in_place(const Plan& plan, const DispatchResult& result);

/// Which ranks are of which node. Collective.
core::Topology topology_of(Communicator& communicator);

/// One dispatch and combine on all ranks, compared bit for bit. The first difference in words, or empty. Collective.
std::string verify(Communicator& communicator, const Plan& plan, const ProblemSpec& spec, const BenchOptions& options, Device device);

}  // namespace turnout::tools
