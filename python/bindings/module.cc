// turnout._core: the C++ library for Python. Users meet it through the package turnout.
#include "bindings/bindings.h"
#include "bindings/lifetime.h"
#include "bindings/log.h"
#include "turnout/communicator.h"

NB_MODULE(_core, m) {
  using namespace turnout::python;
  nanobind::set_leak_warnings(false);  // objects may outlive the interpreter: lifetime.h
  m.doc() = "The C++ library. Use it through the package turnout.";
  m.attr("__version__") = nanobind::str(turnout::version().data(), turnout::version().size());
  watch_forks();
  bind_errors(m);
  bind_array(m);
  bind_communicator(m);
  bind_handle(m);
  bind_results(m);
  bind_bound(m);
  bind_buffer(m);
  bind_jax(m);
  bind_tools(m);
  start_log();
  m.def("_stop_log", &stop_log, "Hands on what was logged; later lines go to stderr: at the exit of the interpreter.");
  m.def("_close_all", &close_all, "Closes what is open and waits for calls under way: at the exit of the interpreter.");
}
