// C: buffers, calls and results.
#include <new>
#include <utility>

#include "api/c_status.h"
#include "engine/cpu/row_format.h"
#include "turnout/buffer.h"
#include "turnout/c/buffer.h"

using namespace turnout;
using namespace turnout::api;

// The allocator is declared first everywhere, so that it goes last: memory is given back to it.
struct turnout_buffer {
  std::shared_ptr<Allocator> allocator;
  Buffer buffer;
};
struct turnout_handle {
  Handle handle;
};
struct turnout_dispatch_result {
  std::shared_ptr<Allocator> allocator;
  DispatchResult result;
  std::vector<turnout_tensor> side;
};
struct turnout_combine_result {
  std::shared_ptr<Allocator> allocator;
  CombineResult result;
};
struct turnout_pending_dispatch {
  std::shared_ptr<Allocator> allocator;
  PendingDispatch pending;
};
struct turnout_pending_combine {
  std::shared_ptr<Allocator> allocator;
  PendingCombine pending;
};

namespace {

class CallbackAllocator final : public Allocator {
 public:
  explicit CallbackAllocator(const turnout_allocator& callbacks) : callbacks_(callbacks) {}
  void* allocate(size_t num_bytes) override {
    void* data = callbacks_.allocate(callbacks_.context, num_bytes);
    if (!data) throw std::bad_alloc();
    return data;
  }
  void deallocate(void* data, size_t num_bytes) noexcept override { callbacks_.deallocate(callbacks_.context, data, num_bytes); }

