// The least that a dispatch or a combine can cost on this machine, measured beside it: the same ranks at once move the same
// bytes with memcpy, nothing else.
#pragma once
#include <cstdint>
#include <vector>

#include "core/reference.h"
#include "tools/shared_arena.h"

namespace turnout::tools {

/// Who sends how many rows to whom, from a problem's routing. Rows are those of the layout: rank_major one per (token, rank),
/// the others one per (token, expert). Rows that a capacity drops are not counted.
class Traffic {
 public:
  explicit Traffic(const core::DispatchProblem& problem);

  struct Item {
    int32_t token, destination, rows;
  };
  int num_ranks() const { return num_ranks_; }
  /// What `source` sends, by token, then destination.
  const std::vector<Item>& items(int source) const { return items_[static_cast<size_t>(source)]; }
  /// Rows at `destination` that come from ranks before `source`.
  int64_t first_row(int source, int destination) const { return first_row_[index(source, destination)]; }
  int64_t num_rows(int destination) const { return first_row(num_ranks_, destination); }
  int64_t most_rows() const;
  /// (token, rank) pairs, one partial sum each on the way back.
  int64_t pairs(int source, int destination) const { return pairs_[index(source, destination)]; }
  int64_t most_pairs() const;
  /// Rows that leave their rank, and all.
  int64_t remote_rows() const;
  int64_t total_rows() const;
  /// Partial sums that leave their rank, and all.
  int64_t remote_pairs() const;
  int64_t total_pairs() const;

 private:
  size_t index(int source, int destination) const { return static_cast<size_t>(source * num_ranks_ + destination); }
  int num_ranks_;
  std::vector<std::vector<Item>> items_;
  std::vector<int64_t> first_row_, pairs_;
};

/// Bytes of arena that the limits need.
size_t limit_bytes(const Traffic& traffic, size_t dispatch_row, size_t combine_row);

/// Every row of this rank from `x` to its place at its destination. Call on all ranks at once.
void copy_dispatch(const Traffic& traffic, int rank, const std::byte* x, size_t row_bytes, std::byte* arena);

/// Reads the rows `y` of this rank, writes what crosses, waits for the others, reads what came, writes the result.
void copy_combine(const Traffic& traffic, int rank, const std::byte* y, size_t row_bytes, std::byte* out, SharedArena& arena);

}  // namespace turnout::tools
