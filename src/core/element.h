// One element of a row of any type that can be added: read, written, and rounded.
// For code that goes element by element (the oracle); engines have row kernels.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "core/dtype.h"
#include "turnout/types.h"

namespace turnout::core {

/// Reads element `i` of `row`. T is float, or double; fp64 is read as double only.
template <class T>
T load_element(DType dtype, const std::byte* row, int64_t i) {
  const std::byte* at = row + static_cast<size_t>(i) * size_of(dtype);
  uint16_t half = 0;
  float single = 0;
  double twice = 0;
  switch (dtype) {
    case DType::fp64: std::memcpy(&twice, at, sizeof twice); return static_cast<T>(twice);
    case DType::fp32: std::memcpy(&single, at, sizeof single); return static_cast<T>(single);
    case DType::bf16: std::memcpy(&half, at, sizeof half); return static_cast<T>(bf16_to_float(half));
    default: std::memcpy(&half, at, sizeof half); return static_cast<T>(fp16_to_float(half));
  }
}

/// Writes `value` to element `i` of `row`, rounded to nearest even; NaN becomes the canonical NaN.
template <class T>
void store_element(DType dtype, std::byte* row, int64_t i, T value) {
  std::byte* at = row + static_cast<size_t>(i) * size_of(dtype);
  value = canonical(value);
  const float single = canonical(static_cast<float>(value));
  const double twice = static_cast<double>(value);
  const uint16_t half = dtype == DType::bf16 ? float_to_bf16(single) : float_to_fp16(single);
  switch (dtype) {
    case DType::fp64: std::memcpy(at, &twice, sizeof twice); return;
    case DType::fp32: std::memcpy(at, &single, sizeof single); return;
    default: std::memcpy(at, &half, sizeof half); return;
  }
}

/// `value` after it was written and read again.
template <class T>
T round_element(DType dtype, T value) {
  std::byte bytes[8];
  store_element(dtype, bytes, 0, value);
  return load_element<T>(dtype, bytes, 0);
}

}  // namespace turnout::core
