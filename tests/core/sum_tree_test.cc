// The order of a sum and its roundings, written down.
#include "core/sum_tree.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>

namespace turnout::core {
namespace {

std::vector<SumTerm> ordered(std::vector<SumTerm> terms, const Topology& topology, Wire wire) {
  order_sum(terms, topology, wire);
  return terms;
}

TEST(SumTree, ExpertsInKOrderThenRanksThenNodes) {
  const Topology topology = Topology::of(std::vector{0, 1, 0});  // ranks 0 and 2 share a node
  const std::vector<SumTerm> terms = {{.rank = 1, .k = 0}, {.rank = 2, .k = 1}, {.rank = 0, .k = 3}, {.rank = 0, .k = 2}};
  EXPECT_EQ(ordered(terms, topology, Wire::payload), (std::vector<SumTerm>{
                                                         {.rank = 0, .k = 2, .row = 0, .ends_rank = false, .ends_node = false},
                                                         {.rank = 0, .k = 3, .row = 0, .ends_rank = true, .ends_node = false},
                                                         {.rank = 2, .k = 1, .row = 0, .ends_rank = true, .ends_node = true},
                                                         {.rank = 1, .k = 0, .row = 0, .ends_rank = true, .ends_node = true},
                                                     }));
}

TEST(SumTree, OneNodeHasNoNodeRounding) {
  const auto terms = ordered({{.rank = 1, .k = 0}, {.rank = 0, .k = 1}}, Topology::single(2), Wire::fp8);
  EXPECT_EQ(terms[0].rank, 0);
  for (const SumTerm& term : terms) {
    EXPECT_TRUE(term.ends_rank);
    EXPECT_FALSE(term.ends_node);
  }
}

TEST(SumTree, RowsAreInKOrderOverAllRanksWithoutRoundings) {
  const auto terms = ordered({{.rank = 0, .k = 2}, {.rank = 1, .k = 0}, {.rank = 0, .k = 1}}, Topology::of(std::vector{0, 1}), Wire::rows);
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(terms[static_cast<size_t>(i)].k, i);
    EXPECT_FALSE(terms[static_cast<size_t>(i)].ends_rank);
    EXPECT_FALSE(terms[static_cast<size_t>(i)].ends_node);
  }
}

TEST(SumTree, NoTermsAreNoSteps) { EXPECT_TRUE(ordered({}, Topology::single(1), Wire::payload).empty()); }

TEST(SumTree, OrderDoesNotDependOnTheOrderOfArrival) {
  const Topology topology = Topology::of(std::vector{0, 1, 1, 0, 2});
  std::vector<SumTerm> terms;
  for (int k = 0; k < 8; ++k) terms.push_back({.rank = k * 3 % 5, .k = k});
  const auto expected = ordered(terms, topology, Wire::payload);
  std::mt19937 random(1);
  for (int i = 0; i < 50; ++i) {
    std::shuffle(terms.begin(), terms.end(), random);
    EXPECT_EQ(ordered(terms, topology, Wire::payload), expected);
  }
}

TEST(SumTree, WireForms) {
  static_assert(wire_form(Wire::payload, DType::fp16) == WireForm{DType::fp16, false});
  static_assert(wire_form(Wire::rows, DType::fp64) == WireForm{DType::fp64, false});
  static_assert(wire_form(Wire::fp32, DType::bf16) == WireForm{DType::fp32, false});
  static_assert(wire_form(Wire::fp8, DType::bf16) == WireForm{DType::fp8_e4m3, true});
  EXPECT_EQ(wire_form(Wire::fp8, DType::bf16).row_bytes(129), 129 + 2 * 4);
  EXPECT_EQ(wire_form(Wire::payload, DType::bf16).row_bytes(129), 258);
}

TEST(SumTree, RunningSumStartsAtItsFirstTerm) {
  RunningSum<float> sum;
  sum.add(-0.0f);
  EXPECT_TRUE(std::signbit(sum.value));
  sum.add(-0.0f);
  EXPECT_TRUE(std::signbit(sum.value));
}

TEST(SumTree, ProductAndSumAreRoundedEach) {
  RunningSum<float> sum;
  const float a = 1.0f + 0x1p-12f;
  sum.add(-1.0f);
  sum.add(a, a);  // a * a = 1 + 2^-11 + 2^-24: its last bit is lost before the addition
  EXPECT_EQ(sum.value, 0x1p-11f);
}

}  // namespace
}  // namespace turnout::core
