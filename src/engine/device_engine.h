// What the public classes see of an engine on a device: calls in, addresses out. No type of the device's toolkit appears here.
#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "core/topology.h"
#include "engine/cpu/header.h"
#include "transport/device_window.h"
#include "transport/transport.h"
#include "turnout/bootstrap.h"
#include "turnout/buffer.h"

namespace turnout::engine {

/// The routing of a dispatch in the memory of a device; a Handle keeps it.
class DeviceRouting {
 public:
  virtual ~DeviceRouting() = default;
  /// [R + 1], on the device: where the received rows of each source begin.
  virtual int32_t* recv_begin() const = 0;
};

/// Addresses of a result's arrays; `memory` keeps them.
struct DeviceDispatch {
  std::shared_ptr<void> memory;
  std::shared_ptr<const DeviceRouting> routing;
  void* x = nullptr;
  int64_t x_stride = 0;  ///< bytes
  void* x_scales = nullptr;
  std::vector<void*> side;
  int64_t array_rows = 0;  ///< first dimension of the row arrays (slab: all of its rows)
  int64_t num_rows = -1;   ///< -1: only the device knows (`num_rows_at`)
  int64_t num_pairs = -1;  ///< entries of sorted_rows; -1: only the device knows, there is room for array_rows * top-k
  int32_t* topk_idx = nullptr;
  float* topk_weights = nullptr;  ///< rank_major [N, K], else one per row of the result
  int64_t* num_rows_at = nullptr;
  int64_t* num_dropped_at = nullptr;
  int32_t* expert_counts = nullptr;
  int64_t* expert_offsets = nullptr;
  int32_t* sorted_rows = nullptr;
  int64_t* arrived = nullptr;
  bool is_lease = false;
};

struct DeviceCombine {
  std::shared_ptr<void> memory;
  void* x = nullptr;
  int64_t x_stride = 0;  ///< bytes
  float* side = nullptr;
  int32_t* num_lost = nullptr;
};

/// A call whose sending part has been issued.
class DevicePending {
 public:
  virtual ~DevicePending() = default;
  /// Issues what receives, in order of the stream of the call.
  virtual DeviceDispatch finish_dispatch() = 0;
  virtual DeviceCombine finish_combine() = 0;
  virtual int64_t* arrived() = 0;
};

/// Facts of a routing that calls with a handle need on the host.
struct RoutingFacts {
  Layout layout = Layout::rank_major;
  int64_t capacity = -1, num_tokens = 0;
  int alignment = 1, num_topk = 0;
  bool has_weights = false;
  int64_t generation = 0;  ///< hash of its expert map
};

class DeviceEngine {
 public:
  virtual ~DeviceEngine() = default;
  /// Arguments have been checked as far as the host can. `receive_now`: the call is complete when the stream has got there.
  virtual std::unique_ptr<DevicePending> dispatch(const DispatchArgs& args, const CallFacts& facts, const RoutingFacts& routing,
                                                  std::shared_ptr<const DeviceRouting> cached, bool receive_now) = 0;
  virtual std::unique_ptr<DevicePending> combine(const CombineArgs& args, const CallFacts& facts, const RoutingFacts& routing,
                                                 std::shared_ptr<const DeviceRouting> handle, bool receive_now) = 0;
  /// Tells all ranks that this one rejected its arguments, and why: the call fails everywhere.
  virtual void refuse(const CallFacts& facts, const Reason& why, int lane, Stream stream) = 0;
  virtual void set_experts(const std::vector<int>& expert_to_rank) = 0;
  /// Throws what an earlier call left. Does not wait.
  virtual void raise_failure() = 0;
  /// The same, and where the Buffer is aborted by a rank that this one does not wait for.
  virtual void check_failure() = 0;
  virtual void synchronize() = 0;
  /// Collective.
  virtual void recover() = 0;
  /// Makes waits of this rank end: a peer is gone, or another rank gave up.
  virtual void stop_waiting() = 0;
  /// What the host sees of its peers, asked now and then: a rank that has closed its Buffer, and (by throwing) that it is aborted. Waits of
  /// this rank end then.
  virtual void watch(std::function<bool(int)> has_closed, std::function<void()> host_check) = 0;
  virtual const uint64_t* status_word() const = 0;
  virtual size_t num_bytes() const = 0;
  virtual int num_outstanding(int lane) const = 0;
  virtual std::string_view transport() const = 0;
  virtual int num_sms() const = 0;
  virtual void suspend() = 0;
  virtual void resume() = 0;
  /// A routing with a capacity as bytes that may lie anywhere on the device: their number, a copy of them in order of a stream, and what they
  /// say, read when calls with it run.
  virtual size_t routing_bytes(const RoutingFacts& facts) const = 0;
  virtual void store_routing(const DeviceRouting& routing, const RoutingFacts& facts, std::byte* to, Stream stream) const = 0;
  virtual std::shared_ptr<const DeviceRouting> routing_at(const RoutingFacts& facts, const std::byte* from) const = 0;
  /// Whether one of the addresses lies in memory of results that no result holds.
  virtual bool is_any_released(std::span<const void* const> addresses) const = 0;
};

struct DeviceEngineSetup {
  Bootstrap& bootstrap;
  std::unique_ptr<transport::DeviceWindow> window;  ///< of the size that the engine's arena has
  std::shared_ptr<transport::Transport> host;
  core::Topology topology;
  BufferConfig config;
  int device = 0;
  Allocator* allocator = nullptr;  ///< of device memory; null: the engine's own
};
using MakeDeviceEngine = std::shared_ptr<DeviceEngine> (*)(DeviceEngineSetup);

}  // namespace turnout::engine
