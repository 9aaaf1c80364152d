// Huge pages where the system gives them, touched when a block is made.
#include "engine/cpu/page_pool.h"

#include <sys/mman.h>

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <new>

namespace turnout {
inline namespace v0 {
Allocator::~Allocator() = default;
}
}  // namespace turnout

namespace turnout::engine {

namespace {

constexpr size_t kPage = 4096, kHugePage = size_t{2} << 20;

void* map_block(size_t bytes) {
  // Room to align large blocks to huge pages; what sticks out is given back.
  const size_t room = bytes >= kHugePage ? bytes + kHugePage : bytes;
  void* base = mmap(nullptr, room, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (base == MAP_FAILED) throw std::bad_alloc();
  auto address = reinterpret_cast<uintptr_t>(base);
  if (room > bytes) {
    const uintptr_t aligned = (address + kHugePage - 1) / kHugePage * kHugePage;
    if (aligned > address) munmap(base, aligned - address);
    if (address + room > aligned + bytes) munmap(reinterpret_cast<void*>(aligned + bytes), address + room - aligned - bytes);
    address = aligned;
    madvise(reinterpret_cast<void*>(address), bytes, MADV_HUGEPAGE);
  }
  std::memset(reinterpret_cast<void*>(address), 0, bytes);
  return reinterpret_cast<void*>(address);
}

}  // namespace

size_t PagePool::class_of(size_t num_bytes) {
  if (num_bytes <= kPage) return kPage;
  const size_t power = std::bit_floor(num_bytes - 1);
  const size_t step = power / 4 < kPage ? kPage : power / 4;
  return (num_bytes + step - 1) / step * step;
}

PagePool::~PagePool() {
  for (auto& [bytes, blocks] : free_) {
    for (void* block : blocks) munmap(block, bytes);
  }
}

void* PagePool::allocate(size_t num_bytes) {
  const size_t bytes = class_of(num_bytes);
  {
    std::lock_guard guard(lock_);
    auto& blocks = free_[bytes];
    if (!blocks.empty()) {
      void* block = blocks.back();
      blocks.pop_back();
      kept_ -= bytes;
      return block;
    }
    ++mapped_;
  }
  void* block = map_block(bytes);
  const auto at = reinterpret_cast<uintptr_t>(block);
  std::lock_guard guard(lock_);
  lowest_.store(std::min(lowest_.load(std::memory_order_relaxed), at), std::memory_order_relaxed);
  highest_.store(std::max(highest_.load(std::memory_order_relaxed), at + bytes), std::memory_order_relaxed);
  return block;
}

void PagePool::deallocate(void* data, size_t num_bytes) noexcept {
  if (!data) return;
  const size_t bytes = class_of(num_bytes);
  {
    std::lock_guard guard(lock_);
    if (kept_ + bytes <= most_kept_) {
      free_[bytes].push_back(data);
      kept_ += bytes;
      return;
    }
  }
  munmap(data, bytes);
}

bool PagePool::is_free(const void* data) const {
  const auto* at = static_cast<const std::byte*>(data);
  std::lock_guard guard(lock_);
  for (const auto& [bytes, blocks] : free_) {
    for (const void* block : blocks) {
      const auto* begin = static_cast<const std::byte*>(block);
      if (at >= begin && at < begin + bytes) return true;
    }
  }
  return false;
}

size_t PagePool::bytes_kept() const {
  std::lock_guard guard(lock_);
  return kept_;
}

size_t PagePool::num_mapped() const {
  std::lock_guard guard(lock_);
  return mapped_;
}

}  // namespace turnout::engine
