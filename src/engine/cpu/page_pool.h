// The default Allocator: pages that were touched once are kept and handed out again, because the first touch of fresh memory
// costs many times the copy that goes into it.
#pragma once
#include <cstddef>
#include <map>
#include <mutex>
#include <vector>

#include "turnout/buffer.h"

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

  /// Whether `data` lies in a block that was given back and not handed out again.
  bool keeps(const void* data) const;
  size_t bytes_kept() const;
  size_t num_mapped() const;  ///< blocks that had to be made

 private:
  /// Blocks come in classes, four to a power of two, so that calls of nearly equal size share them.
  static size_t class_of(size_t num_bytes);

  mutable std::mutex mutex_;
  const size_t most_kept_;
  size_t kept_ = 0, mapped_ = 0;
  std::map<size_t, std::vector<void*>> free_;
};

}  // namespace turnout::engine
