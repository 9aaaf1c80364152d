// The oracle's dispatch against results written by hand. Each test has a mutation in mutation_main.cc.
#include <gtest/gtest.h>

#include "core/reference.h"
#include "reference_cases.h"

namespace turnout::core {
namespace {

using Floats = std::vector<float>;
using Ints = std::vector<int32_t>;
using Longs = std::vector<int64_t>;

// Two ranks, experts {0, 1} and {2, 3}, two choices.
DispatchProblem two_ranks(Layout layout) { return problem_of(ExpertMap::split(4, 2), layout, {{{0, 2}, {3, 1}, {-1, -1}}, {{1, 0}, {2, -1}}}); }

TEST(ReferenceDispatch, RankMajorHasOneRowPerTokenAndRank) {
  const auto all = reference_dispatch(two_ranks(Layout::rank_major));
  const DispatchOutput& out = all[0];
  EXPECT_EQ(origins(out), (Origins{{0, 0, -1}, {0, 1, -1}, {1, 0, -1}}));
  EXPECT_EQ(values_of<uint8_t>(out.x), (std::vector<uint8_t>{1, 0, 1, 1, 2, 0}));
  EXPECT_EQ(out.topk_idx, (Ints{0, -1, -1, 1, 1, 0}));
  EXPECT_EQ(out.num_rows, 3);
  EXPECT_EQ(out.array_rows, 3);
  EXPECT_EQ(out.expert_counts, (Ints{2, 2}));
  EXPECT_EQ(out.expert_offsets, (Longs{0, 2, 4}));
  EXPECT_EQ(out.sorted_rows, (Ints{0, 2, 1, 2}));
  EXPECT_EQ(out.num_dropped, 0);
  EXPECT_EQ(origins(all[1]), (Origins{{0, 0, -1}, {0, 1, -1}, {1, 1, -1}}));
  EXPECT_EQ(all[1].topk_idx, (Ints{-1, 0, 1, -1, 0, -1}));
  EXPECT_EQ(all[1].sorted_rows, (Ints{0, 2, 1}));
}

TEST(ReferenceDispatch, RankMajorWeightsAreZeroWhereNotLocal) {
  const auto all = reference_dispatch(two_ranks(Layout::rank_major));
  EXPECT_EQ(all[0].topk_weights, (Floats{1, 0, 0, 12, 101, 102}));
  EXPECT_EQ(all[1].topk_weights, (Floats{0, 2, 11, 0, 111, 0}));
}

TEST(ReferenceDispatch, SideArraysTravelWithTheRows) {
  const auto all = reference_dispatch(two_ranks(Layout::rank_major));
  EXPECT_EQ(values_of<int32_t>(all[1].side[0]), (Ints{1, 2, 102}));
  const auto expert_major = reference_dispatch(two_ranks(Layout::expert_major));
  EXPECT_EQ(values_of<int32_t>(expert_major[0].side[0]), (Ints{1, 101, 2, 101}));
}

TEST(ReferenceDispatch, ExpertMajorGroupsBySourceTokenK) {
  auto p = problem_of(ExpertMap::split(2, 1), Layout::expert_major, {{{0, 1, 0}, {1, 0, 1}}});
  const DispatchOutput out = reference_dispatch(p)[0];
  EXPECT_EQ(origins(out), (Origins{{0, 0, 0}, {0, 0, 2}, {0, 1, 1}, {0, 0, 1}, {0, 1, 0}, {0, 1, 2}}));
  EXPECT_EQ(values_of<uint8_t>(out.x), (std::vector<uint8_t>{1, 0, 1, 0, 1, 1, 1, 0, 1, 1, 1, 1}));
  EXPECT_EQ(out.expert_offsets, (Longs{0, 3, 6}));
  EXPECT_TRUE(out.topk_idx.empty());
  EXPECT_TRUE(out.sorted_rows.empty());
}

TEST(ReferenceDispatch, ExpertRowsHaveTheirOwnWeight) {
  auto p = problem_of(ExpertMap::split(2, 1), Layout::expert_major, {{{0, 1, 0}, {1, 0, 1}}});
  EXPECT_EQ(reference_dispatch(p)[0].topk_weights, (Floats{1, 3, 12, 2, 11, 13}));
}

TEST(ReferenceDispatch, GroupsStartAtMultiplesAndPaddingIsZero) {
  auto p = two_ranks(Layout::expert_major);
  p.alignment = 3;
  const DispatchOutput out = reference_dispatch(p)[0];
  EXPECT_EQ(origins(out), (Origins{{0, 0, 0}, {1, 0, 1}, kNoRow, {0, 1, 1}, {1, 0, 0}, kNoRow}));
  EXPECT_EQ(out.expert_offsets, (Longs{0, 3, 6}));
  EXPECT_EQ(out.expert_counts, (Ints{2, 2}));
  EXPECT_EQ(out.num_rows, 6);
  EXPECT_EQ(values_of<uint8_t>(out.x), (std::vector<uint8_t>{1, 0, 2, 0, 0, 0, 1, 1, 2, 0, 0, 0}));
  EXPECT_EQ(out.topk_weights, (Floats{1, 102, 0, 12, 101, 0}));
  EXPECT_EQ(values_of<int32_t>(out.side[0]), (Ints{1, 101, 0, 2, 101, 0}));
}

TEST(ReferenceDispatch, DuplicatesCountTwice) {
  const auto rank_major = reference_dispatch(problem_of(ExpertMap::split(2, 2), Layout::rank_major, {{{1, 1}}, {}}));
  EXPECT_EQ(rank_major[1].num_rows, 1);
  EXPECT_EQ(rank_major[1].topk_idx, (Ints{0, 0}));
  EXPECT_EQ(rank_major[1].expert_counts, (Ints{2}));
  EXPECT_EQ(rank_major[1].sorted_rows, (Ints{0, 0}));
  const auto expert_major = reference_dispatch(problem_of(ExpertMap::split(2, 2), Layout::expert_major, {{{1, 1}}, {}}));
  EXPECT_EQ(origins(expert_major[1]), (Origins{{0, 0, 0}, {0, 0, 1}}));
}

TEST(ReferenceDispatch, MinusOneGoesNowhereAndZeroTokensAreNone) {
  for (Layout layout : {Layout::rank_major, Layout::expert_major}) {
    for (const DispatchOutput& out : reference_dispatch(problem_of(ExpertMap::split(4, 3), layout, {{{-1, -1}}, {{-1, -1}, {-1, -1}}, {}}))) {
      EXPECT_EQ(out.num_rows, 0);
      EXPECT_TRUE(out.x.empty());
      for (int32_t count : out.expert_counts) EXPECT_EQ(count, 0);
      for (int64_t offset : out.expert_offsets) EXPECT_EQ(offset, 0);
    }
  }
}

TEST(ReferenceDispatch, LocalNumbersArePositionsAmongTheIdsOfTheRank) {
  const ExpertMap experts = ExpertMap::of(std::vector{1, 0, 1, 0}, 2);  // rank 0: 1, 3; rank 1: 0, 2
  const auto all = reference_dispatch(problem_of(experts, Layout::rank_major, {{{3, 2}, {1, 0}}, {}}));
  EXPECT_EQ(all[0].topk_idx, (Ints{1, -1, 0, -1}));
  EXPECT_EQ(all[1].topk_idx, (Ints{-1, 1, -1, 0}));
}

TEST(ReferenceDispatch, RankMajorCapacityAdmitsTheFirstRows) {
  auto p = two_ranks(Layout::rank_major);
  p.capacity = 2;
  const DispatchOutput out = reference_dispatch(p)[0];
  EXPECT_EQ(origins(out), (Origins{{0, 0, -1}, {0, 1, -1}}));
  EXPECT_EQ(out.num_rows, 2);
  EXPECT_EQ(out.expert_counts, (Ints{1, 1}));
  EXPECT_EQ(out.sorted_rows, (Ints{0, 1}));
}

TEST(ReferenceDispatch, RankMajorDropsAreTokenRows) {
  auto p = two_ranks(Layout::rank_major);
  p.capacity = 2;
  EXPECT_EQ(reference_dispatch(p)[0].num_dropped, 1);  // of two (token, k) pairs
  p.capacity = 0;
  EXPECT_EQ(reference_dispatch(p)[0].num_dropped, 3);
}

TEST(ReferenceDispatch, BeyondTheRowsThereAreNoExpertsAndNoWeights) {
  auto p = two_ranks(Layout::rank_major);
  p.capacity = 4;
  const DispatchOutput out = reference_dispatch(p)[0];
  EXPECT_EQ(out.array_rows, 4);
  EXPECT_EQ(out.num_rows, 3);
  EXPECT_EQ(out.x.size(), 8u);
  EXPECT_EQ(out.topk_idx, (Ints{0, -1, -1, 1, 1, 0, -1, -1}));
  EXPECT_EQ(out.topk_weights, (Floats{1, 0, 0, 12, 101, 102, 0, 0}));
}

TEST(ReferenceDispatch, ExpertMajorCapacityCountsPadding) {
  auto p = problem_of(ExpertMap::split(3, 1), Layout::expert_major, {{{0}, {1}, {2}}});
  p.alignment = 4;
  p.capacity = 11;
  const DispatchOutput out = reference_dispatch(p)[0];
  EXPECT_EQ(out.expert_counts, (Ints{1, 1, 0}));
  EXPECT_EQ(out.expert_offsets, (Longs{0, 4, 8, 8}));
  EXPECT_EQ(out.num_rows, 8);
  EXPECT_EQ(out.array_rows, 11);
  EXPECT_EQ(out.num_dropped, 1);
}

TEST(ReferenceDispatch, ExpertMajorEndsAtTheFirstThatDoesNotFit) {
  auto p = problem_of(ExpertMap::split(2, 1), Layout::expert_major, {{{0, 1}, {0, 0}, {1, -1}}});
  p.alignment = 2;
  p.capacity = 5;
  const DispatchOutput out = reference_dispatch(p)[0];
  EXPECT_EQ(origins(out), (Origins{{0, 0, 0}, {0, 1, 0}, {0, 0, 1}, kNoRow, kNoRow}));  // token 2 would fit into the padding
  EXPECT_EQ(out.num_dropped, 2);
  EXPECT_EQ(out.num_rows, 4);
}

TEST(ReferenceDispatch, SlabHasACapacityPerExpert) {
  auto p = problem_of(ExpertMap::split(2, 1), Layout::expert_slab, {{{0, 0}, {0, 1}, {1, -1}}});
  p.capacity = 2;
  const DispatchOutput out = reference_dispatch(p)[0];
  EXPECT_EQ(origins(out), (Origins{{0, 0, 0}, {0, 0, 1}, {0, 1, 1}, {0, 2, 0}}));
  EXPECT_EQ(out.num_dropped, 1);
  EXPECT_EQ(out.expert_counts, (Ints{2, 2}));
  EXPECT_EQ(out.expert_offsets, (Longs{0, 2, 4}));
  EXPECT_EQ(out.num_rows, 4);
  p.capacity = 3;
  const DispatchOutput wide = reference_dispatch(p)[0];
  EXPECT_EQ(origins(wide), (Origins{{0, 0, 0}, {0, 0, 1}, {0, 1, 0}, {0, 1, 1}, {0, 2, 0}, kNoRow}));
  EXPECT_EQ(wide.topk_weights, (Floats{1, 2, 11, 12, 21, 0}));
  EXPECT_EQ(wide.array_rows, 6);
  EXPECT_EQ(wide.num_rows, 5);
}

TEST(ReferenceDispatch, RowsAreInTheOrderOfSourcesAndTokens) {
  auto p = problem_of(ExpertMap::split(1, 1), Layout::rank_major, {{{0}, {0}, {-1}, {0}}});
  EXPECT_EQ(origins(reference_dispatch(p)[0]), (Origins{{0, 0, -1}, {0, 1, -1}, {0, 3, -1}}));
}

TEST(ReferenceDispatch, QuantisesBlocksAndTheShortLastOne) {
  auto p = problem_of(ExpertMap::split(1, 1), Layout::rank_major, {{{0}}});
  p.dtype = DType::fp32;
  p.hidden = 130;
  std::vector<float> x(130, 0.0f);
  x[0] = 448.0f;
  x[1] = -1.0f;
  x[128] = 2 * 448.0f;
  x[129] = 4.0f;
  p.ranks[0].x = bytes_of(x);
  p.quantize = Quantize::fp8_e4m3;
  const DispatchOutput out = reference_dispatch(p)[0];
  EXPECT_EQ(values_of<float>(out.x_scales), (Floats{1, 2}));
  const auto q = values_of<uint8_t>(out.x);
  ASSERT_EQ(q.size(), 130u);
  EXPECT_EQ(q[0], 0x7e);  // 448
  EXPECT_EQ(q[1], 0xb8);  // -1
  EXPECT_EQ(q[2], 0);
  EXPECT_EQ(q[128], 0x7e);  // 896 / 2
  EXPECT_EQ(q[129], 0x40);  // 4 / 2
}

TEST(ReferenceDispatch, QuantisesWithPowersOfTwo) {
  auto p = problem_of(ExpertMap::split(1, 1), Layout::expert_major, {{{0, 0}}});
  p.dtype = DType::bf16;
  p.hidden = 2;
  p.ranks[0].x = bytes_of(std::vector<uint16_t>{0x4400, 0x3f80});  // 512, 1: the scale 512 / 448 becomes 2
  p.quantize = Quantize::fp8_e4m3_ue8m0;
  const DispatchOutput out = reference_dispatch(p)[0];
  EXPECT_EQ(values_of<uint8_t>(out.x_scales), (std::vector<uint8_t>{128, 128}));
  EXPECT_EQ(values_of<uint8_t>(out.x), (std::vector<uint8_t>{0x78, 0x30, 0x78, 0x30}));  // 256, 0.5
}

TEST(ReferenceDispatch, RefusesWhatIsNoExpertAndASlabWithoutCapacity) {
  for (int64_t id : {int64_t{4}, int64_t{11}, int64_t{-2}, int64_t{1} << 31, INT64_MIN}) {
    auto p = two_ranks(Layout::rank_major);
    p.ranks[1].topk_idx[0] = id;
    EXPECT_THROW(reference_dispatch(p), InvalidArgument) << id;
  }
  EXPECT_THROW(reference_dispatch(two_ranks(Layout::expert_slab)), InvalidArgument);
}

}  // namespace
}  // namespace turnout::core
