// The oracle's combine against sums written by hand. Each test has a mutation in mutation_main.cc.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>

#include "core/reference.h"
#include "reference_cases.h"

namespace turnout::core {
namespace {

using Floats = std::vector<float>;
using Ints = std::vector<int32_t>;

/// A token of rank 0 with one expert per rank; y[rank] is its row there. One node per entry of `nodes` that differs.
struct OneToken {
  DispatchProblem dispatch;
  std::vector<DispatchOutput> received;
  CombineProblem combine;

  OneToken(const std::vector<Floats>& y, const std::vector<int>& nodes, Layout layout = Layout::expert_major) {
    const int ranks = static_cast<int>(nodes.size());
    std::vector<Ids> ids(nodes.size());
    std::vector<int> owners;
    std::vector<int64_t> experts;
    for (int r = 0; r < ranks; ++r) owners.insert(owners.end(), y[static_cast<size_t>(r)].size(), r);
    for (size_t e = 0; e < owners.size(); ++e) experts.push_back(static_cast<int64_t>(e));
    ids[0] = {experts};
    dispatch = problem_of(ExpertMap::of(owners, ranks), layout, ids);
    received = reference_dispatch(dispatch);
    combine = combine_of(dispatch, received, y);
    combine.topology = Topology::of(nodes);
  }
  OneToken(const OneToken&) = delete;

