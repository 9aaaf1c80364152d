// The CUDA engine of one Buffer: its arena, its words in device memory, and what every call needs.
#pragma once
#include <cuda_runtime_api.h>

#include <condition_variable>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "engine/cuda/args.h"
#include "engine/cuda/memory.h"
#include "engine/device_engine.h"
#include "transport/device/range.h"
#include "transport/device/resources.h"
#include "transport/device_window.h"

namespace turnout::engine::cuda {

/// Where the rows of leases are. Where arenas are memory of the host, each block of the region has a twin in this GPU's memory: peers write
/// to the one, and rows are laid out in the other, since whoever works on them would else read them across PCIe, and more than once.
/// REQUIRES, for suspend() and the destructor: as of a DeviceWindow.
class LeaseMemory {
 public:
  LeaseMemory(transport::DeviceWindow& window, const Arena& arena, int device, std::shared_ptr<transport::device::MemoryPool> pool,
              cudaStream_t stream);
  ~LeaseMemory();
  LeaseMemory(const LeaseMemory&) = delete;
  LeaseMemory& operator=(const LeaseMemory&) = delete;
  bool are_apart() const { return apart_ != nullptr; }
  /// Where they are apart: frees their memory and takes some again, at the same addresses; without VMM it is kept. Throws: TransportError, and
  /// they stay suspended.
  void suspend();
  void resume();
  /// `offset`: in the arena.
  std::byte* at(size_t offset) const { return begin_ + (offset - first_); }
  /// Whether `address` is in the region's memory, and then where in the arena.
  std::optional<size_t> offset_of(const std::byte* address) const {
    if (address < begin_ || address >= begin_ + num_bytes_) return std::nullopt;
    return first_ + static_cast<size_t>(address - begin_);
  }

 private:
  size_t first_, num_bytes_, range_bytes_ = 0;
  int device_;
  std::byte* begin_;
  std::byte* apart_ = nullptr;
  std::unique_ptr<transport::device::Range> range_;  ///< of what is apart; none without VMM
  std::shared_ptr<transport::device::MemoryPool> pool_;
  cudaStream_t stream_;
};

/// What results keep alive: they may outlive the Buffer.
struct Shared {
  /// `alone`: no other rank uses the GPU.
  Shared(std::unique_ptr<transport::DeviceWindow> window_, const Arena& arena_, int device_, Allocator* allocator, bool alone)
      : window(std::move(window_)),
        arena(arena_),
        device(device_),
        stream(transport::device::side_stream(device_)),
        pool(std::make_shared<transport::device::MemoryPool>(device_)),
        leases(*window, arena, device_, pool, stream),
        region(device_, arena.receive, arena.receive_bytes),
        results(device_, allocator, stream, pool, alone),
        own(device_, nullptr, stream, pool, alone) {}
  bool through_host() const { return leases.are_apart(); }
  std::unique_ptr<transport::DeviceWindow> window;
  const Arena arena;
  const int device;
  const cudaStream_t stream;  ///< of allocations and of words that the host writes: short work that waits for nobody
  const std::shared_ptr<transport::device::MemoryPool> pool;
  LeaseMemory leases;  ///< goes, as the window does, when `results` has waited for its users
  Region region;
  Memory results;  ///< from the caller's Allocator, if there is one
  Memory own;      ///< handles
};

/// A lease or an allocation, given back in order of the stream of its call when the last reference dies.
class Hold {
 public:
  Hold(std::shared_ptr<Shared> shared, const Lease& lease) : shared_(std::move(shared)), lease_(lease), is_lease_(true) {}
  Hold(std::shared_ptr<Shared> shared, Memory& memory, size_t num_bytes, OnStream on)
      : shared_(std::move(shared)), memory_(&memory), piece_(memory.take(num_bytes, on)) {}
  Hold(const Hold&) = delete;
  Hold& operator=(const Hold&) = delete;
  ~Hold() {
    if (is_lease_) shared_->region.give_back(lease_);
    else memory_->give_back(piece_);
  }
  bool is_lease() const { return is_lease_; }
  size_t offset() const { return lease_.block.offset; }
  std::byte* data() const { return is_lease_ ? shared_->leases.at(lease_.block.offset) : piece_.data; }

