// XLA's foreign function interface: how a compiled program of JAX's calls into a library.
//
// The structs of its C interface, version 0.3, as far as a handler uses them (openxla/xla, xla/ffi/api/c_api.h). Every struct
// begins with its size and grows at its end only, so a handler that was built with these works with any JAX that speaks the interface; the
// functions are in a table that comes with each call. Hence nothing of JAX is needed to build or to import this module, and what was built
// without JAX serves one that is installed later.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string_view>

namespace turnout::python::xla {

inline constexpr int kMajor = 0, kMinor = 3;

enum ErrorCode : int { kInvalidArgument = 3, kDeadlineExceeded = 4, kFailedPrecondition = 9, kInternal = 13, kUnavailable = 14 };
enum DataType : int {
  kS8 = 2,
  kS32 = 4,
  kS64 = 5,
  kU8 = 6,
  kF16 = 10,
  kF32 = 11,
  kF64 = 12,
  kBF16 = 16,
  kF8E5M2 = 19,
  kF8E4M3FN = 20,
  kF8E8M0FNU = 33
};
enum AttributeType : int { kScalar = 3 };
enum ExtensionType : int { kMetadata = 1 };
enum Stage : int { kExecute = 3 };

struct Error;    // theirs
struct Context;  // theirs

struct Extension {
  size_t size;
  ExtensionType type;
  Extension* next;
};
/// What begins every struct of arguments.
struct Header {
  size_t size;
  Extension* extension;
};
struct Version {
  Header header;
  int major, minor;
};
struct CreateError {
  Header header;
  const char* message;
  ErrorCode code;
};
struct GetDeviceOrdinal {
  Header header;
  Context* context;
  int32_t ordinal;  ///< out
};
struct GetStream {
  Header header;
  Context* context;
  void* stream;  ///< out: the CUstream
};
using Function = void();  // of a kind that is not called here

/// The table of functions.
struct Api {
  Header header;
  Version version;
  const void* internal;
  Error* (*create_error)(CreateError*);
  Function* others_before[3];
  Error* (*get_stream)(GetStream*);
  Function* others[12];
  Error* (*get_device_ordinal)(GetDeviceOrdinal*);
};

struct Array {
  Header header;
  DataType dtype;
  void* data;
  int64_t rank;
  int64_t* shape;
};
struct Arrays {
  Header header;
  int64_t count;
  int* types;
  Array** arrays;
};
struct Text {
  const char* data;
  size_t size;
  std::string_view view() const { return {data, size}; }
};
struct Scalar {
  DataType dtype;
  void* value;
};
struct Attributes {
  Header header;
  int64_t count;
  AttributeType* types;
  Text** names;
  Scalar** scalars;
};
struct Call {
  Header header;
  const Api* api;
  Context* context;
  Stage stage;
  Arrays inputs, results;
  Attributes attributes;
  void* future;
};

/// A question that a handler answers when it is registered.
struct Metadata {
  size_t size;
  Version version;
  uint32_t traits;
};
struct MetadataExtension {
  Extension base;
  Metadata* metadata;
};

}  // namespace turnout::python::xla
