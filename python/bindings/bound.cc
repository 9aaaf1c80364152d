#include "bindings/bound.h"

#include <utility>

#include "bindings/arguments.h"

namespace turnout::python {

namespace {

template <class Args, class Given>
Bound<Args> bind(BufferHolder& buffer, const Given& given, std::initializer_list<nb::handle> arrays) {
  static_cast<void>(buffer.buffer.get());  // closed or of another process: told now
  Call<Args> call{{}, {}, nb::steal<nb::list>(nb::handle()), true};
  read(call, buffer, given);
  // Once is enough: the arrays are let go of with the call, and their allocator waits for the stream then.
  keep_for_stream(buffer, call.context.stream, given.stream, arrays);
  return {&buffer, nb::find(buffer), std::move(call), given.stream.is_none()};
}

/// `handle`: one that takes the place of what was bound.
template <class Holder, class Args>
Holder make_call(const Bound<Args>& bound, const Handle* handle) {
  const std::shared_ptr<Buffer> buffer = bound.buffer->buffer.get();
  Args args = bound.call.args;
  CallContext context = bound.call.context;
  if (handle) args.handle = handle;
  if (bound.is_current) args.stream.native = context.stream = current_stream(context.framework, bound.buffer->device);
  auto result = run_unlocked(*buffer, args, context.stream);
  return Holder(std::move(result), std::move(context));
}

DispatchHolder dispatch(const BoundDispatch& bound) { return make_call<DispatchHolder>(bound, nullptr); }

CombineHolder combine(const BoundCombine& bound, nb::handle handle) {
  if (handle.is_none()) return make_call<CombineHolder>(bound, nullptr);
  if (!nb::isinstance<HandleHolder>(handle)) {
    const Stream stream = bound.is_current ? Stream{current_stream(bound.call.context.framework, bound.buffer->device)} : bound.call.args.stream;
    refuse<CombineArgs>(*bound.buffer->buffer.get(), bound.call.args.lane, stream);
    throw InvalidArgument("combine: handle is " + describe(handle) + ", but must be the handle of a dispatch (result.handle)");
  }
  return make_call<CombineHolder>(bound, &nb::cast<const HandleHolder&>(handle).handle());
}

}  // namespace

BoundDispatch bound_dispatch(BufferHolder& buffer, const DispatchGiven& given, std::initializer_list<nb::handle> arrays) {
  return bind<DispatchArgs>(buffer, given, arrays);
}
BoundCombine bound_combine(BufferHolder& buffer, const CombineGiven& given, std::initializer_list<nb::handle> arrays) {
  return bind<CombineArgs>(buffer, given, arrays);
}

void bind_bound(nb::module_& m) {
  nb::class_<BoundDispatch>(m, "BoundDispatch", "dispatch() with arguments that were read once: Buffer.bind_dispatch makes it.")
      .def("__call__", &dispatch, nb::sig("def __call__(self) -> DispatchResult"),
           "Makes the call with what is in the arrays now. Collective, and raises, as dispatch().")
      .def("__repr__", [](const BoundDispatch& b) { return "<turnout.BoundDispatch, x " + b.call.args.x.to_string() + ">"; });
  nb::class_<BoundCombine>(m, "BoundCombine", "combine() with arguments that were read once: Buffer.bind_combine makes it.")
      .def("__call__", &combine, nb::arg("handle").none() = nb::none(), nb::sig("def __call__(self, handle: Handle | None = None) -> CombineResult"),
           "Makes the call with what is in the arrays now, along `handle`, if one is given, instead of the bound one. Collective, and raises, as "
           "combine().")
      .def("__repr__", [](const BoundCombine& b) { return "<turnout.BoundCombine, y " + b.call.args.y.to_string() + ">"; });
}

}  // namespace turnout::python
