// Who owns which expert, who shares a node, and how many rows go where.
#include "core/routing.h"

#include <gtest/gtest.h>

#include <numeric>
#include <vector>

#include "core/counts.h"
#include "core/topology.h"

namespace turnout::core {
namespace {

std::vector<int> copy(std::span<const int> values) { return {values.begin(), values.end()}; }

TEST(ExpertMap, SplitGivesTheFirstRanksOneMore) {
  const ExpertMap map = ExpertMap::split(10, 4);
  EXPECT_EQ(copy(map.experts_of(0)), (std::vector{0, 1, 2}));
  EXPECT_EQ(copy(map.experts_of(1)), (std::vector{3, 4, 5}));
  EXPECT_EQ(copy(map.experts_of(2)), (std::vector{6, 7}));
  EXPECT_EQ(copy(map.experts_of(3)), (std::vector{8, 9}));
  EXPECT_EQ(map.max_local(), 3);
}

TEST(ExpertMap, SplitOfFewerExpertsThanRanksLeavesRanksWithoutAny) {
  const ExpertMap map = ExpertMap::split(2, 5);
  EXPECT_EQ(map.rank_of(1), 1);
  EXPECT_EQ(map.num_local(4), 0);
  EXPECT_TRUE(map.experts_of(4).empty());
}

TEST(ExpertMap, LocalNumbersFollowIdsInAnyOrderOfOwners) {
  const ExpertMap map = ExpertMap::of(std::vector{2, 0, 2, 2, 0}, 3);
  EXPECT_EQ(copy(map.experts_of(0)), (std::vector{1, 4}));
  EXPECT_EQ(copy(map.experts_of(2)), (std::vector{0, 2, 3}));
  EXPECT_EQ(map.local_of(3), 2);
  EXPECT_EQ(map.local_of(4), 1);
  EXPECT_EQ(map.num_local(1), 0);
}

TEST(ExpertMap, EveryExpertIsFoundWhereItIs) {
  for (int ranks : {1, 2, 3, 4, 5, 7, 8}) {
    for (int experts : {1, 2, 7, 8, 17, 256}) {
      const ExpertMap map = ExpertMap::split(experts, ranks);
      int total = 0;
      for (int r = 0; r < ranks; ++r) total += map.num_local(r);
      EXPECT_EQ(total, experts);
      for (int e = 0; e < experts; ++e) EXPECT_EQ(map.experts_of(map.rank_of(e))[static_cast<size_t>(map.local_of(e))], e);
    }
  }
}

TEST(ExpertMap, RefusesOwnersThatAreNotRanks) {
  EXPECT_THROW(ExpertMap::of(std::vector{0, 2}, 2), InvalidArgument);
  EXPECT_THROW(ExpertMap::of(std::vector{0, -1}, 2), InvalidArgument);
  try {
    ExpertMap::of(std::vector{0, 0, 7}, 2);
    FAIL();
  } catch (const InvalidArgument& e) {
    EXPECT_NE(std::string(e.what()).find("expert_to_rank[2] is 7"), std::string::npos) << e.what();
  }
}

TEST(ExpertMap, HashTellsMapsApart) {
  EXPECT_EQ(ExpertMap::split(4, 2).hash(), ExpertMap::of(std::vector{0, 0, 1, 1}, 2).hash());
  EXPECT_NE(ExpertMap::split(4, 2).hash(), ExpertMap::of(std::vector{0, 1, 0, 1}, 2).hash());
  EXPECT_NE(ExpertMap::of(std::vector{0, 0}, 2).hash(), ExpertMap::of(std::vector{0, 0}, 3).hash());
  EXPECT_NE(ExpertMap::of(std::vector{0, 0}, 2).hash(), ExpertMap::of(std::vector{0, 0, 0}, 2).hash());
}

TEST(Replicas, AreCheckedOnly) {
  EXPECT_NO_THROW(check_replicas(std::vector<int>{}, 4));
  EXPECT_NO_THROW(check_replicas(std::vector{0, 1, 1, 0}, 4));
  EXPECT_THROW(check_replicas(std::vector{0, 1, 1}, 4), InvalidArgument);
  EXPECT_THROW(check_replicas(std::vector{0, 1, 1, 4}, 4), InvalidArgument);
  EXPECT_THROW(check_replicas(std::vector{0, 1, 1, -1}, 4), InvalidArgument);
}

TEST(Topology, NodesAreOrderedByTheirLowestRankWhateverTheirLabels) {
  const Topology t = Topology::of(std::vector{9, -4, 9, 2, -4, 9});
  EXPECT_EQ(t.num_ranks(), 6);
  EXPECT_EQ(t.num_nodes(), 3);
  EXPECT_EQ(copy(t.ranks_of(0)), (std::vector{0, 2, 5}));
  EXPECT_EQ(copy(t.ranks_of(1)), (std::vector{1, 4}));
  EXPECT_EQ(copy(t.ranks_of(2)), (std::vector{3}));
  EXPECT_EQ(t.node_of(4), 1);
  EXPECT_EQ(t.local_rank(5), 2);
}

TEST(Topology, RailOfAnUnevenNodeEndsAtItsLastRank) {
  const Topology t = Topology::of(std::vector{0, 0, 0, 1, 1});
  EXPECT_EQ(t.rail_peer(1, 1), 4);
  EXPECT_EQ(t.rail_peer(2, 1), 4);
  EXPECT_EQ(t.rail_peer(3, 0), 0);
  EXPECT_EQ(t.rail_peer(2, 0), 2);
}

TEST(Topology, SingleIsOneNode) {
  EXPECT_EQ(Topology::single(5).num_nodes(), 1);
  EXPECT_EQ(Topology::single(5).ranks_of(0).size(), 5u);
}

TEST(Counts, ATokenCountsOncePerRankAndOncePerPair) {
  const ExpertMap map = ExpertMap::split(4, 2);
  const std::vector<int64_t> ids = {0, 1, 2, -1, 3, 3, -1, -1, -1, 2, 0, 2};
  const TopkView topk{ids.data(), 4, 3};
  std::vector<int64_t> rows(2), pairs(4);
  count_rows_per_rank(topk, map, rows);
  count_pairs_per_expert(topk, pairs);
  EXPECT_EQ(rows, (std::vector<int64_t>{2, 3}));
  EXPECT_EQ(pairs, (std::vector<int64_t>{2, 1, 3, 2}));
}

TEST(Counts, AreAddedToWhatIsThere) {
  const std::vector<int64_t> ids = {0};
  std::vector<int64_t> rows(1, 5), pairs(1, 7);
  count_rows_per_rank({ids.data(), 1, 1}, ExpertMap::split(1, 1), rows);
  count_pairs_per_expert({ids.data(), 1, 1}, pairs);
  EXPECT_EQ(rows[0], 6);
  EXPECT_EQ(pairs[0], 8);
}

TEST(Counts, FirstOnRankMarksTheEntriesThatMakeRows) {
  const ExpertMap map = ExpertMap::split(6, 3);
  const int64_t ids[] = {-1, 4, 0, 5, 1, 0};
  std::vector<bool> first;
  for (int k = 0; k < 6; ++k) first.push_back(is_first_on_rank(ids, k, RankOf{map}));
  EXPECT_EQ(first, (std::vector<bool>{false, true, true, false, false, false}));
}

}  // namespace
}  // namespace turnout::core
