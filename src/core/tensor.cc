// TensorView: construction and the form it takes in messages.
#include "turnout/tensor.h"

#include <algorithm>

namespace turnout {
inline namespace v0 {

TensorView TensorView::dense(const void* data, DType dtype, std::initializer_list<int64_t> shape, Device device) {
  TensorView view;
  view.data = const_cast<void*>(data);  // a view serves inputs (never written) and outputs alike
  view.dtype = dtype;
  view.device = device;
  for (int64_t extent : shape) view.shape[static_cast<size_t>(view.ndim++)] = extent;
  int64_t stride = 1;
  for (int d = view.ndim - 1; d >= 0; --d) {
    view.strides[static_cast<size_t>(d)] = stride;
    stride *= view.shape[static_cast<size_t>(d)];
  }
  return view;
}

TensorView TensorView::matrix(const void* data, DType dtype, int64_t rows, int64_t cols, int64_t row_stride, Device device) {
  TensorView view = dense(data, dtype, {rows, cols}, device);
  view.strides[0] = row_stride;
  return view;
}

int64_t TensorView::num_elements() const {
  if (ndim <= 0) return 0;
  int64_t n = 1;
  bool fits = true;
  for (int d = 0; d < std::min(ndim, 3); ++d) {
    if (shape[static_cast<size_t>(d)] == 0) return 0;
    fits = fits && !__builtin_mul_overflow(n, shape[static_cast<size_t>(d)], &n);
  }
  return fits ? n : INT64_MAX;
}

bool TensorView::is_dense() const {
  int64_t stride = 1;
  for (int d = std::min(ndim, 3) - 1; d >= 0; --d) {
    const auto at = static_cast<size_t>(d);
    if (shape[at] != 1 && strides[at] != stride) return false;
    if (__builtin_mul_overflow(stride, shape[at], &stride)) return false;
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
