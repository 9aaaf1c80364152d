#include "tools/selftest.h"

#include <chrono>
#include <cstdio>
#include <cstring>
#include <memory>
#include <span>

#include "tools/gpus.h"
#include "tools/plan.h"
#include "tools/problem.h"
#include "tools/report.h"
#include "tools/self_launch.h"

namespace turnout::tools {

namespace {

enum class Size { exact, fits, full };

struct Case {
  Mode mode;
  Layout layout;
  Size size;
  Quantize quantize;
  Wire wire;
  std::string to_string() const {
    static constexpr const char* kSizes[] = {"exact", "capacity", "capacity too small"};
    std::string text;
    for (const std::string_view word : {name(mode), name(layout), std::string_view(kSizes[static_cast<size_t>(size)]), name(quantize), name(wire)}) {
      text += (text.empty() ? "" : ", ") + std::string(word);
    }
    return text;
  }
};

std::vector<Case> all_cases() {
  std::vector<Case> cases;
  for (const Mode mode : {Mode::throughput, Mode::low_latency}) {
    for (const Layout layout : {Layout::rank_major, Layout::expert_major, Layout::expert_slab}) {
      for (const Size size : {Size::exact, Size::fits, Size::full}) {
        if (layout == Layout::expert_slab && size == Size::exact) continue;
        for (const Wire wire : {Wire::payload, Wire::fp32, Wire::fp8, Wire::rows}) {
          if (layout == Layout::rank_major && wire == Wire::rows) continue;
          cases.push_back({mode, layout, size, Quantize::none, wire});
        }
        cases.push_back({mode, layout, size, Quantize::fp8_e4m3, Wire::payload});
        cases.push_back({mode, layout, size, Quantize::fp8_e4m3_ue8m0, Wire::payload});
      }
    }
  }
  return cases;
}

ProblemSpec spec_of(const Case& c, int num_ranks) {
  ProblemSpec spec;
  for (int r = 0; r < num_ranks; ++r) spec.tokens.push_back(r == 1 ? 0 : 19 + 7 * r);
  spec.num_experts = 2 * num_ranks + 1;
  spec.topk = 3;
  spec.hidden = 300;  // not a multiple of a block of scales
  spec.layout = c.layout;
  spec.alignment = c.layout == Layout::expert_major ? 4 : 1;
  spec.quantize = c.quantize;
  if (c.size != Size::exact) {
    const int64_t need = most_rows(make_problem(spec, num_ranks));
    spec.capacity = c.size == Size::fits ? need + 3 : need - 2;
  }
  return spec;
}

/// What differs on this rank, or empty. Also what was thrown: then all ranks throw alike.
std::string run_case(Communicator& communicator, const Case& c, Device device) {
  const core::DispatchProblem problem = make_problem(spec_of(c, communicator.num_ranks()));
  const auto want = core::reference_dispatch(problem);
  const std::unique_ptr<Place> place = open_place(device);
  Buffer buffer(communicator, config_for(problem, 2, device));
  const auto me = static_cast<size_t>(communicator.rank());
  DispatchArgs args = dispatch_args(problem, communicator.rank(), *place);
  args.mode = c.mode;
  DispatchResult result = buffer.dispatch(args);
  place->finish();
  buffer.check();
  const std::string text = difference(result, want[me], problem, *place);

  core::CombineProblem back;
  back.dispatch = &problem;
  back.received = &want;
  std::vector<int> nodes;
  const int node = communicator.node();
  for (const auto& bytes : communicator.all_gather(std::as_bytes(std::span(&node, 1)))) std::memcpy(&nodes.emplace_back(), bytes.data(), sizeof node);
  back.topology = core::Topology::of(nodes);
  back.hidden = problem.hidden;
  back.apply = c.layout == Layout::rank_major ? CombineWeights::none : CombineWeights::source;
  back.wire = c.wire;
  for (size_t r = 0; r < want.size(); ++r) {
    core::CombineInput& input = back.ranks.emplace_back();
    input.y.resize(static_cast<size_t>(want[r].array_rows * problem.hidden) * size_of(back.dtype));
    fill_rows(input.y.data(), back.dtype, want[r].array_rows * problem.hidden, 5 + r);
  }
  const auto sums = core::reference_combine(back);
  CombineArgs gather;
  const std::byte* y = back.ranks[me].y.data();
  gather.y = place->put(c.layout == Layout::expert_slab
                            ? TensorView::dense(y, back.dtype, {problem.experts.num_local(communicator.rank()), *problem.capacity, problem.hidden})
                            : TensorView::dense(y, back.dtype, {want[me].array_rows, problem.hidden}));
  gather.stream = place->stream();
  gather.handle = &result.handle;
  gather.apply = back.apply;
  gather.wire = c.wire;
  gather.mode = c.mode;
  const CombineResult combined = buffer.combine(gather);
  place->finish();
  buffer.check();
  return text.empty() ? difference(combined, sums[me], back.dtype, problem.hidden, *place) : text;
}

/// Median time of a small call, to see at a glance whether the machine is healthy.
void print_speed(Communicator& communicator, Device device) {
  ProblemSpec spec;
  spec.tokens.assign(static_cast<size_t>(communicator.num_ranks()), 128);
  spec.num_experts = 64, spec.topk = 8, spec.hidden = 2048;
  const core::DispatchProblem problem = make_problem(spec, communicator.rank());
  const std::unique_ptr<Place> place = open_place(device);
  Buffer buffer(communicator, config_for(problem, 2, device));
  const DispatchArgs args = dispatch_args(problem, communicator.rank(), *place);
  std::vector<double> dispatch, combine;
  for (int i = 0; i < 60; ++i) {
    const auto t0 = std::chrono::steady_clock::now();
    const DispatchResult result = buffer.dispatch(args);
    place->finish();
    const auto t1 = std::chrono::steady_clock::now();
    CombineArgs back;
    back.y = result.x;
    back.handle = &result.handle;
    back.stream = place->stream();
    buffer.combine(back);
    place->finish();
    const auto t2 = std::chrono::steady_clock::now();
    dispatch.push_back(std::chrono::duration<double, std::micro>(t1 - t0).count());
    combine.push_back(std::chrono::duration<double, std::micro>(t2 - t1).count());
  }
  buffer.check();
  if (communicator.rank() != 0) return;
  std::printf("speed: 128 tokens x 2048 bf16, top-8 of 64: dispatch %.1f us, combine %.1f us (median; `turnout bench` measures properly)\n",
              quantile(dispatch, 0.5), quantile(combine, 0.5));
}

int selftest_rank(Communicator& communicator, const SelftestOptions& options) {
  const bool speaks = communicator.rank() == 0;
  Report report = new_report("turnout selftest");
  const Device device = device_of(device_from(options.device), communicator);
  const Gpus gpus = gather_gpus(communicator, device);
  report.host.gpu = gpus.summary();
  const std::vector<Case> cases = all_cases();
  {
    Progress progress("selftest", static_cast<int64_t>(cases.size()), speaks);
    for (size_t i = 0; i < cases.size(); ++i) {
      std::string text;
      try {
        text = run_case(communicator, cases[i], device);
      } catch (const InvalidArgument& e) {
        text = e.what();
      }
      const auto all = communicator.all_gather(std::as_bytes(std::span(text.data(), text.size())));
      bool good = true;
      for (size_t r = 0; r < all.size(); ++r) {
        if (all[r].empty()) continue;
        if (speaks && good) {
          std::printf("FAILED %s: rank %zu: %.*s\n", cases[i].to_string().c_str(), r, static_cast<int>(all[r].size()),
                      reinterpret_cast<const char*>(all[r].data()));
        }
        good = false;
      }
      if (speaks && good && options.verbose) std::printf("ok     %s\n", cases[i].to_string().c_str());
      ++(good ? report.tests.passed : report.tests.failed);
      report.tests.names.push_back(cases[i].to_string() + (good ? ": passed" : ": failed"));
      progress.at(static_cast<int64_t>(i) + 1);
    }
  }
  if (report.tests.failed == 0) print_speed(communicator, device);
  if (speaks) {
    const std::string on = gpus.words.empty() ? "" : " on " + gpus.summary();
    std::printf("%s: %d ranks (%s)%s: %d passed, %d failed\n", report.tests.failed ? "FAIL" : "PASS", communicator.num_ranks(),
                std::string(communicator.transport()).c_str(), on.c_str(), report.tests.passed, report.tests.failed);
    if (options.json) write_report(report, *options.json);
  }
  return report.tests.failed ? 1 : 0;
}

}  // namespace

int run_selftest(const SelftestOptions& options) {
  if (launch_info_from_env().launcher == "none") check_transport(options.transport, options.placement, options.ranks);
  check_writable(options.json);
  check_device(options.device);
  CommunicatorOptions communicator;
  communicator.transport = options.transport;
  return run_ranks(
      options.ranks, placement_from(options.placement), options.command_line, [&](Communicator& c) { return selftest_rank(c, options); },
      communicator);
}

}  // namespace turnout::tools
