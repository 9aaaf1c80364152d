// A store that Python supplies: torch.distributed's, or any object with set and get of bytes.
#pragma once
#include <memory>

#include "bindings/bindings.h"
#include "turnout/bootstrap.h"

namespace turnout::python {

/// Calls `object` with the interpreter's lock, from whatever thread. Throws: InvalidArgument if it has no set and get.
std::shared_ptr<Store> store_of(nb::object object);

}  // namespace turnout::python
