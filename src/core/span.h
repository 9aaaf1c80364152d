// How much memory a view reaches over.
#pragma once
#include <cstddef>
#include <cstdint>

#include "turnout/tensor.h"

namespace turnout::core {

/// Bytes from the first element of a view to behind its last; SIZE_MAX if that wraps around. REQUIRES: no stride is negative.
inline size_t span_bytes(const TensorView& t) {
  if (!t.defined()) return 0;
  size_t last = 0;
  for (size_t d = 0; d < static_cast<size_t>(t.ndim); ++d) {
    if (t.shape[d] <= 0) return 0;
    size_t step = 0;
    if (t.shape[d] > 1 && __builtin_mul_overflow(t.shape[d] - 1, t.strides[d], &step)) return SIZE_MAX;
    if (__builtin_add_overflow(last, step, &last)) return SIZE_MAX;
  }
  size_t bytes = 0;
  return last == SIZE_MAX || __builtin_mul_overflow(last + 1, size_of(t.dtype), &bytes) ? SIZE_MAX : bytes;
}

}  // namespace turnout::core