  /// The same rows in fp64.
  void widen() {
    combine.dtype = DType::fp64;
    for (CombineInput& in : combine.ranks) {
      const Floats rows = values_of<float>(in.y);
      in.y = bytes_of(std::vector<double>(rows.begin(), rows.end()));
    }
  }
  /// The same rows in bf16; they must be representable.
  void narrow() {
    combine.dtype = DType::bf16;
    for (CombineInput& in : combine.ranks) {
      std::vector<uint16_t> rows;
      for (float value : values_of<float>(in.y)) rows.push_back(static_cast<uint16_t>(std::bit_cast<uint32_t>(value) >> 16));
      in.y = bytes_of(rows);
    }
  }
  template <class T = float>
  T sum() const {
    return values_of<T>(reference_combine(combine)[0].x).at(0);
  }
  float bf16_sum() const { return std::bit_cast<float>(uint32_t{sum<uint16_t>()} << 16); }
};

constexpr float kBig = 0x1p24f;  // + 1 is lost in fp32

TEST(ReferenceCombine, AddsTheRowsOfEachToken) {
  const auto p = problem_of(ExpertMap::split(4, 2), Layout::expert_major, {{{0, 2}, {3, 1}, {-1, -1}}, {{1, 0}, {2, -1}}});
  const auto received = reference_dispatch(p);
  // rank 0 rows: (0,0,0) (1,0,1) | (0,1,1) (1,0,0); rank 1 rows: (0,0,1) (1,1,0) | (0,1,0)
  const auto all = reference_combine(combine_of(p, received, {{1, 2, 4, 8}, {16, 32, 64}}));
  EXPECT_EQ(values_of<float>(all[0].x), (Floats{17, 68, 0}));
  EXPECT_EQ(values_of<float>(all[1].x), (Floats{10, 32}));
  EXPECT_EQ(all[0].num_lost, (Ints{0, 0, 0}));
  EXPECT_TRUE(all[0].side.empty());
}

TEST(ReferenceCombine, ExpertsOfARankAreAddedInKOrder) {
  EXPECT_EQ(OneToken({{kBig, 1, -kBig}}, {0}).sum(), 0.0f);
  EXPECT_EQ(OneToken({{kBig, -kBig, 1}}, {0}).sum(), 1.0f);
  EXPECT_EQ(OneToken({{1, 1, kBig}}, {0}).sum(), kBig + 2);
  EXPECT_EQ(OneToken({{kBig, 1, 1}}, {0}).sum(), kBig);
}

TEST(ReferenceCombine, RanksAreAddedInAscendingOrder) {
  EXPECT_EQ(OneToken({{kBig}, {1}, {1}}, {0, 0, 0}).sum(), kBig);
  EXPECT_EQ(OneToken({{1}, {1}, {kBig}}, {0, 0, 0}).sum(), kBig + 2);
}

TEST(ReferenceCombine, NodesAreAddedAfterTheirRanks) {
  // One node: ((big + 1) + -big) + 1 = 1. Ranks 0 and 2 are a node: (big + -big) + (1 + 1) = 2.
  EXPECT_EQ(OneToken({{kBig}, {1}, {-kBig}, {1}}, {0, 0, 0, 0}).sum(), 1.0f);
  EXPECT_EQ(OneToken({{kBig}, {1}, {-kBig}, {1}}, {0, 1, 0, 1}).sum(), 2.0f);
  EXPECT_EQ(OneToken({{kBig}, {1}, {-kBig}, {1}}, {5, -3, 5, -3}).sum(), 2.0f);
}

TEST(ReferenceCombine, EachRankPartialIsRoundedToTheWireItsOwnToo) {
  // bf16 has 8 bits: rank 0's 1 + 2^-8 becomes 1, and the partials 1 + 2^-7 come to the same.
  OneToken own({{1, 0x1p-8f}, {0x1p-7f}}, {0, 0});
  own.narrow();
  EXPECT_EQ(own.bf16_sum(), 1 + 0x1p-7f);
  own.combine.wire = Wire::fp32;  // 1 + 1.5 * 2^-7: rounds to even, upwards
  EXPECT_EQ(own.bf16_sum(), 1 + 0x1p-6f);
}

TEST(ReferenceCombine, EachNodePartialIsRoundedToTheWire) {
  // Node 0: 1 + 2^-8 from two ranks, rounded to 1.
  OneToken token({{1}, {0x1p-8f}, {0x1p-7f}}, {0, 0, 1});
  token.narrow();
  EXPECT_EQ(token.bf16_sum(), 1 + 0x1p-7f);
  token.combine.topology = Topology::single(3);
  EXPECT_EQ(token.bf16_sum(), 1 + 0x1p-6f);
}

TEST(ReferenceCombine, ASumStartsAtItsFirstTerm) {
  EXPECT_TRUE(std::signbit(OneToken({{-0.0f}}, {0}).sum()));
  EXPECT_TRUE(std::signbit(OneToken({{-0.0f, -0.0f}, {-0.0f}}, {0, 1}).sum()));
  EXPECT_FALSE(std::signbit(OneToken({{-0.0f, 0.0f}}, {0}).sum()));
}

TEST(ReferenceCombine, RowsOnTheWireAreAddedInKOrderOverAllRanks) {
  // k order is rank 0, 1, 0: big + -big + 1.
  DispatchProblem p = problem_of(ExpertMap::of(std::vector{0, 1, 0}, 2), Layout::expert_major, {{{0, 1, 2}}, {}});
  const auto received = reference_dispatch(p);
  CombineProblem c = combine_of(p, received, {{kBig, 1}, {-kBig}});
  EXPECT_EQ(values_of<float>(reference_combine(c)[0].x), (Floats{0}));  // (big + 1) + -big
  c.wire = Wire::rows;
  EXPECT_EQ(values_of<float>(reference_combine(c)[0].x), (Floats{1}));
}

TEST(ReferenceCombine, Fp8WireHasAScalePerBlock) {
  // 448 sets the scale to 1; 17 lies between 16 and 18 and goes to the even 16.
  OneToken token({{0}}, {0});
  token.combine.hidden = 130;
  Floats y(130, 0.0f);
  y[0] = 448;
  y[1] = 17;
  y[128] = 17;  // alone in its short block, so exact to fp8's 448 * scale
  token.combine.ranks[0].y = bytes_of(y);
  token.combine.wire = Wire::fp8;
  const auto x = values_of<float>(reference_combine(token.combine)[0].x);
  EXPECT_EQ(x[0], 448.0f);
  EXPECT_EQ(x[1], 16.0f);
  EXPECT_NEAR(x[128], 17.0f, 1e-5f);
  EXPECT_EQ(x[129], 0.0f);
}

TEST(ReferenceCombine, SourceWeightsAreAppliedBeforeAnyRounding) {
  // Weights are 1 and 2 (problem_of). In bf16: 1 * 1 + 2 * 2^-8 = 1 + 2^-7 exactly.
  OneToken token({{1, 0x1p-8f}}, {0});
  token.narrow();
  token.combine.apply = CombineWeights::source;
  EXPECT_EQ(token.bf16_sum(), 1 + 0x1p-7f);
  // With the fp8 wire, 17 * 1 in the block of 448 would round to 16 first.
  token.combine.dtype = DType::fp32;
  token.combine.hidden = 2;
  token.combine.wire = Wire::fp8;
  token.combine.ranks[0].y = bytes_of(Floats{448, 17, 448, 17});  // 1 * 448 + 2 * 448 = 1344 = 3 * 448; 51 / 3 = 17 -> 16
  EXPECT_EQ(values_of<float>(reference_combine(token.combine)[0].x), (Floats{1344, 48}));
  token.combine.ranks[0].y = bytes_of(Floats{448, 17, 0, 3});  // 17 + 6 goes to 24; had 17 been rounded first, 16 + 6 would stay 22
  EXPECT_EQ(values_of<float>(reference_combine(token.combine)[0].x), (Floats{448, 24}));
}

TEST(ReferenceCombine, RowWeightsComeWithTheRows) {
  OneToken token({{1, 10}, {100}}, {0, 0});
  token.combine.apply = CombineWeights::rows;
  token.combine.ranks[0].weights = {2, 3};
  token.combine.ranks[1].weights = {4};
  EXPECT_EQ(token.sum(), 432.0f);
  OneToken rank_major({{1, 1}, {1}}, {0, 0}, Layout::rank_major);  // one row per rank
  rank_major.combine.apply = CombineWeights::rows;
  rank_major.combine.ranks[0].y = bytes_of(Floats{5});
  rank_major.combine.ranks[1].y = bytes_of(Floats{7});
  rank_major.combine.ranks[0].weights = {2};
  rank_major.combine.ranks[1].weights = {3};
  EXPECT_EQ(rank_major.sum(), 31.0f);
}

TEST(ReferenceCombine, TokenWeightsAreThoseOfTheSource) {
  OneToken token({{1, 10}, {100}}, {0, 0});
  token.combine.apply = CombineWeights::tokens;
  token.combine.wire = Wire::rows;
  token.combine.ranks[0].weights = {2, 3, 4};
  EXPECT_EQ(token.sum(), 432.0f);
}

TEST(ReferenceCombine, Float64IsAddedInFloat64) {
  OneToken token({{kBig, 1}, {-kBig}}, {0, 1});
  token.widen();
  EXPECT_EQ(token.sum<double>(), 1.0);
  token.combine.wire = Wire::fp32;  // big + 1 rounds to big on the wire
  EXPECT_EQ(token.sum<double>(), 0.0);
  OneToken across({{kBig}, {1}, {-kBig}}, {0, 0, 0});  // partials in fp32, added in float64
  across.widen();
  across.combine.wire = Wire::fp32;
  EXPECT_EQ(across.sum<double>(), 1.0);
}

TEST(ReferenceCombine, NaNIsCanonical) {
  OneToken token({{std::bit_cast<float>(0xffc12345u)}}, {0});
  EXPECT_EQ(token.sum<uint32_t>(), 0x7fc00000u);
  token.narrow();
  EXPECT_EQ(token.sum<uint16_t>(), 0x7fc0);
  token.combine.dtype = DType::fp16;
  token.combine.ranks[0].y = bytes_of(std::vector<uint16_t>{0xfe01});
  EXPECT_EQ(token.sum<uint16_t>(), 0x7e00);
  token.combine.dtype = DType::fp64;
  token.combine.ranks[0].y = bytes_of(std::vector<uint64_t>{0xfff8000000000001u});
  EXPECT_EQ(token.sum<uint64_t>(), 0x7ff8000000000000u);
}

TEST(ReferenceCombine, SideScalarsGoBackToTheirChoice) {
  const auto p = problem_of(ExpertMap::split(4, 2), Layout::expert_major, {{{0, 2}, {-1, 1}}, {{1, 0}}});
  const auto received = reference_dispatch(p);
  CombineProblem c = combine_of(p, received, {{0, 0, 0, 0}, {0}});
  c.with_side = true;
  c.ranks[0].side = {1, 2, 3, 4};  // (0,0,0) (1,0,1) | (0,1,1) (1,0,0)
  c.ranks[1].side = {5};
  auto all = reference_combine(c);
  EXPECT_EQ(all[0].side, (Floats{1, 5, 0, 3}));
  EXPECT_EQ(all[1].side, (Floats{4, 2}));

  const auto by_rank = problem_of(ExpertMap::split(4, 2), Layout::rank_major, {{{0, 2}, {-1, 1}}, {{1, 0}}});
  const auto rows = reference_dispatch(by_rank);
  CombineProblem d = combine_of(by_rank, rows, {{0, 0, 0}, {0}});
  d.with_side = true;
  d.ranks[0].side = {1, 99, 99, 2, 3, 4};  // 99: entries of other ranks are not looked at
  d.ranks[1].side = {99, 5};
  all = reference_combine(d);
  EXPECT_EQ(all[0].side, (Floats{1, 5, 0, 2}));
  EXPECT_EQ(all[1].side, (Floats{3, 4}));
}

TEST(ReferenceCombine, DroppedTermsAreLeftOutAndCounted) {
  // Rank 0 admits one row; token 1 loses both of its entries there and keeps the one on rank 1.
  auto p = problem_of(ExpertMap::split(3, 2), Layout::rank_major, {{{0, -1, -1}, {0, 1, 2}, {1, 1, -1}}, {}});
  p.capacity = 1;
  const auto received = reference_dispatch(p);
  const CombineOutput out = reference_combine(combine_of(p, received, {{5}, {7}}))[0];
  EXPECT_EQ(out.num_lost, (Ints{0, 2, 2}));
  EXPECT_EQ(values_of<float>(out.x), (Floats{5, 7, 0}));
}

TEST(ReferenceCombine, DroppedExpertRowsAreCountedOneByOne) {
  auto p = problem_of(ExpertMap::split(2, 1), Layout::expert_slab, {{{0, 0, 1}, {0, 1, 0}}});
  p.capacity = 1;
  const auto received = reference_dispatch(p);
  const CombineOutput out = reference_combine(combine_of(p, received, {{5, 7}}))[0];
  EXPECT_EQ(out.num_lost, (Ints{1, 3}));
  EXPECT_EQ(values_of<float>(out.x), (Floats{12, 0}));
}

TEST(ReferenceCombine, RowsThatAreNotRealAreNeverRead) {
  auto p = problem_of(ExpertMap::split(2, 1), Layout::expert_major, {{{0, 1}}});
  p.alignment = 2;
  p.capacity = 5;
  const auto received = reference_dispatch(p);
  const float nan = std::numeric_limits<float>::quiet_NaN();
  EXPECT_EQ(values_of<float>(reference_combine(combine_of(p, received, {{1, nan, 2, nan, nan}}))[0].x), (Floats{3}));
}

TEST(ReferenceCombine, RefusesWhatHasNoMeaning) {
  OneToken rank_major({{1}}, {0}, Layout::rank_major);
  rank_major.combine.wire = Wire::rows;
  EXPECT_THROW(rank_major.sum(), InvalidArgument);
  rank_major.combine.wire = Wire::payload;
  rank_major.combine.apply = CombineWeights::source;
  EXPECT_THROW(rank_major.sum(), InvalidArgument);
  OneToken late({{1}}, {0});
  late.combine.apply = CombineWeights::tokens;
  late.combine.ranks[0].weights = {1};
  EXPECT_THROW(late.sum(), InvalidArgument);
  OneToken bytes({{1}}, {0});
  bytes.combine.dtype = DType::i32;
  EXPECT_THROW(bytes.sum(), InvalidArgument);
}

}  // namespace
}  // namespace turnout::core
