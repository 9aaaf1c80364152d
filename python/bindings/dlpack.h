// DLPack: how array libraries hand memory to each other (the structs of its specification, version 1.0).
#pragma once
#include <cstdint>

namespace turnout::python::dlpack {

enum DeviceType : int32_t { kCpu = 1, kCuda = 2, kCudaHost = 3, kCudaManaged = 13 };
enum TypeCode : uint8_t {
  kInt = 0,
  kUInt = 1,
  kFloat = 2,
  kBfloat = 4,
  kComplex = 5,
  kBool = 6,
  kFloat8E4M3FN = 10,
  kFloat8E5M2 = 12,
  kFloat8E8M0FNU = 14
};

struct Device {
  int32_t type;
  int32_t index;
};
struct DataType {
  uint8_t code;
  uint8_t bits;
  uint16_t lanes;
};
struct Tensor {
  void* data;
  Device device;
  int32_t ndim;
  DataType dtype;
  int64_t* shape;
  int64_t* strides;  ///< null: row-major
  uint64_t byte_offset;
};
struct Managed {
  Tensor tensor;
  void* context;
  void (*deleter)(Managed*);
};

/// Names of the capsules: a consumer renames the one it takes.
inline constexpr const char* kName = "dltensor";
inline constexpr const char* kUsedName = "used_dltensor";

}  // namespace turnout::python::dlpack
