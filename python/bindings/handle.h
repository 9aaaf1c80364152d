// A Handle of Python's.
#pragma once
#include "bindings/lifetime.h"
#include "turnout/handle.h"

namespace turnout::python {

struct HandleHolder {
  explicit HandleHolder(Handle made) : handle("Handle", std::make_shared<Handle>(std::move(made))) {}
  Held<Handle> handle;
};

}  // namespace turnout::python
