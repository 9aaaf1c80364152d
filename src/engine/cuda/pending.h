// A call between its sending part and its wait.
#pragma once
#include <memory>

#include "engine/cpu/block_cache.h"
#include "engine/cuda/engine.h"

namespace turnout::engine::cuda {

class PendingCall : public DevicePending {
 public:
  PendingCall(std::shared_ptr<Engine> engine, int lane_, cudaStream_t stream_)
      : engine_(std::move(engine)), lane(lane_), stream(stream_), capture(capture_of(stream_)), generation(engine_->generation_) {}
  DeviceDispatch finish_dispatch() override;
  DeviceCombine finish_combine() override;
  OnStream on() const { return {stream, capture}; }
  int64_t* arrived() override { return dispatch.arrived; }
  ~PendingCall() override;
  // Too large for malloc's quick lists, and every call makes one.
  using Room = BlockCache<4096>;
  static void* operator new(size_t) { return Room::allocate(); }
  static void operator delete(void* block) noexcept { Room::deallocate(block); }
  PendingCall(const PendingCall&) = delete;
  PendingCall& operator=(const PendingCall&) = delete;
  /// Issues the receiving part, if it has not been: at the wait, or earlier where a later call needs the staging of this one.
  /// REQUIRES: the engine's mutex is held.
  void receive();
  /// From now on the lane knows that there is something to receive.
  void stay_open();
  /// resident: receives on a stream of the engine's, from where the call's stream is now.
  void receive_on(cudaStream_t side);

 private:
  std::shared_ptr<Engine> engine_;
  bool is_open_ = false;
  void join();
  void zero_tail_of_result();
  void turn_scales();

 public:
  int lane;
  cudaStream_t stream;
  uint64_t capture;  ///< of the stream when the call began
  uint64_t generation;
  uint64_t epoch = 0;  ///< number of the call on its lane
  bool is_dispatch = false;
  bool zero_tail = false;
  int ll_blocks = 0;               ///< low_latency: grid of its kernels
  bool receives_now = true;        ///< the receiving part is issued, if there is one apart from the call
  cudaEvent_t received = nullptr;  ///< resident
  DispatchArgs dispatch{};
  CombineArgs combine{};
  std::shared_ptr<const RoutingMemory> routing;
  std::shared_ptr<Hold> block, result, counters, fp8;
};
static_assert(sizeof(PendingCall) <= 4096);

}  // namespace turnout::engine::cuda
