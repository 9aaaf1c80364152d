// Parts of one allocation: first with no base, for the size; then with one, for the addresses.
#pragma once
#include <cstddef>
#include <cstdint>

#include "core/math.h"

namespace turnout::engine::cuda {

class Carver {
 public:
  explicit Carver(std::byte* base) : base_(base) {}
  template <class T>
  T* take(int64_t n) {
    const int64_t here = at_;
    at_ = core::align_up(at_ + n * static_cast<int64_t>(sizeof(T)), 256);
    return base_ ? reinterpret_cast<T*>(base_ + here) : nullptr;
  }
  size_t num_bytes() const { return static_cast<size_t>(at_); }

 private:
  std::byte* base_;
  int64_t at_ = 0;
};

}  // namespace turnout::engine::cuda
