// TensorView: construction and the form it takes in messages.
#include "turnout/tensor.h"

#include <algorithm>
#include <limits>

#include "turnout/error.h"

namespace turnout {
inline namespace v0 {

namespace {

/// The product of two extents, or the largest number: shapes come from callers, and none may look small because it wrapped.
int64_t product(int64_t a, int64_t b) {
  int64_t result = 0;
  return __builtin_mul_overflow(a, b, &result) ? std::numeric_limits<int64_t>::max() : result;
}

}  // namespace

TensorView TensorView::dense(const void* data, DType dtype, std::initializer_list<int64_t> shape, Device device) {
  TensorView view;
  if (shape.size() > view.shape.size()) throw InvalidArgument("TensorView: " + std::to_string(shape.size()) + " dimensions, but at most 3");
  view.data = const_cast<void*>(data);  // a view serves inputs (never written) and outputs alike
  view.dtype = dtype;
  view.device = device;
  for (int64_t extent : shape) view.shape[static_cast<size_t>(view.ndim++)] = extent;
  int64_t stride = 1;
  for (int d = view.ndim - 1; d >= 0; --d) {
    view.strides[static_cast<size_t>(d)] = stride;
    stride = product(stride, view.shape[static_cast<size_t>(d)]);
  }
  return view;
}

TensorView TensorView::matrix(const void* data, DType dtype, int64_t rows, int64_t cols, int64_t row_stride, Device device) {
  TensorView view = dense(data, dtype, {rows, cols}, device);
  view.strides[0] = row_stride;
  return view;
}

int64_t TensorView::num_elements() const {
  int64_t n = ndim <= 0 ? 0 : 1;
  for (int d = 0; d < std::min(ndim, 3); ++d) {
    if (shape[static_cast<size_t>(d)] < 1) return 0;
    n = product(n, shape[static_cast<size_t>(d)]);
  }
  return n;
}

bool TensorView::is_dense() const {
  int64_t stride = 1;
  for (int d = std::min(ndim, 3) - 1; d >= 0; --d) {
    const auto at = static_cast<size_t>(d);
    if (shape[at] != 1 && strides[at] != stride) return false;
    stride = product(stride, shape[at]);
  }
  return true;
}

std::string TensorView::to_string() const {
  if (!defined()) return "nothing";
  std::string text(name(dtype));
  auto list = [&](const std::array<int64_t, 3>& values) {
    std::string out = "[";
    for (int d = 0; d < std::min(ndim, 3); ++d) out += (d ? ", " : "") + std::to_string(values[static_cast<size_t>(d)]);
    return out + "]";
  };
  text += list(shape);
  if (num_elements() > 0 && !is_dense()) text += " with strides " + list(strides);
  if (device.kind == DeviceKind::cuda) text += " on cuda:" + std::to_string(device.index);
  return text;
}

}  // namespace v0
}  // namespace turnout
