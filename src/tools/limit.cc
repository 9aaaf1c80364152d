#include "tools/limit.h"

#include <algorithm>
#include <cstring>

#include "core/slots.h"

namespace turnout::tools {

namespace {

/// Reads two rows and writes one. Integer addition, so that only memory counts.
#if defined(__SANITIZE_THREAD__)
// The loader chooses the clone before ThreadSanitizer is there, and its code in the choice would crash.
#define TURNOUT_WIDEST
#else
#define TURNOUT_WIDEST __attribute__((target_clones("avx512f", "avx2", "default"), optimize("O3")))
#endif
TURNOUT_WIDEST void add_row(std::byte* out, const std::byte* a, const std::byte* b, size_t num_bytes) {
  for (size_t i = 0; i + 8 <= num_bytes; i += 8) {
    uint64_t x, y;
    std::memcpy(&x, a + i, 8);
    std::memcpy(&y, b + i, 8);
    x += y;
    std::memcpy(out + i, &x, 8);
  }
}

size_t staging_bytes(const Traffic& t, size_t row) { return static_cast<size_t>(t.most_pairs()) * row; }

}  // namespace

namespace {

/// Which rows have a place, asked in (source rank, token, k) order, by the rules of core/slots.h.
class Admission {
 public:
  explicit Admission(const core::DispatchProblem& p)
      : layout_(p.layout),
        capacity_(p.capacity.value_or(core::kExact)),
        of_expert_(static_cast<size_t>(p.experts.num_experts())),
        of_rank_(static_cast<size_t>(p.experts.num_ranks()),
                 core::PaddedAdmission{.capacity = capacity_, .alignment = p.layout == Layout::rank_major ? 1 : p.alignment}) {}

  /// `first`: of its token on its rank.
  bool admits(size_t expert, size_t rank, bool first) {
    if (layout_ == Layout::rank_major) return first && of_rank_[rank].admit(0);
    const bool admitted =
        layout_ == Layout::expert_slab ? core::admits_slab(of_expert_[expert], capacity_) : of_rank_[rank].admit(of_expert_[expert]);
    if (admitted) ++of_expert_[expert];
    return admitted;
  }

