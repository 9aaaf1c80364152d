#include "tools/place.h"

#include "core/span.h"
#include "transport/cuda.h"

namespace turnout::tools {

TensorView GpuPlace::put(const TensorView& host) {
  TensorView there = host;
  if (!host.defined()) return there;
  there.device = device();
  there.data = nullptr;
  if (const size_t bytes = core::span_bytes(host)) {
    std::byte* data = stream_->allocate(bytes);
    stream_->upload(data, host.data, bytes);
    there.data = data;
  }
  return there;
}

TensorView GpuPlace::get(const TensorView& there) {
  TensorView host = there;
  if (!there.defined()) return host;
  host.device = {};
  host.data = nullptr;
  if (const size_t bytes = core::span_bytes(there)) {
    host.data = copies_.emplace_back(bytes).data();
    stream_->download(host.data, there.data, bytes);
  }
  return host;
}

std::unique_ptr<Place> open_place(Device device) {
  if (device.kind == DeviceKind::cpu) return std::make_unique<Place>();
  return std::make_unique<GpuPlace>(transport::open_device_stream(device.index));
}

void write_rows(Place& place, const TensorView& to, const std::byte* from, size_t row_bytes) {
  const int64_t rows = to.shape[0];
  if (rows == 0) return;
  if (to.strides[0] * static_cast<int64_t>(size_of(to.dtype)) == static_cast<int64_t>(row_bytes)) {
    place.write(to.data, from, static_cast<size_t>(rows) * row_bytes);
    return;
  }
  for (int64_t row = 0; row < rows; ++row) place.write(to.row(row), from + static_cast<size_t>(row) * row_bytes, row_bytes);
}

}  // namespace turnout::tools