 private:
  std::shared_ptr<Shared> shared_;
  Memory* memory_ = nullptr;
  Lease lease_{};
  Memory::Piece piece_{};
  bool is_lease_ = false;
};

/// The device arrays of a routing, and what the host knows of it.
class RoutingMemory : public DeviceRouting {
 public:
  int32_t* recv_begin() const override { return view.recv_begin; }
  Routing view{};
  int64_t block_rows = 0;  ///< N
  int64_t result_rows = 0;
  std::vector<int64_t> rows_of_rank;      ///< exact: N of each rank
  bool in_rounds = false;                 ///< the dispatch came in rounds, on all ranks
  int64_t num_rows = -1, num_pairs = -1;  ///< known for exact size
  int64_t generation = 0;
  int num_local = 0, max_local = 0;  ///< experts of this rank, and of the rank with most
  int64_t sent_total = -1;           ///< rows that this rank sends, if known
  std::shared_ptr<Hold> source_side, receive_side;
};

/// Pinned host memory that the device sees.
template <class T>
class Mapped {
 public:
  explicit Mapped(size_t n);
  T* host() const { return static_cast<T*>(memory_.get()); }
  T* device() const { return device_; }

 private:
  std::shared_ptr<void> memory_;
  T* device_ = nullptr;
};

/// Bytes from a row of a tensor to the next.
inline int64_t row_stride(const TensorView& t) { return t.strides[static_cast<size_t>(t.ndim - 2)] * static_cast<int64_t>(size_of(t.dtype)); }

/// What is read of the GPU at a time.
inline constexpr size_t kReadBytes = 4096;

class PendingCall;

/// Rows of a block of at most `room` bytes that has room for the ids of all `total`.
int64_t rows_that_fit(const DispatchArgs& a, int64_t total, int64_t room);

class Engine : public DeviceEngine, public std::enable_shared_from_this<Engine> {
 public:
  explicit Engine(DeviceEngineSetup setup);
  ~Engine() override;

  std::unique_ptr<DevicePending> dispatch(const turnout::DispatchArgs& args, const CallFacts& facts, const RoutingFacts& routing,
                                          std::shared_ptr<const DeviceRouting> cached, bool receive_now) override;
  std::unique_ptr<DevicePending> combine(const turnout::CombineArgs& args, const CallFacts& facts, const RoutingFacts& routing,
                                         std::shared_ptr<const DeviceRouting> handle, bool receive_now) override;
  void refuse(const CallFacts& facts, const Reason& why, int lane, Stream stream) override;
  void set_experts(const std::vector<int>& expert_to_rank) override;
  void raise_failure() override;
  void check_failure() override;
  void synchronize() override;
  void recover() override;
  void stop_waiting() override;
  const uint64_t* status_word() const override { return &words_->device()->status; }
  size_t num_bytes() const override { return shared_->arena.num_bytes; }
  int num_outstanding(int lane) const override { return lanes_[static_cast<size_t>(lane)].outstanding; }
  int num_sms() const override { return num_sms_; }
  std::string_view transport() const override { return shared_->window->transport(); }
  void watch(std::function<bool(int)> has_closed, std::function<void()> host_check) override;
  void suspend() override;
  void resume() override;
  size_t routing_bytes(const RoutingFacts& facts) const override;
  void store_routing(const DeviceRouting& routing, const RoutingFacts& facts, std::byte* to, Stream stream) const override;
  std::shared_ptr<const DeviceRouting> routing_at(const RoutingFacts& facts, const std::byte* from) const override;
  bool is_any_released(std::span<const void* const> addresses) const override;

 private:
  friend class PendingCall;
  struct LaneState {
    uint64_t num_sends = 0;                              ///< calls issued
    uint64_t last_low_latency = 0, last_throughput = 0;  ///< of them; the latter as seen by the former
    int outstanding = 0;
    std::vector<PendingCall*> open;  ///< those whose receiving part has yet to be issued on the stream of the lane
    int64_t rounds = 0;              ///< exact: of the call being issued, once all ranks know them
    int64_t rounds_issued = 0;
    std::shared_ptr<CUstream_st> resident;  ///< of resident receives, once there is one
    uint64_t* chunk_counts = nullptr;
    uint32_t *flags = nullptr, *begins = nullptr, *offers = nullptr;
    std::vector<std::shared_ptr<Hold>> records;  ///< of wire = rows with a capacity, for all copies: the last; earlier ones are known to graphs
    size_t record_bytes = 0, record_offset = 0;  ///< room of a copy in it; where the first begins
  };

