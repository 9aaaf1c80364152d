// A dispatch of all ranks made from options, its arguments for one rank, and whether what a Buffer delivered is what the
// reference says. Shared by bench and selftest.
#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "core/reference.h"
#include "tools/place.h"
#include "tools/routing_source.h"
#include "turnout/buffer.h"

namespace turnout::tools {

struct ProblemSpec {
  std::vector<int64_t> tokens;  ///< of each rank
  int num_experts = 8, topk = 2;
  int64_t hidden = 64;
  DType dtype = DType::bf16;
  Layout layout = Layout::rank_major;
  std::optional<int64_t> capacity;
  int alignment = 1;
  Quantize quantize = Quantize::none;
  std::string routing = "uniform";
  uint64_t seed = 1;
  int num_ranks() const { return static_cast<int>(tokens.size()); }
};

/// `rows_of`: -1: x of every rank; else the rows of this rank only (the others have routing but no x, for timing).
core::DispatchProblem make_problem(const ProblemSpec& spec, int rows_of = -1);

/// Elements of magnitude about 1, the same for the same seed; of types that cannot be added, bytes.
void fill_rows(std::byte* out, DType dtype, int64_t num_elements, uint64_t seed);

/// What `rank` gives to the call, put into the place. The problem and the place must outlive the call.
DispatchArgs dispatch_args(const core::DispatchProblem& problem, int rank, Place& place);

/// Rows that the busiest rank receives in the problem's layout, padding included, nothing dropped (slab: of the busiest expert).
int64_t most_rows(const core::DispatchProblem& problem);

/// A configuration in which all results of the problem can be leases, `num_results` at a time, and rows of its dtype be combined.
BufferConfig config_for(const core::DispatchProblem& problem, int num_results, Device device);

/// The first difference in words, or empty.
std::string difference(const DispatchResult& got, const core::DispatchOutput& want, const core::DispatchProblem& problem, Place& place);
std::string difference(const CombineResult& got, const core::CombineOutput& want, DType dtype, int64_t hidden, Place& place);

}  // namespace turnout::tools