 private:
  Layout layout_;
  int64_t capacity_;
  std::vector<int64_t> of_expert_;
  std::vector<core::PaddedAdmission> of_rank_;
};

}  // namespace

Traffic::Traffic(const core::DispatchProblem& p) : num_ranks_(p.experts.num_ranks()) {
  const auto n = static_cast<size_t>(num_ranks_);
  items_.resize(n);
  first_row_.assign((n + 1) * n, 0);
  pairs_.assign(n * n, 0);
  Admission admission(p);
  std::vector<int32_t> rows(n);
  std::vector<char> seen(n);
  for (int source = 0; source < num_ranks_; ++source) {
    const core::DispatchInput& input = p.ranks[static_cast<size_t>(source)];
    for (int r = 0; r < num_ranks_; ++r) first_row_[index(source + 1, r)] = first_row_[index(source, r)];
    for (int64_t t = 0; t < input.num_tokens; ++t) {
      std::fill(rows.begin(), rows.end(), 0);
      std::fill(seen.begin(), seen.end(), 0);
      for (int k = 0; k < p.num_topk; ++k) {
        const int64_t e = input.topk_idx[static_cast<size_t>(t * p.num_topk + k)];
        if (e < 0) continue;
        const auto there = static_cast<size_t>(p.experts.rank_of(static_cast<int>(e)));
        if (admission.admits(static_cast<size_t>(e), there, !seen[there])) ++rows[there];
        seen[there] = 1;
      }
      for (int r = 0; r < num_ranks_; ++r) {
        const int32_t count = rows[static_cast<size_t>(r)];
        if (count == 0) continue;
        items_[static_cast<size_t>(source)].push_back({static_cast<int32_t>(t), r, count});
        first_row_[index(source + 1, r)] += count;
        ++pairs_[index(source, r)];
      }
    }
  }
}

int64_t Traffic::most_rows() const {
  int64_t most = 0;
  for (int r = 0; r < num_ranks_; ++r) most = std::max(most, num_rows(r));
  return most;
}

int64_t Traffic::most_pairs() const { return pairs_.empty() ? 0 : *std::max_element(pairs_.begin(), pairs_.end()); }

int64_t Traffic::total_rows() const {
  int64_t rows = 0;
  for (int r = 0; r < num_ranks_; ++r) rows += num_rows(r);
  return rows;
}

int64_t Traffic::remote_rows() const {
  int64_t rows = total_rows();
  for (int r = 0; r < num_ranks_; ++r) rows -= first_row(r + 1, r) - first_row(r, r);
  return rows;
}

int64_t Traffic::total_pairs() const {
  int64_t all = 0;
  for (const int64_t n : pairs_) all += n;
  return all;
}

int64_t Traffic::remote_pairs() const {
  int64_t remote = total_pairs();
  for (int r = 0; r < num_ranks_; ++r) remote -= pairs(r, r);
  return remote;
}

size_t limit_bytes(const Traffic& t, size_t dispatch_row, size_t combine_row) {
  const auto ranks = static_cast<size_t>(t.num_ranks());
  return std::max(ranks * static_cast<size_t>(t.most_rows()) * dispatch_row, ranks * ranks * staging_bytes(t, combine_row));
}

void copy_dispatch(const Traffic& t, int rank, const std::byte* x, size_t row_bytes, std::byte* arena) {
  const size_t region = static_cast<size_t>(t.most_rows()) * row_bytes;
  std::vector<std::byte*> next;
  for (int r = 0; r < t.num_ranks(); ++r) {
    next.push_back(arena + static_cast<size_t>(r) * region + static_cast<size_t>(t.first_row(rank, r)) * row_bytes);
  }
  for (const Traffic::Item& item : t.items(rank)) {
    std::byte*& there = next[static_cast<size_t>(item.destination)];
    for (int32_t i = 0; i < item.rows; ++i, there += row_bytes) {
      std::memcpy(there, x + static_cast<size_t>(item.token) * row_bytes, row_bytes);
    }
  }
}

void copy_combine(const Traffic& t, int rank, const std::byte* y, size_t row_bytes, std::byte* out, SharedArena& arena) {
  // Staging [destination = the token's source][the rank that has the rows]
  const size_t staging = staging_bytes(t, row_bytes);
  const auto at = [&](int token_rank, int row_rank) { return arena.data() + static_cast<size_t>(token_rank * t.num_ranks() + row_rank) * staging; };
  const std::byte* local = nullptr;
  for (int source = 0; source < t.num_ranks(); ++source) {
    const std::byte* row = y + static_cast<size_t>(t.first_row(source, rank)) * row_bytes;
    if (source == rank) {
      local = row;
      continue;
    }
    std::byte* there = at(source, rank);
    for (const Traffic::Item& item : t.items(source)) {
      if (item.destination != rank) continue;
      if (item.rows == 1) std::memcpy(there, row, row_bytes);
      for (int32_t i = 1; i < item.rows; ++i) add_row(there, i == 1 ? row : there, row + static_cast<size_t>(i) * row_bytes, row_bytes);
      there += row_bytes;
      row += static_cast<size_t>(item.rows) * row_bytes;
    }
  }
  arena.barrier();
  std::vector<const std::byte*> next;
  for (int r = 0; r < t.num_ranks(); ++r) next.push_back(r == rank ? local : at(rank, r));
  // The first row of a token waits for the second, so that a sum of two reads both and writes once.
  const auto& items = t.items(rank);
  for (size_t i = 0; i < items.size();) {
    const int32_t token = items[i].token;
    std::byte* sum = out + static_cast<size_t>(token) * row_bytes;
    const std::byte* first = nullptr;
    int terms = 0;
    for (; i < items.size() && items[i].token == token; ++i) {
      const std::byte*& row = next[static_cast<size_t>(items[i].destination)];
      const int32_t rows = items[i].destination == rank ? items[i].rows : 1;
      for (int32_t n = 0; n < rows; ++n, row += row_bytes) {
        if (++terms == 1) first = row;
        else add_row(sum, terms == 2 ? first : sum, row, row_bytes);
      }
    }
    if (terms == 1) std::memcpy(sum, first, row_bytes);
  }
}

}  // namespace turnout::tools
