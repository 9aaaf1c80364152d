// Streams and memory by which ranks of one process never wait for each other. A rank whose kernel waits for a second rank must
// not hold up, through a queue of the GPU or a piece of memory that both have used, what the second rank needs to come.
#pragma once
#include <cuda_runtime_api.h>

#include <cstddef>
#include <memory>
#include <mutex>
#include <string_view>

namespace turnout::transport::device {

/// The stream of this process for short work on `device` that waits for nobody: allocations, words that the host reads and writes.
/// One for all, never destroyed: streams share the queues of the GPU (CUDA_DEVICE_MAX_CONNECTIONS), so there should be few of them.
cudaStream_t side_stream(int device);

/// Whoever puts work on side streams or waits for them holds this meanwhile, as allocations and frees of MemoryPool do. Two threads in
/// cudaFreeAsync and cudaStreamSynchronize of one stream can wait for each other's locks inside the driver for ever (580.159.04).
std::unique_lock<std::recursive_mutex> hold_side_streams();

/// A stream that waits for no other. When the last owner lets it go, and it is idle, it is kept for who asks next.
std::shared_ptr<CUstream_st> borrow_stream(int device);

/// Pinned memory, zero, that all devices of this process reach. Kept like streams: to free some may be to wait for the GPU.
/// Throws: TransportError.
std::shared_ptr<void> borrow_pinned(size_t num_bytes);

/// Memory in order of streams, out of a pool of its own; asked for by threads with any device current. The pool of the device would give a piece that
/// another stream has freed but is still using, and make the taker wait for that stream; it would also give memory back to the driver at any
/// synchronisation. Nothing goes back to the driver while the pool lives.
class MemoryPool {
 public:
  /// Has its first memory when this returns. Throws: TransportError.
  explicit MemoryPool(int device);
  /// What was freed goes back to the driver once its streams are done with it.
  ~MemoryPool();
  MemoryPool(const MemoryPool&) = delete;
  MemoryPool& operator=(const MemoryPool&) = delete;
  /// In order of `stream`. Throws: TransportError with `what`.
  std::byte* allocate(size_t num_bytes, cudaStream_t stream, std::string_view what);
  /// In order of `stream`, from which it came.
  void free(std::byte* data, cudaStream_t stream) noexcept;

 private:
  const int device_;
  cudaMemPool_t pool_ = nullptr;
};

}  // namespace turnout::transport::device
