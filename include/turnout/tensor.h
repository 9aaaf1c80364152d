// TensorView: a typed, strided view of memory that somebody else owns.
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <string>

#include "turnout/types.h"

namespace turnout {
inline namespace v0 {

/// Up to three dimensions, strides in elements. A view with no elements may have null data.
/// Views given as inputs are never written.
struct TURNOUT_API TensorView {
  void* data = nullptr;
  DType dtype = DType::u8;
  int ndim = 0;
  std::array<int64_t, 3> shape{};
  std::array<int64_t, 3> strides{};
  Device device{};

  /// A dense (row-major, no gaps) view. Throws: InvalidArgument for more than three dimensions.
  static TensorView dense(const void* data, DType dtype, std::initializer_list<int64_t> shape, Device device = {});

  /// A matrix whose rows start `row_stride` elements apart.
  static TensorView matrix(const void* data, DType dtype, int64_t rows, int64_t cols, int64_t row_stride, Device device = {});

  /// True if the view was given at all (a default-constructed view was not).
  bool defined() const { return ndim > 0; }
  int64_t num_elements() const;  ///< 0 if an extent is not positive; at most INT64_MAX
  bool is_dense() const;

  /// First byte of row `i` (and of matrix `j`, row `i` for three dimensions).
  std::byte* row(int64_t i) const { return static_cast<std::byte*>(data) + i * strides[0] * static_cast<int64_t>(size_of(dtype)); }
  template <class T>
  T* as() const {
    return static_cast<T*>(data);
  }

  /// "bf16[128, 7168]" with strides if not dense: for messages.
  std::string to_string() const;
};

}  // namespace v0
}  // namespace turnout
