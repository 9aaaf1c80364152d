// Memory comes in order of the stream, out of one pool for all of them: cudaMalloc may wait for kernels of other virtual ranks, which may
// wait for this one. So may a copy from or to pageable memory that has to wait for its turn in the stream, since the driver copies by
// way of pinned memory of its own, of which there is little: it is issued when the stream has got there.
#include "transport/device/stream.h"

#include <algorithm>
#include <map>
#include <mutex>
#include <set>
#include <vector>

#include "transport/device/driver.h"
#include "transport/device/resources.h"
#include "turnout/error.h"

namespace turnout::transport::device {

namespace {

class Clock final : public DeviceClock {
 public:
  Clock(int device, cudaStream_t stream, size_t num_marks) : device_(device), stream_(stream), marks_(num_marks) {
    for (cudaEvent_t& mark : marks_) check(cudaEventCreate(&mark), "making an event");
  }
  ~Clock() override {
    for (cudaEvent_t mark : marks_) (void)cudaEventDestroy(mark);
  }
  Clock(const Clock&) = delete;
  Clock& operator=(const Clock&) = delete;
  void mark(size_t index) override {
    const CurrentDevice current(device_);
    check(cudaEventRecord(marks_[index], stream_), "recording an event");
  }
  double between(size_t first, size_t last) const override {
    float milliseconds = 0;
    check(cudaEventElapsedTime(&milliseconds, marks_[first], marks_[last]), "the time between two events");
    return static_cast<double>(milliseconds) * 1000;
  }

 private:
  int device_;
  cudaStream_t stream_;
  std::vector<cudaEvent_t> marks_;
};

class Graph final : public DeviceGraph {
 public:
  /// Takes the graph over. REQUIRES: `device` is current.
  Graph(int device, cudaStream_t stream, cudaGraph_t graph)
      : device_(device), stream_(stream), graph_(graph, cudaGraphDestroy), exec_(nullptr, cudaGraphExecDestroy) {
    cudaGraphExec_t exec = nullptr;
    check(cudaGraphInstantiate(&exec, graph, 0), "instantiating a graph");
    exec_.reset(exec);
    check(cudaGraphUpload(exec, stream_), "uploading a graph");
  }
  void launch() override {
    const CurrentDevice current(device_);
    check(cudaGraphLaunch(exec_.get(), stream_), "launching a graph");
  }

 private:
  int device_;
  cudaStream_t stream_;
  std::unique_ptr<CUgraph_st, cudaError_t (*)(cudaGraph_t)> graph_;
  std::unique_ptr<CUgraphExec_st, cudaError_t (*)(cudaGraphExec_t)> exec_;
};

/// Of all streams of this process on a device; never destroyed, as streams may live until the process ends.
MemoryPool& pool_of(int device) {
  static std::mutex mutex;
  static auto* const pools = new std::map<int, MemoryPool>;  // NOLINT(cppcoreguidelines-owning-memory)
  const std::lock_guard lock(mutex);
  return pools->try_emplace(device, device).first->second;
}

class StreamOfGpu final : public DeviceStream {
 public:
  explicit StreamOfGpu(int device) : device_(device), owner_(borrow_stream(device)), stream_(owner_.get()), pool_(pool_of(device)) {}
  ~StreamOfGpu() override {
    try {
      const CurrentDevice current(device_);
      for (std::byte* data : memory_) pool_.free(data, stream_);
      owner_.reset();
    } catch (const TransportError&) {
      // The context is gone, and all of this with it.
    }
  }
  StreamOfGpu(const StreamOfGpu&) = delete;
  StreamOfGpu& operator=(const StreamOfGpu&) = delete;

  int device() const override { return device_; }
  void* native() const override { return stream_; }
  std::byte* allocate(size_t num_bytes) override {
    const CurrentDevice current(device_);
    return *memory_.insert(pool_.allocate(std::max<size_t>(num_bytes, 1), stream_, "allocating " + std::to_string(num_bytes) + " bytes")).first;
  }
  void deallocate(std::byte* data) override {
    const CurrentDevice current(device_);
    memory_.erase(data);
    pool_.free(data, stream_);
  }
  void upload(void* to, const void* from, size_t num_bytes) override { copy(to, from, num_bytes, cudaMemcpyHostToDevice, "uploading"); }
  void download(void* to, const void* from, size_t num_bytes) override { copy(to, from, num_bytes, cudaMemcpyDeviceToHost, "downloading"); }
  void fill(void* to, int value, size_t num_bytes) override {
    const CurrentDevice current(device_);
    check(cudaMemsetAsync(to, value, num_bytes, stream_), "filling memory");
  }
  void synchronize() override {
    const CurrentDevice current(device_);
    check(cudaStreamSynchronize(stream_), "waiting for the work of a stream");
  }
  std::unique_ptr<DeviceClock> make_clock(size_t num_marks) override {
    const CurrentDevice current(device_);
    return std::make_unique<Clock>(device_, stream_, num_marks);
  }
  std::unique_ptr<DeviceGraph> capture(const std::function<void()>& calls) override {
    cudaGraph_t graph = nullptr;
    {
      const CurrentDevice current(device_);
      check(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal), "beginning a capture");
    }
    try {
      calls();
    } catch (...) {
      (void)cudaStreamEndCapture(stream_, &graph);
      if (graph) (void)cudaGraphDestroy(graph);
      (void)cudaGetLastError();
      throw;
    }
    const CurrentDevice current(device_);
    check(cudaStreamEndCapture(stream_, &graph), "ending a capture");
    return std::make_unique<Graph>(device_, stream_, graph);
  }

