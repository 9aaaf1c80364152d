#include "tools/bench.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <memory>

#include "tools/construct.h"
#include "tools/limit.h"
#include "tools/models.h"
#include "tools/plan.h"
#include "tools/problem.h"
#include "tools/report.h"
#include "tools/self_launch.h"
#include "tools/shared_arena.h"

namespace turnout::tools {

namespace {

using Clock = std::chrono::steady_clock;

/// Shapes whose tokens of all ranks have more elements than this are verified with fewer tokens.
constexpr int64_t kVerifyElements = int64_t{1} << 26;
/// Limits that would need more shared memory than this are not measured.
constexpr size_t kMostLimitBytes = size_t{4} << 30;

CombineArgs combine_args(const Plan& plan, const DispatchResult& result, const std::byte* y, DType dtype) {
  CombineArgs args;
  if (result.x.ndim == 3) {
    args.y = TensorView::dense(y, dtype, {result.x.shape[0], result.x.shape[1], plan.spec.hidden});
  } else {
    args.y = TensorView::dense(y, dtype, {result.x.shape[0], plan.spec.hidden});
  }
  args.handle = &result.handle;
  args.apply = plan.apply;
  args.wire = plan.wire;
  args.mode = plan.mode;
  return args;
}

/// Whether expert output can lie where the rows arrived, in registered memory: a lease of the same type.
bool in_place(const Plan& plan, const DispatchResult& result) { return result.is_lease && plan.spec.quantize == Quantize::none; }

core::Topology topology_of(Communicator& communicator) {
  const int node = communicator.node();
  std::vector<int> nodes;
  for (const auto& bytes : communicator.all_gather(std::as_bytes(std::span(&node, 1)))) {
    nodes.push_back(0);
    std::memcpy(&nodes.back(), bytes.data(), sizeof(int));
  }
  return core::Topology::of(nodes);
}

/// One dispatch and combine on all ranks, compared bit for bit. The first difference in words, or empty.
std::string verify(Communicator& communicator, const Plan& plan, const ProblemSpec& spec, const BenchOptions& o) {
  const core::DispatchProblem problem = make_problem(spec);
  const auto want = core::reference_dispatch(problem);
  BufferConfig config = config_for(problem, 2);
  config.num_threads = o.num_threads;
  Buffer buffer(communicator, config);
  DispatchArgs args = dispatch_args(problem, communicator.rank());
  args.mode = plan.mode;
  args.result = plan.result;
  DispatchResult result = buffer.dispatch(args);
  const auto me = static_cast<size_t>(communicator.rank());
  std::string text = difference(result, want[me], problem);
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
  CombineArgs bring = combine_args(plan, result, back.ranks[me].y.data(), spec.dtype);
  if (in_place(plan, result) && bring.y.ndim == 2) {
    const size_t row_bytes = static_cast<size_t>(spec.hidden) * size_of(spec.dtype);
    for (int64_t row = 0; row < bring.y.shape[0]; ++row) std::memcpy(result.x.row(row), bring.y.row(row), row_bytes);
    bring.y = result.x;
  }
  const CombineResult combined = buffer.combine(bring);
  return text.empty() ? difference(combined, sums[me], spec.dtype, spec.hidden) : text;
}

/// Everything that a timed call needs, pages warm.
class Timing {
 public:
  Timing(Communicator& communicator, const Plan& plan, const BenchOptions& o)
      : communicator_(communicator),
        plan_(plan),
        o_(o),
        problem_(make_problem(plan.spec, communicator.rank())),
        traffic_(problem_),
        row_bytes_(static_cast<size_t>(plan.spec.hidden) * size_of(plan.spec.dtype)),
        x_(problem_.ranks[rank()].x.size()),
        out_(problem_.ranks[rank()].x.size()) {
    std::memcpy(x_.data(), problem_.ranks[rank()].x.data(), problem_.ranks[rank()].x.size());
    const size_t wanted = limit_bytes(traffic_, moved_bytes(), row_bytes_);
    measures_limit_ = wanted <= kMostLimitBytes;
    arena_ = std::make_unique<SharedArena>(communicator, measures_limit_ ? wanted : 0);
    BufferConfig config = config_for(problem_, 2);
    config.num_threads = o.num_threads;
    config.touch_pages = true;
    buffer_ = std::make_unique<Buffer>(communicator, config);
    args_ = dispatch_args(problem_, communicator.rank());
    args_.x.data = x_.data();
    args_.mode = plan.mode;
    args_.result = plan.result;
  }

