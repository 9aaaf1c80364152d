// What all calls of one Buffer share: the window, the receive region, the routing map, the abort state. Results hold it
// alive, so a lease outlives its Buffer.
#pragma once
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <new>
#include <string>
#include <thread>
#include <vector>

#include "core/buffer_layout.h"
#include "core/routing.h"
#include "core/topology.h"
#include "engine/cpu/block_cache.h"
#include "engine/cpu/block_pool.h"
#include "engine/cpu/inline_vector.h"
#include "engine/cpu/page_pool.h"
#include "engine/cpu/rows.h"
#include "engine/cpu/thread_pool.h"
#include "engine/cpu/verify.h"
#include "transport/transport.h"
#include "turnout/buffer.h"
#include "util/probe.h"
#include "util/process.h"

namespace turnout::engine {

/// Why a Buffer was stopped, the same on all ranks: the error that they raise, its words, and the record of the rank that found it.
struct Abort {
  enum class Kind : int64_t { timeout, peer_failed, invalid_argument };
  Kind kind = Kind::timeout;
  std::string text;
  WaitRecord record;
};

/// What `rank` wrote into its note here (BufferLayout::kNoteBytes).
Abort abort_of_note(const std::byte* bytes, int rank);

struct Context : std::enable_shared_from_this<Context> {
  Context(std::shared_ptr<transport::Transport> transport, std::unique_ptr<transport::Window> window, const core::BufferLayout& layout,
          core::Topology topology, const BufferConfig& config, Allocator* allocator);

  std::shared_ptr<transport::Transport> transport;
  std::unique_ptr<transport::Window> window;
  const core::BufferLayout layout;
  const core::Topology topology;
  const BufferConfig config;
  const int rank, num_ranks;
  /// What the window answers at every call: its memory here, that of each peer as it is reached by load and store (or null), its signals.
  std::byte* const local;
  const PerRank<std::byte*> peers;
  const std::atomic<uint64_t>* const signals;
  const uint64_t serial;  ///< tells Buffers of this process apart
  const RowKernels& kernels;
  BlockPool pool;
  ThreadPool threads;
  std::mutex threads_mutex;  ///< lanes share the pool: one parallel loop at a time
  PagePool pages;            ///< the default allocator
  Allocator* allocator;      ///< the caller's, or `pages`

  mutable std::mutex experts_mutex;
  std::shared_ptr<const core::ExpertMap> experts;  ///< of new routings
  std::atomic<uint64_t> num_maps{1};               ///< advances, under the mutex, with every new one: a lane looks only then

  /// 0 while all is well; else the abort that stopped the Buffer, as far as this rank has looked. Sticky until recover().
  std::atomic<uint64_t> status{0};
  std::atomic<bool> closed{false};
  const util::Process process;             ///< whose rank this is
  std::atomic<uint64_t> fresh_results{0};  ///< results that found no lease

  /// The calling thread waits in a call.
  void note_caller() {
    const auto me = std::this_thread::get_id();
    std::thread::id before = caller_.load(std::memory_order_relaxed);
    if (before == me) return;
    if (before != std::thread::id() || !caller_.compare_exchange_strong(before, me)) several_callers_.store(true, std::memory_order_relaxed);
  }
  /// Whether one thread makes all calls: while it waits in one, it makes no other.
  bool has_one_caller() const { return !several_callers_.load(std::memory_order_relaxed); }

  /// Counts a result of `num_bytes` that found no lease; the first one is logged.
  void count_fresh_result(size_t num_bytes);
  /// Whether `data` lies in memory that a result had and gave back, and that nothing has taken since.
  bool is_released(const void* data) const {
    const auto* at = static_cast<const std::byte*>(data);
    const std::byte* region = local + layout.receive;
    if (at >= region && at < region + layout.receive_bytes) return !pool.is_taken(static_cast<size_t>(at - local));
    return pages.keeps(data);
  }