 private:
  void copy(void* to, const void* from, size_t num_bytes, cudaMemcpyKind kind, const char* what) {
    if (num_bytes == 0) return;
    const CurrentDevice current(device_);
    const std::string words = std::string(what) + " " + std::to_string(num_bytes) + " bytes";
    check(cudaStreamSynchronize(stream_), words);
    check(cudaMemcpyAsync(to, from, num_bytes, kind, stream_), words);
    check(cudaStreamSynchronize(stream_), words);
  }

  int device_;
  std::shared_ptr<CUstream_st> owner_;
  cudaStream_t stream_;
  MemoryPool& pool_;
  std::set<std::byte*> memory_;
};

/// One way of a measurement: its own memory, stream and events on one of its GPUs.
class Way {
 public:
  static constexpr size_t kBytes = size_t{256} << 20;
  static constexpr int kTimes = 4;

  explicit Way(DeviceCopy copy) : copy_(copy), device_(copy.from >= 0 ? copy.from : copy.to) {
    from_ = allocate(copy_.from);
    to_ = allocate(copy_.to);
    const CurrentDevice current(device_);
    if (copy_.from >= 0 && copy_.to >= 0 && copy_.from != copy_.to) {
      (void)cudaDeviceEnablePeerAccess(copy_.to, 0);  // where there is none, or it is enabled already, copies work all the same
      (void)cudaGetLastError();
    }
    stream_ = std::make_unique<StreamOfGpu>(device_);
    clock_ = stream_->make_clock(2);
  }
  ~Way() {
    release(copy_.from, from_);
    release(copy_.to, to_);
  }
  Way(const Way&) = delete;
  Way& operator=(const Way&) = delete;

  void start() {
    const CurrentDevice current(device_);
    auto* stream = static_cast<cudaStream_t>(stream_->native());
    clock_->mark(0);
    for (int i = 0; i < kTimes; ++i) check(cudaMemcpyAsync(to_, from_, kBytes, cudaMemcpyDefault, stream), "copying");
    clock_->mark(1);
  }
  double microseconds() {
    stream_->synchronize();
    return clock_->between(0, 1);
  }

 private:
  void* allocate(int place) const {
    void* data = nullptr;
    const CurrentDevice current(place == DeviceCopy::kHost ? device_ : place);
    if (place == DeviceCopy::kHost) check(cudaMallocHost(&data, kBytes), "allocating pinned memory");
    else check(cudaMalloc(&data, kBytes), "allocating memory to copy");
    return data;
  }
  void release(int place, void* data) const {
    try {
      const CurrentDevice current(place == DeviceCopy::kHost ? device_ : place);
      (void)(place == DeviceCopy::kHost ? cudaFreeHost(data) : cudaFree(data));
    } catch (const TransportError&) {
      // As above.
    }
  }

  DeviceCopy copy_;
  int device_;
  void *from_ = nullptr, *to_ = nullptr;
  std::unique_ptr<StreamOfGpu> stream_;
  std::unique_ptr<DeviceClock> clock_;
};

}  // namespace

std::unique_ptr<DeviceStream> open_stream(int device) { return std::make_unique<StreamOfGpu>(device); }

double copy_GBps(std::span<const DeviceCopy> copies) {
  constexpr int kRounds = 4;
  std::vector<std::unique_ptr<Way>> ways;
  for (const DeviceCopy& copy : copies) ways.push_back(std::make_unique<Way>(copy));
  double best = 0;
  for (int round = 0; round < kRounds; ++round) {
    for (const auto& way : ways) way->start();
    double slowest = 0;
    for (const auto& way : ways) slowest = std::max(slowest, way->microseconds());
    best = std::max(best, static_cast<double>(Way::kBytes) * Way::kTimes / (slowest * 1e3));
  }
  return best;
}

}  // namespace turnout::transport::device
