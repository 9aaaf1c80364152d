// Calls of one rank captured in a CUDA graph, and replayed with what the test writes into their inputs in between.
#pragma once
#include <deque>
#include <string>

#include "cuda/gpu_test.h"
#include "engine/contract.h"

namespace turnout::testing {

inline constexpr int kReplayExperts = 12;

/// The capacity-mode calls that a graph is made of.
struct ReplayShape {
  Layout layout = Layout::rank_major;
  Mode mode = Mode::throughput;
  Quantize quantize = Quantize::none;
  int64_t max_tokens = 24;
};

/// Several problems of one shape: the same tokens, widths and capacity, other routings, rows and weights.
class Routings {
 public:
  Routings(uint64_t seed, int num_ranks, const ReplayShape& shape, int num_variants) {
    Random random(seed);
    RandomLimits limits;
    limits.num_ranks = num_ranks;
    limits.max_tokens = shape.max_tokens;
    limits.zero_tokens = shape.max_tokens > 1 ? 0.1 : 0.0;
    limits.layouts = {shape.layout};
    limits.exact = limits.quantize = false;
    if (shape.quantize != Quantize::none) limits.dtypes = {DType::bf16, DType::fp16, DType::fp32};
    RandomProblem p = random_problem(random.bits(), limits);
    p.dispatch.quantize = shape.quantize;
    const core::ExpertMap split = core::ExpertMap::split(kReplayExperts, num_ranks);
    p.expert_to_rank.clear();
    for (int e = 0; e < kReplayExperts; ++e) p.expert_to_rank.push_back(split.rank_of(e));
    p.dispatch.experts = split;
    p.node_of_rank.assign(static_cast<size_t>(num_ranks), 0);
    for (int v = 0; v < num_variants; ++v) {
      reroute(p, random, v);
      variants_.emplace_back(random.bits(), p);
    }
  }
  const Expected& variant(size_t v) const { return variants_[v % variants_.size()]; }
  const RandomProblem& problem() const { return variants_.front().p; }

 private:
  static void reroute(RandomProblem& p, Random& random, int variant) {
    core::DispatchProblem& d = p.dispatch;
    p.kind = variant == 0 ? RoutingKind::uniform : random.one_of(kRoutingKinds);
    for (core::DispatchInput& in : d.ranks) {
      in.topk_idx = random_topk(random, p.kind, in.num_tokens, d.num_topk, kReplayExperts);
      in.x = random_rows(random, d.dtype, in.num_tokens * d.hidden, 0.05);
      if (d.has_weights) in.topk_weights = random_floats(random, in.num_tokens * d.num_topk);
      for (size_t s = 0; s < in.side.size(); ++s) in.side[s] = random_rows(random, DType::u8, in.num_tokens * static_cast<int64_t>(d.side_bytes[s]));
    }
  }
  std::deque<Expected> variants_;
};

/// What a Buffer must be made for to take all of them.
inline BufferConfig config_for(const std::vector<const Routings*>& all, const RunChoices& run, Device device) {
  BufferConfig c = config_of(all.front()->problem(), run);
  for (const Routings* routings : all) {
    const BufferConfig other = config_of(routings->problem(), run);
    c.hidden = std::max(c.hidden, other.hidden);
    c.max_topk = std::max(c.max_topk, other.max_topk);
    c.max_tokens_per_rank = std::max(c.max_tokens_per_rank, other.max_tokens_per_rank);
    c.max_side_bytes = std::max(c.max_side_bytes, other.max_side_bytes);
  }
  c.expert_to_rank.clear();
  c.num_experts = kReplayExperts;
  c.receive_bytes = size_t{512} << 20;
  c.timeouts.timeout = c.timeouts.busy_timeout = run.timeout.count() > 0 ? run.timeout : std::chrono::seconds(8);
  c.device = device;
  return c;
}

/// Ends a capture in any case: one that is left open would spoil what comes after.
class Capture {
 public:
  Capture(cudaStream_t stream, cudaStreamCaptureMode mode) : stream_(stream) { cuda_ok(cudaStreamBeginCapture(stream_, mode), "begin capture"); }
  Capture(const Capture&) = delete;
  Capture& operator=(const Capture&) = delete;
  ~Capture() {
    cudaGraph_t graph = nullptr;
    if (stream_) cudaStreamEndCapture(stream_, &graph);
    if (graph) cudaGraphDestroy(graph);
    (void)cudaGetLastError();
  }
  cudaGraph_t end() {
    cudaGraph_t graph = nullptr;
    cuda_ok(cudaStreamEndCapture(std::exchange(stream_, nullptr), &graph), "end capture");
    return graph;
  }

