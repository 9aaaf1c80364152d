// Tensors of a test in the memory of a GPU.
#pragma once
#include <cuda_runtime_api.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <set>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "cuda/gpu_main.h"
#include "support/place.h"
#include "turnout/error.h"

namespace turnout::testing {

inline void cuda_ok(cudaError_t e, const char* what) {
  if (e != cudaSuccess) throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(e));
}

/// After a fault of a kernel every call fails, in this process only.
inline bool has_fault() {
  const cudaError_t e = cudaFree(nullptr);
  (void)cudaGetLastError();
  return e != cudaSuccess;
}

/// Makes a GPU current, and again the one that was. Memory of a pool is only there for its own GPU, so every call that touches some is
/// made with that GPU current, whichever thread it comes from.
class CurrentGpu {
 public:
  explicit CurrentGpu(int device) {
    cuda_ok(cudaGetDevice(&before_), "cudaGetDevice");
    cuda_ok(cudaSetDevice(device), "cudaSetDevice");
  }
  ~CurrentGpu() { cudaSetDevice(before_); }
  CurrentGpu(const CurrentGpu&) = delete;
  CurrentGpu& operator=(const CurrentGpu&) = delete;

 private:
  int before_ = 0;
};

/// The pool that allocations come from. A piece that another stream has freed is given when that stream has passed the place, not to
/// somebody who would have to wait for it: another virtual rank may be running there, and waiting for whoever asks. Nor does memory go
/// back to the driver, which may be to wait for the GPU.
inline cudaMemPool_t pool_of(int device) {
  cudaMemPool_t pool = nullptr;
  cuda_ok(cudaDeviceGetDefaultMemPool(&pool, device), "cudaDeviceGetDefaultMemPool");
  int no = 0;
  uint64_t most = UINT64_MAX;
  cuda_ok(cudaMemPoolSetAttribute(pool, cudaMemPoolReuseAllowInternalDependencies, &no), "cudaMemPoolSetAttribute");
  cuda_ok(cudaMemPoolSetAttribute(pool, cudaMemPoolAttrReleaseThreshold, &most), "cudaMemPoolSetAttribute");
  return pool;
}

/// Streams that wait for no other. They are kept: a new one may be given the queue of any that lives, and so of a rank that waits for it.
class KeptStreams {
 public:
  static cudaStream_t take(int device) {
    const std::lock_guard lock(mutex());
    auto& spare = of(device);
    cudaStream_t stream = nullptr;
    if (spare.empty()) {
      cuda_ok(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate");
    } else {
      stream = spare.back();
      spare.pop_back();
    }
    return stream;
  }
  static void give_back(int device, cudaStream_t stream) {
    const std::lock_guard lock(mutex());
    of(device).push_back(stream);
  }

 private:
  static std::mutex& mutex() {
    static std::mutex instance;
    return instance;
  }
  static std::vector<cudaStream_t>& of(int device) {
    static std::map<int, std::vector<cudaStream_t>> spare;
    return spare[device];
  }
};

/// The pool has room from now on: virtual ranks allocate while kernels of others wait for them, and to ask the driver may be to wait, too.
inline void keep_memory(int device) {
  static std::mutex mutex;
  static std::set<int> kept;
  const std::lock_guard lock(mutex);
  if (!kept.insert(device).second) return;
  const CurrentGpu current(device);
  pool_of(device);
  cudaStream_t stream = nullptr;
  void* p = nullptr;
  cuda_ok(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate");
  cuda_ok(cudaMallocAsync(&p, size_t{512} << 20, stream), "cudaMallocAsync");
  cuda_ok(cudaFreeAsync(p, stream), "cudaFreeAsync");
  cuda_ok(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
  cuda_ok(cudaStreamDestroy(stream), "cudaStreamDestroy");
}

class CudaPlace : public Place {
 public:
  explicit CudaPlace(int device) : device_(device) {
    static const bool told = (gpu_is_lost() = has_fault, true);
    (void)told;
    cuda_ok(cudaSetDevice(device_), "cudaSetDevice");
    pool_of(device_);
    stream_ = KeptStreams::take(device_);
  }
  ~CudaPlace() override {
    cudaSetDevice(device_);
    for (void* p : memory_) cudaFreeAsync(p, stream_);
    if (cudaStreamSynchronize(stream_) == cudaSuccess) KeptStreams::give_back(device_, stream_);
  }
  Device device() const override { return {DeviceKind::cuda, device_}; }
  Stream stream() const override { return {stream_}; }
  TensorView put(const TensorView& host) override {
    TensorView t = host;
    if (!t.defined()) return t;
    t.device = device();
    const size_t bytes = span_bytes(host);
    if (bytes == 0) return t;
    const CurrentGpu current(device_);
    void* p = nullptr;
    cuda_ok(cudaMallocAsync(&p, bytes, stream_), "cudaMallocAsync");  // cudaMalloc may wait for other virtual ranks
    memory_.push_back(p);
    write(p, host.data, bytes);
    t.data = p;
    return t;
  }
  void give_back(const TensorView& there) override {
    const auto found = std::find(memory_.begin(), memory_.end(), there.data);
    if (found == memory_.end()) return;
    const CurrentGpu current(device_);
    cuda_ok(cudaFreeAsync(*found, stream_), "cudaFreeAsync");
    memory_.erase(found);
  }
  // Copies from and to pageable memory are issued when the stream has got there: the driver's part in them is not one that may wait.
  void write(void* to, const void* from, size_t num_bytes) override {
    const CurrentGpu current(device_);
    finish();
    cuda_ok(cudaMemcpyAsync(to, from, num_bytes, cudaMemcpyHostToDevice, stream_), "upload");
    cuda_ok(cudaStreamSynchronize(stream_), "upload");
  }
  void fill(void* to, int value, size_t num_bytes) override {
    const CurrentGpu current(device_);
    cuda_ok(cudaMemsetAsync(to, value, num_bytes, stream_), "fill");
  }
  TensorView get(const TensorView& there) override {
    TensorView t = there;
    const size_t bytes = span_bytes(there);
    if (bytes == 0) return t;
    // What a test reads it compares soon: the oldest go.
    while (host_.size() > 256 || (host_.size() > 32 && host_bytes_ > (size_t{4} << 30))) {
      host_bytes_ -= host_.front().size();
      host_.pop_front();
    }
    host_.emplace_back(bytes + 16);
    host_bytes_ += bytes + 16;
    const std::string what = "download of " + std::to_string(bytes) + " bytes of " + there.to_string();
    const CurrentGpu current(device_);
    cuda_ok(cudaStreamSynchronize(stream_), what.c_str());
    cuda_ok(cudaMemcpyAsync(host_.back().data(), there.data, bytes, cudaMemcpyDeviceToHost, stream_), what.c_str());
    cuda_ok(cudaStreamSynchronize(stream_), what.c_str());
    t.data = host_.back().data();
    return t;
  }
  void finish() override { cuda_ok(cudaStreamSynchronize(stream_), "the call"); }

 private:
  int device_;
  cudaStream_t stream_ = nullptr;
  std::vector<void*> memory_;
  std::deque<std::vector<std::byte>> host_;
  size_t host_bytes_ = 0;
};

}  // namespace turnout::testing
