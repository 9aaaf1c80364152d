// Times of dispatch and combine between GPUs: whole calls by CUDA events, the slower rank of each call, inputs rotated over four sets,
// and the limit of the link measured in the same run.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <functional>
#include <memory>

#include "core/dtype.h"
#include "core/scale.h"
#include "cuda/job.h"
#include "tools/report.h"

namespace turnout::bench {
namespace {

constexpr int kSets = 4;

struct Options {
  int calls = 200, warm = 30;
  std::string filter, json;
  bool check = true;
};

struct Stat {
  double p50 = 0, p99 = 0;
};

/// Of each call the slower rank counts.
Stat slower(Communicator& comm, const std::vector<float>& mine) {
  const auto all = comm.all_gather(std::as_bytes(std::span(mine)));
  std::vector<double> worst(mine.size(), 0.0);
  for (const auto& bytes : all) {
    std::vector<float> us(bytes.size() / sizeof(float));
    std::memcpy(us.data(), bytes.data(), bytes.size());
    for (size_t i = 0; i < worst.size() && i < us.size(); ++i) worst[i] = std::max(worst[i], static_cast<double>(us[i]));
  }
  return {tools::quantile(worst, 0.5), tools::quantile(worst, 0.99)};
}

/// Times of `call(i)`, event to event; `before` is issued ahead of the first event. `host_us`: time of the host per call, its two events
/// included.
std::vector<float> time_calls(Communicator& comm, cudaStream_t stream, int warm, int calls, const std::function<void(int)>& call,
                              double* host_us = nullptr, const std::function<void()>& before = {}) {
  std::vector<cudaEvent_t> events(static_cast<size_t>(2 * calls));
  for (cudaEvent_t& e : events) cuda_ok(cudaEventCreate(&e), "cudaEventCreate");
  comm.barrier();
  for (int i = 0; i < warm; ++i) call(i);
  cuda_ok(cudaStreamSynchronize(stream), "warm-up");
  comm.barrier();
  const auto begin = std::chrono::steady_clock::now();
  for (int i = 0; i < calls; ++i) {
    if (before) before();
    cuda_ok(cudaEventRecord(events[static_cast<size_t>(2 * i)], stream), "cudaEventRecord");
    call(i);
    cuda_ok(cudaEventRecord(events[static_cast<size_t>(2 * i + 1)], stream), "cudaEventRecord");
  }
  if (host_us) *host_us = std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - begin).count() / calls;
  cuda_ok(cudaStreamSynchronize(stream), "timed calls");
  std::vector<float> us;
  for (int i = 0; i < calls; ++i) {
    float ms = 0;
    cuda_ok(cudaEventElapsedTime(&ms, events[static_cast<size_t>(2 * i)], events[static_cast<size_t>(2 * i + 1)]), "cudaEventElapsedTime");
    us.push_back(ms * 1000);
  }
  for (cudaEvent_t e : events) cudaEventDestroy(e);
  return us;
}

/// One captured graph of `inside` calls; times of replays over `inside`.
std::vector<float> time_graph(Communicator& comm, cudaStream_t stream, int inside, int replays, const std::function<void(int)>& call) {
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t exec = nullptr;
  cuda_ok(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "begin capture");
  for (int i = 0; i < inside; ++i) call(i);
  cuda_ok(cudaStreamEndCapture(stream, &graph), "end capture");
  cuda_ok(cudaGraphInstantiate(&exec, graph, 0), "instantiate");
  cuda_ok(cudaGraphUpload(exec, stream), "upload");
  std::vector<float> us = time_calls(comm, stream, 3, replays, [&](int) { cuda_ok(cudaGraphLaunch(exec, stream), "graph launch"); });
  for (float& t : us) t /= static_cast<float>(inside);
  cudaGraphExecDestroy(exec);
  cudaGraphDestroy(graph);
  return us;
}

class Runner {
 public:
  Runner(Communicator& comm, const Options& options, double link)
      : comm_(comm), options_(options), link_(link), rank_(comm.rank()), num_ranks_(comm.num_ranks()) {
    int devices = 0;
    cuda_ok(cudaGetDeviceCount(&devices), "cudaGetDeviceCount");
    device_ = {DeviceKind::cuda, comm.local_rank() % devices};
    one_gpu_ = num_ranks_ > devices;
    cuda_ok(cudaSetDevice(device_.index), "cudaSetDevice");
    cuda_ok(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreate");
  }
  ~Runner() { cudaStreamDestroy(stream_); }

  tools::ReportCase run(const Shape& shape) {
    const Problem p = make_problem(shape, num_ranks_, 7);
    const int64_t capacity = capacity_of(p);
    BufferConfig config;
    config.num_experts = shape.experts;
    config.hidden = shape.hidden;
    config.dtype = DType::bf16;
    config.max_tokens_per_rank = shape.tokens;
    config.max_topk = shape.topk;
    config.max_side_bytes = static_cast<size_t>((shape.hidden + 127) / 128 * 4);
    config.receive_bytes = shape.tokens <= 512 ? size_t{512} << 20 : size_t{3} << 30;
    config.device = device_;
    config.timeouts.timeout = config.timeouts.busy_timeout = std::chrono::seconds(20);
    Buffer buffer(comm_, config);
    std::vector<DispatchArgs> sets = make_inputs(p, capacity);

    std::string problem;
    DispatchResult first = buffer.dispatch(sets[0]);
    if (options_.check) problem = check_dispatch(p, rank_, first, stream_);
    tools::ReportCase c = describe(p);
    std::vector<float> us;
    double host_us = 0;
    std::function<void()> before;
    if (shape.cold) before = [this] { pass_through_l2(); };
    if (shape.skew_us > 0) before = [this, &shape] { wait_together(rank_ == 0 ? shape.skew_us : 0); };
    const auto measure = [&](const std::function<void(int)>& call) {
      us = shape.graph_calls ? time_graph(comm_, stream_, shape.graph_calls, 40, call)
                             : time_calls(comm_, stream_, options_.warm, options_.calls, call, &host_us, before);
    };
    if (!shape.combine) {
      first.release();
      measure([&](int i) { buffer.dispatch(sets[static_cast<size_t>(i % kSets)]); });
    } else {
      const int64_t rows = shape.layout == Layout::expert_slab ? first.x.shape[0] * first.x.shape[1] : first.x.shape[0];
      std::vector<DeviceArray> y;
      const auto host = y_rows(p, rank_, rows);
      for (int s = 0; s < kSets; ++s) y.emplace_back(host.data(), host.size() * 2);
      std::vector<CombineArgs> backs;
      for (int s = 0; s < kSets; ++s) {
        CombineArgs back;
        back.y = TensorView::dense(y[static_cast<size_t>(s)].data(), DType::bf16, {rows, shape.hidden}, device_);
        back.handle = &first.handle;
        back.mode = shape.mode;
        back.num_sms = shape.num_sms;
        back.stream = {stream_};
        backs.push_back(back);
      }
      const CombineResult sum = buffer.combine(backs[0]);
      if (options_.check && problem.empty()) problem = check_combine(p, rank_, sum, stream_);
      measure([&](int i) {
        const auto set = static_cast<size_t>(i % kSets);
        if (!shape.both) {
          buffer.combine(backs[set]);
          return;
        }
        const DispatchResult there = buffer.dispatch(sets[set]);
        CombineArgs back = backs[set];
        back.handle = &there.handle;
        buffer.combine(back);
      });
      cuda_ok(cudaStreamSynchronize(stream_), "combine");
    }
    buffer.synchronize();
    const Stat stat = slower(comm_, us);
    c.p50_us = stat.p50;
    c.p99_us = stat.p99;
    c.n_calls = static_cast<int64_t>(us.size());
    c.verified = all_good(problem);
    keep_.clear();
    if (rank_ == 0) {
      std::printf("%-52s p50 %8.1f us  p99 %8.1f us  host %6.1f us  %s%s\n", shape.name.c_str(), stat.p50, stat.p99, host_us,
                  c.limit_us ? ("x limit " + std::to_string(stat.p50 / *c.limit_us)).substr(0, 12).c_str() : "", c.verified ? "" : "  WRONG");
      std::fflush(stdout);
    }
    if (!problem.empty()) std::fprintf(stderr, "rank %d: %s: %s\n", rank_, shape.name.c_str(), problem.c_str());
    return c;
  }

 private:
  std::vector<DispatchArgs> make_inputs(const Problem& p, int64_t capacity) {
    const Shape& shape = p.shape;
    const auto at = static_cast<size_t>(rank_);
    const auto x = bf16_rows(p.seed + at, shape.tokens, shape.hidden);
    std::vector<uint8_t> q;
    std::vector<float> scales;
    if (shape.fp8_rows) quantise(x, shape, q, scales);
    std::vector<DispatchArgs> sets;
    for (int s = 0; s < kSets; ++s) {
      DispatchArgs args;
      const int64_t blocks = (shape.hidden + 127) / 128;
      if (shape.fp8_rows) {
        args.x = TensorView::dense(upload(q), DType::fp8_e4m3, {shape.tokens, shape.hidden}, device_);
        args.side = {TensorView::dense(upload(scales), DType::fp32, {shape.tokens, blocks}, device_)};
      } else {
        args.x = TensorView::dense(upload(x), DType::bf16, {shape.tokens, shape.hidden}, device_);
      }
      args.topk_idx = TensorView::dense(upload(p.ids[at]), DType::i64, {shape.tokens, shape.topk}, device_);
      args.topk_weights = TensorView::dense(upload(p.weights[at]), DType::fp32, {shape.tokens, shape.topk}, device_);
      args.mode = shape.mode;
      args.layout = shape.layout;
      args.capacity = capacity;
      args.expert_alignment = shape.alignment;
      args.quantize = shape.quantize;
      args.result = shape.result;
      args.num_sms = shape.num_sms;
      args.stream = {stream_};
      sets.push_back(args);
    }
    return sets;
  }
  template <class T>
  void* upload(const std::vector<T>& host) {
    keep_.emplace_back(host.data(), host.size() * sizeof(T));
    return keep_.back().data();
  }
  /// Twice as much as L2 holds is written, so that what a call reads is not in it.
  void pass_through_l2() {
    if (!other_data_) other_data_ = std::make_unique<DeviceArray>(kOtherBytes);
    cuda_ok(cudaMemsetAsync(other_data_->data(), 1, kOtherBytes, stream_), "cudaMemset");
  }
  /// A call's time counts from its own first event. So ranks must be together before it but for the delay: the call before has made
  /// them so, and each waits long enough for the host to be ahead.
  void wait_together(double late_us) {
    constexpr double kHostUs = 60;
    delay(kHostUs + late_us, stream_);
  }
  static void quantise(const std::vector<uint16_t>& x, const Shape& shape, std::vector<uint8_t>& q, std::vector<float>& scales);

  tools::ReportCase describe(const Problem& p) const {
    const Shape& s = p.shape;
    tools::ReportCase c;
    c.op = s.both ? "both" : s.combine ? "combine" : "dispatch";
    c.mode = name(s.mode);
    c.layout = name(s.layout);
    const bool fp8 = !s.combine && (s.fp8_rows || s.quantize != Quantize::none);
    c.dtype = fp8 ? "fp8_e4m3" : "bf16";
    c.input_dtype = s.fp8_rows && !s.combine ? "fp8_e4m3" : "bf16";
    c.tokens = s.tokens;
    c.hidden = s.hidden;
    c.top_k = s.topk;
    c.experts = s.experts;
    c.ranks = num_ranks_;
    c.transport = "cuda_p2p";
    c.placement = one_gpu_ ? "one_gpu" : "processes";
    c.launch = s.graph_calls ? "graph" : "eager";
    c.result = s.result == ResultKind::fresh || s.combine ? "fresh" : "lease";
    c.size = "capacity";
    c.wire = "payload";
    c.routing = s.routing;
    c.seed = p.seed;
    if (s.num_sms) c.sms = s.num_sms;
    if (s.skew_us > 0) c.skew_us = s.skew_us;
    if (s.cold) c.l2 = "cold";
    const Traffic t = traffic_of(p);
    const int64_t row = fp8 ? s.hidden + (s.hidden + 127) / 128 * 4 : s.hidden * 2;
    c.remote_bytes = t.remote_rows * row;
    c.total_bytes = (t.remote_rows + t.local_rows) * row;
    if (s.by_stores) {
      c.limit_us = static_cast<double>(t.most_pairs * row) / (s.num_sms * kStoreGBps * 1e3);
      c.limit_kind = "bytes that the rank with most pairs stores / (SMs x 50 GB/s)";
    } else if (link_ > 0 && !one_gpu_ && !s.both) {
      c.limit_us = static_cast<double>(t.most_remote_to_one * row) / (link_ * 1e3);
      c.limit_kind = "copy engine, both ways at once, for the bytes of the rank that sends most";
    }
    return c;
  }
  bool all_good(const std::string& problem) {
    const char good = problem.empty() && options_.check;
    for (const auto& other : comm_.all_gather(std::as_bytes(std::span(&good, 1)))) {
      if (other[0] == std::byte{0}) return false;
    }
    return true;
  }

  Communicator& comm_;
  const Options options_;
  const double link_;
  const int rank_, num_ranks_;
  Device device_;
  bool one_gpu_ = false;
  cudaStream_t stream_ = nullptr;
  std::vector<DeviceArray> keep_;
  static constexpr size_t kOtherBytes = size_t{128} << 20;
  std::unique_ptr<DeviceArray> other_data_;
};

/// x as fp8 with a scale per 128, by the rule of the fused form.
void Runner::quantise(const std::vector<uint16_t>& x, const Shape& shape, std::vector<uint8_t>& q, std::vector<float>& scales) {
  q.resize(x.size());
  for (int64_t t = 0; t < shape.tokens; ++t) {
    for (int64_t b = 0; b < shape.hidden; b += core::kScaleBlock) {
      float values[core::kScaleBlock], scale = 0;
      const int64_t n = std::min(core::kScaleBlock, shape.hidden - b);
      const auto at = static_cast<size_t>(t * shape.hidden + b);
      for (int64_t i = 0; i < n; ++i) values[i] = core::bf16_to_float(x[at + static_cast<size_t>(i)]);
      core::quantize_block(values, n, q.data() + at, &scale, nullptr);
      scales.push_back(scale);
    }
  }
}

int run(const Options& options, const std::string& command) {
  Communicator comm = Communicator::from_env();
  double link = 0;
  if (comm.rank() == 0) link = link_GBps();
  const auto told = comm.all_gather(std::as_bytes(std::span(&link, 1)));
  std::memcpy(&link, told[0].data(), sizeof link);
  tools::Report report = tools::new_report(command);
  if (link > 0) report.link_GBps = link;
  if (comm.rank() == 0) std::printf("link: %.0f GB/s per direction, both ways at once (copy engine)\n", link);
  int wrong = 0;
  {
    Runner runner(comm, options, link);
    for (const Shape& shape : shapes()) {
      if (!options.filter.empty() && shape.name.find(options.filter) == std::string::npos) continue;
      try {
        report.cases.push_back(runner.run(shape));
        wrong += !report.cases.back().verified && options.check;
      } catch (const std::exception& e) {
        std::fprintf(stderr, "rank %d: %s: %s\n", comm.rank(), shape.name.c_str(), e.what());
        return 1;  // ranks may be out of step: what follows would wait for nobody
      }
    }
  }
  if (comm.rank() == 0 && !options.json.empty()) tools::write_report(report, options.json);
  return wrong ? 1 : 0;
}

}  // namespace
}  // namespace turnout::bench

int main(int argc, char** argv) {
  turnout::bench::Options options;
  CLI::App app("Times dispatch and combine between GPUs. Start one process per GPU: turnout launch -n 2 -- gpu_bench");
  app.add_option("--calls", options.calls, "timed calls of a shape")->check(CLI::Range(1, 100000));
  app.add_option("--filter", options.filter, "only shapes whose name contains this");
  app.add_option("--json", options.json, "write a record here");
  bool unchecked = false;
  app.add_flag("--no-check", unchecked, "do not compare results with the problem");
  CLI11_PARSE(app, argc, argv);
  options.check = !unchecked;
  std::string command = "gpu_bench";
  for (int i = 1; i < argc; ++i) command += std::string(" ") + argv[i];
  try {
    return turnout::bench::run(options, command);
  } catch (const std::exception& e) {
    std::fprintf(stderr, "gpu_bench: %s\n", e.what());
    return 1;
  }
}
