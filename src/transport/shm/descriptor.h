// File descriptors and mappings as owners, and the exchange of a descriptor among all ranks of a machine.
#pragma once
#include <cstddef>
#include <string_view>
#include <utility>
#include <vector>

#include "turnout/bootstrap.h"

namespace turnout::transport {

class Descriptor {
 public:
  Descriptor() = default;
  explicit Descriptor(int fd) : fd_(fd) {}
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

struct PeerFile {
  Descriptor file;
  int pid = 0;  ///< of the process that sent it, as our kernel numbers it
};

/// Every rank's descriptor, in rank order (this rank's is a duplicate). Collective over processes of one user on one machine:
/// descriptors travel over abstract unix sockets of random names, which vanish with the process.
std::vector<PeerFile> exchange_descriptors(Bootstrap& bootstrap, std::string_view step, const Descriptor& mine);

}  // namespace turnout::transport
