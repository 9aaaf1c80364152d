// First fit over an ordered list of gaps: a Buffer has a handful of leases, so simple is fast enough.
#include "engine/cpu/block_pool.h"

#include <algorithm>
#include <cassert>
#include <mutex>

namespace turnout::engine {

namespace {
constexpr size_t round_up(size_t n) { return (n + BlockPool::kGranule - 1) / BlockPool::kGranule * BlockPool::kGranule; }
}  // namespace

BlockPool::BlockPool(size_t begin, size_t num_bytes) : num_bytes_(num_bytes) {
  if (num_bytes > 0) gaps_.push_back({begin, num_bytes});
}

std::optional<BlockPool::Block> BlockPool::take(size_t num_bytes) {
  const size_t wanted = std::max(round_up(num_bytes), kGranule);
  std::lock_guard guard(lock_);
  for (auto gap = gaps_.begin(); gap != gaps_.end(); ++gap) {
    if (gap->num_bytes >= wanted) return cut(gap, wanted);
  }
  return std::nullopt;
}

std::optional<BlockPool::Block> BlockPool::take_largest(size_t num_bytes) {
  const size_t wanted = std::max(round_up(num_bytes), kGranule);
  std::lock_guard guard(lock_);
  auto best = gaps_.end();
  for (auto gap = gaps_.begin(); gap != gaps_.end(); ++gap) {
    if (gap->num_bytes >= wanted) return cut(gap, wanted);
    if (best == gaps_.end() || gap->num_bytes > best->num_bytes) best = gap;
  }
  if (best == gaps_.end()) return std::nullopt;
  return cut(best, best->num_bytes);
}

void BlockPool::trim(Block& block, size_t num_bytes) {
  const size_t kept = std::max(round_up(num_bytes), kGranule);
  if (kept >= block.num_bytes) return;
  std::lock_guard guard(lock_);
  add_gap(block.offset + kept, block.num_bytes - kept);
  block.num_bytes = kept;
}

void BlockPool::give_back(const Block& block) {
  std::lock_guard guard(lock_);
  add_gap(block.offset, block.num_bytes);
}

bool BlockPool::is_taken(size_t offset) const {
  std::lock_guard guard(lock_);
  return std::none_of(gaps_.begin(), gaps_.end(), [&](const Block& gap) { return offset >= gap.offset && offset < gap.offset + gap.num_bytes; });
}

size_t BlockPool::bytes_free() const {
  std::lock_guard guard(lock_);
  size_t sum = 0;
  for (const Block& gap : gaps_) sum += gap.num_bytes;
  return sum;
}

size_t BlockPool::largest_gap() const {
  std::lock_guard guard(lock_);
  size_t largest = 0;
  for (const Block& gap : gaps_) largest = std::max(largest, gap.num_bytes);
  return largest;
}

size_t BlockPool::largest_gap_with(std::vector<Block> more) const {
  {
    std::lock_guard guard(lock_);
    more.insert(more.end(), gaps_.begin(), gaps_.end());
  }
  std::sort(more.begin(), more.end(), [](const Block& a, const Block& b) { return a.offset < b.offset; });
  size_t largest = 0, begin = 0, end = 0;
  for (const Block& gap : more) {
    if (gap.offset != end) begin = gap.offset;
    end = gap.offset + gap.num_bytes;
    largest = std::max(largest, end - begin);
  }
  return largest;
}

BlockPool::Block BlockPool::cut(std::vector<Block>::iterator gap, size_t num_bytes) {
  const Block block{gap->offset, num_bytes};
  gap->offset += num_bytes;
  gap->num_bytes -= num_bytes;
  if (gap->num_bytes == 0) gaps_.erase(gap);
  return block;
}

void BlockPool::add_gap(size_t offset, size_t num_bytes) {
  const auto next = std::find_if(gaps_.begin(), gaps_.end(), [&](const Block& gap) { return gap.offset > offset; });
  assert(next == gaps_.end() || offset + num_bytes <= next->offset);
  const bool joins_next = next != gaps_.end() && offset + num_bytes == next->offset;
  if (next != gaps_.begin()) {
    Block& before = *std::prev(next);
    assert(before.offset + before.num_bytes <= offset);
    if (before.offset + before.num_bytes == offset) {
      before.num_bytes += num_bytes + (joins_next ? next->num_bytes : 0);
      if (joins_next) gaps_.erase(next);
      return;
    }
  }
  if (!joins_next) {
    gaps_.insert(next, {offset, num_bytes});
    return;
  }
  next->offset = offset;
  next->num_bytes += num_bytes;
}

}  // namespace turnout::engine
