// Addresses of GPU memory that stay while the memory behind them comes and goes: the driver's virtual memory management.
#pragma once
#include <cstddef>
#include <utility>
#include <vector>

#include "transport/descriptor.h"
#include "transport/device/driver.h"

namespace turnout::transport::device {

/// A piece of some GPU's memory. The driver keeps the memory as long as anybody has a handle or a mapping.
class Allocation {
 public:
  Allocation() = default;
  Allocation(Allocation&& other) noexcept : handle_(other.handle_), is_open_(std::exchange(other.is_open_, false)) {}
  Allocation& operator=(Allocation&& other) noexcept {
    std::swap(handle_, other.handle_);
    std::swap(is_open_, other.is_open_);
    return *this;
  }
  ~Allocation();

  /// `num_bytes`: a whole number of granules. Throws: TransportError.
  static Allocation make(int device, size_t num_bytes, bool for_processes);
  /// What rank `rank` has shared. Throws: TransportError.
  static Allocation import(const Descriptor& file, int rank);
  Descriptor share() const;
  CUmemGenericAllocationHandle handle() const { return handle_; }

 private:
  explicit Allocation(CUmemGenericAllocationHandle handle) : handle_(handle), is_open_(true) {}
  CUmemGenericAllocationHandle handle_ = 0;
  bool is_open_ = false;
};

/// Addresses reserved for one piece of memory, with or without memory behind them.
class Range {
 public:
  Range(size_t num_bytes, size_t alignment);
  Range(const Range&) = delete;
  Range& operator=(const Range&) = delete;
  ~Range();

  /// Puts memory behind the addresses, for kernels on `devices`.
  void attach(Allocation allocation, const std::vector<int>& devices);
  void detach();
  const Allocation& allocation() const { return allocation_; }
  std::byte* address() const { return reinterpret_cast<std::byte*>(address_); }

 private:
  const size_t num_bytes_;
  CUdeviceptr address_ = 0;
  bool is_mapped_ = false;
  Allocation allocation_;
};

}  // namespace turnout::transport::device
