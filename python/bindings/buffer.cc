// Buffer.
#include "bindings/buffer.h"

#include <utility>

#include "bindings/arguments.h"
#include "bindings/bound.h"
#include "bindings/calls.h"
#include "bindings/communicator.h"
#include "bindings/config.h"
#include "bindings/errors.h"
#include "bindings/log.h"

namespace turnout::python {

namespace {

template <class Holder, class Args, class Given>
Holder run_call(BufferHolder& self, const Given& given, std::initializer_list<nb::handle> arrays) {
  const std::shared_ptr<Buffer> buffer = self.buffer.get();
  Call<Args> call{{}, {}, nb::steal<nb::list>(nb::handle()), false};
  read_or_refuse(call, self, *buffer, given);
  keep_for_stream(self, call.context.stream, given.stream, arrays);
  auto result = run_unlocked(*buffer, call.args, call.context.stream);
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
  keep_for_stream(self, call.context.stream, given.stream, arrays);
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
  const Stream stream = usual_stream(self.device);
  if (call == "combine") refuse<CombineArgs>(*buffer, lane, stream);
  else refuse<DispatchArgs>(*buffer, lane, stream);
}

using H = nb::handle;

template <auto call, class Holder>
Holder with_dispatch(BufferHolder& self, H x, H topk_idx, H topk_weights, H side, H handle, H mode, H layout, H capacity, H expert_alignment,
                     H quantize, H scale_order, H out_scales, H result, H out, H receive, H num_sms, H on_failure, H zero_tail, H lane, H stream) {
  const DispatchGiven given{x,        topk_idx,         topk_weights, side,        handle,     mode,   layout,
                            capacity, expert_alignment, quantize,     scale_order, out_scales, result, out,
                            receive,  num_sms,          on_failure,   zero_tail,   lane,       stream};
  return call(self, given, {x, topk_idx, topk_weights, side, out, out_scales});
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
  bind_call<20>(bound, "_dispatch", "DispatchResult", &with_dispatch<&run_call<DispatchHolder, DispatchArgs, DispatchGiven>, DispatchHolder>);
  bind_call<20>(bound, "_dispatch_async", "PendingDispatch",
                &with_dispatch<&issue_call<PendingDispatchHolder, DispatchArgs, DispatchGiven>, PendingDispatchHolder>);
  bind_call<12>(bound, "_combine", "CombineResult", &with_combine<&run_call<CombineHolder, CombineArgs, CombineGiven>, CombineHolder>);
  bind_call<12>(bound, "_combine_async", "PendingCombine",
                &with_combine<&issue_call<PendingCombineHolder, CombineArgs, CombineGiven>, PendingCombineHolder>);
  bind_call<20>(bound, "_bind_dispatch", "BoundDispatch", &with_dispatch<&bound_dispatch, BoundDispatch>);
  bind_call<12>(bound, "_bind_combine", "BoundCombine", &with_combine<&bound_combine, BoundCombine>);
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
