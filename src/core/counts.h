// How many rows each rank and each expert gets from a [T, K] table of expert ids.
#pragma once
#include <cassert>
#include <cstdint>
#include <span>
#include <vector>

#include "core/host_device.h"
#include "core/routing.h"

namespace turnout::core {

/// Expert ids of the tokens of one rank, [T, K] dense; -1 = none. Checked before: other ids are experts.
struct TopkView {
  const int64_t* ids = nullptr;
  int64_t num_tokens = 0;
  int num_topk = 0;

  TURNOUT_HOST_DEVICE constexpr int64_t at(int64_t token, int k) const { return ids[token * num_topk + k]; }
  TURNOUT_HOST_DEVICE constexpr const int64_t* row(int64_t token) const { return ids + token * num_topk; }
};

/// True if entry `k` is the first of its token that goes to its rank: a token crosses a link once per rank, so these are the
/// entries that make rank_major rows. `rank_of(id)` is the owner of an expert.
template <class RankOf>
TURNOUT_HOST_DEVICE constexpr bool is_first_on_rank(const int64_t* ids, int k, const RankOf& rank_of) {
  if (ids[k] < 0) return false;
  const int rank = rank_of(ids[k]);
  for (int earlier = 0; earlier < k; ++earlier) {
    if (ids[earlier] >= 0 && rank_of(ids[earlier]) == rank) return false;
  }
  return true;
}

/// Owner of an expert, for is_first_on_rank().
struct RankOf {
  const ExpertMap& experts;
  int operator()(int64_t expert) const { return experts.rank_of(static_cast<int>(expert)); }
};

/// Adds to `rows[rank]` the tokens that have an expert on `rank`. Linear in T * K, whatever K is.
inline void count_rows_per_rank(const TopkView& topk, const ExpertMap& experts, std::span<int64_t> rows) {
  assert(rows.size() == static_cast<size_t>(experts.num_ranks()));
  std::vector<int64_t> last_token(rows.size(), -1);
  for (int64_t token = 0; token < topk.num_tokens; ++token) {
    for (int k = 0; k < topk.num_topk; ++k) {
      const int64_t expert = topk.at(token, k);
      if (expert < 0) continue;
      const auto rank = static_cast<size_t>(experts.rank_of(static_cast<int>(expert)));
      if (last_token[rank] == token) continue;
      last_token[rank] = token;
      ++rows[rank];
    }
  }
}

/// Adds to `pairs[expert]` the (token, k) pairs that chose it; duplicates count.
inline void count_pairs_per_expert(const TopkView& topk, std::span<int64_t> pairs) {
  for (int64_t i = 0; i < topk.num_tokens * topk.num_topk; ++i) {
    if (topk.ids[i] >= 0) ++pairs[static_cast<size_t>(topk.ids[i])];
  }
}

}  // namespace turnout::core
