// Between C and C++: errors become statuses with words kept per thread; structs grow at their end and carry their size.
#pragma once
#include <algorithm>
#include <cstring>
#include <memory>
#include <string>
#include <type_traits>

#include "turnout/c/types.h"
#include "turnout/communicator.h"
#include "turnout/error.h"
#include "turnout/tensor.h"

/// The bytes that a get callback left.
struct turnout_bytes {
  bool given = false;
  std::vector<std::byte> bytes;
};

struct turnout_communicator {
  turnout::Communicator communicator;
  std::string transport{communicator.transport()};
};

namespace turnout::api {

/// How a call failed: what turnout_last_error() and turnout_last_wait_record() say.
struct Failure {
  turnout_status status = TURNOUT_OK;
  std::string text;
  bool has_record = false;
  WaitRecord record;
};

/// Thrown by a body of turnout_run_virtual_ranks: a failure that another thread reports.
struct FailedElsewhere {
  Failure failure;
};

/// The last failure of this thread.
const Failure& last_failure();
/// Turns the exception being handled into this thread's last failure. Never throws.
turnout_status keep_current_exception() noexcept;

/// Runs `body`; what it throws becomes a status and its words.
template <class Body>
turnout_status guarded(Body&& body) noexcept {
  try {
    body();
    return TURNOUT_OK;
  } catch (...) {
    return keep_current_exception();
  }
}

template <class T>
T& require(T* pointer, const char* what) {
  if (!pointer) throw InvalidArgument(std::string(what) + " is null");
  return *pointer;
}

/// A place for a new object, null until there is one.
template <class T>
T*& output(T** pointer, const char* what) {
  T*& place = require(pointer, what);
  place = nullptr;
  return place;
}

/// A struct of the caller's, perhaps of an older or a newer header: fields it lacks are zero, fields we lack must be.
template <class T>
T read_struct(const T* given, const char* what) {
  static_assert(std::is_trivially_copyable_v<T>);
  const size_t size = require(given, what).struct_size;
  if (size < sizeof(size_t)) {
    throw InvalidArgument(std::string(what) + ".struct_size is " + std::to_string(size) + "; set it to sizeof the struct (" +
                          std::to_string(sizeof(T)) + ")");
  }
  const auto* bytes = reinterpret_cast<const unsigned char*>(given);
  for (size_t i = sizeof(T); i < size; ++i) {
    if (bytes[i] == 0) continue;
    throw InvalidArgument(std::string(what) + " has " + std::to_string(size) + " bytes and uses fields that this library, version " +
                          std::string(version()) + ", does not have (it knows " + std::to_string(sizeof(T)) + " bytes)");
  }
  T value{};
  std::memcpy(static_cast<void*>(&value), given, std::min(size, sizeof(T)));
  return value;
}

/// Fills as much of the caller's struct as it has.
template <class T>
void write_struct(T* to, T value, const char* what) {
  const size_t size = require(to, what).struct_size;
  if (size < sizeof(size_t)) throw InvalidArgument(std::string(what) + ".struct_size is " + std::to_string(size) + "; set it to sizeof the struct");
  value.struct_size = size;
  std::memcpy(static_cast<void*>(to), &value, std::min(size, sizeof(T)));
}

/// A number of the caller's as one of a closed set whose last member is `last`.
template <class Enum>
Enum to_enum(int32_t value, Enum last, const std::string& what) {
  if (value >= 0 && value <= static_cast<int32_t>(last)) return static_cast<Enum>(value);
  throw InvalidArgument(what + " is " + std::to_string(value) + ", but must be 0 to " + std::to_string(static_cast<int32_t>(last)));
}

TensorView to_view(const turnout_tensor& tensor, const std::string& what);
turnout_tensor from_view(const TensorView& view);

}  // namespace turnout::api
