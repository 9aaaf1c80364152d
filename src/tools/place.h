// Where the tensors of a run are and its calls happen: on the host as it stands, or on a GPU with a stream of its own. Tests bring
// places of their own (tests/cuda/cuda_place.h).
#pragma once
#include <cstring>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "core/span.h"
#include "transport/device_stream.h"
#include "turnout/tensor.h"

namespace turnout::tools {

/// The host: nothing is copied.
class Place {
 public:
  virtual ~Place() = default;
  virtual Device device() const { return {}; }
  virtual Stream stream() const { return {}; }
  /// An input of a call, in the memory of the place until give_back(), or for as long as the Place lives.
  virtual TensorView put(const TensorView& host) { return host; }
  /// Of put(): what was issued may still use it.
  virtual void give_back(const TensorView&) {}
  /// What a result holds, as the host can read and write it; a copy, where it is one, lives as long as the Place.
  virtual TensorView get(const TensorView& there) { return there; }
  /// Writes bytes into memory that a result holds.
  virtual void write(void* to, const void* from, size_t num_bytes) { std::memcpy(to, from, num_bytes); }
  virtual void fill(void* to, int value, size_t num_bytes) { std::memset(to, value, num_bytes); }
  /// Returns when what was issued has happened.
  virtual void finish() {}
  /// Of a GPU, else null.
  virtual transport::DeviceStream* gpu() { return nullptr; }
};

using core::span_bytes;

/// On a GPU. What it gives must go before it.
class GpuPlace final : public Place {
 public:
  /// Throws: TransportError, also later, with the step that failed.
  explicit GpuPlace(std::unique_ptr<transport::DeviceStream> stream) : stream_(std::move(stream)) {}
  Device device() const override { return {DeviceKind::cuda, stream_->device()}; }
  Stream stream() const override { return {stream_->native()}; }
  TensorView put(const TensorView& host) override;
  void give_back(const TensorView& there) override {
    if (there.data) stream_->deallocate(static_cast<std::byte*>(there.data));
  }
  TensorView get(const TensorView& there) override;
  void fill(void* to, int value, size_t num_bytes) override { stream_->fill(to, value, num_bytes); }
  void write(void* to, const void* from, size_t num_bytes) override { stream_->upload(to, from, num_bytes); }
  void finish() override { stream_->synchronize(); }
  transport::DeviceStream* gpu() override { return stream_.get(); }

 private:
  std::unique_ptr<transport::DeviceStream> stream_;
  std::deque<std::vector<std::byte>> copies_;
};

std::unique_ptr<Place> open_place(Device device);

/// Writes dense rows of `row_bytes` into the rows of a matrix that a result holds.
void write_rows(Place& place, const TensorView& to, const std::byte* from, size_t row_bytes);

}  // namespace turnout::tools
