// Tensors of a test in the memory of a GPU.
#pragma once
#include <cuda_runtime_api.h>

#include <algorithm>
#include <mutex>
#include <set>
#include <stdexcept>
#include <string>

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

/// The pool that allocations come from has room from now on, and keeps it. Virtual ranks allocate while kernels of others wait for them: to
/// ask the driver for memory, or to give it back, may be to wait for the GPU.
inline void keep_memory(int device) {
  static std::mutex mutex;
  static std::set<int> kept;
  const std::lock_guard lock(mutex);
  if (!kept.insert(device).second) return;
  cuda_ok(cudaSetDevice(device), "cudaSetDevice");
  cudaMemPool_t pool = nullptr;
  cuda_ok(cudaDeviceGetDefaultMemPool(&pool, device), "cudaDeviceGetDefaultMemPool");
  uint64_t most = UINT64_MAX;
  cuda_ok(cudaMemPoolSetAttribute(pool, cudaMemPoolAttrReleaseThreshold, &most), "cudaMemPoolSetAttribute");
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
    cuda_ok(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreate");
  }
  ~CudaPlace() override {
    cudaSetDevice(device_);
    for (void* p : memory_) cudaFreeAsync(p, stream_);
    cudaStreamSynchronize(stream_);
    cudaStreamDestroy(stream_);
  }
  Device device() const override { return {DeviceKind::cuda, device_}; }
  Stream stream() const override { return {stream_}; }
  TensorView put(const TensorView& host) override {
    TensorView t = host;
    if (!t.defined()) return t;
    t.device = device();
    const size_t bytes = span_bytes(host);
    if (bytes == 0) return t;
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
    cuda_ok(cudaFreeAsync(*found, stream_), "cudaFreeAsync");
    memory_.erase(found);
  }
  void write(void* to, const void* from, size_t num_bytes) override {
    cuda_ok(cudaMemcpyAsync(to, from, num_bytes, cudaMemcpyHostToDevice, stream_), "upload");
    cuda_ok(cudaStreamSynchronize(stream_), "upload");
  }
  void fill(void* to, int value, size_t num_bytes) override { cuda_ok(cudaMemsetAsync(to, value, num_bytes, stream_), "fill"); }
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
