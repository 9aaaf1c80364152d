// A trial of one case: the problem of all ranks is made from its number, the reference says what must come, a Buffer does the calls.
#include "tools/selftest_cases.h"

#include <algorithm>
#include <cstring>
#include <span>

#include "tools/place.h"
#include "tools/problem.h"
#include "tools/verify.h"

namespace turnout::tools {

namespace {

constexpr uint64_t kSeed = 1, kOtherSeed = 2;

ProblemSpec spec_of(const TestCase& c, int num_ranks) {
  ProblemSpec spec;
  // Of three ranks and more one has no tokens.
  for (int r = 0; r < num_ranks; ++r) spec.tokens.push_back(num_ranks > 2 && r == 1 ? 0 : 19 + 7 * r);
  spec.num_experts = 2 * num_ranks + 1;
  spec.topk = 3;
  spec.hidden = 300;  // not a multiple of a block of scales
  spec.dtype = c.dtype;
  spec.layout = c.layout;
  spec.alignment = c.layout == Layout::expert_major ? 4 : 1;
  spec.quantize = c.quantize;
  spec.seed = kSeed;
  if (c.size != Size::exact) {
    const int64_t need = most_rows(make_problem(spec, num_ranks));
    spec.capacity = c.size == Size::fits ? need + 3 : need - 2;
  }
  return spec;
}

class Trial {
 public:
  Trial(Communicator& communicator, const TestCase& c, Device device, Flip* flip, bool corrupt_arrived);
  std::string run();

 private:
  DType sum_dtype() const { return is_summable(c_.dtype) ? c_.dtype : DType::bf16; }
  BufferConfig config(Device device) const;
  void prepare_combine();
  DispatchResult dispatch();
  CombineResult combine(const DispatchResult& result);
  std::string run_graph();
  void arm(Flip& flip);
  void flip_a_bit(const DispatchResult& result);
  /// Waits for what was issued, so that results can be read.
  void finish() {
    place_->finish();
    buffer_.check();
  }
  std::string difference_of(const DispatchResult& result, bool other = false) {
    return difference(result, (other ? other_want_ : want_)[me_], other ? other_ : problem_, *place_);
  }
  std::string difference_of(const CombineResult& result) { return difference(result, sums_[me_], back_.dtype, problem_.hidden, *place_); }

