#include "tools/bench.h"

#include <algorithm>
#include <array>
#include <cstdio>

#include "tools/construct.h"
#include "tools/measure.h"
#include "tools/models.h"
#include "tools/problem.h"
#include "tools/report.h"
#include "tools/self_launch.h"
#include "tools/timing.h"
#include "tools/verify.h"

namespace turnout::tools {

namespace {

/// Shapes whose tokens of all ranks have more elements than this are verified with fewer tokens.
constexpr int64_t kVerifyElements = int64_t{1} << 26;

/// What was asked, the same in every case of a run.
void describe(ReportCase& c, const Communicator& communicator, const Where& where, const Plan& plan, const BenchOptions& o) {
  // `auto` chooses by the bytes of the largest call: what it chose is the engine's business, the record says what was asked.
  c.mode = o.mode;
  c.layout = o.layout;
  c.input_dtype = std::string(name(plan.spec.dtype));
  c.dtype = c.op == "dispatch" && plan.spec.quantize != Quantize::none ? "fp8_e4m3" : c.input_dtype;
  c.tokens = o.tokens, c.hidden = plan.spec.hidden, c.top_k = plan.spec.topk, c.experts = plan.spec.num_experts;
  c.ranks = communicator.num_ranks(), c.nodes = communicator.num_nodes();
  c.placement = where.gpus.shared ? "one_gpu" : communicator.transport() == "inproc" ? "threads" : "processes";
  c.launch = o.launch;
  if (o.num_sms > 0) c.sms = o.num_sms;
  c.result = o.result, c.size = o.size, c.wire = o.wire, c.routing = o.routing, c.seed = o.seed;
  c.verified = true;
}

std::string shown(const std::optional<double>& value, int decimals) {
  std::array<char, 32> text{};
  if (!value) return "-";
  std::snprintf(text.data(), text.size(), "%.*f", decimals, *value);
  return text.data();
}

void print_case(const ReportCase& c) {
  if (c.op == "construct") {
    std::printf("construct: p50 %.0f us, p99 %.0f us of %ld Buffers with %.0f MiB per rank\n", *c.p50_us, *c.p99_us, static_cast<long>(c.n_calls),
                static_cast<double>(c.total_bytes) / 0x1p20 / c.ranks);
    return;
  }
  const double bytes = static_cast<double>(c.total_bytes), seconds = *c.p50_us * 1e-6;
  std::printf("%-9s %11.1f %11.1f %11s %8s %11.2f %11.2f %9.2f %7ld\n", c.op.c_str(), *c.p50_us, *c.p99_us, shown(c.limit_us, 1).c_str(),
              shown(c.ratio(), 2).c_str(), static_cast<double>(c.remote_bytes) / 1e6, bytes / 1e6, bytes / seconds / 1e9,
              static_cast<long>(c.n_calls));
}

/// True on all ranks if no rank has a text; the first one is printed.
bool all_empty(Communicator& communicator, const std::string& text) {
  const auto all = communicator.all_gather(std::as_bytes(std::span(text.data(), text.size())));
  for (size_t r = 0; r < all.size(); ++r) {
    if (all[r].empty()) continue;
    if (communicator.rank() == 0) {
      std::printf("WRONG on rank %zu: %.*s\n", r, static_cast<int>(all[r].size()), reinterpret_cast<const char*>(all[r].data()));
    }
    return false;
  }
  return true;
}

void introduce(const Communicator& communicator, const Where& where, const Plan& plan, const BenchOptions& o) {
  if (o.model) {
    const auto model = find_model(*o.model);
    std::printf("%s: %s\n", std::string(model->name).c_str(), std::string(model->source).c_str());
  }
  const std::string gpus = where.gpus.words.empty() ? "" : " on " + where.gpus.summary();
  std::printf("%d ranks (%s)%s, %ld tokens per rank x %ld %s, top-%d of %d experts\n", communicator.num_ranks(),
              std::string(communicator.transport()).c_str(), gpus.c_str(), static_cast<long>(o.tokens), static_cast<long>(plan.spec.hidden),
              o.dtype.c_str(), plan.spec.topk, plan.spec.num_experts);
  std::printf("%s, %s, %s, result %s, wire %s, routing %s, ", o.layout.c_str(), o.mode.c_str(), o.size.c_str(), o.result.c_str(), o.wire.c_str(),
              o.routing.c_str());
  if (gpus.empty()) std::printf("%d thread%s per rank\n", o.num_threads, o.num_threads == 1 ? "" : "s");
  else std::printf("launch %s, SMs %s\n", o.launch.c_str(), o.num_sms ? std::to_string(o.num_sms).c_str() : "as many as calls gain from");
  if (where.gpus.shared && communicator.transport() != "inproc") {
    std::printf("note: processes that share a GPU take turns on it; with --placement threads ranks run at once\n");
  }
}

void print_cases(const Report& report, const Plan& plan) {
  if (plan.construct) return print_case(report.cases[0]);
  if (report.link_GBps) std::printf("link: %.0f GB/s per direction (%s)\n", *report.link_GBps, report.cases[0].limit_kind.c_str());
  std::printf("\n%-9s %11s %11s %11s %8s %11s %11s %9s %7s\n", "op", "p50 us", "p99 us", "limit us", "x limit", "remote MB", "total MB", "GB/s",
              "calls");
  for (const ReportCase& c : report.cases) print_case(c);
}

}  // namespace

void time_calls(Communicator& communicator, const Where& where, const Plan& plan, const BenchOptions& o, Report& report) {
  const size_t before = report.cases.size();
  if (plan.construct) {
    report.cases.push_back(time_construct(communicator, plan, o, where.device));
  } else {
    Timing timing(communicator, plan, o, where.device, where.gpus);
    if (plan.dispatch) report.cases.push_back(timing.dispatch());
    if (plan.combine) report.cases.push_back(timing.combine());
    for (size_t i = before; i < report.cases.size(); ++i) report.cases[i].transport = timing.transport();
    report.link_GBps = timing.link();
  }
  for (size_t i = before; i < report.cases.size(); ++i) describe(report.cases[i], communicator, where, plan, o);
}

std::string verify_small(Communicator& communicator, const Where& where, const Plan& plan, const BenchOptions& o, int64_t* verified_tokens) {
  ProblemSpec small = plan.spec;
  const int64_t most = std::max<int64_t>(16, kVerifyElements / (plan.spec.hidden * communicator.num_ranks()));
  for (int64_t& tokens : small.tokens) tokens = std::min(tokens, most);
  if (verified_tokens) *verified_tokens = small.tokens[0];
  return verify(communicator, plan, small, o, where.device);
}

Plan plan_of_ranks(const BenchOptions& o, int num_ranks) {
  Plan plan = plan_of(o, num_ranks);
  if (o.size == "capacity") plan.spec.capacity = o.capacity ? *o.capacity : most_rows(make_problem(plan.spec, num_ranks));
  return plan;
}

namespace {

int bench_rank(Communicator& communicator, const BenchOptions& o) {
  const Plan plan = plan_of_ranks(o, communicator.num_ranks());
  Where where{device_of(device_from(o.device), communicator), {}};
  where.gpus = gather_gpus(communicator, where.device);
  const bool speaks = communicator.rank() == 0 && o.json != "-";
  if (speaks) introduce(communicator, where, plan, o);
  int64_t verified_tokens = 0;
  {
    Progress progress("verify", 1, communicator.rank() == 0);
    const std::string wrong = verify_small(communicator, where, plan, o, &verified_tokens);
    if (!all_empty(communicator, wrong)) return 1;
  }
  if (speaks) std::printf("verified against the reference, bit for bit (%ld tokens per rank)\n", static_cast<long>(verified_tokens));

  Report report = new_report("turnout bench");
  for (const std::string& word : o.command_line.arguments) report.command += word == "bench" ? "" : " " + word;
  report.host.gpu = where.gpus.summary();
  time_calls(communicator, where, plan, o, report);
  if (speaks) print_cases(report, plan);
  if (communicator.rank() == 0 && o.json) write_report(report, *o.json);
  return 0;
}

}  // namespace

int run_bench(const BenchOptions& options) {
  // What is wrong is told once, before ranks start; a launcher has started them already.
  const LaunchInfo launched = launch_info_from_env();
  const int num_ranks = launched.launcher == "none" ? options.ranks : launched.num_ranks;
  const Plan plan = plan_of(options, num_ranks);
  if (launched.launcher == "none") {
    check_transport(options.transport, options.placement, num_ranks);
    check_resources(options, plan, num_ranks);
  }
  check_num_sms(check_device(options.device), options.num_sms);
  CommunicatorOptions communicator;
  communicator.transport = options.transport;
  return run_ranks(
      options.ranks, placement_from(options.placement), options.command_line, [&](Communicator& c) { return bench_rank(c, options); }, communicator);
}

}  // namespace turnout::tools
