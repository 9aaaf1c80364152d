// Copies that may be of nothing: memcpy does not take null pointers, not even for no bytes, and empty arrays have them.
#pragma once
#include <cstddef>
#include <cstring>

namespace turnout::core {

inline void copy_bytes(void* dst, const void* src, size_t num_bytes) {
  if (num_bytes > 0) std::memcpy(dst, src, num_bytes);
}

}  // namespace turnout::core
