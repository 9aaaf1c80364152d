#include "tools/timing.h"

#include <algorithm>
#include <chrono>
#include <cstring>

#include "tools/problem.h"
#include "tools/verify.h"

namespace turnout::tools {

namespace {

using Clock = std::chrono::steady_clock;

/// Limits that would need more shared memory than this are not measured.
constexpr size_t kMostLimitBytes = size_t{4} << 30;
/// Calls on a GPU that are issued without waiting: few enough that ranks that are threads do not fill the queues they share.
constexpr size_t kIssued = 16;
/// Calls of one captured graph.
constexpr size_t kGraphCalls = 10;

/// What `source` sends to other ranks, in rows of the wire.
int64_t sent_pairs(const Traffic& t, int source) {
  int64_t pairs = 0;
  for (int r = 0; r < t.num_ranks(); ++r) pairs += r == source ? 0 : t.pairs(source, r);
  return pairs;
}
/// What `rank` sends back to other ranks: a partial sum for each pair, or every row.
int64_t returned_rows(const Traffic& t, int rank, Wire wire) {
  int64_t rows = 0;
  for (int source = 0; source < t.num_ranks(); ++source) {
    if (source == rank) continue;
    rows += wire == Wire::rows ? t.first_row(source + 1, rank) - t.first_row(source, rank) : t.pairs(source, rank);
  }
  return rows;
}

template <class Rows>
int64_t most_of_ranks(int num_ranks, Rows rows) {
  int64_t most = 0;
  for (int r = 0; r < num_ranks; ++r) most = std::max(most, rows(r));
  return most;
}

}  // namespace

Timing::Timing(Communicator& communicator, const Plan& plan, const BenchOptions& o, Device device, const Gpus& gpus)
    : communicator_(communicator),
      plan_(plan),
      o_(o),
      problem_(make_problem(plan.spec, communicator.rank())),
      traffic_(problem_),
      row_bytes_(static_cast<size_t>(plan.spec.hidden) * size_of(plan.spec.dtype)),
      x_(problem_.ranks[rank()].x.size()),
      out_(problem_.ranks[rank()].x.size()),
      place_(open_place(device)) {
  std::memcpy(x_.data(), problem_.ranks[rank()].x.data(), problem_.ranks[rank()].x.size());
  const size_t wanted = limit_bytes(traffic_, moved_bytes(), row_bytes_);
  copies_limit_ = !place_->gpu() && wanted <= kMostLimitBytes;
  arena_ = std::make_unique<SharedArena>(communicator, copies_limit_ ? wanted : 0);
  BufferConfig config = config_for(problem_, 2, device);
  config.num_threads = o.num_threads;
  config.touch_pages = true;
  if (plan.graph) config.receive_bytes *= 2;  // a graph keeps what its calls took
  buffer_ = std::make_unique<Buffer>(communicator, config);
  transport_ = transport_of(*buffer_, communicator);
  if (place_->gpu()) link_ = link_GBps(communicator, gpus, transport_);
  args_ = dispatch_args(problem_, communicator.rank(), *place_);
  if (!place_->gpu()) args_.x.data = x_.data();
  args_.mode = plan.mode;
  args_.result = plan.result;
  args_.num_sms = o.num_sms;
}

size_t Timing::moved_bytes() const { return plan_.spec.quantize == Quantize::none ? row_bytes_ : static_cast<size_t>(plan_.spec.hidden); }

/// Every call starts on all ranks together; its time is that of the slowest rank, in microseconds.
template <class Call>
std::vector<double> Timing::timed_on_host(const char* label, const Call& call, double share) {
  const auto once = [&] {
    arena_->barrier();
    const auto start = Clock::now();
    [[maybe_unused]] const auto result = call();  // dies outside of the time
    const auto end = Clock::now();
    return std::chrono::duration<double, std::micro>(end - start).count();
  };
  double typical = 0;
  for (int i = 0; i < 4; ++i) typical = once();
  typical = arena_->max(typical);
  const int count = count_for(typical, share, 20000);
  Progress progress(label, count, communicator_.rank() == 0);
  std::vector<double> mine;
  for (int i = 0; i < count; ++i) {
    mine.push_back(once());
    if (typical > 1000 || i % 1000 == 0) progress.at(i);
  }
  return arena_->max(mine);
}

/// `call` returns its result, which dies outside of the time.
template <class Call>
Timing::Times Timing::timed(const char* label, const Call& call, const std::function<void()>& limit) {
  if (place_->gpu()) return {timed_on_gpu(label, [&] { call(); }), {}};
  const std::string limit_label = std::string(label) + " limit";
  const auto copied = [&] {
    limit();
    return 0;
  };
  const auto half = [&] { return copies_limit_ ? timed_on_host(limit_label.c_str(), copied, 0.15) : std::vector<double>(); };
  Times times;
  times.limits = half();
  times.calls = timed_on_host(label, call, 1);
  const std::vector<double> more = half();
  times.limits.insert(times.limits.end(), more.begin(), more.end());
  return times;
}

ReportCase Timing::dispatch() {
  const Times times = timed(
      "dispatch", [&] { return buffer_->dispatch(args_); },
      [&] { copy_dispatch(traffic_, communicator_.rank(), x_.data(), moved_bytes(), arena_->data()); });
  const auto bytes = static_cast<int64_t>(moved_bytes());
  ReportCase c = new_case("dispatch", times, bytes * most_of_ranks(traffic_.num_ranks(), [&](int r) { return sent_pairs(traffic_, r); }));
  c.remote_bytes = traffic_.remote_pairs() * bytes;
  c.total_bytes = traffic_.total_pairs() * bytes;
  return c;
}

ReportCase Timing::combine() {
  DispatchResult result = buffer_->dispatch(args_);
  place_->finish();  // memory is found while no call of this rank is under way
  int64_t rows = result.x.shape[0];
  if (result.x.ndim == 3) rows *= result.x.shape[1];
  const int64_t y_rows = std::max(rows, traffic_.num_rows(communicator_.rank()));
  WarmMemory y(static_cast<size_t>(y_rows) * row_bytes_);
  fill_rows(y.data(), plan_.spec.dtype, y_rows * plan_.spec.hidden, 99);
  // Experts that write where their rows came in, or elsewhere.
  const TensorView on_place = in_place(plan_, result) ? result.x : place_->put(rows_like(result, y.data(), plan_.spec.dtype, plan_.spec.hidden));
  CombineArgs args = combine_args(plan_, result, on_place, place_->stream());
  args.num_sms = o_.num_sms;
  const Times times = timed(
      "combine", [&] { return buffer_->combine(args); },
      [&] { copy_combine(traffic_, communicator_.rank(), y.data(), row_bytes_, out_.data(), *arena_); });
  const auto bytes = static_cast<int64_t>(row_bytes_);
  ReportCase c =
      new_case("combine", times, bytes * most_of_ranks(traffic_.num_ranks(), [&](int r) { return returned_rows(traffic_, r, plan_.wire); }));
  c.remote_bytes = (plan_.wire == Wire::rows ? traffic_.remote_rows() : traffic_.remote_pairs()) * bytes;
  c.total_bytes = (plan_.wire == Wire::rows ? traffic_.total_rows() : traffic_.total_pairs()) * bytes;
  return c;
}

int Timing::count_for(double typical_us, double share, int most) const {
  if (o_.iterations > 0) return o_.iterations;
  return static_cast<int>(std::clamp(o_.seconds * share * 1e6 / std::max(typical_us, 0.1), 10.0, static_cast<double>(most)));
}

/// Whole calls in order of the stream, event to event; the time of a call is that of its slowest rank. Calls are issued in rows whose
/// first is not counted: while it runs, the others are issued.
std::vector<double> Timing::timed_on_gpu(const char* label, const std::function<void()>& call) {
  transport::DeviceStream& stream = *place_->gpu();
  const std::unique_ptr<transport::DeviceClock> clock = stream.make_clock(2 * kIssued);
  std::unique_ptr<transport::DeviceGraph> graph;
  std::function<void()> once = call;
  const auto row_of = [&](size_t count) {
    arena_->barrier();
    once();
    for (size_t i = 0; i < count; ++i) {
      clock->mark(2 * i);
      once();
      clock->mark(2 * i + 1);
    }
    stream.synchronize();
    buffer_->check();
    std::vector<double> times;
    const double calls = graph ? static_cast<double>(kGraphCalls) : 1.0;
    for (size_t i = 0; i < count; ++i) times.push_back(clock->between(2 * i, 2 * i + 1) / calls);
    return times;
  };
  row_of(kIssued);
  if (plan_.graph) {
    graph = stream.capture([&] {
      for (size_t i = 0; i < kGraphCalls; ++i) call();
    });
    once = [&] { graph->launch(); };
  }
  double typical = arena_->max(quantile(row_of(kIssued), 0.5));
  if (graph) typical *= static_cast<double>(kGraphCalls);
  const auto count = static_cast<size_t>(count_for(typical, 1, 2000));
  Progress progress(label, static_cast<int64_t>(count), communicator_.rank() == 0);
  std::vector<double> mine;
  while (mine.size() < count) {
    const std::vector<double> row = row_of(std::min(kIssued, count - mine.size()));
    mine.insert(mine.end(), row.begin(), row.end());
    progress.at(static_cast<int64_t>(mine.size()));
  }
  return arena_->max(mine);
}

ReportCase Timing::new_case(const char* op, const Times& times, int64_t busiest_bytes) const {
  ReportCase c;
  c.op = op;
  c.p50_us = quantile(times.calls, 0.5);
  c.p99_us = quantile(times.calls, 0.99);
  c.n_calls = static_cast<int64_t>(times.calls.size() * (plan_.graph ? kGraphCalls : 1));
  if (!times.limits.empty()) c.limit_us = quantile(times.limits, 0.5), c.limit_kind = "memcpy";
  if (link_ && busiest_bytes > 0) {
    c.limit_us = static_cast<double>(busiest_bytes) / (*link_ * 1e3);
    c.limit_kind = std::string(transport_ == "cuda_host" ? "copies to and from pinned memory" : "copy engine") +
                   ", both ways at once, for what the busiest rank sends to others";
  }
  return c;
}

}  // namespace turnout::tools
