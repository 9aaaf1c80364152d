// The body of Buffer: lanes over one engine context, and what pending calls and results keep.
#pragma once
#include <atomic>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "api/communicator_impl.h"
#include "api/known_call.h"
#include "engine/cpu/combine_call.h"
#include "engine/cpu/dispatch_call.h"
#include "engine/cpu/lane.h"
#include "engine/device_engine.h"
#include "turnout/buffer.h"

namespace turnout {
inline namespace v0 {
namespace internal {

/// Keeps the memory behind a result's views.
class Memory {
 public:
  std::shared_ptr<engine::ResultMemory> rows;
  std::shared_ptr<const Routing> routing;
  int64_t num_rows = 0, num_dropped = 0;
  engine::PerRank<int64_t> arrived;
  std::vector<float> side;
  std::vector<int32_t> num_lost;
  std::vector<uint32_t> scale_columns;
  std::shared_ptr<void> on_device;
};

/// The view of scales by columns, of `rows` rows whose scales are `scale_bytes`; `groups`: the local experts of a slab,
/// of which a rank may have none; absent for other layouts.
TensorView scale_columns(void* data, bool fp32, int64_t rows, std::optional<int64_t> groups, int64_t scale_bytes, Device device);

class BufferImpl;

class PendingImpl {
 public:
  PendingImpl(BufferImpl* buffer_, int lane_) : buffer(buffer_), lane(lane_) {}
  PendingImpl(const PendingImpl&) = delete;
  PendingImpl& operator=(const PendingImpl&) = delete;
  ~PendingImpl();
  void stop_resident();

  BufferImpl* const buffer;
  std::shared_ptr<BufferImpl> keeper;  ///< the same, where the call may outlive whoever made it
  const int lane;
  engine::DispatchCall* dispatch = nullptr;  ///< the lane's while it is outstanding there
  engine::CombineCall* combine = nullptr;    ///< likewise
  std::shared_ptr<engine::Call> call;        ///< one of these, where something may come between the issue and the end
  std::unique_ptr<engine::DevicePending> device;
  std::optional<DispatchArgs> dispatch_args;  ///< of a call that outlives the caller's, and with `device`
  std::optional<CombineArgs> combine_args;
  std::shared_ptr<const Routing> routing;
  std::shared_ptr<Routing> fresh;     ///< the same, if this call makes it
  std::unique_lock<std::mutex> lock;  ///< of the lane, held from the issue to the end of a call that nothing comes between
  bool waited = true;                 ///< nobody has to wait for it: not issued yet, failed, or waited for
  std::atomic<bool> stop{false};
  std::thread resident;  ///< receives meanwhile, if asked
};

class BufferImpl : public std::enable_shared_from_this<BufferImpl> {
 public:
  BufferImpl(std::shared_ptr<CommunicatorImpl> communicator, const BufferConfig& config, Allocator* allocator);
  BufferImpl(const BufferImpl&) = delete;
  BufferImpl& operator=(const BufferImpl&) = delete;
  ~BufferImpl();

  /// Checks and issues a call. What this rank cannot do is refused on all ranks. `pending` keeps it, or, without one, a new one that is
  /// returned. REQUIRES: `pending` is new and of args.lane.
  template <class Args>
  std::shared_ptr<PendingImpl> start(const Args& args, PendingImpl* pending = nullptr);
  DispatchResult finish_dispatch(PendingImpl& pending) {
    return pending.device ? finish_dispatch_on_device(pending) : finish_dispatch_on_host(pending);
  }
  CombineResult finish_combine(PendingImpl& pending) { return pending.device ? finish_combine_on_device(pending) : finish_combine_on_host(pending); }
  /// Drives a pending call that nobody wants any more to its end.
  void drop(PendingImpl& pending) noexcept;

  /// Starts a thread that receives until the call is done or waited for.
  void receive_meanwhile(const std::shared_ptr<PendingImpl>& pending);
  void set_expert_to_rank(const std::vector<int>& expert_to_rank);
  void check();
  void synchronize();
  void recover();
  void suspend();
  void resume();
  void close();
  void require_open(const char* call) const;

  const std::shared_ptr<engine::Context>& context() const { return context_; }
  engine::DeviceEngine* device() const { return device_.get(); }
  engine::Lane& lane(int index) { return *lanes_[static_cast<size_t>(index)]; }

 private:
  std::shared_ptr<PendingImpl> new_pending(int lane);
  engine::Call* make_call(const DispatchArgs& args, engine::Lane& lane, PendingImpl& pending);
  engine::Call* make_call(const CombineArgs& args, engine::Lane& lane, PendingImpl& pending);
  template <class Args>
  [[noreturn]] void refuse(const Args& args, engine::Lane& lane, const std::exception_ptr& why);
  DispatchResult finish_dispatch_on_host(PendingImpl& pending);
  CombineResult finish_combine_on_host(PendingImpl& pending);
  [[noreturn]] void stop_for_lane(const char* call, int lane);
  void agree(const BufferConfig& config);

  // On a device (device_calls.cc).
  void open_device(const BufferConfig& config, Allocator* allocator);
  std::shared_ptr<PendingImpl> start_on_device(const DispatchArgs& args, int lane, PendingImpl* pending);
  std::shared_ptr<PendingImpl> start_on_device(const CombineArgs& args, int lane, PendingImpl* pending);
  template <class Args, class Issue>
  std::shared_ptr<PendingImpl> issue(const Args& args, int lane, PendingImpl* pending, Issue issue_call);
  DispatchResult finish_dispatch_on_device(PendingImpl& pending);
  CombineResult finish_combine_on_device(PendingImpl& pending);

  std::shared_ptr<CommunicatorImpl> communicator_;
  std::shared_ptr<engine::Context> context_;
  std::vector<std::unique_ptr<engine::Lane>> lanes_;
  std::atomic<bool> recovering_{false};  ///< some thread holds all lanes and waits for peers
  struct Known {
    api::KnownDispatch dispatch;
    api::KnownCombine combine;
  };
  std::vector<Known> known_;  ///< per lane
  std::shared_ptr<engine::DeviceEngine> device_;
  std::vector<int64_t> device_calls_;  ///< per lane: calls issued, refused ones included
};

}  // namespace internal
}  // namespace v0
}  // namespace turnout
