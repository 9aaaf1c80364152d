// Errors: C++ exceptions become the classes of turnout/errors.py.
#pragma once
#include <string>

#include "bindings/bindings.h"
#include "turnout/error.h"

namespace turnout::python {

/// The words of the Python exception that is set, which is cleared.
std::string words_of(nb::python_error& error);

/// The Python exception that `error` becomes, ready to raise.
nb::object python_error_of(const std::exception_ptr& error);

}  // namespace turnout::python
