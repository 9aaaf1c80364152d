#include "bindings/array.h"

#include <string>
#include <utility>

#include "bindings/dlpack.h"
#include "bindings/errors.h"
#include "bindings/exchange.h"
#include "bindings/lifetime.h"
#include "bindings/tensor.h"

namespace turnout::python {

namespace {

/// Bytes of memory with an owner, by the buffer protocol: what NumPy's arrays stand on.
struct Memory {
  void* data = nullptr;
  Py_ssize_t num_bytes = 0;
  std::shared_ptr<void> owner;
};

int get_buffer(PyObject* self, Py_buffer* buffer, int flags) {
  const Memory& memory = *nb::inst_ptr<Memory>(self);
  return PyBuffer_FillInfo(buffer, self, memory.data, memory.num_bytes, /*readonly=*/0, flags);
}

PyType_Slot memory_slots[] = {{Py_bf_getbuffer, reinterpret_cast<void*>(get_buffer)}, {0, nullptr}};

/// Bytes from the first element to the end of the last.
int64_t span_of(const TensorView& view) {
  if (view.num_elements() == 0) return 0;
  int64_t last = 0;
  for (size_t d = 0; d < static_cast<size_t>(view.ndim); ++d) last += (view.shape[d] - 1) * view.strides[d];
  return (last + 1) * static_cast<int64_t>(size_of(view.dtype));
}

char nothing[64];  // arrays without elements point here: null is not an address to everybody
void* address_of(const TensorView& view) { return view.data ? view.data : nothing; }

nb::tuple tuple_of(const std::array<int64_t, 3>& numbers, int n, int64_t factor = 1) {
  nb::object tuple = nb::steal(PyTuple_New(n));
  for (int i = 0; i < n; ++i) PyTuple_SetItem(tuple.ptr(), i, PyLong_FromLongLong(numbers[static_cast<size_t>(i)] * factor));
  return nb::cast<nb::tuple>(tuple);
}

nb::object to_numpy(const TensorView& view, const std::shared_ptr<void>& owner) {
  if (view.device.kind != DeviceKind::cpu) throw InvalidArgument("this array is in the memory of a GPU, and NumPy has none there: take it by DLPack");
  static const nb::handle ndarray = forever(nb::module_::import_("numpy").attr("ndarray"));
  const auto size = static_cast<int64_t>(size_of(view.dtype));
  const nb::object memory = nb::cast(Memory{address_of(view), static_cast<Py_ssize_t>(span_of(view)), owner});
  const nb::object dtype = numpy_dtype(view.dtype), shape = tuple_of(view.shape, view.ndim), strides = tuple_of(view.strides, view.ndim, size);
  static const nb::handle zero = PyLong_FromLong(0);
  PyObject* const arguments[] = {shape.ptr(), dtype.ptr(), memory.ptr(), zero.ptr(), strides.ptr()};
  PyObject* const made = PyObject_Vectorcall(ndarray.ptr(), arguments, 5, nullptr);
  if (!made) throw nb::python_error();
  return nb::steal(made);
}

/// Memory that others take, a Managed or a ManagedVersioned: freed by whoever took it, on any thread, with or without the interpreter's lock.
template <class Managed>
struct Exported {
  Managed managed{};
  std::array<int64_t, 3> shape, strides;
  std::shared_ptr<void> owner;
};

dlpack::DataType dlpack_dtype(DType dtype, bool fp8_as_bytes) {
  using namespace dlpack;
  const auto bits = static_cast<uint8_t>(size_of(dtype) * 8);
  const auto fp8 = [&](uint8_t code) { return DataType{fp8_as_bytes ? static_cast<uint8_t>(kUInt) : code, bits, 1}; };
  switch (dtype) {
    case DType::u8: return {kUInt, bits, 1};
    case DType::i8:
    case DType::i32:
    case DType::i64: return {kInt, bits, 1};
    case DType::fp8_e4m3: return fp8(kFloat8E4M3FN);
    case DType::fp8_e5m2: return fp8(kFloat8E5M2);
    case DType::ue8m0: return fp8(kFloat8E8M0FNU);
    case DType::bf16: return {kBfloat, bits, 1};
    default: return {kFloat, bits, 1};
  }
}

template <class Managed>
std::unique_ptr<Exported<Managed>> export_view(const TensorView& view, const std::shared_ptr<void>& owner, bool fp8_as_bytes) {
  auto exported = std::make_unique<Exported<Managed>>();
  exported->shape = view.shape;
  exported->strides = view.strides;
  exported->owner = owner;
  dlpack::Tensor& t = exported->managed.tensor;
  t.data = address_of(view);
  t.device = {view.device.kind == DeviceKind::cpu ? dlpack::kCpu : dlpack::kCuda, view.device.index};
  t.ndim = view.ndim;
  t.dtype = dlpack_dtype(view.dtype, fp8_as_bytes);
  t.shape = exported->shape.data();
  t.strides = exported->strides.data();
  t.byte_offset = 0;
  exported->managed.context = exported.get();
  exported->managed.deleter = [](Managed* managed) { delete static_cast<Exported<Managed>*>(managed->context); };
  return exported;
}

nb::object to_capsule(const TensorView& view, const std::shared_ptr<void>& owner, bool fp8_as_bytes) {
  auto exported = export_view<dlpack::Managed>(view, owner, fp8_as_bytes);
  nb::object capsule = nb::steal(PyCapsule_New(&exported->managed, dlpack::kName, [](PyObject* self) {
    if (!PyCapsule_IsValid(self, dlpack::kName)) return;  // somebody took it
    auto* const managed = static_cast<dlpack::Managed*>(PyCapsule_GetPointer(self, dlpack::kName));
    managed->deleter(managed);
  }));
  if (!capsule.is_valid()) throw nb::python_error();
  exported.release();
  return capsule;
}

nb::object new_tensor(const TensorView& view, const std::shared_ptr<void>& owner) {
  if (const dlpack::ExchangeApi* const api = dlpack::torch_exchange()) {
    auto exported = export_view<dlpack::ManagedVersioned>(view, owner, /*fp8_as_bytes=*/true);
    exported->managed.version = {1, 0};
    void* made = nullptr;
    if (api->object_of(&exported->managed, &made) != 0) throw nb::python_error();
    exported.release();
    return nb::steal(static_cast<PyObject*>(made));
  }
  // What torch.utils.dlpack.from_dlpack ends in for a capsule; it costs half as much.
  static const nb::handle from_dlpack = forever(nb::module_::import_("torch").attr("_C").attr("_from_dlpack"));
  return from_dlpack(to_capsule(view, owner, /*fp8_as_bytes=*/true));
}

nb::object to_torch(const TensorView& view, const std::shared_ptr<void>& owner) {
  const bool is_fp8 = view.dtype == DType::fp8_e4m3 || view.dtype == DType::fp8_e5m2 || view.dtype == DType::ue8m0;
  const nb::object tensor = new_tensor(view, owner);
  return is_fp8 ? tensor.attr("view")(torch_dtype(view.dtype)) : tensor;
}

/// Makes the stream of the consumer wait for that of the call, where they differ and a framework that can do it is here.
nb::object dlpack_of(const Array& array, nb::object stream) {
  if (array.view.device.kind == DeviceKind::cuda && !stream.is_none()) {
    const auto consumer = nb::cast<intptr_t>(stream);
    const auto producer = reinterpret_cast<intptr_t>(array.stream);
    const auto same = [](intptr_t a, intptr_t b) { return a == b || (a <= 1 && b <= 1 && a >= 0 && b >= 0); };  // 0 and 1: the default stream
    if (consumer != -1 && !same(consumer, producer))
      nb::module_::import_("turnout._streams").attr("order")(producer, consumer, array.view.device.index);
  }
  return to_capsule(array.view, array.owner, /*fp8_as_bytes=*/false);
}

}  // namespace

nb::object array_of(Framework framework, const TensorView& view, const std::shared_ptr<void>& owner, void* stream) {
  if (!view.defined()) return nb::none();
  if (framework == Framework::numpy) return to_numpy(view, owner);
  if (framework == Framework::torch) return to_torch(view, owner);
  return nb::cast(Array{view, owner, stream});
}

void bind_array(nb::module_& m) {
  nb::class_<Memory>(m, "Memory", nb::type_slots(memory_slots), "Bytes of a result, by the buffer protocol.");
  nb::class_<Array>(m, "Array",
                    "An array of a result, for libraries that take DLPack (jax.dlpack.from_dlpack, cupy.from_dlpack), and for numpy.asarray.\n\n"
                    "Its memory is a result's: a lease goes back when the last array of it is gone.")
      .def_prop_ro(
          "shape", [](const Array& a) { return tuple_of(a.view.shape, a.view.ndim); }, nb::sig("def shape(self) -> tuple[int, ...]"))
      .def_prop_ro(
          "strides", [](const Array& a) { return tuple_of(a.view.strides, a.view.ndim); }, nb::sig("def strides(self) -> tuple[int, ...]"),
          "In elements.")
      .def_prop_ro(
          "dtype", [](const Array& a) { return numpy_dtype(a.view.dtype); }, nb::sig("def dtype(self) -> object"),
          "NumPy's dtype; bf16 and fp8 are those of ml_dtypes.")
      .def_prop_ro(
          "device",
          [](const Array& a) { return a.view.device.kind == DeviceKind::cpu ? std::string("cpu") : "cuda:" + std::to_string(a.view.device.index); },
          nb::sig("def device(self) -> str"))
      .def_prop_ro(
          "data_ptr", [](const Array& a) { return reinterpret_cast<uintptr_t>(a.view.data); }, "Address of the first element.")
      .def("__repr__", [](const Array& a) { return "turnout.Array(" + a.view.to_string() + ")"; })
      .def(
          "__array__",
          [](const Array& a, nb::object dtype, nb::object copy) {
            nb::object array = to_numpy(a.view, a.owner);
            if (!dtype.is_none()) return array.attr("astype")(dtype);
            return copy.is(nb::handle(Py_True)) ? array.attr("copy")() : array;
          },
          nb::arg("dtype") = nb::none(), nb::arg("copy") = nb::none(),
          nb::sig("def __array__(self, dtype: object = None, copy: object = None) -> object"))
      .def(
          "__dlpack__",
          [](const Array& a, nb::object stream, nb::object, nb::object, nb::object copy) {
            if (copy.is(nb::handle(Py_True))) throw nb::buffer_error("turnout.Array makes no copies: copy what you got");
            return dlpack_of(a, std::move(stream));
          },
          nb::kw_only(), nb::arg("stream") = nb::none(), nb::arg("max_version") = nb::none(), nb::arg("dl_device") = nb::none(),
          nb::arg("copy") = nb::none(),
          nb::sig("def __dlpack__(self, *, stream: int | None = None, max_version: object = None, dl_device: object = None, copy: bool | None = "
                  "None) -> object"))
      .def(
          "__dlpack_device__",
          [](const Array& a) {
            return nb::make_tuple(static_cast<int>(a.view.device.kind == DeviceKind::cpu ? dlpack::kCpu : dlpack::kCuda), a.view.device.index);
          },
          nb::sig("def __dlpack_device__(self) -> tuple[int, int]"));
  nb::class_<Tagged>(m, "Tagged", "An array whose elements are said to be of another type of the same size: turnout.array makes it.")
      .def(
          "__init__",
          [](Tagged* self, nb::object base, const char* dtype) {
            const auto named = dtype_named(dtype);
            if (!named) throw InvalidArgument("array: dtype is '" + std::string(dtype) + "', but must be one of " + dtype_list());
            new (self) Tagged{std::move(base), *named};
          },
          nb::arg("base"), nb::arg("dtype"), nb::sig("def __init__(self, base: object, dtype: str) -> None"));
}

}  // namespace turnout::python
