#include "bindings/results.h"

#include <string>

#include "bindings/allocator.h"
#include "bindings/handle.h"
#include "engine/device_engine.h"
#include "engine/routing.h"

namespace turnout::python {

namespace {

enum DispatchArray : size_t {
  kX,
  kXScales,
  kSide,
  kTopkIdx,
  kTopkWeights,
  kNumRows,
  kExpertCounts,
  kExpertOffsets,
  kSortedRows,
  kNumDropped,
  kArrived
};
enum CombineArray : size_t { kSum, kSumSide, kNumLost };

/// A property: array number `index`, which `member` of the result views.
template <size_t index, auto member, class Holder>
nb::object array_property(Holder& self) {
  return self.array(index, self.result().*member);
}

nb::object side_of(DispatchHolder& self) {
  nb::list arrays;
  for (const TensorView& side : self.result().side) arrays.append(self.new_array(side));
  return nb::tuple(arrays);
}

/// Where the received rows of each source begin, of a dispatch on a GPU; else nothing.
nb::object recv_begin(DispatchHolder& self) {
  const auto& routing = self.result().handle.routing();
  if (!routing || !routing->device) return nb::none();
  return self.new_array(TensorView::dense(routing->device->recv_begin(), DType::i32, {routing->experts->num_ranks() + 1}, self.result().x.device));
}

template <class Holder, class Pending>
auto wait(PendingHolder<Pending>& self) {
  const auto pending = self.pending.get();
  const auto receive = [&] {
    const UnderWay call;
    const nb::gil_scoped_release unlocked;
    const AllocatingFor stream(self.context.stream);
    return pending->wait();
  };
  auto result = receive();
  self.inputs.reset();
  // The call that is over keeps the Buffer's memory, and so needs its allocator, for as long as it is there.
  const std::shared_ptr<Allocator> allocator = self.context.allocator;
  Holder holder(std::move(result), std::move(self.context));
  self.context.allocator = allocator;
  return holder;
}

template <class Class>
void bind_common(Class& bound) {
  using Holder = typename Class::Type;
  bound
      .def("release", &Holder::release,
           "Lets go of the memory now. What arrays of it are still there keep it; a lease goes back when the last of them is gone, in order of "
           "the stream. Idempotent.")
      .def(
          "__enter__", [](nb::object self) { return self; }, nb::sig("def __enter__(self) -> Self"))
      .def(
          "__exit__", [](Holder& h, nb::args) { h.release(); }, nb::sig("def __exit__(self, *args: object) -> None"));
}

void bind_dispatch_result(nb::module_& m) {
  using Holder = DispatchHolder;
  nb::class_<Holder> bound(m, "DispatchResult", R"(What arrived. N rows, K experts per token, C rows per expert of a slab, Le local experts.

Arrays are of the framework that x was of. With a capacity the first dimension of the row arrays is the capacity, and num_rows says
how many are real. The memory lives as long as this object or any of its arrays.)");
  const auto add = [&](const char* name, auto getter, const char* doc) {
    bound.def_prop_ro(name, getter, nb::sig(("def " + std::string(name) + "(self) -> Any").c_str()), doc);
  };
  using R = DispatchResult;
  add("x", &array_property<kX, &R::x, Holder>, "rank_major and expert_major [N, H], expert_slab [Le, C, H]; the row stride may exceed H.");
  add("x_scales", &array_property<kXScales, &R::x_scales, Holder>,
      "With quantize: fp32 or ue8m0 [N, ceil(H/128)], slab [Le, C, ceil(H/128)], as scale_order says; else None.");
  add("side", &side_of, "A tuple: the side arrays as given, with the rows of x.");
  add("topk_idx", &array_property<kTopkIdx, &R::topk_idx, Holder>, "rank_major: int32 [N, K] local expert, -1 where not local; else None.");
  add("topk_weights", &array_property<kTopkWeights, &R::topk_weights, Holder>,
      "fp32: rank_major [N, K] (0 where not local), expert_major [N], slab [Le, C]; None without weights.");
  add("num_rows", &array_property<kNumRows, &R::num_rows, Holder>, "int64 [1]: rows present (expert_major: padding included).");
  add("expert_counts", &array_property<kExpertCounts, &R::expert_counts, Holder>, "int32 [Le]: rows of each local expert, without padding.");
  add("expert_offsets", &array_property<kExpertOffsets, &R::expert_offsets, Holder>,
      "int64 [Le + 1]: where each group starts, in rows of x (expert_major) or in sorted_rows (rank_major).");
  add("sorted_rows", &array_property<kSortedRows, &R::sorted_rows, Holder>, "rank_major: int32, rows of x grouped by expert; else None.");
  add("num_dropped", &array_property<kNumDropped, &R::num_dropped, Holder>, "int64 [1]: rows that exceeded the capacity.");
  add("arrived", &array_property<kArrived, &R::arrived, Holder>, "int64 [num_ranks]: rows of each source rank.");
  bound
      .def_prop_ro(
          "handle", [](Holder& h) { return HandleHolder(h.result().handle, h.allocator()); }, nb::sig("def handle(self) -> Handle"),
          "The routing, for combine() and cached dispatches.")
      .def_prop_ro("_recv_begin", &recv_begin)
      .def_prop_ro(
          "is_lease", [](Holder& h) { return h.result().is_lease; }, "Whether x lies in the receive region.")
      .def("__repr__", [](Holder& h) {
        if (h.is_released()) return std::string("<turnout.DispatchResult, released>");
        return "<turnout.DispatchResult x " + h.result().x.to_string() + (h.result().is_lease ? ", a lease>" : ">");
      });
  bind_common(bound);
}

void bind_combine_result(nb::module_& m) {
  using Holder = CombineHolder;
  using R = CombineResult;
  nb::class_<Holder> bound(m, "CombineResult",
                           "What came back. T tokens of this rank, K experts per token. Arrays are of the framework that y was of.");
  bound.def_prop_ro("x", &array_property<kSum, &R::x, Holder>, nb::sig("def x(self) -> Any"), "[T, H] of y's dtype; 0 for a token without rows.")
      .def_prop_ro("side", &array_property<kSumSide, &R::side, Holder>, nb::sig("def side(self) -> Any"),
                   "fp32 [T, K], 0 where there is no row; None without side.")
      .def_prop_ro("num_lost", &array_property<kNumLost, &R::num_lost, Holder>, nb::sig("def num_lost(self) -> Any"),
                   "int32 [T]: terms omitted for capacity or a masked rank.")
      .def("__repr__", [](Holder& h) {
        return h.is_released() ? std::string("<turnout.CombineResult, released>") : "<turnout.CombineResult x " + h.result().x.to_string() + ">";
      });
  bind_common(bound);
}

}  // namespace

void bind_results(nb::module_& m) {
  bind_dispatch_result(m);
  bind_combine_result(m);
  constexpr const char* kDoc =
      "A call that was issued. Its inputs must stay unchanged until wait(). One that is dropped is waited for, and its result with it.";
  nb::class_<PendingDispatchHolder>(m, "PendingDispatch", kDoc)
      .def("wait", &wait<DispatchHolder, PendingDispatch>, nb::sig("def wait(self) -> DispatchResult"),
           "Receives what the call brought. Raises as the call itself; InvalidArgument the second time.")
      .def_prop_ro(
          "arrived",
          [](PendingDispatchHolder& self) {
            const auto& pending = self.pending.get();
            return array_of(self.context.framework, pending->arrived(), pending, self.context.stream);
          },
          nb::sig("def arrived(self) -> Any"), "receive='resident': int64 [num_ranks], rows of each source rank present so far; it grows by itself.");
  nb::class_<PendingCombineHolder>(m, "PendingCombine", kDoc)
      .def("wait", &wait<CombineHolder, PendingCombine>, nb::sig("def wait(self) -> CombineResult"),
           "Receives what the call brought. Raises as the call itself; InvalidArgument the second time.");
}

}  // namespace turnout::python
