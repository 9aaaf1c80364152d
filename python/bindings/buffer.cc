// Buffer: what Python gives becomes the arguments of the library's calls. What cannot is refused as the library refuses: on all ranks.
#include "bindings/buffer.h"

#include <utility>

#include "bindings/allocator.h"
#include "bindings/arguments.h"
#include "bindings/communicator.h"
#include "bindings/config.h"
#include "bindings/errors.h"
#include "bindings/handle.h"
#include "bindings/log.h"
#include "bindings/results.h"
#include "bindings/tensor.h"

namespace turnout::python {

namespace {

constexpr const char* kModes[] = {"auto", "throughput", "low_latency", nullptr};
constexpr const char* kLayouts[] = {"rank_major", "expert_major", "expert_slab", nullptr};
constexpr const char* kQuantize[] = {"none", "fp8_e4m3", "fp8_e4m3_ue8m0", nullptr};
constexpr const char* kResults[] = {"auto", "lease", "fresh", nullptr};
constexpr const char* kReceive[] = {"deferred", "resident", nullptr};
constexpr const char* kFailures[] = {"raise", "mask", nullptr};
constexpr const char* kWeights[] = {"none", "source", "rows", nullptr};
constexpr const char* kWires[] = {"payload", "fp32", "fp8", "rows", nullptr};

struct BufferHolder {
  BufferHolder(std::shared_ptr<Allocator> given, std::shared_ptr<Buffer> made)
      : allocator(std::move(given)), buffer("Buffer", std::move(made)), device(buffer.get()->config().device) {}
  ~BufferHolder() {
    const Unlocked unlocked;
    buffer.reset();
  }
  std::shared_ptr<Allocator> allocator;
  Held<Buffer> buffer;
  Device device;
};

/// Arguments of a call, and what they point into.
template <class Args>
struct Call {
  Args args;
  CallContext context;
  nb::list keep;  ///< made only for a call that outlives its caller's arguments, or of capsules
  bool is_pending = false;

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
    args.handle = nb::cast<const HandleHolder&>(handle).handle.get().get();
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
    args.num_sms = int_of(num_sms, "num_sms");
  }
};

struct DispatchGiven {
  nb::handle x, topk_idx, topk_weights, side, handle, mode, layout, capacity, expert_alignment, quantize, result, out, receive, num_sms, on_failure,
      lane, stream;
};

void read(Call<DispatchArgs>& call, const BufferHolder& buffer, const DispatchGiven& g) {
  DispatchArgs& args = call.args;
  call.set_common(buffer, g.x, g.stream, g.num_sms, g.lane);
  if (g.x.is_none()) throw InvalidArgument("dispatch: x is missing: give the tokens, [T, H]");
  args.x = call.input(g.x, "dispatch", "x");
  args.topk_idx = call.input(g.topk_idx, "dispatch", "topk_idx", Form::dense);
  args.topk_weights = call.input(g.topk_weights, "dispatch", "topk_weights", Form::dense);
  call.set_handle(g.handle, "dispatch");
  if (!g.side.is_none() && nb::len(g.side) > 0) {
    for (const nb::handle array : g.side) {
      const std::string name = "side[" + std::to_string(args.side.size()) + "]";
      args.side.push_back(call.input(array, "dispatch", name.c_str()));
    }
  }
  args.mode = enum_of<Mode>(g.mode, kModes, "dispatch: mode");
  args.layout = enum_of<Layout>(g.layout, kLayouts, "dispatch: layout");
  if (!g.capacity.is_none()) args.capacity = integer_of(g.capacity, "dispatch: capacity");
  args.expert_alignment = int_of(g.expert_alignment, "dispatch: expert_alignment");
  args.quantize = enum_of<Quantize>(g.quantize, kQuantize, "dispatch: quantize");
  args.result = enum_of<ResultKind>(g.result, kResults, "dispatch: result");
  args.out = call.input(g.out, "dispatch", "out", Form::rows, /*is_written=*/true);
  if (args.out.defined()) call.context.out = nb::borrow(g.out);
  args.receive = enum_of<Receive>(g.receive, kReceive, "dispatch: receive");
  args.on_failure = enum_of<OnFailure>(g.on_failure, kFailures, "dispatch: on_failure");
}

struct CombineGiven {
  nb::handle y, handle, apply, weights, side, wire, out, mode, num_sms, on_failure, lane, stream;
};

void read(Call<CombineArgs>& call, const BufferHolder& buffer, const CombineGiven& g) {
  CombineArgs& args = call.args;
  call.set_common(buffer, g.y, g.stream, g.num_sms, g.lane);
  if (g.y.is_none()) throw InvalidArgument("combine: y is missing: give the rows, in the layout of the handle");
  args.y = call.input(g.y, "combine", "y");
  call.set_handle(g.handle, "combine");
  // weights='source' says with one word what apply='source' does, and weights that are given are to be applied.
  const bool by_word = PyUnicode_Check(g.weights.ptr());
  if (!by_word) args.weights = call.input(g.weights, "combine", "weights", Form::dense);
  if (!g.apply.is_none()) args.apply = enum_of<CombineWeights>(g.apply, kWeights, "combine: apply");
  else if (by_word) args.apply = enum_of<CombineWeights>(g.weights, kWeights, "combine: weights");
  else if (args.weights.defined()) args.apply = CombineWeights::rows;
  args.side = call.input(g.side, "combine", "side", Form::dense);
  args.wire = enum_of<Wire>(g.wire, kWires, "combine: wire");
  args.out = call.input(g.out, "combine", "out", Form::rows, /*is_written=*/true);
  if (args.out.defined()) call.context.out = nb::borrow(g.out);
  args.mode = enum_of<Mode>(g.mode, kModes, "combine: mode");
  args.on_failure = enum_of<OnFailure>(g.on_failure, kFailures, "combine: on_failure");
}

DispatchResult run(Buffer& buffer, const DispatchArgs& args) { return buffer.dispatch(args); }
CombineResult run(Buffer& buffer, const CombineArgs& args) { return buffer.combine(args); }
PendingDispatch issue(Buffer& buffer, const DispatchArgs& args) { return buffer.dispatch_async(args); }
PendingCombine issue(Buffer& buffer, const CombineArgs& args) { return buffer.combine_async(args); }

template <class Args>
void refuse(Buffer& buffer, int lane) {
  const UnderWay call;
  const nb::gil_scoped_release unlocked;
  refuse_quietly<Args>(buffer, lane);
}

/// Reads the arguments. What is wrong with them is told to all ranks before it is raised here.
template <class Args, class Given>
void read_or_refuse(Call<Args>& call, const BufferHolder& self, Buffer& buffer, const Given& given) {
  try {
    read(call, self, given);
  } catch (const InvalidArgument& why) {
    const InvalidArgument reason(why);
    refuse<Args>(buffer, call.args.lane);
    throw reason;
  }
}

/// The allocator of torch must not give memory of an array to others before a stream that is not torch's current one has done the call. It
/// is told before the call is made: one that fails may have been read from, too.
template <class Args>
void keep_for_stream(const Call<Args>& call, const BufferHolder& self, nb::handle stream, std::initializer_list<nb::handle> arrays) {
  if (self.device.kind != DeviceKind::cuda || stream.is_none()) return;
  nb::list tensors;
  const auto add = [&](nb::handle array) {
    if (framework_of(array) == Framework::torch) tensors.append(array);
  };
  for (const nb::handle array : arrays) {
    if (!PyTuple_Check(array.ptr()) && !PyList_Check(array.ptr())) add(array);
    else
      for (const nb::handle side : array) add(side);
  }
  if (nb::len(tensors) == 0) return;
  nb::module_::import_("turnout._streams").attr("keep")(tensors, reinterpret_cast<uintptr_t>(call.context.stream), self.device.index);
}

template <class Holder, class Args, class Given>
Holder run_call(BufferHolder& self, const Given& given, std::initializer_list<nb::handle> arrays) {
  const std::shared_ptr<Buffer> buffer = self.buffer.get();
  Call<Args> call{{}, {}, nb::steal<nb::list>(nb::handle()), false};
  read_or_refuse(call, self, *buffer, given);
  const auto unlocked_run = [&] {
    const UnderWay under_way;
    const nb::gil_scoped_release unlocked;
    const AllocatingFor stream(call.context.stream);
    return run(*buffer, call.args);
  };
  keep_for_stream(call, self, given.stream, arrays);
  auto result = unlocked_run();
  return Holder(std::move(result), std::move(call.context));
}

template <class Holder, class Args, class Given>
Holder issue_call(BufferHolder& self, const Given& given, std::initializer_list<nb::handle> arrays) {
  const std::shared_ptr<Buffer> buffer = self.buffer.get();
  Call<Args> call{{}, {}, nb::steal<nb::list>(nb::handle()), true};
  read_or_refuse(call, self, *buffer, given);
  const auto unlocked_issue = [&] {
    const UnderWay under_way;
    const nb::gil_scoped_release unlocked;
    const AllocatingFor stream(call.context.stream);
    return issue(*buffer, call.args);
  };
  keep_for_stream(call, self, given.stream, arrays);
  auto pending = unlocked_issue();
  return Holder(std::move(pending), std::move(call.context), std::move(call.keep));
}

/// 'cuda' without a number: torch's current GPU where torch is in use, else the one of this rank's number on its node.
void choose_device(BufferConfig& config, const Communicator& communicator) {
  if (config.device.index >= 0) return;
  const nb::handle torch = imported_module("torch");
  const bool in_use = torch.is_valid() && nb::cast<bool>(torch.attr("cuda").attr("is_initialized")());
  config.device.index = in_use ? nb::cast<int>(torch.attr("cuda").attr("current_device")()) : communicator.local_rank();
}

void make_buffer(BufferHolder* self, CommunicatorHolder& holder, nb::dict fields, nb::object allocator) {
  const std::shared_ptr<Communicator> communicator = holder.communicator.get();
  follow_log_level();
  std::shared_ptr<Allocator> own;
  BufferConfig config;
  std::string refusal;
  try {
    config = config_of(fields);
    choose_device(config, *communicator);
    own = allocator_of(std::move(allocator));
  } catch (const InvalidArgument& why) {
    refusal = why.what();
    config = BufferConfig{};  // is refused, and all ranks learn by whom
  }
  std::shared_ptr<Buffer> made;
  {
    const UnderWay call;
    const nb::gil_scoped_release unlocked;
    try {
      made = std::make_shared<Buffer>(*communicator, config, own.get());
    } catch (const InvalidArgument&) {
      if (refusal.empty()) throw;
      throw InvalidArgument(refusal);
    }
  }
  new (self) BufferHolder(std::move(own), made);
  holder.add(made);
  close_at_exit(
      made,
      [buffer = std::weak_ptr(made)] {
        if (const auto open = buffer.lock()) open->close();
      },
      self->buffer.let_go());
}

/// A method that takes no arguments and may wait.
template <auto method>
void simple_call(BufferHolder& self) {
  const std::shared_ptr<Buffer> buffer = self.buffer.get();
  const UnderWay call;
  const nb::gil_scoped_release unlocked;
  ((*buffer).*method)();
}

void close(BufferHolder& self) {
  if (!self.buffer.is_here()) return;
  const std::shared_ptr<Buffer> buffer = self.buffer.get();
  const Unlocked unlocked;
  buffer->close();
}

void refuse_call(BufferHolder& self, const std::string& call, int lane) {
  const std::shared_ptr<Buffer> buffer = self.buffer.get();
  if (call == "combine") refuse<CombineArgs>(*buffer, lane);
  else refuse<DispatchArgs>(*buffer, lane);
}

using H = nb::handle;

template <auto call, class Holder>
Holder with_dispatch(BufferHolder& self, H x, H topk_idx, H topk_weights, H side, H handle, H mode, H layout, H capacity, H expert_alignment,
                     H quantize, H result, H out, H receive, H num_sms, H on_failure, H lane, H stream) {
  const DispatchGiven given{x,        topk_idx, topk_weights, side,    handle,  mode,       layout, capacity, expert_alignment,
                            quantize, result,   out,          receive, num_sms, on_failure, lane,   stream};
  return call(self, given, {x, topk_idx, topk_weights, side, out});
}

template <auto call, class Holder>
Holder with_combine(BufferHolder& self, H y, H handle, H apply, H weights, H side, H wire, H out, H mode, H num_sms, H on_failure, H lane, H stream) {
  return call(self, CombineGiven{y, handle, apply, weights, side, wire, out, mode, num_sms, on_failure, lane, stream}, {y, weights, side, out});
}

/// A method whose `n` arguments are all given, by position, and may be None.
template <size_t n, class Method>
void bind_call(nb::class_<BufferHolder>& bound, const char* name, const std::string& gives, Method method) {
  const std::string signature = "def " + std::string(name) + "(self, *args: object) -> " + gives;
  [&]<size_t... i>(std::index_sequence<i...>) { bound.def(name, method, (static_cast<void>(i), nb::arg().none())..., nb::sig(signature.c_str())); }
  (std::make_index_sequence<n>());
}

template <auto member>
auto fact(const BufferHolder& self) {
  return ((*self.buffer.get()).*member)();
}

std::string repr(const BufferHolder& self) {
  if (!self.buffer.is_here()) return "<turnout.Buffer, of another process or closed at exit>";
  const Buffer& b = *self.buffer.get();
  const BufferConfig& c = b.config();
  return "<turnout.Buffer rank " + std::to_string(b.rank()) + " of " + std::to_string(b.num_ranks()) + ": " + std::to_string(c.num_experts) +
         " experts, " + std::to_string(c.max_tokens_per_rank) + " tokens of " + std::to_string(c.hidden) + " " + std::string(name(c.dtype)) + ">";
}

}  // namespace

