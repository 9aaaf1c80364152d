// Small copies on a stream that is somebody else's (XLA's), by the driver itself: the module is built without CUDA, and whoever has a
// stream has the driver loaded.
#pragma once
#include <cstddef>
#include <cstdint>

namespace turnout::python {

/// Work in order of a stream, on memory of its GPU. The thread's current context stays as it was. Throws: TransportError with the step.
class GpuStream {
 public:
  explicit GpuStream(void* stream);
  ~GpuStream();
  GpuStream(const GpuStream&) = delete;
  GpuStream& operator=(const GpuStream&) = delete;

  void copy(void* to, const void* from, size_t num_bytes);

 private:
  void* stream_;
};

}  // namespace turnout::python