  ReportCase dispatch() {
    const auto limit = [&] { copy_dispatch(traffic_, communicator_.rank(), x_.data(), moved_bytes(), arena_->data()); };
    std::vector<double> limits = measures_limit_ ? timed(
                                                       "dispatch limit", limit, [] {}, 0.15)
                                                 : std::vector<double>{};
    std::optional<DispatchResult> result;
    const auto times = timed(
        "dispatch", [&] { result = buffer_->dispatch(args_); }, [&] { result.reset(); }, 1);
    append(limits, "dispatch limit", limit);
    ReportCase c = new_case("dispatch", times, limits);
    c.remote_bytes = traffic_.remote_pairs() * static_cast<int64_t>(moved_bytes());
    c.total_bytes = traffic_.total_pairs() * static_cast<int64_t>(moved_bytes());
    return c;
  }

  ReportCase combine() {
    DispatchResult result = buffer_->dispatch(args_);
    int64_t rows = result.x.shape[0];
    if (result.x.ndim == 3) rows *= result.x.shape[1];
    const int64_t y_rows = std::max(rows, traffic_.num_rows(communicator_.rank()));
    WarmMemory y(static_cast<size_t>(y_rows) * row_bytes_);
    fill_rows(y.data(), plan_.spec.dtype, y_rows * plan_.spec.hidden, 99);
    const auto limit = [&] { copy_combine(traffic_, communicator_.rank(), y.data(), row_bytes_, out_.data(), *arena_); };
    std::vector<double> limits = measures_limit_ ? timed(
                                                       "combine limit", limit, [] {}, 0.15)
                                                 : std::vector<double>{};
    CombineArgs args = combine_args(plan_, result, y.data(), plan_.spec.dtype);
    if (in_place(plan_, result)) args.y = result.x;  // experts that write where their rows came in
    std::optional<CombineResult> combined;
    const auto times = timed(
        "combine", [&] { combined = buffer_->combine(args); }, [&] { combined.reset(); }, 1);
    append(limits, "combine limit", limit);
    ReportCase c = new_case("combine", times, limits);
    const auto bytes = static_cast<int64_t>(row_bytes_);
    c.remote_bytes = (plan_.wire == Wire::rows ? traffic_.remote_rows() : traffic_.remote_pairs()) * bytes;
    c.total_bytes = (plan_.wire == Wire::rows ? traffic_.total_rows() : traffic_.total_pairs()) * bytes;
    return c;
  }

 private:
  size_t rank() const { return static_cast<size_t>(communicator_.rank()); }
  /// Bytes of a row as it travels, without what lies beside it.
  size_t moved_bytes() const { return plan_.spec.quantize == Quantize::none ? row_bytes_ : static_cast<size_t>(plan_.spec.hidden); }

  /// Half of the limit's calls come before the calls they are held against, half after.
  template <class Call>
  void append(std::vector<double>& limits, const char* label, Call call) {
    if (!measures_limit_) return;
    const auto more = timed(
        label, call, [] {}, 0.15);
    limits.insert(limits.end(), more.begin(), more.end());
  }

  /// Every call starts on all ranks together; its time is that of the slowest rank, in microseconds.
  template <class Call, class After>
  std::vector<double> timed(const char* label, Call call, After after, double share) {
    const auto once = [&] {
      arena_->barrier();
      const auto start = Clock::now();
      call();
      const auto end = Clock::now();
      after();
      return std::chrono::duration<double, std::micro>(end - start).count();
    };
    double typical = 0;
    for (int i = 0; i < 4; ++i) typical = once();
    typical = arena_->max(typical);
    int count = o_.iterations > 0 ? o_.iterations : static_cast<int>(std::clamp(o_.seconds * share * 1e6 / std::max(typical, 0.1), 10.0, 20000.0));
    Progress progress(label, count, communicator_.rank() == 0);
    std::vector<double> mine;
    for (int i = 0; i < count; ++i) {
      mine.push_back(once());
      if (typical > 1000 || i % 1000 == 0) progress.at(i);
    }
    return arena_->max(mine);
  }

  ReportCase new_case(const char* op, const std::vector<double>& times, const std::vector<double>& limits) const {
    ReportCase c;
    c.op = op;
    c.p50_us = quantile(times, 0.5);
    c.p99_us = quantile(times, 0.99);
    c.n_calls = static_cast<int64_t>(times.size());
    if (!limits.empty()) c.limit_us = quantile(limits, 0.5), c.limit_kind = "memcpy";
    return c;
  }

