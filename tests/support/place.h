// Where the memory of a test's tensors is: on the host as it stands, or on a device that a test brings along.
#pragma once
#include <cstddef>
#include <cstring>
#include <deque>
#include <memory>
#include <vector>

#include "core/span.h"
#include "turnout/tensor.h"

namespace turnout::testing {

/// The host: nothing is copied.
class Place {
 public:
  virtual ~Place() = default;
  virtual Device device() const { return {}; }
  virtual Stream stream() const { return {}; }
  /// An input of a call, in the memory of the place.
  virtual TensorView put(const TensorView& host) { return host; }
  /// Of put(): what was issued may still use it.
  virtual void give_back(const TensorView&) {}
  /// Writes rows into memory that a result holds.
  virtual void write(void* to, const void* from, size_t num_bytes) { std::memcpy(to, from, num_bytes); }
  virtual void fill(void* to, int value, size_t num_bytes) { std::memset(to, value, num_bytes); }
  /// What a result holds, where the test can read it.
  virtual TensorView get(const TensorView& there) { return there; }
  /// After a call: what is asynchronous has happened.
  virtual void finish() {}
};

using core::span_bytes;

}  // namespace turnout::testing
