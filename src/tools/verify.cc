#include "tools/verify.h"

#include <cstring>

#include "tools/problem.h"

namespace turnout::tools {

core::Topology topology_of(Communicator& communicator) {
  const int node = communicator.node();
  std::vector<int> nodes;
  for (const auto& bytes : communicator.all_gather(std::as_bytes(std::span(&node, 1)))) {
    nodes.push_back(0);
    std::memcpy(&nodes.back(), bytes.data(), sizeof(int));
  }
  return core::Topology::of(nodes);
}

TensorView rows_like(const DispatchResult& result, const std::byte* y, DType dtype, int64_t hidden) {
  if (result.x.ndim == 3) return TensorView::dense(y, dtype, {result.x.shape[0], result.x.shape[1], hidden});
  return TensorView::dense(y, dtype, {result.x.shape[0], hidden});
}

CombineArgs combine_args(const Plan& plan, const DispatchResult& result, const TensorView& y, Stream stream) {
  CombineArgs args;
  args.y = y;
  args.handle = &result.handle;
  args.apply = plan.apply;
  args.wire = plan.wire;
  args.mode = plan.mode;
  args.stream = stream;
  return args;
}

bool in_place(const Plan& plan, const DispatchResult& result) { return result.is_lease && plan.spec.quantize == Quantize::none; }

std::string verify(Communicator& communicator, const Plan& plan, const ProblemSpec& spec, const BenchOptions& o, Device device) {
  const core::DispatchProblem problem = make_problem(spec);
  const auto want = core::reference_dispatch(problem);
  BufferConfig config = config_for(problem, 2, device);
  config.num_threads = o.num_threads;
  const std::unique_ptr<Place> place = open_place(device);
  Buffer buffer(communicator, config);
  DispatchArgs args = dispatch_args(problem, communicator.rank(), *place);
  args.mode = plan.mode;
  args.result = plan.result;
  args.num_sms = o.num_sms;
  DispatchResult result = buffer.dispatch(args);
  place->finish();
  buffer.check();
  const auto me = static_cast<size_t>(communicator.rank());
  std::string text = difference(result, want[me], problem, *place);
  if (text.empty() && o.result == "lease" && !result.is_lease && result.x.num_elements() > 0) text = "the receive region had no room for a lease";
  if (!plan.combine) return text;

  core::CombineProblem back;
  back.dispatch = &problem;
  back.received = &want;
  back.topology = topology_of(communicator);
  back.hidden = spec.hidden;
  back.dtype = spec.dtype;
  back.apply = plan.apply;
  back.wire = plan.wire;
  for (size_t r = 0; r < want.size(); ++r) {
    core::CombineInput input;
    input.y.resize(static_cast<size_t>(want[r].array_rows * spec.hidden) * size_of(spec.dtype));
    fill_rows(input.y.data(), spec.dtype, want[r].array_rows * spec.hidden, spec.seed * 77 + r);
    back.ranks.push_back(std::move(input));
  }
  const auto sums = core::reference_combine(back);
  const bool stays = in_place(plan, result) && result.x.ndim == 2;
  if (stays) write_rows(*place, result.x, back.ranks[me].y.data(), static_cast<size_t>(spec.hidden) * size_of(spec.dtype));
  const TensorView y = stays ? result.x : place->put(rows_like(result, back.ranks[me].y.data(), spec.dtype, spec.hidden));
  CombineArgs bring = combine_args(plan, result, y, place->stream());
  bring.num_sms = o.num_sms;
  const CombineResult combined = buffer.combine(bring);
  place->finish();
  buffer.check();
  return text.empty() ? difference(combined, sums[me], spec.dtype, spec.hidden, *place) : text;
}

}  // namespace turnout::tools