  /// Stops this Buffer on all ranks: peers find `why` in their note and see the abort signal. The first reason stays.
  void abort(const Abort& why);
  /// abort(), and throws.
  [[noreturn]] void stop(const Abort& why);
  /// Throws if some rank aborted. Cheap.
  void check_abort();
  /// Keeps a block of a failed call, into which peers may still write, out of the pool until recover(), when all have left theirs.
  void retire(const BlockPool::Block& block);
  /// Of a lease that nobody uses any more.
  void give_back(const BlockPool::Block& block);
  /// Tells the peers that this rank makes no call any more. Never throws, never waits.
  void announce_close() noexcept;
  /// Of this rank, in new routings.
  int num_local_experts() const {
    std::lock_guard lock(experts_mutex);
    return experts->num_local(rank);
  }
  uint64_t read(int signal) const {
    util::probe::at(util::probe::Step::load);
    return signals[signal].load(std::memory_order_acquire);
  }
  std::byte* peer(int rank_of_it) const { return peers[static_cast<size_t>(rank_of_it)]; }
  /// The same for who makes no call: the rank that aborts stores it here.
  uint64_t* status_word() const { return reinterpret_cast<uint64_t*>(local + layout.status); }
  bool has_closed(int peer) const { return read(layout.closed_signal(peer)) != 0; }
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
  [[noreturn]] void throw_abort();
  void set_status_word(std::byte* arena, uint64_t value) const;
  std::atomic<std::thread::id> caller_{};
  std::atomic<bool> several_callers_{false};
  std::mutex abort_mutex_;
  Abort abort_;
  std::vector<BlockPool::Block> retired_;
  std::vector<std::atomic<uint64_t>> abort_seen_;  ///< per source: abort signals already answered by a recover()
  uint64_t num_aborts_ = 0;                        ///< raised by this rank
};

/// Memory of a result that is not the routing: a lease or an allocation, given back when the last reference dies.
class ResultMemory {
 public:
  ResultMemory(std::shared_ptr<Context> context, BlockPool::Block lease) : context_(std::move(context)), lease_(lease), is_lease_(true) {
    data_ = context_->local + lease.offset;
  }
  ResultMemory(std::shared_ptr<Context> context, size_t num_bytes) : context_(std::move(context)), num_bytes_(num_bytes) {
    try {
      data_ = static_cast<std::byte*>(context_->allocator->allocate(num_bytes));
    } catch (const std::bad_alloc&) {
      // Told below, as what returns null is.
    }
    if (data_) {
      if (context_->layout.verified) poison(data_, num_bytes_);
      return;
    }
    throw TransportError("no memory for " + std::to_string(num_bytes) +
                         " bytes of a result: give a smaller capacity, call with fewer tokens, release results, or "
                         "raise receive_bytes, where leases lie");
  }
  ResultMemory(const ResultMemory&) = delete;
  ResultMemory& operator=(const ResultMemory&) = delete;
  ~ResultMemory() {
    if (is_retired_) return;
    if (is_lease_) {
      context_->give_back(lease_);
      return;
    }
    if (context_->layout.verified) poison(data_, num_bytes_);
    context_->allocator->deallocate(data_, num_bytes_);
  }
  std::byte* data() const { return data_; }
  bool is_lease() const { return is_lease_; }
  const BlockPool::Block& lease() const { return lease_; }
  /// Gives back what a lease has beyond its first bytes.
  void trim(size_t num_bytes) { context_->pool.trim(lease_, num_bytes); }
  /// The call failed: a lease goes the way of Context::retire().
  void retire() {
    if (is_lease_) context_->retire(lease_);
    is_retired_ = is_lease_;
  }

 private:
  std::shared_ptr<Context> context_;
  std::byte* data_ = nullptr;
  BlockPool::Block lease_{};
  size_t num_bytes_ = 0;
  bool is_lease_ = false, is_retired_ = false;
};

template <class Room>
std::shared_ptr<ResultMemory> new_memory(std::shared_ptr<Context> context, const Room& room) {
  return std::allocate_shared<ResultMemory>(CachedAllocator<ResultMemory>(), std::move(context), room);
}

}  // namespace turnout::engine
