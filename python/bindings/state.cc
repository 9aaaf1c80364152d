#include "bindings/state.h"

#include <algorithm>
#include <array>

namespace turnout::python {

namespace {

nb::object interned(const char* text) { return nb::steal(PyUnicode_InternFromString(text)); }

struct NamedType {
  DType dtype;
  const char* ours;
  const char* theirs;  ///< of ml_dtypes and NumPy; torch's but for the prefix
};
constexpr std::array<NamedType, 11> kTypes = {{
    {DType::u8, "u8", "uint8"},
    {DType::i8, "i8", "int8"},
    {DType::i32, "i32", "int32"},
    {DType::i64, "i64", "int64"},
    {DType::fp8_e4m3, "fp8_e4m3", "float8_e4m3fn"},
    {DType::fp8_e5m2, "fp8_e5m2", "float8_e5m2"},
    {DType::ue8m0, "ue8m0", "float8_e8m0fnu"},
    {DType::fp16, "fp16", "float16"},
    {DType::bf16, "bf16", "bfloat16"},
    {DType::fp32, "fp32", "float32"},
    {DType::fp64, "fp64", "float64"},
}};

const NamedType& named(DType dtype) { return kTypes[static_cast<size_t>(dtype)]; }

/// What was found out about a framework. Types and dtype objects are singletons that their modules keep: compared by address.
struct Known {
  nb::handle array_class;
  std::vector<nb::handle> classes;  ///< of arrays seen so far
  std::vector<std::pair<PyObject*, DType>> dtypes;
  std::array<nb::object, kTypes.size()> objects;
};

Known& known(Framework framework) {
  static Known* const all = new Known[4];
  return all[static_cast<size_t>(framework)];
}

/// Its class of arrays, once the program has imported it.
nb::handle array_class(Framework framework) {
  Known& k = known(framework);
  if (k.array_class.is_valid()) return k.array_class;
  const nb::handle module = imported_module(framework == Framework::numpy ? "numpy" : "torch");
  const char* const name = framework == Framework::numpy ? "ndarray" : "Tensor";
  if (!module.is_valid() || !nb::hasattr(module, name)) return {};
  return k.array_class = forever(module.attr(name));
}

bool is_of(Framework framework, nb::handle object) {
  Known& k = known(framework);
  const nb::handle type = object.type();
  for (const nb::handle seen : k.classes) {
    if (seen.is(type)) return true;
  }
  const nb::handle of = array_class(framework);
  if (!of.is_valid() || PyObject_IsInstance(object.ptr(), of.ptr()) != 1) return false;
  k.classes.push_back(type.inc_ref());
  return true;
}

nb::object make_numpy_dtype(DType dtype) {
  const nb::object make = nb::module_::import_("numpy").attr("dtype");
  switch (dtype) {
    case DType::bf16:
    case DType::fp8_e4m3:
    case DType::fp8_e5m2:
    case DType::ue8m0: {
      const nb::object types = nb::module_::import_("ml_dtypes");
      return nb::hasattr(types, named(dtype).theirs) ? make(types.attr(named(dtype).theirs)) : make("uint8");
    }
    default: return make(named(dtype).theirs);
  }
}

}  // namespace

Names::Names()
    : data_ptr(interned("data_ptr")),
      shape(interned("shape")),
      stride(interned("stride")),
      dtype(interned("dtype")),
      get_device(interned("get_device")),
      is_cpu(interned("is_cpu")),
      is_cuda(interned("is_cuda")),
      requires_grad(interned("requires_grad")),
      dlpack(interned("__dlpack__")),
      dlpack_device(interned("__dlpack_device__")),
      name(interned("name")),
      isnative(interned("isnative")) {}

const Names& names() {
  static const Names* const all = new Names;
  return *all;
}

nb::handle imported_module(const char* name) { return PyDict_GetItemString(PyImport_GetModuleDict(), name); }

Framework framework_of(nb::handle object) {
  if (is_of(Framework::numpy, object)) return Framework::numpy;
  if (is_of(Framework::torch, object)) return Framework::torch;
  const int has = PyObject_HasAttr(object.ptr(), names().dlpack.ptr());
  return has ? Framework::other : Framework::none;
}

std::optional<DType> dtype_named(std::string_view name) {
  for (const NamedType& type : kTypes) {
    if (name == type.ours || name == type.theirs) return type.dtype;
  }
  return std::nullopt;
}

std::string dtype_list() {
  std::string list;
  for (const NamedType& type : kTypes) list += (list.empty() ? "" : ", ") + std::string(type.ours);
  return list;
}

std::optional<DType> dtype_of(Framework framework, nb::handle dtype) {
  Known& k = known(framework);
  for (const auto& [object, type] : k.dtypes) {
    if (object == dtype.ptr()) return type;
  }
  std::string name;
  if (framework == Framework::numpy) {
    if (!nb::cast<bool>(get_attribute(dtype, names().isnative))) return std::nullopt;
    name = text_of(get_attribute(dtype, names().name));
  } else {
    name = text_of(dtype);
    if (name.starts_with("torch.")) name.erase(0, 6);
  }
  const auto found = dtype_named(name);
  if (found && k.dtypes.size() < 64) k.dtypes.emplace_back(dtype.inc_ref().ptr(), *found);
  return found;
}

nb::object numpy_dtype(DType dtype) {
  nb::object& object = known(Framework::numpy).objects[static_cast<size_t>(dtype)];
  if (!object.is_valid()) object = make_numpy_dtype(dtype);
  return object;
}

nb::object torch_dtype(DType dtype) {
  nb::object& object = known(Framework::torch).objects[static_cast<size_t>(dtype)];
  if (!object.is_valid()) {
    const nb::object torch = nb::module_::import_("torch");
    object = nb::hasattr(torch, named(dtype).theirs) ? torch.attr(named(dtype).theirs) : torch.attr("uint8");
  }
  return object;
}

}  // namespace turnout::python
