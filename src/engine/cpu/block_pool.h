// The receive region as a pool of blocks. A block is a lease: taken for a call, cut to what arrived, given back when the
// result's last view dies. The lowest fitting gap is taken, so pages in use stay few and warm.
#pragma once
#include <cstddef>
#include <optional>
#include <vector>

#include "util/spin_lock.h"

namespace turnout::engine {

class BlockPool {
 public:
  /// Hands out [begin, begin + num_bytes); everything is a multiple of kGranule.
  static constexpr size_t kGranule = 4096;
  BlockPool(size_t begin, size_t num_bytes);

  struct Block {
    size_t offset = 0;
    size_t num_bytes = 0;
  };

  /// The lowest gap of at least `num_bytes`, or nothing.
  std::optional<Block> take(size_t num_bytes);
  /// The largest gap, but at most `num_bytes` of it; nothing if the region is full.
  std::optional<Block> take_largest(size_t num_bytes);
  /// Keeps the first `num_bytes` of a taken block and gives the rest back.
  void trim(Block& block, size_t num_bytes);
  void give_back(const Block& block);

  /// Whether the byte at `offset` of the region belongs to a block that is taken.
  bool is_taken(size_t offset) const;

  size_t num_bytes() const { return num_bytes_; }
  size_t bytes_free() const;
  size_t largest_gap() const;
  /// The same if `more` were given back.
  size_t largest_gap_with(std::vector<Block> more) const;

 private:
  Block cut(std::vector<Block>::iterator gap, size_t num_bytes);
  void add_gap(size_t offset, size_t num_bytes);

  mutable util::SpinLock lock_;
  size_t num_bytes_;
  std::vector<Block> gaps_;  ///< ascending, no two adjacent
};

}  // namespace turnout::engine