 private:
  cudaStream_t stream_;
};

/// A graph that can be launched.
class Graph {
 public:
  Graph() = default;
  Graph(cudaGraph_t graph, cudaStream_t stream) {
    size_t nodes = 0;
    cuda_ok(cudaGraphGetNodes(graph, nullptr, &nodes), "cudaGraphGetNodes");
    num_nodes = static_cast<int>(nodes);
    cuda_ok(cudaGraphInstantiate(&exec_, graph, 0), "cudaGraphInstantiate");
    cuda_ok(cudaGraphDestroy(graph), "cudaGraphDestroy");
    cuda_ok(cudaGraphUpload(exec_, stream), "cudaGraphUpload");
    cuda_ok(cudaStreamSynchronize(stream), "cudaGraphUpload");
  }
  Graph(Graph&& other) noexcept : num_nodes(other.num_nodes), exec_(std::exchange(other.exec_, nullptr)) {}
  Graph& operator=(Graph&& other) noexcept {
    std::swap(exec_, other.exec_);
    num_nodes = other.num_nodes;
    return *this;
  }
  ~Graph() {
    if (exec_) cudaGraphExecDestroy(exec_);
  }
  void launch(cudaStream_t stream) const { cuda_ok(cudaGraphLaunch(exec_, stream), "cudaGraphLaunch"); }
  int num_nodes = 0;

 private:
  cudaGraphExec_t exec_ = nullptr;
};

/// One rank's calls, captured: a dispatch, the same with its handle, the same with a deferred receive, and two combines of the first.
class CapturedCalls {
 public:
  /// REQUIRES: no kernel on this GPU waits for this rank.
  CapturedCalls(Buffer& buffer, const Routings& routings, const ReplayShape& shape, Place& place, cudaStreamCaptureMode how,
                Receive receive = Receive::deferred)
      : routings_(routings), rank_(buffer.rank()), place_(place), stream_(static_cast<cudaStream_t>(place.stream().native)) {
    run_.mode = shape.mode;
    run_.receive = receive;
    const Expected& e = routings.variant(0);
    arguments_ = std::make_unique<RankArguments>(e.p, rank_, run_);
    arguments_->move_to(place);
    back_ = combine_args(e.p, e.combine, e.received, rank_, handle_);
    back_.y = place.put(back_.y);
    back_.weights = place.put(back_.weights);
    back_.side = place.put(back_.side);
    back_.mode = shape.mode;
    back_.stream = place.stream();
    place.finish();
    Capture capture(stream_, how);
    first_ = buffer.dispatch(arguments_->dispatch);
    handle_ = first_.handle;
    DispatchArgs again = arguments_->dispatch;
    again.handle = &handle_;
    again.topk_idx = again.topk_weights = TensorView();
    cached_ = buffer.dispatch(again);
    deferred_ = buffer.dispatch_async(arguments_->dispatch).wait();
    sum_ = buffer.combine(back_);
    deferred_sum_ = buffer.combine_async(back_).wait();
    graph_ = Graph(capture.end(), stream_);
  }
  int num_nodes() const { return graph_.num_nodes; }
  static constexpr int kNumCalls = 5;

  /// Writes the inputs of another routing and replays.
  void replay(size_t variant) {
    const Expected& e = routings_.variant(variant);
    const RankArguments in(e.p, rank_, run_);
    const DispatchArgs& to = arguments_->dispatch;
    write(to.x, in.dispatch.x);
    write(to.topk_idx, in.dispatch.topk_idx);
    write(to.topk_weights, in.dispatch.topk_weights);
    for (size_t s = 0; s < to.side.size(); ++s) write(to.side[s], in.dispatch.side[s]);
    const CombineArgs back = combine_args(e.p, e.combine, e.received, rank_, handle_);
    write(back_.y, back.y);
    write(back_.weights, back.weights);
    write(back_.side, back.side);
    graph_.launch(stream_);
  }
  /// The same inputs once more.
  void launch_only() const { graph_.launch(stream_); }
  /// The results of the last replay, which has ended.
  void expect(size_t variant) {
    const Expected& e = routings_.variant(variant);
    const auto at = static_cast<size_t>(rank_);
    const char* names[] = {"dispatch", "cached dispatch", "deferred dispatch"};
    const DispatchResult* results[] = {&first_, &cached_, &deferred_};
    for (int i = 0; i < 3; ++i) {
      SCOPED_TRACE(std::string(names[i]) + " of replay with routing " + std::to_string(variant) + " on rank " + std::to_string(rank_));
      expect_dispatch(*results[i], e.received[at], e.p.dispatch, place_);
    }
    const CombineResult* sums[] = {&sum_, &deferred_sum_};
    for (int i = 0; i < 2; ++i) {
      SCOPED_TRACE(std::string(i ? "deferred combine" : "combine") + " of replay with routing " + std::to_string(variant));
      expect_combine(*sums[i], e.combined[at], e.p.dtype, e.p.hidden, e.p.with_side, place_);
    }
  }

 private:
  void write(const TensorView& to, const TensorView& from) {
    if (const size_t bytes = span_bytes(from)) place_.write(to.data, from.data, bytes);
  }
  const Routings& routings_;
  const int rank_;
  Place& place_;
  cudaStream_t stream_;
  RunChoices run_;
  std::unique_ptr<RankArguments> arguments_;
  CombineArgs back_;
  Handle handle_;
  DispatchResult first_, cached_, deferred_;
  CombineResult sum_, deferred_sum_;
  Graph graph_;
};

}  // namespace turnout::testing
