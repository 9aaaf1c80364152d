#include "bindings/errors.h"

#include "bindings/state.h"

namespace turnout::python {

namespace {

/// A class of turnout/errors.py. Kept: raising must work while modules are torn down.
nb::handle error_class(const char* name) { return forever(nb::module_::import_("turnout.errors").attr(name)); }

nb::object to_python(const WaitRecord& r) {
  nb::list peers;
  for (const int peer : r.peers) peers.append(peer);
  static const nb::handle record = error_class("WaitRecord");
  return record(r.rank, nb::tuple(peers), r.lane, r.call.c_str(), r.epoch, r.phase.c_str(), r.expected, r.seen, r.peer_state.c_str());
}

nb::object make(nb::handle type, const std::exception& error) { return type(nb::str(error.what())); }

nb::object make(nb::handle type, const std::exception& error, const WaitRecord& record) {
  nb::object made = type(nb::str(error.what()));
  made.attr("record") = to_python(record);
  return made;
}

/// Null if it is none of ours.
nb::object ours(const std::exception_ptr& error) {
  static const nb::handle invalid = error_class("InvalidArgument"), transport = error_class("TransportError"), timeout = error_class("PeerTimeout"),
                          failed = error_class("PeerFailed"), any = error_class("Error");
  try {
    std::rethrow_exception(error);
  } catch (const InvalidArgument& e) {
    return make(invalid, e);
  } catch (const TransportError& e) {
    return make(transport, e);
  } catch (const PeerTimeout& e) {
    return make(timeout, e, e.record());
  } catch (const PeerFailed& e) {
    return make(failed, e, e.record());
  } catch (const Error& e) {
    return make(any, e);
  } catch (...) {
    return {};
  }
}

void translate(const std::exception_ptr& error, void*) {
  const nb::object made = ours(error);
  if (!made.is_valid()) std::rethrow_exception(error);
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(made.ptr())), made.ptr());
}

}  // namespace

std::string words_of(nb::python_error& error) {
  const nb::object text = nb::steal(PyObject_Str(error.value().ptr()));
  if (text.is_valid()) return text_of(text);
  PyErr_Clear();
  return "an error without words";
}

nb::object python_error_of(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (nb::python_error& e) {
    return nb::borrow(e.value());
  } catch (const std::exception& e) {
    const nb::object made = ours(error);
    return made.is_valid() ? made : nb::steal(PyObject_CallFunction(PyExc_RuntimeError, "s", e.what()));
  }
}

void bind_errors(nb::module_&) { nb::register_exception_translator(translate); }

}  // namespace turnout::python