 private:
  turnout_allocator callbacks_;
};

BufferConfig to_config(const turnout_buffer_config* given) {
  const auto c = read_struct(given, "config");
  const Timeouts defaults;
  const auto or_default = [](auto value, auto otherwise) { return value == 0 ? otherwise : static_cast<decltype(otherwise)>(value); };
  BufferConfig config;
  config.num_experts = c.num_experts;
  config.hidden = c.hidden;
  config.dtype = to_enum(c.dtype, DType::fp64, "config.dtype");
  config.max_tokens_per_rank = c.max_tokens_per_rank;
  config.max_topk = or_default(c.max_topk, config.max_topk);
  config.max_side_bytes = c.max_side_bytes;
  if (c.expert_to_rank && c.num_experts > 0) config.expert_to_rank.assign(c.expert_to_rank, c.expert_to_rank + c.num_experts);
  if (c.replica_of && c.num_experts > 0) config.replica_of.assign(c.replica_of, c.replica_of + c.num_experts);
  config.num_lanes = or_default(c.num_lanes, config.num_lanes);
  config.max_outstanding = or_default(c.max_outstanding, config.max_outstanding);
  config.receive_bytes = c.receive_bytes;
  config.staging_bytes = c.staging_bytes;
  config.num_threads = or_default(c.num_threads, config.num_threads);
  config.timeouts.timeout = or_default(c.timeout_ms, defaults.timeout);
  config.timeouts.busy_timeout = or_default(c.busy_timeout_ms, defaults.busy_timeout);
  config.timeouts.report_every = or_default(c.report_every_ms, defaults.report_every);
  config.touch_pages = c.touch_pages != 0;
  config.device = {to_enum(c.device_kind, DeviceKind::cuda, "config.device_kind"), c.device_index};
  return config;
}

DispatchArgs to_args(const turnout_dispatch_args& c) {
  DispatchArgs args;
  args.x = to_view(c.x, "dispatch: x");
  args.topk_idx = to_view(c.topk_idx, "dispatch: topk_idx");
  args.topk_weights = to_view(c.topk_weights, "dispatch: topk_weights");
  if (c.num_side > engine::kMaxSideArrays) {
    throw InvalidArgument("dispatch: num_side is " + std::to_string(c.num_side) + ", but must be at most " + std::to_string(engine::kMaxSideArrays));
  }
  if (c.num_side > 0) require(c.side, "dispatch: side");
  for (size_t s = 0; s < c.num_side; ++s) args.side.push_back(to_view(c.side[s], "dispatch: side[" + std::to_string(s) + "]"));
  if (c.handle) args.handle = &c.handle->handle;
  args.mode = to_enum(c.mode, Mode::low_latency, "dispatch: mode");
  args.layout = to_enum(c.layout, Layout::expert_slab, "dispatch: layout");
  if (c.has_capacity) args.capacity = c.capacity;
  else if (c.capacity != 0)
    throw InvalidArgument("dispatch: capacity is " + std::to_string(c.capacity) + ", but has_capacity is 0, which means an exact size");
  args.expert_alignment = c.expert_alignment == 0 ? 1 : c.expert_alignment;
  args.quantize = to_enum(c.quantize, Quantize::fp8_e4m3_ue8m0, "dispatch: quantize");
  args.result = to_enum(c.result, ResultKind::fresh, "dispatch: result");
  args.out = to_view(c.out, "dispatch: out");
  args.receive = to_enum(c.receive, Receive::resident, "dispatch: receive");
  args.on_failure = to_enum(c.on_failure, OnFailure::mask, "dispatch: on_failure");
  args.lane = c.lane;
  args.num_sms = c.num_sms;
  args.stream = {c.stream};
  return args;
}

CombineArgs to_args(const turnout_combine_args& c) {
  CombineArgs args;
  args.y = to_view(c.y, "combine: y");
  if (c.handle) args.handle = &c.handle->handle;
  args.apply = to_enum(c.apply, CombineWeights::tokens, "combine: apply");
  args.weights = to_view(c.weights, "combine: weights");
  args.side = to_view(c.side, "combine: side");
  args.wire = to_enum(c.wire, Wire::rows, "combine: wire");
  args.out = to_view(c.out, "combine: out");
  args.mode = to_enum(c.mode, Mode::low_latency, "combine: mode");
  args.on_failure = to_enum(c.on_failure, OnFailure::mask, "combine: on_failure");
  args.lane = c.lane;
  args.num_sms = c.num_sms;
  args.stream = {c.stream};
  return args;
}

DispatchResult run(Buffer& buffer, const DispatchArgs& args) { return buffer.dispatch(args); }
CombineResult run(Buffer& buffer, const CombineArgs& args) { return buffer.combine(args); }
PendingDispatch issue(Buffer& buffer, const DispatchArgs& args) { return buffer.dispatch_async(args); }
PendingCombine issue(Buffer& buffer, const CombineArgs& args) { return buffer.combine_async(args); }

/// Arguments of a call for C++. What C++ cannot even express is refused here, but as C++ refuses: a call that was given nothing
/// uses up the epoch and tells all ranks; its own error makes way for the one that says why. Which lane it is for may be unknown.
template <class Args, class CArgs>
Args checked_args(Buffer& buffer, const CArgs* given, const char* what) {
  Args refused;
  refused.lane = -1;
  try {
    const CArgs c = read_struct(given, what);
    refused.lane = c.lane;
    return to_args(c);
  } catch (const InvalidArgument& why) {
    const InvalidArgument reason(why);
    try {
      run(buffer, refused);
    } catch (const InvalidArgument&) {
      throw reason;
    }
    throw reason;
  }
}

/// A call that waits.
template <class Args, class CArgs>
auto run_call(turnout_buffer* buffer, const CArgs* given, const char* what) {
  Buffer& b = require(buffer, "buffer").buffer;
  return run(b, checked_args<Args>(b, given, what));
}

/// A call that is waited for later.
template <class Args, class Made, class CArgs>
Made* issue_call(turnout_buffer* buffer, const CArgs* given, const char* what) {
  turnout_buffer& b = require(buffer, "buffer");
  return new Made{b.allocator, issue(b.buffer, checked_args<Args>(b.buffer, given, what))};
}

}  // namespace

