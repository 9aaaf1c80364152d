// What two libraries must have in common for C++ types to pass between them: the headers that define these, and how a compiler laid them out.
#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "transport/device_stream.h"
#include "transport/device_window.h"
#include "turnout/buffer.h"

namespace turnout::transport {

/// Of the headers that both sides include, in hexadecimal (cmake/SharedHeaders.cmake).
inline constexpr char kSharedHeaders[] =
#include <build_identity.inc>
    ;

/// Differs where compilers, standard libraries or their settings lay out alike-named types differently.
constexpr uint64_t layout_digest() {
  uint64_t digest = 14695981039346656037u;  // FNV-1a
  const auto add = [&](size_t value) { digest = (digest ^ value) * 1099511628211u; };
#ifdef _GLIBCXX_USE_CXX11_ABI
  add(_GLIBCXX_USE_CXX11_ABI);
#endif
#ifdef __GXX_ABI_VERSION
  add(__GXX_ABI_VERSION);
#endif
  for (const size_t size : {sizeof(std::string), sizeof(std::vector<int>), sizeof(std::function<void()>), sizeof(std::shared_ptr<int>),
                            sizeof(std::optional<int64_t>), sizeof(std::mutex), sizeof(BufferConfig), sizeof(DispatchArgs), sizeof(CombineArgs),
                            sizeof(TensorView), sizeof(Stream), sizeof(DeviceCopy), offsetof(TensorView, strides), offsetof(TensorView, device)}) {
    add(size);
  }
  return digest;
}

}  // namespace turnout::transport
