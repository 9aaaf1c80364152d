// The files of the module turnout._core: each binds one class, or what several need.
#pragma once
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

namespace turnout::python {

namespace nb = nanobind;

void bind_errors(nb::module_& m);
void bind_array(nb::module_& m);
void bind_communicator(nb::module_& m);
void bind_handle(nb::module_& m);
void bind_results(nb::module_& m);
void bind_bound(nb::module_& m);
void bind_buffer(nb::module_& m);
void bind_jax(nb::module_& m);
void bind_tools(nb::module_& m);

}  // namespace turnout::python