extern "C" {

turnout_status turnout_required_bytes(const turnout_buffer_config* config, int32_t num_ranks, size_t* num_bytes) {
  return guarded([&] { require(num_bytes, "num_bytes") = required_bytes(to_config(config), num_ranks); });
}

turnout_status turnout_buffer_create(turnout_communicator* communicator, const turnout_buffer_config* config, const turnout_allocator* allocator,
                                     turnout_buffer** buffer) {
  return guarded([&] {
    turnout_buffer*& out = output(buffer, "buffer");
    Communicator& c = require(communicator, "communicator").communicator;
    std::shared_ptr<Allocator> own;
    BufferConfig cpp;
    try {
      cpp = to_config(config);
      if (allocator) {
        const auto callbacks = read_struct(allocator, "allocator");
        if (!callbacks.allocate || !callbacks.deallocate) throw InvalidArgument("allocator: allocate and deallocate must both be given");
        own = std::make_shared<CallbackAllocator>(callbacks);
      }
    } catch (const InvalidArgument& why) {
      // As checked_args(): a configuration without experts is refused, and all ranks learn by whom.
      const InvalidArgument reason(why);
      try {
        Buffer refused(c, BufferConfig{});
      } catch (const InvalidArgument&) {
        throw reason;
      }
      throw reason;
    }
    Buffer made(c, cpp, own.get());
    out = new turnout_buffer{std::move(own), std::move(made)};
  });
}

void turnout_buffer_destroy(turnout_buffer* buffer) { delete buffer; }

turnout_status turnout_dispatch(turnout_buffer* buffer, const turnout_dispatch_args* args, turnout_dispatch_result** result) {
  return guarded([&] {
    turnout_dispatch_result*& out = output(result, "result");
    DispatchResult made = run_call<DispatchArgs>(buffer, args, "dispatch: args");
    out = new turnout_dispatch_result{buffer->allocator, std::move(made), {}};
  });
}

turnout_status turnout_dispatch_async(turnout_buffer* buffer, const turnout_dispatch_args* args, turnout_pending_dispatch** pending) {
  return guarded([&] {
    turnout_pending_dispatch*& out = output(pending, "pending");
    out = issue_call<DispatchArgs, turnout_pending_dispatch>(buffer, args, "dispatch: args");
  });
}

turnout_status turnout_dispatch_wait(turnout_pending_dispatch* pending, turnout_dispatch_result** result) {
  return guarded([&] {
    turnout_dispatch_result*& out = output(result, "result");
    turnout_pending_dispatch& p = require(pending, "pending");
    out = new turnout_dispatch_result{p.allocator, p.pending.wait(), {}};
  });
}

turnout_status turnout_dispatch_arrived(const turnout_pending_dispatch* pending, turnout_tensor* arrived) {
  return guarded([&] { require(arrived, "arrived") = from_view(require(pending, "pending").pending.arrived()); });
}

void turnout_pending_dispatch_destroy(turnout_pending_dispatch* pending) { delete pending; }

turnout_status turnout_dispatch_result_view(const turnout_dispatch_result* result, turnout_dispatch_view* view) {
  return guarded([&] {
    // The C form of the side arrays lies beside them: made when it is first asked for.
    auto& holder = const_cast<turnout_dispatch_result&>(require(result, "result"));
    const DispatchResult& r = holder.result;
    holder.side.clear();
    for (const TensorView& side : r.side) holder.side.push_back(from_view(side));
    turnout_dispatch_view v{};
    v.x = from_view(r.x);
    v.x_scales = from_view(r.x_scales);
    v.side = holder.side.data();
    v.num_side = holder.side.size();
    v.topk_idx = from_view(r.topk_idx);
    v.topk_weights = from_view(r.topk_weights);
    v.num_rows = from_view(r.num_rows);
    v.expert_counts = from_view(r.expert_counts);
    v.expert_offsets = from_view(r.expert_offsets);
    v.sorted_rows = from_view(r.sorted_rows);
    v.num_dropped = from_view(r.num_dropped);
    v.arrived = from_view(r.arrived);
    v.is_lease = r.is_lease;
    write_struct(view, v, "view");
  });
}

turnout_status turnout_dispatch_result_handle(const turnout_dispatch_result* result, turnout_handle** handle) {
  return guarded([&] {
    turnout_handle*& out = output(handle, "handle");
    out = new turnout_handle{require(result, "result").result.handle};
  });
}

turnout_status turnout_dispatch_result_release(turnout_dispatch_result* result) {
  return guarded([&] { require(result, "result").result.release(); });
}

void turnout_dispatch_result_destroy(turnout_dispatch_result* result) { delete result; }

turnout_status turnout_handle_get_info(const turnout_handle* handle, turnout_handle_info* info) {
  return guarded([&] {
    const Handle& h = require(handle, "handle").handle;
    turnout_handle_info value{};
    value.num_tokens = h.num_tokens();
    value.num_rows = h.num_rows();
    value.num_topk = h.num_topk();
    value.layout = static_cast<int32_t>(h.layout());
    write_struct(info, value, "info");
  });
}

void turnout_handle_destroy(turnout_handle* handle) { delete handle; }

turnout_status turnout_combine(turnout_buffer* buffer, const turnout_combine_args* args, turnout_combine_result** result) {
  return guarded([&] {
    turnout_combine_result*& out = output(result, "result");
    CombineResult made = run_call<CombineArgs>(buffer, args, "combine: args");
    out = new turnout_combine_result{buffer->allocator, std::move(made)};
  });
}

turnout_status turnout_combine_async(turnout_buffer* buffer, const turnout_combine_args* args, turnout_pending_combine** pending) {
  return guarded([&] {
    turnout_pending_combine*& out = output(pending, "pending");
    out = issue_call<CombineArgs, turnout_pending_combine>(buffer, args, "combine: args");
  });
}

turnout_status turnout_combine_wait(turnout_pending_combine* pending, turnout_combine_result** result) {
  return guarded([&] {
    turnout_combine_result*& out = output(result, "result");
    turnout_pending_combine& p = require(pending, "pending");
    out = new turnout_combine_result{p.allocator, p.pending.wait()};
  });
}

void turnout_pending_combine_destroy(turnout_pending_combine* pending) { delete pending; }

turnout_status turnout_combine_result_view(const turnout_combine_result* result, turnout_combine_view* view) {
  return guarded([&] {
    const CombineResult& r = require(result, "result").result;
    turnout_combine_view v{};
    v.x = from_view(r.x);
    v.side = from_view(r.side);
    v.num_lost = from_view(r.num_lost);
    write_struct(view, v, "view");
  });
}

turnout_status turnout_combine_result_release(turnout_combine_result* result) {
  return guarded([&] { require(result, "result").result.release(); });
}

void turnout_combine_result_destroy(turnout_combine_result* result) { delete result; }

turnout_status turnout_buffer_set_expert_to_rank(turnout_buffer* buffer, const int32_t* expert_to_rank, size_t num_experts) {
  return guarded([&] {
    Buffer& b = require(buffer, "buffer").buffer;
    if (num_experts > 0) require(expert_to_rank, "expert_to_rank");
    b.set_expert_to_rank(std::vector<int>(expert_to_rank, expert_to_rank + num_experts));
  });
}

turnout_status turnout_buffer_check(turnout_buffer* buffer) {
  return guarded([&] { require(buffer, "buffer").buffer.check(); });
}
turnout_status turnout_buffer_synchronize(turnout_buffer* buffer) {
  return guarded([&] { require(buffer, "buffer").buffer.synchronize(); });
}
turnout_status turnout_buffer_recover(turnout_buffer* buffer) {
  return guarded([&] { require(buffer, "buffer").buffer.recover(); });
}
turnout_status turnout_buffer_suspend(turnout_buffer* buffer) {
  return guarded([&] { require(buffer, "buffer").buffer.suspend(); });
}
turnout_status turnout_buffer_resume(turnout_buffer* buffer) {
  return guarded([&] { require(buffer, "buffer").buffer.resume(); });
}
turnout_status turnout_buffer_close(turnout_buffer* buffer) {
  return guarded([&] { require(buffer, "buffer").buffer.close(); });
}

turnout_status turnout_buffer_get_info(const turnout_buffer* buffer, turnout_buffer_info* info) {
  return guarded([&] {
    const Buffer& b = require(buffer, "buffer").buffer;
    turnout_buffer_info value{};
    value.rank = b.rank();
    value.num_ranks = b.num_ranks();
    value.num_local_experts = b.num_local_experts();
    value.num_bytes = b.num_bytes();
    value.status_word = b.status_word();
    value.num_fresh_results = b.num_fresh_results();
    write_struct(info, value, "info");
  });
}

}  // extern "C"
