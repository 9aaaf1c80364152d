// What Python gives for a call becomes the arguments of the library's.
#include "bindings/calls.h"

#include "bindings/arguments.h"

namespace turnout::python {

namespace {

constexpr const char* kModes[] = {"auto", "throughput", "low_latency", nullptr};
constexpr const char* kLayouts[] = {"rank_major", "expert_major", "expert_slab", nullptr};
constexpr const char* kQuantize[] = {"none", "fp8_e4m3", "fp8_e4m3_ue8m0", nullptr};
constexpr const char* kScaleOrders[] = {"rows", "columns", nullptr};
constexpr const char* kResults[] = {"auto", "lease", "fresh", nullptr};
constexpr const char* kReceive[] = {"deferred", "resident", nullptr};
constexpr const char* kFailures[] = {"raise", "mask", nullptr};
constexpr const char* kWeights[] = {"none", "source", "rows", "tokens", nullptr};
constexpr const char* kWires[] = {"payload", "fp32", "fp8", "rows", nullptr};

}  // namespace

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
  args.scale_order = enum_of<ScaleOrder>(g.scale_order, kScaleOrders, "dispatch: scale_order");
  args.out_scales = call.input(g.out_scales, "dispatch", "out_scales", Form::any, /*is_written=*/true);
  args.result = enum_of<ResultKind>(g.result, kResults, "dispatch: result");
  args.out = call.input(g.out, "dispatch", "out", Form::rows, /*is_written=*/true);
  if (args.out.defined()) call.context.out = nb::borrow(g.out);
  if (args.out_scales.defined()) call.context.out = nb::make_tuple(g.out, g.out_scales);
  args.receive = enum_of<Receive>(g.receive, kReceive, "dispatch: receive");
  args.on_failure = enum_of<OnFailure>(g.on_failure, kFailures, "dispatch: on_failure");
  args.zero_tail = bool_of(g.zero_tail, "dispatch: zero_tail");
}

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

void keep_for_stream(const BufferHolder& self, void* native, nb::handle stream, std::initializer_list<nb::handle> arrays) {
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
  nb::module_::import_("turnout._streams").attr("keep")(tensors, reinterpret_cast<uintptr_t>(native), self.device.index);
}

}  // namespace turnout::python
