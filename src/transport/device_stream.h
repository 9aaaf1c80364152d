// One GPU as programs without a CUDA header use it: memory, one stream, clocks and graphs on it. For tools and tests; the engine has its
// own. Made by libturnout_cuda.so (transport/cuda.h: open_device_stream).
#pragma once
#include <cstddef>
#include <functional>
#include <memory>

namespace turnout::transport {

/// Marks in the order of a stream, and the time between them.
class DeviceClock {
 public:
  virtual ~DeviceClock() = default;
  /// Notes the time when the stream gets here as mark `index`.
  virtual void mark(size_t index) = 0;
  /// Microseconds from one mark to another. REQUIRES: both were made, and the stream has been synchronised since.
  virtual double between(size_t first, size_t last) const = 0;
};

/// Captured calls. REQUIRES: what the calls used lives.
class DeviceGraph {
 public:
  virtual ~DeviceGraph() = default;
  virtual void launch() = 0;
};

/// A stream that waits for no other, and memory of its GPU. Used by one thread at a time, whose current device stays as it is. Errors
/// are TransportErrors that name the step. Destruction does not wait: memory goes when the stream has got there.
class DeviceStream {
 public:
  virtual ~DeviceStream() = default;
  virtual int device() const = 0;
  /// The cudaStream_t.
  virtual void* native() const = 0;

  /// Memory for work on this stream, until deallocate() or the stream's end.
  virtual std::byte* allocate(size_t num_bytes) = 0;
  virtual void deallocate(std::byte* data) = 0;
  /// Copies from and to the host, in order of the stream; they return when they are done.
  virtual void upload(void* to, const void* from, size_t num_bytes) = 0;
  virtual void download(void* to, const void* from, size_t num_bytes) = 0;
  virtual void fill(void* to, int value, size_t num_bytes) = 0;
  /// Returns when everything issued has happened.
  virtual void synchronize() = 0;

  virtual std::unique_ptr<DeviceClock> make_clock(size_t num_marks) = 0;
  /// Runs `calls`, which issue on this stream only, without doing their work. What they throw ends the capture.
  virtual std::unique_ptr<DeviceGraph> capture(const std::function<void()>& calls) = 0;
};

/// One of several copies at once, between GPUs of this process or pinned memory of the host.
struct DeviceCopy {
  static constexpr int kHost = -1;
  int from, to;
};

}  // namespace turnout::transport
