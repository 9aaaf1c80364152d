// Tensors of a test in the memory of a GPU.
#pragma once
#include <cuda_runtime_api.h>

#include <stdexcept>
#include <string>

#include "support/place.h"
#include "turnout/error.h"

namespace turnout::testing {

inline void cuda_ok(cudaError_t e, const char* what) {
  if (e != cudaSuccess) throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(e));
}

class CudaPlace : public Place {
 public:
  explicit CudaPlace(int device) : device_(device) {
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
  void write(void* to, const void* from, size_t num_bytes) override {
    cuda_ok(cudaMemcpyAsync(to, from, num_bytes, cudaMemcpyHostToDevice, stream_), "upload");
    cuda_ok(cudaStreamSynchronize(stream_), "upload");
  }
  void fill(void* to, int value, size_t num_bytes) override { cuda_ok(cudaMemsetAsync(to, value, num_bytes, stream_), "fill"); }
  TensorView get(const TensorView& there) override {
    TensorView t = there;
    const size_t bytes = span_bytes(there);
    if (bytes == 0) return t;
    host_.emplace_back(bytes + 16);
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
};

}  // namespace turnout::testing
