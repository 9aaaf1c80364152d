// DLPack's table of C functions (its specification, from version 1.2 on), which torch has since 2.10: a tensor is read, and one is made,
// without any object in between.
#pragma once
#include "bindings/bindings.h"
#include "bindings/dlpack.h"

namespace turnout::python::dlpack {

struct Version {
  uint32_t major, minor;
};
/// What owns memory since version 1.0.
struct ManagedVersioned {
  Version version;
  void* context;
  void (*deleter)(ManagedVersioned*);
  uint64_t flags;
  Tensor tensor;
};

/// Functions give 0, or set a Python error and give -1.
struct ExchangeApi {
  Version version;
  const ExchangeApi* earlier;
  void (*allocate)();  // of a kind that is not called here
  int (*managed_of)(void* object, ManagedVersioned** out);
  int (*object_of)(ManagedVersioned* managed, void** out);  ///< takes `managed`, if it succeeds
  int (*view_of)(void* object, Tensor* out);                ///< may be null; `out` borrows shape and strides of the object
  int (*current_stream)(int32_t device_type, int32_t device, void** out);
};

/// The table of torch, if this release of it has one and the program has imported it; null if not. Its functions take objects of torch.Tensor
/// itself: a subclass may be anything.
const ExchangeApi* torch_exchange();
/// Whether `object` is of torch.Tensor itself.
bool is_plain_tensor(nb::handle object);

}  // namespace turnout::python::dlpack