  Communicator& communicator_;
  const Plan& plan_;
  const BenchOptions& o_;
  core::DispatchProblem problem_;
  Traffic traffic_;
  size_t row_bytes_;
  WarmMemory x_, out_;
  bool measures_limit_ = false;
  std::unique_ptr<SharedArena> arena_;
  std::unique_ptr<Buffer> buffer_;
  DispatchArgs args_;
};

/// What was asked, the same in every case of a run.
void describe(ReportCase& c, const Communicator& communicator, const Plan& plan, const BenchOptions& o) {
  // `auto` chooses by the bytes of the largest call: what it chose is the engine's business, the record says what was asked.
  c.mode = o.mode;
  c.layout = o.layout;
  c.input_dtype = std::string(name(plan.spec.dtype));
  c.dtype = c.op == "dispatch" && plan.spec.quantize != Quantize::none ? "fp8_e4m3" : c.input_dtype;
  c.tokens = o.tokens, c.hidden = plan.spec.hidden, c.top_k = plan.spec.topk, c.experts = plan.spec.num_experts;
  c.ranks = communicator.num_ranks(), c.nodes = communicator.num_nodes();
  c.transport = std::string(communicator.transport());
  c.placement = c.transport == "inproc" ? "threads" : "processes";
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

void time_calls(Communicator& communicator, const Plan& plan, const BenchOptions& o, Report& report) {
  Timing timing(communicator, plan, o);
  if (plan.dispatch) report.cases.push_back(timing.dispatch());
  if (plan.combine) report.cases.push_back(timing.combine());
}

int bench_rank(Communicator& communicator, const BenchOptions& o) {
  Plan plan = plan_of(o, communicator.num_ranks());
  if (o.size == "capacity") plan.spec.capacity = o.capacity ? *o.capacity : most_rows(make_problem(plan.spec, communicator.num_ranks()));
  const bool speaks = communicator.rank() == 0 && o.json != "-";
  if (speaks) {
    if (o.model)
      std::printf("%.*s: %s\n", static_cast<int>(find_model(*o.model)->name.size()), find_model(*o.model)->name.data(),
                  std::string(find_model(*o.model)->source).c_str());
    std::printf("%d ranks (%.*s), %ld tokens per rank x %ld %s, top-%d of %d experts\n", communicator.num_ranks(),
                static_cast<int>(communicator.transport().size()), communicator.transport().data(), static_cast<long>(o.tokens),
                static_cast<long>(plan.spec.hidden), o.dtype.c_str(), plan.spec.topk, plan.spec.num_experts);
    std::printf("%s, %s, %s, result %s, wire %s, routing %s, %d thread%s per rank\n", o.layout.c_str(), o.mode.c_str(), o.size.c_str(),
                o.result.c_str(), o.wire.c_str(), o.routing.c_str(), o.num_threads, o.num_threads == 1 ? "" : "s");
  }
  ProblemSpec small = plan.spec;
  const int64_t most = std::max<int64_t>(16, kVerifyElements / (plan.spec.hidden * communicator.num_ranks()));
  for (int64_t& tokens : small.tokens) tokens = std::min(tokens, most);
  {
    Progress progress("verify", 1, communicator.rank() == 0);
    const std::string wrong = verify(communicator, plan, small, o);
    if (!all_empty(communicator, wrong)) return 1;
  }
  if (speaks) std::printf("verified against the reference, bit for bit (%ld tokens per rank)\n", static_cast<long>(small.tokens[0]));

  Report report = new_report("turnout bench");
  for (const std::string& word : o.arguments) report.command += word == "bench" ? "" : " " + word;
  if (plan.construct) report.cases.push_back(time_construct(communicator, plan, o));
  else time_calls(communicator, plan, o, report);
  for (ReportCase& c : report.cases) describe(c, communicator, plan, o);
  if (speaks && plan.construct) print_case(report.cases[0]);
  else if (speaks) {
    std::printf("\n%-9s %11s %11s %11s %8s %11s %11s %9s %7s\n", "op", "p50 us", "p99 us", "limit us", "x limit", "remote MB", "total MB", "GB/s",
                "calls");
    for (const ReportCase& c : report.cases) print_case(c);
  }
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
  CommunicatorOptions communicator;
  communicator.transport = options.transport;
  return run_ranks(
      options.ranks, placement_from(options.placement), options.arguments, [&](Communicator& c) { return bench_rank(c, options); }, communicator);
}

}  // namespace turnout::tools
