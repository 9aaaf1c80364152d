// What all calls of one Buffer share: the window, the receive region, the routing map, the abort state. Results hold it
// alive, so a lease outlives its Buffer.
#pragma once
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "core/buffer_layout.h"
#include "core/routing.h"
#include "core/topology.h"
#include "engine/cpu/block_pool.h"
#include "engine/cpu/rows.h"
#include "engine/cpu/thread_pool.h"
#include "transport/transport.h"
#include "turnout/buffer.h"

namespace turnout::engine {

struct Context : std::enable_shared_from_this<Context> {
  Context(std::shared_ptr<transport::Transport> transport, std::unique_ptr<transport::Window> window, const core::BufferLayout& layout,
          core::Topology topology, const BufferConfig& config, std::shared_ptr<Allocator> own_allocator, Allocator* allocator);

  std::shared_ptr<transport::Transport> transport;
  std::unique_ptr<transport::Window> window;
  const core::BufferLayout layout;
  const core::Topology topology;
  const BufferConfig config;
  const int rank, num_ranks;
  const uint64_t serial;  ///< tells Buffers of this process apart
  const RowKernels& kernels;
  BlockPool pool;
  ThreadPool threads;
  std::mutex threads_mutex;  ///< lanes share the pool: one parallel loop at a time
  std::shared_ptr<Allocator> own_allocator;
  Allocator* allocator;

  std::mutex experts_mutex;
  std::shared_ptr<const core::ExpertMap> experts;  ///< of new routings

  /// 0 while all is well; else the abort that stopped the Buffer. Sticky until recover().
  std::atomic<uint64_t> status{0};
  std::atomic<bool> closed{false};
  std::atomic<uint64_t> fresh_results{0};  ///< results that found no lease

  /// Stops this Buffer on all ranks: peers learn `why` in their note and see the abort signal. Idempotent.
  void abort(const std::string& why, bool peer_failed);
  /// Throws if some rank aborted. Cheap.
  void check_abort();
  /// After recover(): what was raised so far is history.
  void forget_abort();

  /// Splits [0, n) over the Buffer's threads.
  template <class Body>
  void parallel_for(int64_t n, int64_t grain, const Body& body) {
    if (n <= 0) return;
    if (threads.num_threads() == 1 || n <= grain) return body(0, n);
    std::lock_guard lock(threads_mutex);
    threads.parallel_for(n, grain, body);
  }

 private:
  struct Note {
    uint64_t peer_failed;
    char text[core::BufferLayout::kNoteBytes - 8];
  };
  [[noreturn]] void throw_abort();
  std::mutex abort_mutex_;
  std::string abort_text_;
  bool abort_peer_failed_ = false;
  std::vector<uint64_t> abort_seen_;  ///< per source: abort signals already answered by a recover()
  uint64_t num_aborts_ = 0;           ///< raised by this rank
};

/// Memory of a result that is not the routing: a lease or an allocation, given back when the last reference dies.
class ResultMemory {
 public:
  ResultMemory(std::shared_ptr<Context> context, BlockPool::Block lease) : context_(std::move(context)), lease_(lease), is_lease_(true) {
    data_ = context_->window->local() + lease.offset;
  }
  ResultMemory(std::shared_ptr<Context> context, size_t num_bytes) : context_(std::move(context)), num_bytes_(num_bytes) {
    data_ = static_cast<std::byte*>(context_->allocator->allocate(num_bytes));
  }
  ResultMemory(const ResultMemory&) = delete;
  ResultMemory& operator=(const ResultMemory&) = delete;
  ~ResultMemory() {
    if (is_lease_) context_->pool.give_back(lease_);
    else context_->allocator->deallocate(data_, num_bytes_);
  }
  std::byte* data() const { return data_; }
  bool is_lease() const { return is_lease_; }
  const BlockPool::Block& lease() const { return lease_; }
  /// Gives back what a lease has beyond its first bytes.
  void trim(size_t num_bytes) { context_->pool.trim(lease_, num_bytes); }

 private:
  std::shared_ptr<Context> context_;
  std::byte* data_ = nullptr;
  BlockPool::Block lease_{};
  size_t num_bytes_ = 0;
  bool is_lease_ = false;
};

}  // namespace turnout::engine
