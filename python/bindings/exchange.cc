#include "bindings/exchange.h"

#include "bindings/state.h"

namespace turnout::python::dlpack {

namespace {

struct Torch {
  PyTypeObject* tensor = nullptr;
  const ExchangeApi* api = nullptr;
};

/// Looked up once torch is there; another thread would find the same.
const Torch& torch() {
  static Torch found;
  if (found.tensor) [[likely]]
    return found;
  const nb::handle module = imported_module("torch");
  if (!module.is_valid() || !nb::hasattr(module, "Tensor")) return found;
  const nb::object tensor = module.attr("Tensor");
  if (nb::hasattr(tensor, "__dlpack_c_exchange_api__")) {
    const nb::object capsule = tensor.attr("__dlpack_c_exchange_api__");
    const auto* api = static_cast<const ExchangeApi*>(PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
    if (!api) PyErr_Clear();
    while (api && api->version.major > 1) api = api->earlier;
    if (api && api->version.major == 1 && api->view_of) found.api = api;
  }
  found.tensor = reinterpret_cast<PyTypeObject*>(forever(tensor).ptr());
  return found;
}

}  // namespace

const ExchangeApi* torch_exchange() { return torch().api; }

bool is_plain_tensor(nb::handle object) { return Py_TYPE(object.ptr()) == torch().tensor; }

}  // namespace turnout::python::dlpack
