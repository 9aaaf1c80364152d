// What the module looks up once: interned names, and classes and dtypes of frameworks that the program has imported itself.
#pragma once
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "turnout/types.h"

namespace turnout::python {

/// Whose arrays an input is, and so its results.
enum class Framework : uint8_t { none, numpy, torch, other };

/// Interned strings, compared by address before anything else.
struct Names {
  nb::object data_ptr, shape, stride, dtype, get_device, is_cpu, is_cuda, requires_grad, dlpack, dlpack_device, name, isnative;
  Names();
};
const Names& names();

/// A reference that is never let go: for what is looked up once and lives as long as its module.
inline nb::handle forever(nb::object object) { return object.release(); }

/// str(object).
inline std::string text_of(nb::handle object) {
  const nb::object text = nb::steal(PyObject_Str(object.ptr()));
  const char* const words = text.is_valid() ? PyUnicode_AsUTF8AndSize(text.ptr(), nullptr) : nullptr;
  if (!words) throw nb::python_error();
  return words;
}

/// A module that the program has imported; null if it has not. Nothing is imported here.
nb::handle imported_module(const char* name);

/// The framework whose class, or a subclass of it, `object` is of; none if it is no array.
Framework framework_of(nb::handle object);

/// The element type of a NumPy or torch dtype object; nullopt if Turnout has no such type.
std::optional<DType> dtype_of(Framework framework, nb::handle dtype);
/// Its dtype object; u8 where this release of the framework has no such type.
nb::object numpy_dtype(DType dtype);
nb::object torch_dtype(DType dtype);

/// "bf16", or a name of NumPy's or torch's ("bfloat16", "float8_e4m3fn"); nullopt if unknown.
std::optional<DType> dtype_named(std::string_view name);
/// u8, i8, ...: for messages.
std::string dtype_list();

/// Calls a method without arguments whose name is interned.
inline nb::object call_method(nb::handle object, const nb::object& name) {
  PyObject* const self = object.ptr();
  PyObject* const made = PyObject_VectorcallMethod(name.ptr(), &self, 1 | PY_VECTORCALL_ARGUMENTS_OFFSET, nullptr);
  if (!made) throw nb::python_error();
  return nb::steal(made);
}
inline nb::object get_attribute(nb::handle object, const nb::object& name) {
  PyObject* const made = PyObject_GetAttr(object.ptr(), name.ptr());
  if (!made) throw nb::python_error();
  return nb::steal(made);
}

}  // namespace turnout::python
