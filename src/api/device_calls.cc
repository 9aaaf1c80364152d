// Calls of a Buffer on a device: checked here as far as the host can see, issued by the engine of the device, wrapped as results.
#include <array>
#include <string>
#include <type_traits>

#include "api/arguments.h"
#include "api/buffer_impl.h"
#include "engine/cpu/block_cache.h"
#include "engine/cuda/sizes.h"
#include "transport/cuda.h"
#include "util/env.h"
#include "util/log.h"

namespace turnout {
inline namespace v0 {
namespace internal {

namespace {

engine::RoutingFacts facts_of(const Routing& r) {
  engine::RoutingFacts f;
  f.layout = r.layout;
  f.capacity = r.capacity;
  f.num_tokens = r.num_tokens;
  f.alignment = r.alignment;
  f.num_topk = r.num_topk;
  f.has_weights = r.has_weights;
  return f;
}

/// What shapes need to know of a routing whose arrays are on the device.
std::shared_ptr<Routing> shape_of(const DispatchArgs& args, uint64_t buffer, int64_t id, std::shared_ptr<const core::ExpertMap> experts, int rank) {
  auto r = std::allocate_shared<Routing>(engine::CachedAllocator<Routing>());
  r->buffer = buffer;
  r->id = id;
  r->num_tokens = args.x.shape[0];
  r->num_topk = static_cast<int>(args.topk_idx.shape[1]);
  r->has_weights = args.topk_weights.defined();
  r->layout = args.layout;
  r->capacity = args.capacity.value_or(-1);
  r->alignment = args.layout == Layout::expert_major ? args.expert_alignment : 1;
  r->expert_counts.resize(static_cast<size_t>(experts->num_local(rank)));
  r->experts = std::move(experts);
  return r;
}

/// The arrays of a call, with their names: none may be of a result that was released.
class Given {
 public:
  void add(const char* name, const TensorView& t) {
    if (!t.defined() || !t.data || t.num_elements() == 0) return;
    addresses_[count_] = t.data;
    names_[count_++] = name;
  }
  void check_alive(const engine::DeviceEngine& device, const char* call) const {
    if (!device.is_any_released({addresses_.data(), count_})) return;
    for (size_t i = 0; i < count_; ++i) {
      if (device.is_any_released({&addresses_[i], 1}))
        throw InvalidArgument(std::string(call) + names_[i] + " is a view of a result that was released");
    }
  }

 private:
  std::array<const void*, 8> addresses_;
  std::array<const char*, 8> names_;
  size_t count_ = 0;
};

/// The arrays of a result with a row per token or per (token, expert).
struct Rows {
  Layout layout;
  int64_t rows, local, capacity;
  Device device;

  TensorView array(void* data, DType dtype, int64_t width, int64_t stride_bytes) const {
    const int64_t stride = stride_bytes / static_cast<int64_t>(size_of(dtype));
    if (layout != Layout::expert_slab) return TensorView::matrix(data, dtype, rows, width, stride, device);
    TensorView view = TensorView::dense(data, dtype, {local, capacity, width}, device);
    view.strides = {stride * capacity, stride, 1};
    return view;
  }
};

}  // namespace

/// REQUIRES: the steps of the Communicator are this call's.
void BufferImpl::open_device(const BufferConfig& config, Allocator* allocator) {
  if (util::env().verify) {
    util::log_once(util::LogLevel::warn, "TURNOUT_VERIFY=1: calls on GPUs carry no checksums in this version, those on CPUs do (docs/verify.md)");
  }
  const int num_ranks = communicator_->transport->num_ranks();
  const engine::cuda::Arena arena = engine::cuda::Arena::of(engine::cuda::arena_shape(config, num_ranks));
  auto window = transport::open_device_window(*communicator_->bootstrap, *communicator_->transport, "auto", config.device.index, arena.num_bytes);
  const auto make = reinterpret_cast<engine::MakeDeviceEngine>(transport::cuda_table()->make_engine);
  device_ =
      make({*communicator_->bootstrap, std::move(window), communicator_->transport, communicator_->topology, config, config.device.index, allocator});
  device_calls_.assign(static_cast<size_t>(config.num_lanes), 0);
}

/// Runs `issue_call`; what this rank cannot do fails on all ranks. What an earlier call left is such a thing too: the others may
/// have issued this call already.
template <class Args, class Issue>
std::shared_ptr<PendingImpl> BufferImpl::issue(const Args& args, int lane, PendingImpl* pending, Issue issue_call) {
  std::shared_ptr<PendingImpl> made;
  if (!pending) {
    made = new_pending(lane);
    pending = made.get();
  }
  ++device_calls_[static_cast<size_t>(lane)];
  const std::string call = std::is_same_v<Args, DispatchArgs> ? "dispatch: " : "combine: ";
  try {
    if (device_->num_outstanding(lane) >= context_->config.max_outstanding) {
      throw InvalidArgument(call + "lane " + std::to_string(lane) + " has " + std::to_string(device_->num_outstanding(lane)) +
                            " calls in flight, at most " + std::to_string(context_->config.max_outstanding) +
                            " (max_outstanding); wait for one first");
    }
    if (args.num_sms < 0 || args.num_sms > device_->num_sms()) {
      throw InvalidArgument(call + "num_sms is " + std::to_string(args.num_sms) + ", but this GPU has " + std::to_string(device_->num_sms()) +
                            " multiprocessors; give 1 to " + std::to_string(device_->num_sms()) + ", or 0 for the default");
    }
    issue_call(*pending);
  } catch (const PeerTimeout&) {
    throw;  // all ranks know, or will
  } catch (const PeerFailed&) {
    throw;
  } catch (...) {
    const std::exception_ptr why = std::current_exception();
    try {
      device_->refuse(api::facts_of(*context_, args), engine::Reason::of(why), lane, args.stream);
    } catch (const TransportError&) {
      // The GPU itself has failed: it tells nobody any more.
    }
    std::rethrow_exception(why);
  }
  pending->waited = false;
  return made;
}

std::shared_ptr<PendingImpl> BufferImpl::start_on_device(const DispatchArgs& args, int lane, PendingImpl* pending) {
  const bool receive_now = pending != nullptr;
  return issue(args, lane, pending, [&](PendingImpl& call) {
    api::check_dispatch(*context_, args);
    Given given;
    given.add("x", args.x);
    given.add("topk_idx", args.topk_idx);
    given.add("topk_weights", args.topk_weights);
    given.add("out", args.out);
    given.add("out_scales", args.out_scales);
    given.check_alive(*device_, "dispatch: ");
    for (size_t s = 0; s < args.side.size(); ++s) {
      const std::string name = "side[" + std::to_string(s) + "]";
      Given side;
      side.add(name.c_str(), args.side[s]);
      side.check_alive(*device_, "dispatch: ");
    }
    std::shared_ptr<const engine::DeviceRouting> cached;
    if (args.handle) {
      call.routing = args.handle->routing();
      cached = call.routing->device;
    } else {
      std::shared_ptr<const core::ExpertMap> experts;
      {
        std::lock_guard map_lock(context_->experts_mutex);
        experts = context_->experts;
      }
      const int64_t id = static_cast<int64_t>(lane) << 48 | device_calls_[static_cast<size_t>(lane)];
      call.fresh = shape_of(args, context_->serial, id, std::move(experts), context_->rank);
      call.routing = call.fresh;
    }
    call.dispatch_args = args;
    call.device = device_->dispatch(args, api::facts_of(*context_, args), facts_of(*call.routing), std::move(cached), receive_now);
  });
}

std::shared_ptr<PendingImpl> BufferImpl::start_on_device(const CombineArgs& args, int lane, PendingImpl* pending) {
  const bool receive_now = pending != nullptr;
  return issue(args, lane, pending, [&](PendingImpl& call) {
    api::check_combine(*context_, args);
    Given given;
    given.add("y", args.y);
    given.add("weights", args.weights);
    given.add("side", args.side);
    given.add("out", args.out);
    given.check_alive(*device_, "combine: ");
    call.routing = args.handle->routing();
    call.combine_args = args;
    call.device = device_->combine(args, api::facts_of(*context_, args), facts_of(*call.routing), call.routing->device, receive_now);
  });
}

void BufferImpl::suspend() {
  require_open("suspend");
  if (!device_) throw InvalidArgument("suspend: this Buffer is on the CPU; suspend() gives back the memory of a GPU");
  std::lock_guard lock(communicator_->mutex);
  device_->suspend();
}

void BufferImpl::resume() {
  require_open("resume");
  if (!device_) throw InvalidArgument("resume: this Buffer is on the CPU");
  std::lock_guard lock(communicator_->mutex);
  device_->resume();
}

DispatchResult BufferImpl::finish_dispatch_on_device(PendingImpl& pending) {
  const engine::DeviceDispatch d = pending.device->finish_dispatch();
  const DispatchArgs& args = *pending.dispatch_args;
  const Routing& r = *pending.routing;
  const Device device = context_->config.device;
  if (Routing* fresh = pending.fresh.get()) {
    fresh->device = d.routing;
    fresh->num_rows = r.layout == Layout::expert_slab || d.num_rows < 0 ? d.array_rows : d.num_rows;
    fresh->recv_begin.assign(2, 0);
    fresh->recv_begin[1] = d.array_rows;
  }
  const Rows shape{r.layout, d.array_rows, r.num_local_experts(), r.capacity, device};
  DispatchResult result;
  const bool quantised = args.quantize != Quantize::none;
  result.x = shape.array(d.x, quantised ? DType::fp8_e4m3 : args.x.dtype, args.x.shape[1], d.x_stride);
  if (quantised) {
    const bool fp32 = args.quantize == Quantize::fp8_e4m3;
    const int64_t blocks = (args.x.shape[1] + 127) / 128;
    const int64_t scale_bytes = blocks * (fp32 ? 4 : 1);
    if (args.scale_order == ScaleOrder::rows) {
      result.x_scales = shape.array(d.x_scales, fp32 ? DType::fp32 : DType::ue8m0, blocks, scale_bytes);
    } else {
      const bool is_slab = r.layout == Layout::expert_slab;
      result.x_scales = is_slab ? scale_columns(d.x_scales, fp32, r.capacity, r.num_local_experts(), scale_bytes, device)
                                : scale_columns(d.x_scales, fp32, d.array_rows, std::nullopt, scale_bytes, device);
    }
  }
  for (size_t s = 0; s < args.side.size(); ++s) {
    const TensorView& side = args.side[s];
    result.side.push_back(shape.array(d.side[s], side.dtype, side.shape[1], side.shape[1] * static_cast<int64_t>(size_of(side.dtype))));
  }
  const int64_t local = shape.local, rows = d.array_rows;
  result.num_rows = TensorView::dense(d.num_rows_at, DType::i64, {1}, device);
  result.num_dropped = TensorView::dense(d.num_dropped_at, DType::i64, {1}, device);
  if (d.arrived) result.arrived = TensorView::dense(d.arrived, DType::i64, {context_->num_ranks}, device);
  result.expert_counts = TensorView::dense(d.expert_counts, DType::i32, {local}, device);
  result.expert_offsets = TensorView::dense(d.expert_offsets, DType::i64, {local + 1}, device);
  if (r.layout == Layout::rank_major) {
    result.topk_idx = TensorView::dense(d.topk_idx, DType::i32, {rows, r.num_topk}, device);
    if (r.has_weights) result.topk_weights = TensorView::dense(d.topk_weights, DType::fp32, {rows, r.num_topk}, device);
    result.sorted_rows = TensorView::dense(d.sorted_rows, DType::i32, {d.num_pairs >= 0 ? d.num_pairs : rows * r.num_topk}, device);
  } else if (r.has_weights) {
    result.topk_weights = r.layout == Layout::expert_slab ? TensorView::dense(d.topk_weights, DType::fp32, {local, r.capacity}, device)
                                                          : TensorView::dense(d.topk_weights, DType::fp32, {rows}, device);
  }
  result.is_lease = d.is_lease;
  // Not logged: the rows go where they belong at once, wherever that is.
  if (!d.is_lease && args.result == ResultKind::automatic && !args.out.defined()) context_->fresh_results.fetch_add(1, std::memory_order_relaxed);
  result.handle = Handle(pending.routing);
  result.memory_ = std::make_shared<Memory>();
  result.memory_->on_device = d.memory;
  return result;
}

CombineResult BufferImpl::finish_combine_on_device(PendingImpl& pending) {
  const engine::DeviceCombine d = pending.device->finish_combine();
  const CombineArgs& args = *pending.combine_args;
  const Routing& r = *pending.routing;
  const Device device = context_->config.device;
  const int64_t hidden = args.y.shape[static_cast<size_t>(args.y.ndim - 1)];
  CombineResult result;
  result.x = TensorView::matrix(d.x, args.y.dtype, r.num_tokens, hidden, d.x_stride / static_cast<int64_t>(size_of(args.y.dtype)), device);
  if (args.side.defined()) result.side = TensorView::dense(d.side, DType::fp32, {r.num_tokens, r.num_topk}, device);
  result.num_lost = TensorView::dense(d.num_lost, DType::i32, {r.num_tokens}, device);
  result.memory_ = std::make_shared<Memory>();
  result.memory_->on_device = d.memory;
  return result;
}

}  // namespace internal
}  // namespace v0
}  // namespace turnout
