// BufferConfig from keyword arguments.
#pragma once
#include "bindings/bindings.h"
#include "turnout/config.h"

namespace turnout::python {

/// A device of -1 is left for the caller to choose. Throws: InvalidArgument naming the field.
BufferConfig config_of(nb::dict fields);
nb::dict to_python(const BufferConfig& config);

}  // namespace turnout::python
