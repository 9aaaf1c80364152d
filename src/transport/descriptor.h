// File descriptors and mappings as owners, and memory that all ranks of a machine map.
#pragma once
#include <cstddef>
#include <functional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "turnout/bootstrap.h"
#include "util/standard_streams.h"

namespace turnout::transport {

/// Throws: TransportError with `what`, the system's reason and what the operator can do about it.
[[noreturn]] void fail(const std::string& what, int error);

class Descriptor {
 public:
  Descriptor() = default;
  /// Owns `fd`, under a number above those of the standard streams.
  explicit Descriptor(int fd) : fd_(util::above_standard_streams(fd)) {}
  Descriptor(Descriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~Descriptor();
  int get() const { return fd_; }
  explicit operator bool() const { return fd_ >= 0; }

 private:
  int fd_ = -1;
};

/// Shared memory mapped whole.
class Mapping {
 public:
  Mapping() = default;
  Mapping(const Descriptor& file, size_t num_bytes);
  Mapping(Mapping&& other) noexcept : data_(std::exchange(other.data_, nullptr)), num_bytes_(other.num_bytes_) {}
  Mapping& operator=(Mapping&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(num_bytes_, other.num_bytes_);
    return *this;
  }
  ~Mapping();
  std::byte* data() const { return static_cast<std::byte*>(data_); }

 private:
  void* data_ = nullptr;
  size_t num_bytes_ = 0;
};

/// An anonymous memory file of `num_bytes`, sealed so that no peer can shrink it under us.
Descriptor make_memory_file(std::string_view label, size_t num_bytes);

struct PeerMemory {
  Mapping map;
  int pid = 0;  ///< of the rank's process as our kernel numbers it; 0 if it lies in a pid namespace that we cannot see
};

/// One memory file of `num_bytes` per rank, zero but for what `construct` puts into its own before others see it; all mapped
/// here, in rank order. Collective over processes (or threads) of one user on one machine; `facts` must be equal on all ranks.
/// Throws alike on all ranks: TransportError, InvalidArgument; PeerTimeout.
std::vector<PeerMemory> share_memory(Bootstrap& bootstrap, std::string_view label, const std::string& facts, size_t num_bytes,
                                     const std::function<void(std::byte*)>& construct);

}  // namespace turnout::transport
