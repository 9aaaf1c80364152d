#include "bindings/tensor.h"

#include <algorithm>

#include "bindings/array.h"
#include "bindings/dlpack.h"
#include "bindings/errors.h"
#include "bindings/exchange.h"

namespace turnout::python {

namespace {

[[noreturn]] void refuse(const Wanted& wanted, const std::string& rest) {
  throw InvalidArgument(std::string(wanted.call) + ": " + wanted.name + " " + rest);
}

[[noreturn]] void refuse_dtype(const Wanted& wanted, nb::handle array) {
  refuse(wanted, "is " + describe(array) + ", but elements must be one of " + dtype_list() +
                     ": convert it, or say what its bytes are with turnout.array(" + wanted.name + ", dtype=...)");
}

void set_extents(Input& input, const Wanted& wanted, nb::handle array, int64_t ndim) {
  if (ndim < 1 || ndim > 3) refuse(wanted, "is " + describe(array) + " of " + std::to_string(ndim) + " dimensions, but must have 1 to 3");
  input.view.ndim = static_cast<int>(ndim);
}

/// NumPy's strides are bytes, of any number.
Input from_numpy(nb::handle array, const Wanted& wanted) {
  Input input{{}, nb::borrow(array), Framework::numpy};
  const auto dtype = dtype_of(Framework::numpy, get_attribute(array, names().dtype));
  if (!dtype) refuse_dtype(wanted, array);
  Py_buffer buffer;
  if (PyObject_GetBuffer(array.ptr(), &buffer, wanted.is_written ? PyBUF_STRIDED : PyBUF_STRIDED_RO) != 0) {
    nb::python_error error;
    refuse(wanted,
           "is " + describe(array) + ", which cannot be used: " + words_of(error) + (wanted.is_written ? "; give an array that may be written" : ""));
  }
  // The array itself keeps the memory; the buffer only told where it is.
  const std::unique_ptr<Py_buffer, void (*)(Py_buffer*)> release(&buffer, PyBuffer_Release);
  input.view.dtype = *dtype;
  set_extents(input, wanted, array, buffer.ndim);
  input.view.data = buffer.buf;
  const auto size = static_cast<int64_t>(size_of(*dtype));
  for (int d = 0; d < buffer.ndim; ++d) {
    const auto at = static_cast<size_t>(d);
    input.view.shape[at] = buffer.shape[d];
    if (buffer.strides[d] % size != 0 && buffer.shape[d] > 1) {
      refuse(wanted, "is " + describe(array) + " with a stride of " + std::to_string(buffer.strides[d]) + " bytes, no multiple of its elements of " +
                         std::to_string(size) + ": copy it (numpy.ascontiguousarray)");
    }
    input.view.strides[at] = buffer.strides[d] / size;
  }
  return input;
}

std::optional<DType> dtype_of(const dlpack::DataType& type) {
  using namespace dlpack;
  if (type.lanes != 1) return std::nullopt;
  const auto is = [&](uint8_t code, int bits) { return type.code == code && type.bits == bits; };
  if (is(kUInt, 8)) return DType::u8;
  if (is(kInt, 8)) return DType::i8;
  if (is(kInt, 32)) return DType::i32;
  if (is(kInt, 64)) return DType::i64;
  if (is(kFloat, 16)) return DType::fp16;
  if (is(kFloat, 32)) return DType::fp32;
  if (is(kFloat, 64)) return DType::fp64;
  if (is(kBfloat, 16)) return DType::bf16;
  if (is(kFloat8E4M3FN, 8)) return DType::fp8_e4m3;
  if (is(kFloat8E5M2, 8)) return DType::fp8_e5m2;
  if (is(kFloat8E8M0FNU, 8)) return DType::ue8m0;
  return std::nullopt;
}

int64_t item(PyObject* tuple, Py_ssize_t i) { return PyLong_AsLongLong(PyTuple_GetItem(tuple, i)); }

bool is_grad_enabled() {
  const nb::handle torch = imported_module("torch");
  return torch.is_valid() && nb::cast<bool>(torch.attr("is_grad_enabled")());
}

/// A tensor by torch's table of functions; false where that says no, or the tensor is none that a call takes: then it is looked at again, and
/// what is wrong with it is told.
bool read_at_once(nb::handle array, Input& input) {
  const dlpack::ExchangeApi* const api = dlpack::torch_exchange();
  if (!api || !dlpack::is_plain_tensor(array)) return false;
  dlpack::Tensor t;
  if (api->view_of(array.ptr(), &t) != 0) {
    PyErr_Clear();
    return false;
  }
  const auto dtype = dtype_of(t.dtype);
  const bool on_gpu = t.device.type == dlpack::kCuda;
  if (!dtype || !t.strides || t.ndim < 1 || t.ndim > 3 || (!on_gpu && t.device.type != dlpack::kCpu)) return false;
  const nb::object follows = get_attribute(array, names().requires_grad);
  if (follows.is(nb::handle(Py_True)) && is_grad_enabled()) return false;
  input.view.dtype = *dtype;
  input.view.ndim = t.ndim;
  for (size_t d = 0; d < static_cast<size_t>(t.ndim); ++d) {
    input.view.shape[d] = t.shape[d];
    input.view.strides[d] = t.strides[d];
  }
  if (on_gpu) input.view.device = {DeviceKind::cuda, t.device.index};
  input.view.data = static_cast<std::byte*>(t.data) + t.byte_offset;
  return true;
}

Input from_torch(nb::handle array, const Wanted& wanted) {
  const Names& n = names();
  Input input{{}, nb::borrow(array), Framework::torch};
  if (read_at_once(array, input)) return input;
  try {
    const auto dtype = dtype_of(Framework::torch, get_attribute(array, n.dtype));
    if (!dtype) refuse_dtype(wanted, array);
    input.view.dtype = *dtype;
    if (get_attribute(array, n.requires_grad).is(nb::handle(Py_True)) && is_grad_enabled()) {
      refuse(wanted, "is " + describe(array) + " that requires grad, which this call does not follow: give " + wanted.name +
                         ".detach(), or call turnout.torch, which differentiates");
    }
    const nb::object shape = get_attribute(array, n.shape), strides = call_method(array, n.stride);
    const Py_ssize_t ndim = PyTuple_Size(shape.ptr());
    set_extents(input, wanted, array, ndim);
    for (Py_ssize_t d = 0; d < ndim; ++d) {
      input.view.shape[static_cast<size_t>(d)] = item(shape.ptr(), d);
      input.view.strides[static_cast<size_t>(d)] = item(strides.ptr(), d);
    }
    const nb::object index = call_method(array, n.get_device);
    const long device = PyLong_AsLong(index.ptr());
    if (device >= 0) input.view.device = {DeviceKind::cuda, static_cast<int>(device)};
    if (!get_attribute(array, device >= 0 ? n.is_cuda : n.is_cpu).is(nb::handle(Py_True))) {
      refuse(wanted, "is " + describe(array) + ", but must be in the memory of the CPU or of a CUDA GPU");
    }
    const nb::object data = call_method(array, n.data_ptr);
    input.view.data = PyLong_AsVoidPtr(data.ptr());
  } catch (nb::python_error& error) {
    refuse(wanted, "is " + describe(array) + ", which cannot be used: " + words_of(error));
  }
  return input;
}

/// The capsule of an array whose contents are there for the stream of the call.
nb::object capsule_of(nb::handle array, bool on_gpu, const Wanted& wanted) {
  const Names& n = names();
  if (!on_gpu) return call_method(array, n.dlpack);
  // 1 is the legacy default stream: DLPack has no 0.
  const auto stream = reinterpret_cast<intptr_t>(wanted.stream);
  return get_attribute(array, n.dlpack)(nb::arg("stream") = stream == 0 ? intptr_t{1} : stream);
}

Input from_dlpack(nb::handle array, const Wanted& wanted) {
  using namespace dlpack;
  Input input{{}, {}, Framework::other};
  try {
    const nb::object device = call_method(array, names().dlpack_device);
    const int32_t kind = nb::cast<int32_t>(device[0]);
    const bool on_gpu = kind == kCuda || kind == kCudaManaged;
    if (!on_gpu && kind != kCpu && kind != kCudaHost) {
      refuse(wanted, "is " + describe(array) + " on a device of DLPack's kind " + std::to_string(kind) +
                         ", but must be in the memory of the CPU (1) or of a CUDA GPU (2)");
    }
    input.keep = capsule_of(array, on_gpu, wanted);
    const auto* const managed = static_cast<const Managed*>(PyCapsule_GetPointer(input.keep.ptr(), kName));
    if (!managed) throw nb::python_error();
    const Tensor& t = managed->tensor;
    const auto dtype = wanted.dtype ? wanted.dtype : dtype_of(t.dtype);
    if (!dtype) refuse_dtype(wanted, array);
    if (wanted.dtype && size_of(*dtype) * 8 != static_cast<size_t>(t.dtype.bits) * t.dtype.lanes) {
      refuse(wanted, "is " + describe(array) + ", whose elements cannot be said to be " + std::string(turnout::name(*dtype)) + ": the sizes differ");
    }
    input.view.dtype = *dtype;
    set_extents(input, wanted, array, t.ndim);
    input.view.data = static_cast<std::byte*>(t.data) + t.byte_offset;
    if (on_gpu) input.view.device = {DeviceKind::cuda, nb::cast<int>(device[1])};
    int64_t dense = 1;
    for (int d = t.ndim - 1; d >= 0; --d) {
      input.view.shape[static_cast<size_t>(d)] = t.shape[d];
      input.view.strides[static_cast<size_t>(d)] = t.strides ? t.strides[d] : dense;
      dense *= t.shape[d];
    }
  } catch (nb::python_error& error) {
    refuse(wanted, "is " + describe(array) + ", which does not give its memory by DLPack: " + words_of(error));
  }
  return input;
}

/// What the library would refuse, told with what helps in Python.
void check_form(const Input& input, const Wanted& wanted, nb::handle array) {
  const TensorView& view = input.view;
  if (view.ndim == 0 || view.num_elements() == 0 || wanted.form == Form::any) return;
  const auto last = static_cast<size_t>(view.ndim - 1);
  const bool adjacent = view.shape[last] <= 1 || view.strides[last] == 1;
  if (wanted.form == Form::dense ? view.is_dense() : adjacent) return;
  std::string strides;
  for (int d = 0; d < view.ndim; ++d) strides += (d ? ", " : "") + std::to_string(view.strides[static_cast<size_t>(d)]);
  const std::string copy = input.framework == Framework::torch   ? std::string(wanted.name) + ".contiguous()"
                           : input.framework == Framework::numpy ? "numpy.ascontiguousarray(" + std::string(wanted.name) + ")"
                                                                 : std::string("a contiguous copy");
  refuse(wanted, "is " + describe(array) + " with strides [" + strides + "], but " +
                     (wanted.form == Form::dense ? "must be contiguous" : "elements of a row must be adjacent (last stride 1)") + ": give " + copy);
}

std::string shape_text(nb::handle object) {
  std::string text;
  for (const nb::handle extent : object.attr("shape")) text += (text.empty() ? "" : ", ") + text_of(extent);
  return "[" + text + "]";
}

}  // namespace

std::string describe(nb::handle object) {
  const std::string type = text_of(nb::handle(object.type()).attr("__name__"));
  try {
    if (nb::hasattr(object, "shape") && nb::hasattr(object, "dtype")) {
      std::string dtype = text_of(object.attr("dtype"));
      std::string module = text_of(nb::handle(object.type()).attr("__module__"));
      module = module.substr(0, module.find('.'));
      if (dtype.starts_with("torch.")) dtype.erase(0, 6);
      return dtype + shape_text(object) + " (" + module + ")";
    }
    if (object.is_none()) return "None";
    std::string value = text_of(nb::repr(object));
    if (value.size() > 40) value = value.substr(0, 37) + "...";
    return value + " (" + type + ")";
  } catch (nb::python_error&) {
    return "a " + type;
  }
}

namespace {

Input any_input(nb::handle array, const Wanted& wanted) {
  if (nb::isinstance<Array>(array)) return {nb::cast<const Array&>(array).view, nb::borrow(array), Framework::other};
  switch (framework_of(array)) {
    case Framework::numpy: return from_numpy(array, wanted);
    case Framework::torch: return from_torch(array, wanted);
    case Framework::other: return from_dlpack(array, wanted);
    case Framework::none: break;
  }
  if (nb::isinstance<Tagged>(array)) {
    const Tagged& tagged = nb::cast<const Tagged&>(array);
    Wanted as_tagged = wanted;
    as_tagged.dtype = tagged.dtype;
    return from_dlpack(tagged.base, as_tagged);
  }
  refuse(wanted, "is " + describe(array) + ", but must be an array: NumPy's, torch's, or any other with __dlpack__");
}

}  // namespace

Input input_of(nb::handle array, const Wanted& wanted) {
  Input input = any_input(array, wanted);
  check_form(input, wanted, array);
  return input;
}

}  // namespace turnout::python
