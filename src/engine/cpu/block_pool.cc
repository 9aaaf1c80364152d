// First fit over an ordered map of gaps: a Buffer has a handful of leases, so simple is fast enough.
#include "engine/cpu/block_pool.h"

#include <algorithm>
#include <cassert>

namespace turnout::engine {

namespace {
constexpr size_t round_up(size_t n) { return (n + BlockPool::kGranule - 1) / BlockPool::kGranule * BlockPool::kGranule; }
}  // namespace

BlockPool::BlockPool(size_t begin, size_t num_bytes) : num_bytes_(num_bytes) {
  if (num_bytes > 0) gaps_[begin] = num_bytes;
}

std::optional<BlockPool::Block> BlockPool::take(size_t num_bytes) {
  const size_t wanted = std::max(round_up(num_bytes), kGranule);
  std::lock_guard lock(mutex_);
  for (auto gap = gaps_.begin(); gap != gaps_.end(); ++gap) {
    if (gap->second >= wanted) return cut(gap, wanted);
  }
  return std::nullopt;
}

std::optional<BlockPool::Block> BlockPool::take_largest(size_t num_bytes) {
  const size_t wanted = std::max(round_up(num_bytes), kGranule);
  std::lock_guard lock(mutex_);
  auto best = gaps_.end();
  for (auto gap = gaps_.begin(); gap != gaps_.end(); ++gap) {
    if (gap->second >= wanted) return cut(gap, wanted);
    if (best == gaps_.end() || gap->second > best->second) best = gap;
  }
  if (best == gaps_.end()) return std::nullopt;
  return cut(best, best->second);
}

void BlockPool::trim(Block& block, size_t num_bytes) {
  const size_t kept = std::max(round_up(num_bytes), kGranule);
  if (kept >= block.num_bytes) return;
  std::lock_guard lock(mutex_);
  add_gap(block.offset + kept, block.num_bytes - kept);
  block.num_bytes = kept;
}

void BlockPool::give_back(const Block& block) {
  std::lock_guard lock(mutex_);
  add_gap(block.offset, block.num_bytes);
}

bool BlockPool::is_taken(size_t offset) const {
  std::lock_guard lock(mutex_);
  auto next = gaps_.upper_bound(offset);
  if (next == gaps_.begin()) return true;
  const auto gap = std::prev(next);
  return offset >= gap->first + gap->second;
}

size_t BlockPool::bytes_free() const {
  std::lock_guard lock(mutex_);
  size_t sum = 0;
  for (const auto& [offset, bytes] : gaps_) sum += bytes;
  return sum;
}

size_t BlockPool::largest_gap() const {
  std::lock_guard lock(mutex_);
  size_t largest = 0;
  for (const auto& [offset, bytes] : gaps_) largest = std::max(largest, bytes);
  return largest;
}

BlockPool::Block BlockPool::cut(std::map<size_t, size_t>::iterator gap, size_t num_bytes) {
  const Block block{gap->first, num_bytes};
  const size_t rest = gap->second - num_bytes;
  gaps_.erase(gap);
  if (rest > 0) gaps_[block.offset + num_bytes] = rest;
  return block;
}

void BlockPool::add_gap(size_t offset, size_t num_bytes) {
  auto next = gaps_.lower_bound(offset);
  assert(next == gaps_.end() || offset + num_bytes <= next->first);
  if (next != gaps_.end() && offset + num_bytes == next->first) {
    num_bytes += next->second;
    next = gaps_.erase(next);
  }
  if (next != gaps_.begin()) {
    auto before = std::prev(next);
    assert(before->first + before->second <= offset);
    if (before->first + before->second == offset) {
      before->second += num_bytes;
      return;
    }
  }
  gaps_[offset] = num_bytes;
}

}  // namespace turnout::engine
