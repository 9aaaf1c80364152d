// A call of a Buffer: what Python gives becomes the arguments of the library's. What cannot is refused as the library refuses: on all ranks.
#pragma once
#include <initializer_list>
#include <memory>
#include <string>
#include <utility>

#include "bindings/allocator.h"
#include "bindings/arguments.h"
#include "bindings/bindings.h"
#include "bindings/buffer.h"
#include "bindings/handle.h"
#include "bindings/lifetime.h"
#include "bindings/results.h"
#include "bindings/tensor.h"
#include "turnout/buffer.h"

namespace turnout::python {

struct BufferHolder {
  BufferHolder(std::shared_ptr<Allocator> given, std::shared_ptr<Buffer> made)
      : allocator(std::move(given)), buffer("Buffer", std::move(made)), device(buffer.get()->config().device) {}
  ~BufferHolder() {
    const Unlocked unlocked;
    buffer.reset();
  }
  std::shared_ptr<Allocator> allocator;
  HeldToExit<Buffer> buffer;
  Device device;
};

/// Arguments of a call, and what they point into.
template <class Args>
struct Call {
  Args args;
  CallContext context;
  nb::list keep;  ///< made only for a call that outlives its caller's arguments, or of capsules
  bool is_pending = false, has_stream = false;

  TensorView input(nb::handle array, const char* call, const char* name, Form form = Form::rows, bool is_written = false) {
    if (array.is_none()) return {};
    Input given = input_of(array, {.call = call, .name = name, .form = form, .is_written = is_written, .stream = context.stream});
    if (is_pending || given.framework == Framework::other) hold(std::move(given.keep));
    return given.view;
  }
  void hold(nb::object object) {
    if (!keep.is_valid()) keep = nb::list();
    keep.append(std::move(object));
  }
  void set_handle(nb::handle handle, const char* call) {
    if (handle.is_none()) return;
    if (!nb::isinstance<HandleHolder>(handle)) {
      throw InvalidArgument(std::string(call) + ": handle is " + describe(handle) + ", but must be the handle of a dispatch (result.handle)");
    }
    args.handle = &nb::cast<const HandleHolder&>(handle).handle();
    if (is_pending) hold(nb::borrow(handle));
  }
  /// What both calls have. The stream comes first: arrays of others are asked for in its order.
  void set_common(const BufferHolder& buffer, nb::handle first, nb::handle stream, nb::handle num_sms, nb::handle lane) {
    context.allocator = buffer.allocator;
    context.framework = framework_of(first);
    args.lane = -1;
    args.lane = int_of(lane, "lane");
    args.stream = stream_of(stream, context.framework, buffer.device, "stream");
    context.stream = args.stream.native;
    has_stream = true;
    args.num_sms = int_of(num_sms, "num_sms");
  }
};

struct DispatchGiven {
  nb::handle x, topk_idx, topk_weights, side, handle, mode, layout, capacity, expert_alignment, quantize, scale_order, out_scales, result, out,
      receive, num_sms, on_failure, zero_tail, lane, stream;
};

struct CombineGiven {
  nb::handle y, handle, apply, weights, side, wire, out, mode, num_sms, on_failure, lane, stream;
};

void read(Call<DispatchArgs>& call, const BufferHolder& buffer, const DispatchGiven& given);
void read(Call<CombineArgs>& call, const BufferHolder& buffer, const CombineGiven& given);

inline DispatchResult run(Buffer& buffer, const DispatchArgs& args) { return buffer.dispatch(args); }
inline CombineResult run(Buffer& buffer, const CombineArgs& args) { return buffer.combine(args); }
inline PendingDispatch issue(Buffer& buffer, const DispatchArgs& args) { return buffer.dispatch_async(args); }
inline PendingCombine issue(Buffer& buffer, const CombineArgs& args) { return buffer.combine_async(args); }

/// In order of `stream`, as the calls before it: a kernel tells it, which takes its number from theirs.
template <class Args>
void refuse(Buffer& buffer, int lane, Stream stream) {
  const UnderWay call;
  const nb::gil_scoped_release unlocked;
  refuse_quietly<Args>(buffer, lane, stream);
}

/// Reads the arguments. What is wrong with them is told to all ranks before it is raised here.
template <class Args, class Given>
void read_or_refuse(Call<Args>& call, const BufferHolder& self, Buffer& buffer, const Given& given) {
  try {
    read(call, self, given);
  } catch (const InvalidArgument& why) {
    const InvalidArgument reason(why);
    refuse<Args>(buffer, call.args.lane, call.has_stream ? call.args.stream : usual_stream(self.device));
    throw reason;
  }
}

/// The allocator of torch must not give memory of an array to others before a stream that is not torch's current one has done the call. It
/// is told before the call is made: one that fails may have been read from, too.
void keep_for_stream(const BufferHolder& buffer, void* native, nb::handle stream, std::initializer_list<nb::handle> arrays);

/// Runs the call without the interpreter's lock.
template <class Args>
auto run_unlocked(Buffer& buffer, const Args& args, void* stream) {
  const UnderWay under_way;
  const nb::gil_scoped_release unlocked;
  const AllocatingFor allocating(stream);
  return run(buffer, args);
}

}  // namespace turnout::python
