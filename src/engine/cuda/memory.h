// Memory of results and handles: blocks of the receive region, and allocations of the engine's own or the caller's. What is given
// back may be taken again at once by work of the same stream; another stream first waits for an event.
#pragma once
#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <vector>

#include "engine/cpu/block_pool.h"
#include "transport/device/resources.h"
#include "turnout/buffer.h"

namespace turnout::engine::cuda {

/// 0 where `stream` is not being captured, else the capture's number. Throws: TransportError if the capture is broken.
uint64_t capture_of(cudaStream_t stream);

/// A stream and the capture that runs on it (0: none), which a call asks the driver for once.
struct OnStream {
  cudaStream_t stream = nullptr;
  uint64_t capture = 0;
};

/// The stream of all calls, as long as there is only one. What it gives back only it takes again, and nothing is recorded: an event
/// costs as much as half a call in low_latency mode. From the second stream on every block gets its event when it is given back.
class OnlyStream {
 public:
  /// Notes a call on `stream`. True: it is the first stream, and others have come.
  bool must_share(cudaStream_t stream) {
    if (!seen_) seen_ = true, first_ = stream;
    if (stream != first_) shared_ = true;
    return shared_ && stream == first_;
  }
  bool is(cudaStream_t stream) const { return seen_ && stream == first_; }
  bool is_shared() const { return shared_; }
  cudaStream_t stream() const { return first_; }

 private:
  cudaStream_t first_ = nullptr;
  bool seen_ = false, shared_ = false;
};

/// Ranges of addresses with the streams that may still be using them. Called by threads with any device current: results are given back
/// wherever their last owner lets them go.
class Fences {
 public:
  explicit Fences(int device) : device_(device) {}
  ~Fences();
  Fences(const Fences&) = delete;
  Fences& operator=(const Fences&) = delete;
  /// What was issued on `stream` so far may use [begin, begin + num_bytes).
  void add(size_t begin, size_t num_bytes, cudaStream_t stream);
  /// The same while the stream is being captured, when it can record nothing: who wants the range records it.
  void add_later(size_t begin, size_t num_bytes, cudaStream_t stream) { fences_.push_back({begin, begin + num_bytes, stream, nullptr}); }
  /// add, or add_later where the stream is being captured.
  void add_after(size_t begin, size_t num_bytes, cudaStream_t stream);
  /// Makes `stream` wait for all other streams that may use the range, and forgets them.
  void wait(size_t begin, size_t num_bytes, cudaStream_t stream);

 private:
  struct Fence {
    size_t begin, end;
    cudaStream_t stream;
    cudaEvent_t event;
  };
  cudaEvent_t take_event();
  const int device_;
  std::vector<Fence> fences_;
  std::vector<cudaEvent_t> spare_;
};

struct Lease {
  BlockPool::Block block;
  cudaStream_t stream = nullptr;
  uint64_t capture = 0;  ///< taken while this capture ran: the graph holds it for life
};

/// The receive region.
class Region {
 public:
  Region(int device, size_t begin, size_t num_bytes) : pool_(begin, num_bytes), fences_(device) {}
  std::optional<Lease> take(size_t num_bytes, OnStream on);
  void give_back(const Lease& lease) noexcept;
  bool is_taken(size_t offset) const;
  size_t largest_gap() const { return pool_.largest_gap(); }
  /// What take() can give outside of a capture, at least until it gives something.
  size_t room() const;
  size_t num_bytes() const { return pool_.num_bytes(); }

 private:
  std::optional<BlockPool::Block> take_idle(size_t wanted);
  void share_idle(bool in_capture);

  mutable std::mutex mutex_;
  BlockPool pool_;
  OnlyStream only_;
  std::vector<BlockPool::Block> idle_;  ///< given back by the only stream; not in the pool
  Fences fences_;
  std::map<uint64_t, std::vector<BlockPool::Block>> captured_;  ///< free again within their capture only
};

/// Device memory that is not symmetric.
class Memory {
 public:
  /// `alone`: no other rank of this process uses the GPU.
  Memory(int device, Allocator* allocator, cudaStream_t stream, std::shared_ptr<transport::device::MemoryPool> pool, bool alone)
      : device_(device), allocator_(allocator), stream_(stream), pool_(std::move(pool)), alone_(alone), fences_(device) {}
  ~Memory();
  struct Piece {
    std::byte* data = nullptr;
    size_t num_bytes = 0;
    cudaStream_t stream = nullptr;
    uint64_t capture = 0;
  };
  /// `of_caller`: from the caller's Allocator if there is one (results; handles are the engine's own).
  Piece take(size_t num_bytes, OnStream on);
  void give_back(const Piece& piece) noexcept;
  /// Whether an address lies in what was given back and not taken again; a caller's Allocator alone knows.
  bool keeps_any(std::span<const void* const> addresses) const;

 private:
  int device_;
  Allocator* allocator_;
  void finish();
  cudaStream_t stream_;  ///< of allocations; nothing that waits is ever on it
  std::shared_ptr<transport::device::MemoryPool> pool_;
  const bool alone_;
  std::vector<cudaStream_t> users_;  ///< streams that memory was taken for
  mutable std::mutex mutex_;
  Fences fences_;
  OnlyStream only_;
  std::multimap<size_t, std::byte*> idle_;                          ///< given back by the only stream
  std::multimap<size_t, std::byte*> free_;                          ///< by size
  std::map<uint64_t, std::multimap<size_t, std::byte*>> captured_;  ///< free again within their capture only
  struct Returned {
    std::byte* data;
    size_t num_bytes;
    cudaEvent_t event;  ///< null: cannot be told before all is over
  };
  void deallocate_returned();
  std::byte* allocate(size_t num_bytes, cudaStream_t stream, uint64_t capture, std::unique_lock<std::mutex> lock);
  std::byte* take_kept(size_t num_bytes, cudaStream_t stream, uint64_t capture, std::multimap<size_t, std::byte*>* unwanted);
  bool keep(const Piece& piece);
  std::vector<Returned> returned_;  ///< to the caller's Allocator, when the GPU has passed the event
  std::vector<std::byte*> all_;
};

}  // namespace turnout::engine::cuda