std::shared_ptr<Buffer> buffer_of(nb::handle object) {
  if (!nb::isinstance<BufferHolder>(object)) throw InvalidArgument("buffer is " + describe(object) + ", but must be a turnout.Buffer");
  return nb::cast<const BufferHolder&>(object).buffer.get();
}

void bind_buffer(nb::module_& m) {
  using Class = BufferHolder;
  nb::class_<Class> bound(m, "Buffer", "The body of turnout.Buffer.", nb::is_weak_referenceable());
  bind_call<17>(bound, "_dispatch", "DispatchResult", &with_dispatch<&run_call<DispatchHolder, DispatchArgs, DispatchGiven>, DispatchHolder>);
  bind_call<17>(bound, "_dispatch_async", "PendingDispatch",
                &with_dispatch<&issue_call<PendingDispatchHolder, DispatchArgs, DispatchGiven>, PendingDispatchHolder>);
  bind_call<12>(bound, "_combine", "CombineResult", &with_combine<&run_call<CombineHolder, CombineArgs, CombineGiven>, CombineHolder>);
  bind_call<12>(bound, "_combine_async", "PendingCombine",
                &with_combine<&issue_call<PendingCombineHolder, CombineArgs, CombineGiven>, PendingCombineHolder>);
  bound
      .def("__init__", &make_buffer, nb::arg("communicator"), nb::arg("config"), nb::arg("allocator").none(),
           nb::sig("def __init__(self, communicator: Communicator, config: dict[str, object], allocator: object) -> None"))
      .def("_refuse", &refuse_call, nb::arg("call"), nb::arg("lane"), "Tells all ranks that this one does not make the call.")
      .def(
          "set_expert_to_rank",
          [](Class& self, nb::object map) {
            const std::vector<int> ranks = ints_of(map, "set_expert_to_rank: expert_to_rank");
            const std::shared_ptr<Buffer> buffer = self.buffer.get();
            const nb::gil_scoped_release unlocked;
            buffer->set_expert_to_rank(ranks);
          },
          nb::arg("expert_to_rank"), nb::sig("def set_expert_to_rank(self, expert_to_rank: Sequence[int]) -> None"),
          "Changes the owner of every expert from the next call on: all ranks with the same map before the same call, else that call raises. "
          "Handles made before keep their own map.")
      .def("check", &simple_call<&Buffer::check>, "Raises what an earlier asynchronous failure left; cheap, does not wait.")
      .def("synchronize", &simple_call<&Buffer::synchronize>, "check() after everything issued has finished.")
      .def("recover", &simple_call<&Buffer::recover>, "Ends the abort that an expired wait left. Collective; every pending call is lost.")
      .def("suspend", &simple_call<&Buffer::suspend>,
           "GPU, collective, no call under way: gives the symmetric memory back; leases lose their rows. Raises InvalidArgument on a CPU.")
      .def("resume", &simple_call<&Buffer::resume>, "Maps fresh memory at the same addresses. Collective. Raises TransportError.")
      .def("close", &close, "Later calls raise InvalidArgument; peers that wait for this rank raise PeerFailed. Local, idempotent.")
      .def(
          "__enter__", [](nb::object self) { return self; }, nb::sig("def __enter__(self) -> Self"))
      .def(
          "__exit__", [](Class& self, nb::args) { close(self); }, nb::sig("def __exit__(self, *args: object) -> None"))
      .def("__repr__", &repr)
      .def_prop_ro(
          "config", [](const Class& self) { return to_python(self.buffer.get()->config()); }, nb::sig("def config(self) -> dict[str, Any]"),
          "The configuration as it is used, by the names of the constructor's arguments.")
      .def_prop_ro("rank", &fact<&Buffer::rank>)
      .def_prop_ro("num_ranks", &fact<&Buffer::num_ranks>)
      .def_prop_ro("num_local_experts", &fact<&Buffer::num_local_experts>)
      .def_prop_ro("num_fresh_results", &fact<&Buffer::num_fresh_results>, "Dispatches with result='auto' that found no lease.")
      .def_prop_ro("num_bytes", &fact<&Buffer::num_bytes>, "Symmetric memory of this rank, in bytes.")
      .def_prop_ro(
          "status_word", [](const Class& self) { return reinterpret_cast<uintptr_t>(self.buffer.get()->status_word()); },
          "Address of a uint64 that is not 0 once the Buffer is aborted (on a GPU: in its memory).");
  m.def(
      "required_bytes", [](nb::dict config, int num_ranks) { return required_bytes(config_of(config), num_ranks); }, nb::arg("config"),
      nb::arg("num_ranks"), nb::sig("def required_bytes(config: dict[str, object], num_ranks: int) -> int"));
}

}  // namespace turnout::python
