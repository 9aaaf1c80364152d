// The default Allocator: pages that were touched once are kept and handed out again, because the first touch of fresh memory
// costs many times the copy that goes into it.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <vector>

#include "turnout/buffer.h"
#include "util/spin_lock.h"

namespace turnout::engine {

class PagePool final : public Allocator {
 public:
  /// Keeps at most `most_kept` bytes that nobody uses.
  explicit PagePool(size_t most_kept = size_t{1} << 30) : most_kept_(most_kept) {}
  PagePool(const PagePool&) = delete;
  PagePool& operator=(const PagePool&) = delete;
  ~PagePool() override;

  void* allocate(size_t num_bytes) override;
  void deallocate(void* data, size_t num_bytes) noexcept override;

  /// Whether `data` lies in a block that was given back and not handed out again. Asked of every argument of a call, most of which
  /// are memory of quite another part of the address space.
  bool keeps(const void* data) const {
    const auto at = reinterpret_cast<uintptr_t>(data);
    return at >= lowest_.load(std::memory_order_relaxed) && at < highest_.load(std::memory_order_relaxed) && is_free(data);
  }
  size_t bytes_kept() const;
  size_t num_mapped() const;  ///< blocks that had to be made

 private:
  /// Blocks come in classes, four to a power of two, so that calls of nearly equal size share them.
  static size_t class_of(size_t num_bytes);
  bool is_free(const void* data) const;

  mutable util::SpinLock lock_;
  const size_t most_kept_;
  size_t kept_ = 0, mapped_ = 0;
  std::atomic<uintptr_t> lowest_{UINTPTR_MAX}, highest_{0};  ///< of all blocks there ever were
  std::map<size_t, std::vector<void*>> free_;
};

}  // namespace turnout::engine
