// Which rank owns which expert, and where in its rank an expert sits.
#pragma once
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "turnout/error.h"

namespace turnout::core {

/// The first expert of `rank` in the default split: in order, the first `num_experts % num_ranks` ranks hold one more.
constexpr int first_expert(int rank, int num_experts, int num_ranks) {
  const int extra = num_experts % num_ranks;
  return rank * (num_experts / num_ranks) + (rank < extra ? rank : extra);
}
static_assert(first_expert(/*rank=*/3, /*num_experts=*/10, /*num_ranks=*/4) == 8);

/// Owner and local number of every physical expert. Local numbers are positions among the ids of a rank, ascending.
class ExpertMap {
 public:
  static ExpertMap split(int num_experts, int num_ranks) {
    std::vector<int> owner(static_cast<size_t>(num_experts));
    for (int rank = 0; rank < num_ranks; ++rank) {
      for (int e = first_expert(rank, num_experts, num_ranks); e < first_expert(rank + 1, num_experts, num_ranks); ++e) {
        owner[static_cast<size_t>(e)] = rank;
      }
    }
    return of(owner, num_ranks);
  }

  /// Throws: InvalidArgument if an owner is not a rank.
  static ExpertMap of(std::span<const int> expert_to_rank, int num_ranks) {
    ExpertMap map;
    map.num_ranks_ = num_ranks;
    map.owner_.assign(expert_to_rank.begin(), expert_to_rank.end());
    map.local_.resize(map.owner_.size());
    std::vector<int> count(static_cast<size_t>(num_ranks), 0);
    for (size_t e = 0; e < map.owner_.size(); ++e) {
      const int owner = map.owner_[e];
      if (owner < 0 || owner >= num_ranks) {
        throw InvalidArgument("expert_to_rank[" + std::to_string(e) + "] is " + std::to_string(owner) + ", but ranks are 0 to " +
                              std::to_string(num_ranks - 1));
      }
      map.local_[e] = count[static_cast<size_t>(owner)]++;
    }
    map.begin_.assign(static_cast<size_t>(num_ranks) + 1, 0);
    for (size_t r = 0; r < count.size(); ++r) map.begin_[r + 1] = map.begin_[r] + count[r];
    map.by_rank_.resize(map.owner_.size());
    for (size_t e = 0; e < map.owner_.size(); ++e) {
      map.by_rank_[static_cast<size_t>(map.begin_[static_cast<size_t>(map.owner_[e])] + map.local_[e])] = static_cast<int>(e);
    }
    map.hash_ = 14695981039346656037ull;
    for (int owner : map.owner_) map.hash_ = (map.hash_ ^ static_cast<uint64_t>(owner)) * 1099511628211ull;
    map.hash_ ^= static_cast<uint64_t>(num_ranks);
    return map;
  }

  int num_experts() const { return static_cast<int>(owner_.size()); }
  int num_ranks() const { return num_ranks_; }
  int rank_of(int expert) const { return owner_[static_cast<size_t>(expert)]; }
  /// The owner of every expert.
  std::span<const int> owners() const { return owner_; }
  /// The local number of every expert.
  std::span<const int> locals() const { return local_; }
  int local_of(int expert) const { return local_[static_cast<size_t>(expert)]; }
  int num_local(int rank) const { return begin_[static_cast<size_t>(rank) + 1] - begin_[static_cast<size_t>(rank)]; }
  int max_local() const {
    int most = 0;
    for (int rank = 0; rank < num_ranks_; ++rank) most = num_local(rank) > most ? num_local(rank) : most;
    return most;
  }
  /// Ids of the experts of `rank`, ascending.
  std::span<const int> experts_of(int rank) const {
    return std::span(by_rank_).subspan(static_cast<size_t>(begin_[static_cast<size_t>(rank)]), static_cast<size_t>(num_local(rank)));
  }
  /// Equal maps have equal hashes (FNV-1a): ranks compare it in the fingerprint of a call.
  uint64_t hash() const { return hash_; }

 private:
  int num_ranks_ = 0;
  uint64_t hash_ = 0;
  std::vector<int> owner_, local_, begin_, by_rank_;
};

/// `replica_of` is empty or gives a logical number to each physical expert; which replica a token goes to is the caller's choice.
/// Throws: InvalidArgument if it does neither.
inline void check_replicas(std::span<const int> replica_of, int num_experts) {
  if (replica_of.empty()) return;
  if (replica_of.size() != static_cast<size_t>(num_experts)) {
    throw InvalidArgument("replica_of has " + std::to_string(replica_of.size()) + " entries, but there are " + std::to_string(num_experts) +
                          " experts; give one each, or none at all");
  }
  for (size_t e = 0; e < replica_of.size(); ++e) {
    if (replica_of[e] >= 0 && replica_of[e] < num_experts) continue;
    throw InvalidArgument("replica_of[" + std::to_string(e) + "] is " + std::to_string(replica_of[e]) + ", but logical numbers are 0 to " +
                          std::to_string(num_experts - 1));
  }
}

}  // namespace turnout::core
