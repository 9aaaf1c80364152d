// Where the ranks of this program keep their tensors: on the host, unless the program brings a device along. The tests of the calls are
// written once and run in both.
#pragma once
#include <cstdlib>
#include <functional>
#include <initializer_list>
#include <memory>
#include <vector>

#include "support/place.h"
#include "turnout/buffer.h"

namespace turnout::testing {

struct Surroundings {
  std::function<std::unique_ptr<Place>()> make_place = [] { return std::make_unique<Place>(); };
  /// Memory that tests read and write and calls use as theirs.
  std::function<void*(size_t)> allocate = [](size_t bytes) { return std::aligned_alloc(64, (bytes + 63) / 64 * 64); };
  std::function<void(void*)> deallocate = [](void* p) { std::free(p); };
};
inline Surroundings& surroundings() {
  static Surroundings s;
  return s;
}

/// The place of this thread's rank.
inline Place& here() {
  thread_local const std::unique_ptr<Place> place = surroundings().make_place();
  return *place;
}
inline bool on_host() { return here().device().kind == DeviceKind::cpu; }

template <class T>
struct SharedAllocator {
  using value_type = T;
  SharedAllocator() = default;
  template <class U>
  SharedAllocator(const SharedAllocator<U>&) {}
  T* allocate(size_t n) { return static_cast<T*>(surroundings().allocate(n * sizeof(T))); }
  void deallocate(T* p, size_t) { surroundings().deallocate(p); }
  friend bool operator==(const SharedAllocator&, const SharedAllocator&) { return true; }
};
template <class T>
using Shared = std::vector<T, SharedAllocator<T>>;

inline TensorView dense(const void* data, DType dtype, std::initializer_list<int64_t> shape, Device device = here().device()) {
  return TensorView::dense(data, dtype, shape, device);
}
inline TensorView matrix(const void* data, DType dtype, int64_t rows, int64_t cols, int64_t row_stride, Device device = here().device()) {
  return TensorView::matrix(data, dtype, rows, cols, row_stride, device);
}

/// Values of a result, where the test can read them.
template <class T>
const T* read(const TensorView& t) {
  return here().get(t).as<const T>();
}
inline const float* read_row(const TensorView& t, int64_t i) { return reinterpret_cast<const float*>(here().get(t).row(i)); }

/// On a device a call returns before it is over: what it left comes now.
inline void settle(Buffer& buffer) {
  if (!on_host()) buffer.synchronize();
}
template <class Result>
Result settled(Buffer& buffer, Result result) {
  settle(buffer);
  return result;
}

}  // namespace turnout::testing
