#include "bindings/handle.h"

#include <string>

namespace turnout::python {

void bind_handle(nb::module_& m) {
  using Holder = HandleHolder;
  nb::class_<Holder>(m, "Handle", R"(The routing of a dispatch: what combine() and a cached dispatch() need to know of it.

It may be used any number of times, in any order, on any lane of the Buffer that made it, by all ranks alike.)")
      .def_prop_ro(
          "num_tokens", [](const Holder& h) { return h.handle.get()->num_tokens(); }, "Tokens that this rank sent.")
      .def_prop_ro(
          "num_topk", [](const Holder& h) { return h.handle.get()->num_topk(); }, "Experts per token.")
      .def_prop_ro(
          "num_rows", [](const Holder& h) { return h.handle.get()->num_rows(); },
          "Rows that this rank received (expert_slab: the sum of its counts).")
      .def_prop_ro(
          "layout", [](const Holder& h) { return std::string(name(h.handle.get()->layout())); }, "'rank_major', 'expert_major' or 'expert_slab'.")
      .def("__repr__", [](const Holder& h) {
        if (!h.handle.is_here()) return std::string("<turnout.Handle of another process>");
        const Handle& handle = *h.handle.get();
        return "<turnout.Handle of " + std::to_string(handle.num_tokens()) + " tokens, " + std::string(name(handle.layout())) + ">";
      });
}

}  // namespace turnout::python
