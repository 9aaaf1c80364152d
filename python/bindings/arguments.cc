#include "bindings/arguments.h"

#include <cmath>
#include <cstring>

#include "bindings/dlpack.h"
#include "bindings/exchange.h"
#include "bindings/tensor.h"
#include "turnout/error.h"

namespace turnout::python {

namespace {

[[noreturn]] void refuse(const char* argument, nb::handle came, const std::string& wanted) {
  throw InvalidArgument(std::string(argument) + " is " + describe(came) + ", but must be " + wanted);
}

std::string list_of(const char* const* words) {
  std::string list;
  for (; *words; ++words) list += (list.empty() ? "'" : words[1] ? ", '" : " or '") + std::string(*words) + "'";
  return list;
}

}  // namespace

int index_of(nb::handle word, const char* const* words, const char* argument) {
  if (PyUnicode_Check(word.ptr())) {
    const char* const text = PyUnicode_AsUTF8AndSize(word.ptr(), nullptr);
    if (!text) throw nb::python_error();
    for (int i = 0; words[i]; ++i) {
      if (std::strcmp(text, words[i]) == 0) return i;
    }
  }
  refuse(argument, word, list_of(words));
}

int64_t integer_of(nb::handle number, const char* argument, int64_t least, int64_t most) {
  const auto range = [&] {
    if (least == INT64_MIN && most == INT64_MAX) return std::string("a whole number");
    return "a whole number from " + std::to_string(least) + (most == INT64_MAX ? " on" : " to " + std::to_string(most));
  };
  const nb::object index = nb::steal(PyNumber_Index(number.ptr()));
  if (!index.is_valid() || PyBool_Check(number.ptr())) {
    PyErr_Clear();
    refuse(argument, number, range());
  }
  int overflow = 0;
  const int64_t value = PyLong_AsLongLongAndOverflow(index.ptr(), &overflow);
  if (overflow || value < least || value > most) refuse(argument, number, range());
  return value;
}

int int_of(nb::handle number, const char* argument) { return static_cast<int>(integer_of(number, argument, INT32_MIN, INT32_MAX)); }

bool bool_of(nb::handle value, const char* argument) {
  if (!PyBool_Check(value.ptr())) refuse(argument, value, "True or False");
  return value.is(nb::handle(Py_True));
}

std::vector<int> ints_of(nb::handle numbers, const char* argument) {
  std::vector<int> values;
  if (numbers.is_none()) return values;
  const nb::object iterator = nb::steal(PyObject_GetIter(numbers.ptr()));
  if (!iterator.is_valid()) {
    PyErr_Clear();
    refuse(argument, numbers, "a sequence of whole numbers");
  }
  while (PyObject* item = PyIter_Next(iterator.ptr())) {
    const nb::object number = nb::steal(item);
    values.push_back(int_of(number, argument));
  }
  if (PyErr_Occurred()) throw nb::python_error();
  return values;
}

std::chrono::milliseconds duration_of(nb::handle seconds, const char* argument) {
  nb::object number = nb::borrow(seconds);
  if (nb::hasattr(seconds, "total_seconds")) number = seconds.attr("total_seconds")();
  const double value = PyFloat_AsDouble(number.ptr());
  if (value == -1 && PyErr_Occurred()) {
    PyErr_Clear();
    refuse(argument, seconds, "a number of seconds, or a timedelta");
  }
  if (!(value >= 0 && value < 1e9)) refuse(argument, seconds, "a number of seconds from 0.001 to a year");
  return std::chrono::milliseconds(std::llround(value * 1000));
}

DType dtype_argument(nb::handle dtype, const char* argument) {
  std::string name;
  if (PyUnicode_Check(dtype.ptr())) {
    name = text_of(dtype);
  } else if (nb::hasattr(dtype, "name")) {
    name = text_of(dtype.attr("name"));  // numpy.dtype
  } else if (nb::hasattr(dtype, "__name__")) {
    name = text_of(dtype.attr("__name__"));  // numpy.float32, ml_dtypes.bfloat16, jax.numpy.bfloat16
  } else {
    name = text_of(dtype);
    if (name.starts_with("torch.")) name.erase(0, 6);
  }
  if (const auto found = dtype_named(name)) return *found;
  refuse(argument, dtype, "one of " + dtype_list() + ", or a dtype of NumPy or torch that is one of them");
}

Device device_of(nb::handle device, const char* argument) {
  const char* const wanted = "'cpu', 'cuda' (the GPU of this rank's number on its node), 'cuda:N', a torch.device, or the number of a GPU";
  if (PyLong_Check(device.ptr()) && !PyBool_Check(device.ptr()))
    return {DeviceKind::cuda, static_cast<int>(integer_of(device, argument, 0, 1 << 20))};
  const std::string text = text_of(device);  // of a torch.device, too
  if (text == "cpu") return {};
  if (text.starts_with("cuda:")) {
    const nb::object number = nb::steal(PyLong_FromString(text.c_str() + 5, nullptr, 10));
    if (number.is_valid()) return {DeviceKind::cuda, static_cast<int>(integer_of(number, argument, 0, 1 << 20))};
    PyErr_Clear();
  }
  if (text == "cuda") return {DeviceKind::cuda, -1};
  refuse(argument, device, wanted);
}

void* current_stream(Framework inputs, Device device) {
  if (device.kind != DeviceKind::cuda) return nullptr;
  if (inputs == Framework::torch) {
    void* current = nullptr;
    const dlpack::ExchangeApi* const api = dlpack::torch_exchange();
    if (api && api->current_stream(dlpack::kCuda, device.index, &current) == 0) return current;
    PyErr_Clear();
    // What torch's own generated code asks: an integer, without making a Stream object.
    static const nb::handle ask = forever(nb::module_::import_("torch").attr("_C").attr("_cuda_getCurrentRawStream"));
    const nb::object stream = ask(device.index);
    return PyLong_AsVoidPtr(stream.ptr());
  }
  const nb::handle cupy = imported_module("cupy");
  if (!cupy.is_valid() || !nb::hasattr(cupy, "cuda")) return nullptr;
  const nb::object stream = cupy.attr("cuda").attr("get_current_stream")().attr("ptr");
  return PyLong_AsVoidPtr(stream.ptr());
}

Stream usual_stream(Device device) {
  const nb::handle torch = imported_module("torch");
  return {current_stream(torch.is_valid() && nb::hasattr(torch, "Tensor") ? Framework::torch : Framework::other, device)};
}

Stream stream_of(nb::handle stream, Framework inputs, Device device, const char* argument) {
  if (stream.is_none()) return {current_stream(inputs, device)};
  nb::object number = nb::borrow(stream);
  if (nb::hasattr(stream, "cuda_stream")) number = stream.attr("cuda_stream");
  else if (nb::hasattr(stream, "__cuda_stream__")) number = stream.attr("__cuda_stream__")()[1];
  else if (nb::hasattr(stream, "ptr")) number = stream.attr("ptr");
  if (!PyLong_Check(number.ptr()) || PyBool_Check(number.ptr())) {
    refuse(argument, stream, "None, a stream of torch or CuPy, or the integer that a cudaStream_t is");
  }
  void* const native = PyLong_AsVoidPtr(number.ptr());
  if (!native && PyErr_Occurred()) {
    PyErr_Clear();
    refuse(argument, stream, "the integer that a cudaStream_t is");
  }
  return {native};
}

}  // namespace turnout::python
