// Which ranks share a node. Nodes are ordered by their lowest rank and may hold different numbers of ranks.
#pragma once
#include <span>
#include <vector>

namespace turnout::core {

class Topology {
 public:
  static Topology single(int num_ranks) { return of(std::vector<int>(static_cast<size_t>(num_ranks), 0)); }

  /// `label_of_rank` may hold any numbers; equal numbers are one node.
  static Topology of(std::span<const int> label_of_rank) {
    Topology t;
    std::vector<int> labels;
    for (size_t rank = 0; rank < label_of_rank.size(); ++rank) {
      size_t node = 0;
      while (node < labels.size() && labels[node] != label_of_rank[rank]) ++node;
      if (node == labels.size()) {
        labels.push_back(label_of_rank[rank]);
        t.ranks_of_.emplace_back();
      }
      t.node_of_.push_back(static_cast<int>(node));
      t.local_rank_.push_back(static_cast<int>(t.ranks_of_[node].size()));
      t.ranks_of_[node].push_back(static_cast<int>(rank));
    }
    return t;
  }

  int num_ranks() const { return static_cast<int>(node_of_.size()); }
  int num_nodes() const { return static_cast<int>(ranks_of_.size()); }
  int node_of(int rank) const { return node_of_[static_cast<size_t>(rank)]; }
  int local_rank(int rank) const { return local_rank_[static_cast<size_t>(rank)]; }
  /// Ranks of `node`, ascending.
  std::span<const int> ranks_of(int node) const { return ranks_of_[static_cast<size_t>(node)]; }
  /// The rank of `node` on the rail of `rank`: same local rank, or the last one if the node is smaller.
  int rail_peer(int rank, int node) const {
    const auto ranks = ranks_of(node);
    const auto local = static_cast<size_t>(local_rank(rank));
    return ranks[local < ranks.size() ? local : ranks.size() - 1];
  }

 private:
  std::vector<int> node_of_, local_rank_;
  std::vector<std::vector<int>> ranks_of_;
};

}  // namespace turnout::core