  /// The part of construction that may fail on one rank alone.
  void build(std::unique_ptr<transport::DeviceWindow> window, Allocator* allocator);
  /// `num_calls_ago`: how many calls of the lane were issued since.
  Common common(int lane, const CallFacts& facts, int num_calls_ago, bool last_of_send) const;
  int blocks(int wanted) const;
  std::shared_ptr<RoutingMemory> new_routing(const turnout::DispatchArgs& args, OnStream on) const;
  void add_receive_side(RoutingMemory& r, int64_t block_rows, int64_t result_rows, int num_topk, bool has_weights, Layout layout, int64_t slot_rows,
                        OnStream on) const;
  int64_t most_block_rows(Layout layout, int64_t capacity) const;
  int64_t most_result_rows(Layout layout, int64_t capacity) const;
  DispatchArgs dispatch_args(const turnout::DispatchArgs& args, const CallFacts& facts, const RoutingFacts& routing) const;
  void receive_with_this_map();
  bool is_low_latency(const DispatchArgs& a) const;
  bool is_low_latency(const CombineArgs& a) const;
  void dispatch_low_latency(const turnout::DispatchArgs& args, PendingCall& call, std::shared_ptr<const RoutingMemory> cached, bool counts_arrivals,
                            bool receives_now);
  void combine_low_latency(const turnout::CombineArgs& args, PendingCall& call, bool receives_now);
  template <class KernelArgs>
  void note_low_latency(PendingCall& call, KernelArgs& a);
  void place_sums(const turnout::CombineArgs& args, CombineArgs& a, std::shared_ptr<Hold>* result, OnStream on) const;
  void read(void* to, const void* from, size_t num_bytes, std::string_view what);
  const volatile int64_t* wait_for_words(cudaStream_t stream);
  void wait_for_counts(DispatchArgs& a, RoutingMemory& r, cudaStream_t stream);
  void make_routing(const turnout::DispatchArgs& args, PendingCall& call, int plan_blocks);
  void reuse_routing(PendingCall& call, std::shared_ptr<const RoutingMemory> cached) const;
  void place_call(const turnout::DispatchArgs& args, PendingCall& call) const;
  void quantize_ahead(PendingCall& call, int num_sms) const;
  void open_call(PendingCall& call, int plan_blocks);
  uint32_t room() const;
  bool may_need_rounds(const DispatchArgs& a, const RoutingMemory& r) const;
  int64_t num_rounds(const DispatchArgs& a, const RoutingMemory& r, const volatile int64_t* rooms) const;
  void prepare_rounds(LaneState& lane, cudaStream_t stream);
  void issue_rounds(PendingCall& call, int move_blocks);
  bool place_lasting_records(CombineArgs& a, LaneState& lane, OnStream on) const;
  void place_block(DispatchArgs& a, std::shared_ptr<Hold>* block, OnStream on) const;
  void place_result(const turnout::DispatchArgs& args, DispatchArgs& a, std::shared_ptr<Hold>* result, OnStream on) const;
  [[noreturn]] void throw_record();
  std::optional<CallFacts> told_by(int source, int lane, int64_t epoch);
  std::string disagreement_of(int lane, int64_t epoch);
  void watch_peers();
  void note_stream(cudaStream_t stream);
  void finish_calls(std::string_view what);
  void let_calls_end() noexcept;
  /// Throws: InvalidArgument between suspend() and resume().
  void require_memory() const;
  /// Before the next call of a lane: what others must not write over yet has been received.
  void receive_earlier(int lane, cudaStream_t stream, int64_t num_calls = 1);
  void receive_half(int lane, cudaStream_t stream);
  void receive_if(int lane, cudaStream_t stream, const std::function<bool(const PendingCall&)>& wanted);
  [[noreturn]] void throw_abort(const DeviceRecord& own);
  std::string calls_made(int lane);

  Bootstrap& bootstrap_;
  std::shared_ptr<transport::Transport> host_;
  const core::Topology topology_;
  const BufferConfig config_;
  const int device_, rank_, num_ranks_;
  int num_sms_ = 1, sharers_ = 1;
  bool lines_ = false;  ///< Common::lines
  std::shared_ptr<Shared> shared_;
  std::unique_ptr<Mapped<HostWords>> words_;
  std::unique_ptr<Mapped<int64_t>> counts_;
  std::unique_ptr<Mapped<std::byte>> read_room_;
  std::mutex read_mutex_;
  std::byte* device_words_ = nullptr;  ///< one allocation: Control, LaneControls, expert table, scratch
  size_t device_words_bytes_ = 0;
  Control* control_ = nullptr;
  LaneControl* lane_controls_ = nullptr;
  ExpertTable* experts_ = nullptr;
  std::byte* expert_arrays_ = nullptr;
  int32_t* node_of_rank_ = nullptr;
  std::vector<LaneState> lanes_;
  std::vector<int> num_local_;
  int64_t experts_hash_ = 0;
  int max_local_ = 0;
  uint64_t generation_ = 0;
  cudaStream_t side_stream_ = nullptr;  ///< that of `shared_`
  std::thread watch_;
  std::mutex watch_mutex_;
  std::condition_variable watch_stop_;
  bool stopping_ = false;
  std::function<bool(int)> has_closed_;
  std::function<void()> host_check_;
  std::exception_ptr host_failure_;  ///< what `host_check_` threw; these and `generation_` under `watch_mutex_`, too
  std::vector<cudaStream_t> streams_;
  bool suspended_ = false, told_of_rounds_ = false;
  mutable std::mutex mutex_;
};

}  // namespace turnout::engine::cuda