  Communicator& communicator_;
  const TestCase& c_;
  const size_t me_;
  const bool corrupt_arrived_;
  core::DispatchProblem problem_, other_;  ///< the same routing, other rows
  std::vector<core::DispatchOutput> want_, other_want_;
  core::CombineProblem back_;
  std::vector<core::CombineOutput> sums_;
  std::unique_ptr<Place> place_;
  Buffer buffer_;
  DispatchArgs args_;
  CombineArgs gather_;
  Handle known_;
};

Trial::Trial(Communicator& communicator, const TestCase& c, Device device, Flip* flip, bool corrupt_arrived)
    : communicator_(communicator),
      c_(c),
      me_(static_cast<size_t>(communicator.rank())),
      corrupt_arrived_(corrupt_arrived),
      problem_(make_problem(spec_of(c, communicator.num_ranks()))),
      other_(problem_),
      want_(core::reference_dispatch(problem_)),
      place_(open_place(device)),
      buffer_(communicator, config(device)),
      args_(dispatch_args(problem_, communicator.rank(), *place_)) {
  args_.mode = c.mode;
  if (c.way == Way::fresh) args_.result = ResultKind::fresh;
  if (c.way == Way::resident) args_.receive = Receive::resident;
  if (c.way == Way::cached || c.way == Way::graph) {
    for (size_t r = 0; r < other_.ranks.size(); ++r) {
      core::DispatchInput& input = other_.ranks[r];
      fill_rows(input.x.data(), other_.dtype, input.num_tokens * other_.hidden, kOtherSeed * 1000 + r);
    }
    other_want_ = core::reference_dispatch(other_);
  }
  prepare_combine();
  if (flip) arm(*flip);
}

BufferConfig Trial::config(Device device) const {
  core::DispatchProblem widest = problem_;
  widest.dtype = sum_dtype();
  BufferConfig config = config_for(widest, 3, device);
  if (c_.way == Way::graph) config.receive_bytes *= 2;  // a graph keeps what its calls took
  return config;
}

void Trial::prepare_combine() {
  back_.dispatch = &problem_;
  back_.received = &want_;
  back_.topology = topology_of(communicator_);
  back_.hidden = problem_.hidden;
  back_.dtype = sum_dtype();
  back_.apply = c_.layout == Layout::rank_major ? CombineWeights::none : CombineWeights::source;
  back_.wire = c_.wire;
  for (size_t r = 0; r < want_.size(); ++r) {
    core::CombineInput& input = back_.ranks.emplace_back();
    input.y.resize(static_cast<size_t>(want_[r].array_rows * problem_.hidden) * size_of(back_.dtype));
    fill_rows(input.y.data(), back_.dtype, want_[r].array_rows * problem_.hidden, 5 + r);
  }
  sums_ = core::reference_combine(back_);
  const std::byte* y = back_.ranks[me_].y.data();
  gather_.y =
      place_->put(c_.layout == Layout::expert_slab
                      ? TensorView::dense(y, back_.dtype, {problem_.experts.num_local(communicator_.rank()), *problem_.capacity, problem_.hidden})
                      : TensorView::dense(y, back_.dtype, {want_[me_].array_rows, problem_.hidden}));
  gather_.stream = place_->stream();
  gather_.apply = back_.apply;
  gather_.wire = c_.wire;
  gather_.mode = c_.mode;
}

DispatchResult Trial::dispatch() {
  if (c_.way == Way::deferred || c_.way == Way::resident) return buffer_.dispatch_async(args_).wait();
  if (c_.way != Way::cached) return buffer_.dispatch(args_);
  known_ = buffer_.dispatch(args_).handle;
  DispatchArgs again = args_;
  again.x = place_->put(TensorView::dense(other_.ranks[me_].x.data(), other_.dtype, {other_.ranks[me_].num_tokens, other_.hidden}));
  again.topk_idx = again.topk_weights = {};
  again.handle = &known_;
  return buffer_.dispatch(again);
}

CombineResult Trial::combine(const DispatchResult& result) {
  gather_.handle = &result.handle;
  const bool later = c_.way == Way::deferred || c_.way == Way::resident;
  return later ? buffer_.combine_async(gather_).wait() : buffer_.combine(gather_);
}

/// Captured once; replayed with the rows that were there, and with others in their place.
std::string Trial::run_graph() {
  combine(dispatch());  // what calls load when they are first made
  finish();
  DispatchResult result;
  CombineResult sums;
  const auto graph = place_->gpu()->capture([&] {
    result = buffer_.dispatch(args_);
    sums = combine(result);
  });
  std::string first;
  for (const bool other : {false, true}) {
    const core::DispatchInput& input = (other ? other_ : problem_).ranks[me_];
    if (!input.x.empty()) place_->write(args_.x.data, input.x.data(), input.x.size());
    communicator_.barrier();
    graph->launch();
    finish();
    for (const std::string& text : {difference_of(result, other), difference_of(sums)}) {
      if (first.empty() && !text.empty()) first = (other ? "second replay: " : "first replay: ") + text;
    }
    communicator_.barrier();  // nobody sends rows that a slower rank still compares
  }
  return first;
}

std::string Trial::run() {
  if (c_.way == Way::graph) return run_graph();
  const DispatchResult result = dispatch();
  finish();
  if (corrupt_arrived_) flip_a_bit(result);
  const std::string text = difference_of(result, c_.way == Way::cached);
  const CombineResult sums = combine(result);
  finish();
  return text.empty() ? difference_of(sums) : text;
}

/// The first row that leaves its rank, on the first rank that has one.
void Trial::arm(Flip& flip) {
  for (int r = 0; r < communicator_.num_ranks(); ++r) {
    const core::DispatchInput& input = problem_.ranks[static_cast<size_t>(r)];
    const auto leaves = [&](int64_t id) { return id >= 0 && problem_.experts.rank_of(static_cast<int>(id)) != r; };
    const auto found = std::find_if(input.topk_idx.begin(), input.topk_idx.end(), leaves);
    if (found == input.topk_idx.end()) continue;
    if (r != communicator_.rank()) return;
    const size_t row_bytes = static_cast<size_t>(problem_.hidden) * size_of(problem_.dtype);
    const auto token = static_cast<size_t>(found - input.topk_idx.begin()) / static_cast<size_t>(problem_.num_topk);
    const auto row = input.x.begin() + static_cast<int64_t>(token * row_bytes);
    flip.row.assign(row, row + static_cast<int64_t>(row_bytes));
    flip.mask = std::byte{0x40};
    flip.armed.store(true, std::memory_order_release);
    return;
  }
}

/// Rows that GPUs send do not pass by here: of the first row that arrived at the last rank that has rows.
void Trial::flip_a_bit(const DispatchResult& result) {
  int victim = communicator_.num_ranks() - 1;
  while (victim > 0 && want_[static_cast<size_t>(victim)].num_rows == 0) --victim;
  if (communicator_.rank() != victim || want_[me_].num_rows == 0) return;
  const std::byte changed = *static_cast<const std::byte*>(place_->get(result.x).data) ^ std::byte{0x40};
  place_->write(result.x.data, &changed, 1);
}

void add_group(std::vector<TestCase>& cases, Mode mode, Layout layout, bool on_gpu) {
  for (const Size size : {Size::exact, Size::fits, Size::full}) {
    if (layout == Layout::expert_slab && size == Size::exact) continue;
    for (const Wire wire : {Wire::payload, Wire::fp32, Wire::fp8, Wire::rows}) {
      if (layout == Layout::rank_major && wire == Wire::rows) continue;
      cases.push_back({.mode = mode, .layout = layout, .size = size, .wire = wire});
    }
    for (const Quantize quantize : {Quantize::fp8_e4m3, Quantize::fp8_e4m3_ue8m0}) {
      cases.push_back({.mode = mode, .layout = layout, .size = size, .quantize = quantize});
    }
  }
  for (const DType dtype : {DType::fp16, DType::fp32, DType::fp64, DType::fp8_e4m3}) {
    cases.push_back({.mode = mode, .layout = layout, .size = Size::fits, .dtype = dtype});
    if (dtype != DType::fp16 && dtype != DType::fp32) continue;
    cases.push_back({.mode = mode, .layout = layout, .size = Size::fits, .dtype = dtype, .quantize = Quantize::fp8_e4m3});
  }
  for (const Way way : {Way::fresh, Way::cached, Way::deferred, Way::resident, Way::graph}) {
    if (way == Way::graph && !on_gpu) continue;
    cases.push_back({.mode = mode, .layout = layout, .size = Size::fits, .way = way});
    cases.push_back({.mode = mode, .layout = layout, .size = Size::fits, .quantize = Quantize::fp8_e4m3, .way = way});
    if (layout != Layout::expert_slab && way != Way::graph) cases.push_back({.mode = mode, .layout = layout, .size = Size::exact, .way = way});
  }
}

}  // namespace

std::string TestCase::to_string() const {
  static constexpr const char* kSizes[] = {"exact", "capacity", "capacity too small"};
  static constexpr const char* kWays[] = {"", ", fresh", ", cached handle", ", deferred", ", resident", ", graph"};
  std::string text = std::string(name(mode)) + ", " + std::string(name(layout)) + ", " + kSizes[static_cast<size_t>(size)] + ", " +
                     std::string(name(dtype)) + (quantize == Quantize::none ? "" : " -> " + std::string(name(quantize))) + ", wire " +
                     std::string(name(wire));
  return text + kWays[static_cast<size_t>(way)];
}

std::vector<TestCase> all_test_cases(bool on_gpu) {
  std::vector<TestCase> cases;
  for (const Mode mode : {Mode::throughput, Mode::low_latency}) {
    for (const Layout layout : {Layout::rank_major, Layout::expert_major, Layout::expert_slab}) add_group(cases, mode, layout, on_gpu);
  }
  return cases;
}

std::string run_test_case(Communicator& communicator, const TestCase& c, Device device, Flip* flip, bool corrupt_arrived) {
  return Trial(communicator, c, device, flip, corrupt_arrived).run();
}

}  // namespace turnout::tools
