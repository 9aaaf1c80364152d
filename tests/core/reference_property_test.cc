// What holds for the oracle on any problem: nothing is lost or invented, and its places are those that core/slots.h computes.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <map>
#include <set>
#include <tuple>

#include "core/counts.h"
#include "core/element.h"
#include "core/reference.h"
#include "core/slots.h"
#include "reference_cases.h"
#include "support/random_routing.h"

namespace turnout::core {
namespace {

using testing::random_combine;
using testing::random_problem;
using testing::RandomLimits;
using testing::RandomProblem;

constexpr int kRankCounts[] = {1, 2, 3, 4, 5, 7, 8};
constexpr uint64_t kSeeds = 40;

/// Runs `body` on random problems of every number of ranks.
void for_problems(const std::function<void(const RandomProblem&, const std::vector<DispatchOutput>&)>& body, RandomLimits limits = {}) {
  limits.max_hidden = 140;
  for (int ranks : kRankCounts) {
    limits.num_ranks = ranks;
    for (uint64_t seed = 0; seed < kSeeds; ++seed) {
      SCOPED_TRACE(::testing::Message() << ranks << " ranks, seed " << seed);
      const RandomProblem p = random_problem(seed * 16 + static_cast<uint64_t>(ranks), limits);
      body(p, reference_dispatch(p.dispatch));
      if (::testing::Test::HasFailure()) return;
    }
  }
}

TopkView topk_of(const DispatchProblem& d, size_t source) { return {d.ranks[source].topk_idx.data(), d.ranks[source].num_tokens, d.num_topk}; }

TEST(ReferenceProperty, EveryChoiceIsARowOrDropped) {
  for_problems([](const RandomProblem& p, const auto& received) {
    const DispatchProblem& d = p.dispatch;
    std::vector<int64_t> rows(d.ranks.size(), 0), pairs(static_cast<size_t>(d.experts.num_experts()), 0);
    for (size_t s = 0; s < d.ranks.size(); ++s) {
      count_rows_per_rank(topk_of(d, s), d.experts, rows);
      count_pairs_per_expert(topk_of(d, s), pairs);
    }
    for (size_t r = 0; r < received.size(); ++r) {
      const DispatchOutput& out = received[r];
      int64_t real = 0, counted = 0, expected = 0;
      std::set<std::tuple<int, int64_t, int>> seen;
      for (const RowOrigin& o : out.origin) {
        real += o.source >= 0;
        EXPECT_TRUE(o.source < 0 || seen.insert({o.source, o.token, o.k}).second);
      }
      for (int32_t count : out.expert_counts) counted += count;
      for (int e : d.experts.experts_of(static_cast<int>(r))) expected += pairs[static_cast<size_t>(e)];
      if (d.layout == Layout::rank_major) {
        EXPECT_EQ(real + out.num_dropped, rows[r]);
        EXPECT_EQ(counted, static_cast<int64_t>(out.sorted_rows.size()));
        if (!d.capacity) {
          EXPECT_EQ(counted, expected);
        }
      } else {
        EXPECT_EQ(real, counted);
        EXPECT_EQ(real + out.num_dropped, expected);
      }
      if (!d.capacity) {
        EXPECT_EQ(out.num_dropped, 0);
      }
    }
  });
}

TEST(ReferenceProperty, SlotsAreWhereTheyAreComputed) {
  for_problems([](const RandomProblem& p, const auto& received) {
    const DispatchProblem& d = p.dispatch;
    if (d.layout != Layout::rank_major) return;
    const int64_t capacity = d.capacity.value_or(kExact);
    for (int r = 0; r < d.experts.num_ranks(); ++r) {
      std::vector<int64_t> per_source, begins(d.ranks.size() + 1);
      for (size_t s = 0; s < d.ranks.size(); ++s) {
        std::vector<int64_t> rows(d.ranks.size(), 0);
        count_rows_per_rank(topk_of(d, s), d.experts, rows);
        per_source.push_back(rows[static_cast<size_t>(r)]);
      }
      exclusive_prefix(per_source, begins);
      int64_t admitted = 0;
      for (size_t s = 0; s < d.ranks.size(); ++s) {
        int64_t i = 0;
        for (int64_t token = 0; token < d.ranks[s].num_tokens; ++token) {
          for (int k = 0; k < d.num_topk; ++k) {
            const int64_t* ids = topk_of(d, s).row(token);
            if (ids[k] < 0 || d.experts.rank_of(static_cast<int>(ids[k])) != r || !is_first_on_rank(ids, k, RankOf{d.experts})) continue;
            if (i < admitted_rows(begins[s], per_source[s], capacity)) {
              ++admitted;
              EXPECT_EQ(received[static_cast<size_t>(r)].origin[static_cast<size_t>(begins[s] + i)], (RowOrigin{static_cast<int>(s), token, -1}));
            }
            ++i;
          }
        }
      }
      EXPECT_EQ(received[static_cast<size_t>(r)].num_rows, admitted);
    }
  });
}

TEST(ReferenceProperty, AdmissionIsThatOfTheSlots) {
  for_problems([](const RandomProblem& p, const auto& received) {
    const DispatchProblem& d = p.dispatch;
    if (d.layout == Layout::rank_major) return;
    for (int r = 0; r < d.experts.num_ranks(); ++r) {
      const DispatchOutput& out = received[static_cast<size_t>(r)];
      std::vector<int64_t> counts(static_cast<size_t>(d.experts.num_local(r)), 0), offsets(counts.size() + 1);
      std::vector<std::vector<RowOrigin>> groups(counts.size());
      PaddedAdmission padded{.capacity = d.capacity.value_or(kExact), .alignment = d.alignment};
      for (int s = 0; s < d.experts.num_ranks(); ++s) {
        const TopkView topk = topk_of(d, static_cast<size_t>(s));
        for (int64_t token = 0; token < topk.num_tokens; ++token) {
          for (int k = 0; k < topk.num_topk; ++k) {
            if (topk.at(token, k) < 0 || d.experts.rank_of(static_cast<int>(topk.at(token, k))) != r) continue;
            const auto e = static_cast<size_t>(d.experts.local_of(static_cast<int>(topk.at(token, k))));
            if (!(d.layout == Layout::expert_slab ? admits_slab(counts[e], *d.capacity) : padded.admit(counts[e]))) continue;
            ++counts[e];
            groups[e].push_back({s, token, k});
          }
        }
      }
      group_offsets(counts, d.alignment, offsets);
      for (size_t e = 0; e < counts.size(); ++e) {
        EXPECT_EQ(out.expert_counts[e], counts[e]);
        const int64_t begin = d.layout == Layout::expert_slab ? slab_row(static_cast<int64_t>(e), 0, *d.capacity) : offsets[e];
        EXPECT_EQ(out.expert_offsets[e], begin);
        for (size_t i = 0; i < groups[e].size(); ++i) EXPECT_EQ(out.origin[static_cast<size_t>(begin) + i], groups[e][i]);
      }
      if (d.layout == Layout::expert_major) {
        EXPECT_EQ(out.num_rows, padded.padded_rows);
        EXPECT_EQ(out.num_rows, offsets.back());
      }
    }
  });
}

TEST(ReferenceProperty, SortedRowsListEachRowOncePerLocalChoice) {
  for_problems([](const RandomProblem& p, const auto& received) {
    if (p.dispatch.layout != Layout::rank_major) return;
    for (const DispatchOutput& out : received) {
      std::map<std::pair<int32_t, int64_t>, int> choices;  // (expert, row)
      for (int64_t i = 0; i < static_cast<int64_t>(out.topk_idx.size()); ++i) {
        if (out.topk_idx[static_cast<size_t>(i)] >= 0) ++choices[{out.topk_idx[static_cast<size_t>(i)], i / p.dispatch.num_topk}];
      }
      std::vector<int32_t> expected;
      for (const auto& [key, times] : choices) expected.insert(expected.end(), static_cast<size_t>(times), static_cast<int32_t>(key.second));
      EXPECT_EQ(out.sorted_rows, expected);
    }
  });
}

TEST(ReferenceProperty, RowsAreThoseThatTheirSourceSent) {
  RandomLimits limits;
  limits.quantize = false;
  for_problems(
      [](const RandomProblem& p, const auto& received) {
        const DispatchProblem& d = p.dispatch;
        const size_t row_bytes = static_cast<size_t>(d.hidden) * size_of(d.dtype);
        for (const DispatchOutput& out : received) {
          for (size_t row = 0; row < out.origin.size(); ++row) {
            if (out.origin[row].source < 0) continue;
            const DispatchInput& in = d.ranks[static_cast<size_t>(out.origin[row].source)];
            const auto token = static_cast<size_t>(out.origin[row].token);
            EXPECT_EQ(std::memcmp(out.x.data() + row * row_bytes, in.x.data() + token * row_bytes, row_bytes), 0);
            for (size_t i = 0; i < d.side_bytes.size(); ++i) {
              const size_t width = d.side_bytes[i];
              EXPECT_EQ(std::memcmp(out.side[i].data() + row * width, in.side[i].data() + token * width, width), 0);
            }
          }
        }
      },
      limits);
}

TEST(ReferenceProperty, CombineOfOnesCountsTheRowsAndLosesTheRest) {
  for_problems([](const RandomProblem& p, const auto& received) {
    const DispatchProblem& d = p.dispatch;
    std::vector<std::vector<float>> ones;
    for (const DispatchOutput& out : received) ones.emplace_back(static_cast<size_t>(out.array_rows), 1.0f);
    const auto back = reference_combine(combine_of(d, received, ones));
    for (size_t s = 0; s < d.ranks.size(); ++s) {
      std::vector<float> rows(static_cast<size_t>(d.ranks[s].num_tokens), 0.0f);
      std::vector<int32_t> lost(rows.size(), 0);
      for (int64_t t = 0; t < d.ranks[s].num_tokens; ++t) {
        for (int k = 0; k < d.num_topk; ++k) lost[static_cast<size_t>(t)] += topk_of(d, s).at(t, k) >= 0;
      }
      for (const DispatchOutput& out : received) {
        for (size_t row = 0; row < out.origin.size(); ++row) {
          if (out.origin[row].source != static_cast<int>(s)) continue;
          const auto token = static_cast<size_t>(out.origin[row].token);
          rows[token] += 1.0f;
          for (int k = 0; k < d.num_topk; ++k) {
            lost[token] -= d.layout == Layout::rank_major ? out.topk_idx[row * static_cast<size_t>(d.num_topk) + static_cast<size_t>(k)] >= 0
                                                          : out.origin[row].k == k;
          }
        }
      }
      EXPECT_EQ(values_of<float>(back[s].x), rows);
      EXPECT_EQ(back[s].num_lost, lost);
    }
  });
}

TEST(ReferenceProperty, CombineIsNearTheSumInDouble) {
  RandomLimits limits;
  limits.specials = 0;
  for_problems(
      [](const RandomProblem& p, const auto& received) {
        const CombineProblem c = random_combine(p, received, 5);
        const auto back = reference_combine(c);
        const double epsilon = c.wire == Wire::fp8 ? 0x1p-3 : c.dtype == DType::bf16 ? 0x1p-7 : c.dtype == DType::fp16 ? 0x1p-9 : 0x1p-20;
        for (size_t s = 0; s < back.size(); ++s) {
          const int64_t num_tokens = p.dispatch.ranks[s].num_tokens;
          std::vector<double> sum(static_cast<size_t>(num_tokens * p.hidden), 0.0), size(static_cast<size_t>(num_tokens), 0.0);
          for (size_t r = 0; r < received.size(); ++r) {
            for (size_t row = 0; row < received[r].origin.size(); ++row) {
              const RowOrigin o = received[r].origin[row];
              if (o.source != static_cast<int>(s)) continue;
              double weight = 1, most = 0;
              if (c.apply == CombineWeights::rows) weight = c.ranks[r].weights[row];
              if (c.apply == CombineWeights::tokens) weight = c.ranks[s].weights[static_cast<size_t>(o.token * p.dispatch.num_topk + o.k)];
              if (c.apply == CombineWeights::source)
                weight = p.dispatch.ranks[s].topk_weights[static_cast<size_t>(o.token * p.dispatch.num_topk + o.k)];
              for (int64_t i = 0; i < p.hidden; ++i) {
                const double term = weight * load_element<double>(c.dtype, c.ranks[r].y.data(), static_cast<int64_t>(row) * p.hidden + i);
                sum[static_cast<size_t>(o.token * p.hidden + i)] += term;
                most = std::max(most, std::abs(term));
              }
              size[static_cast<size_t>(o.token)] += most;
            }
          }
          for (int64_t i = 0; i < num_tokens * p.hidden; ++i) {
            ASSERT_NEAR(load_element<double>(c.dtype, back[s].x.data(), i), sum[static_cast<size_t>(i)],
                        size[static_cast<size_t>(i / p.hidden)] * epsilon + 1e-4);  // fp8: no scale under 1e-4 / 448
          }
        }
      },
      limits);
}

/// The same tokens and experts on `ranks` ranks and `nodes` nodes: results of all tokens, in order.
Bytes layer(uint64_t seed, int ranks, int nodes, Wire wire) {
  constexpr int64_t kTokens = 26, kHidden = 5;
  constexpr int kExperts = 11, kTopk = 6;
  testing::Random random(seed);
  const auto ids = testing::random_topk(random, testing::RoutingKind::zipf, kTokens, kTopk, kExperts);
  const auto weights = testing::random_floats(random, kTokens * kTopk);
  const auto rows = testing::random_rows(random, DType::fp32, kTokens * kExperts * kHidden);  // what each expert makes of each token

  DispatchProblem d;
  d.experts = ExpertMap::split(kExperts, ranks);
  d.num_topk = kTopk;
  d.hidden = 8;  // a row is the number of its token
  d.dtype = DType::u8;
  d.has_weights = true;
  d.layout = Layout::expert_major;
  for (int r = 0; r < ranks; ++r) {
    const int64_t begin = first_expert(r, kTokens, ranks), end = first_expert(r + 1, kTokens, ranks);
    DispatchInput& in = d.ranks.emplace_back();
    in.num_tokens = end - begin;
    in.topk_idx.assign(ids.begin() + begin * kTopk, ids.begin() + end * kTopk);
    in.topk_weights.assign(weights.begin() + begin * kTopk, weights.begin() + end * kTopk);
    std::vector<int64_t> x;
    for (int64_t token = begin; token < end; ++token) x.push_back(token);
    in.x = bytes_of(x);
  }
  const auto received = reference_dispatch(d);
  CombineProblem c;
  c.dispatch = &d;
  c.received = &received;
  std::vector<int> node_of_rank;
  for (int r = 0; r < ranks; ++r) node_of_rank.push_back(r % nodes);
  c.topology = Topology::of(node_of_rank);
  c.hidden = kHidden;
  c.dtype = DType::fp32;
  c.apply = CombineWeights::source;
  c.wire = wire;
  for (int r = 0; r < ranks; ++r) {
    CombineInput& in = c.ranks.emplace_back();
    const DispatchOutput& out = received[static_cast<size_t>(r)];
    const auto tokens = values_of<int64_t>(out.x);
    for (size_t e = 0; e < out.expert_counts.size(); ++e) {
      for (int64_t row = out.expert_offsets[e]; row < out.expert_offsets[e + 1]; ++row) {
        const int64_t at = (tokens[static_cast<size_t>(row)] * kExperts + d.experts.experts_of(r)[e]) * kHidden * 4;
        in.y.insert(in.y.end(), rows.begin() + at, rows.begin() + at + kHidden * 4);
      }
    }
  }
  Bytes all;
  for (const CombineOutput& out : reference_combine(c)) all.insert(all.end(), out.x.begin(), out.x.end());
  return all;
}

TEST(ReferenceProperty, RowsOnTheWireDoNotDependOnRanksOrNodes) {
  bool payload_depends = false;
  for (uint64_t seed = 0; seed < 5; ++seed) {
    const Bytes one = layer(seed, 1, 1, Wire::rows);
    for (int ranks : kRankCounts) {
      for (int nodes = 1; nodes <= ranks; ++nodes) {
        EXPECT_EQ(layer(seed, ranks, nodes, Wire::rows), one) << ranks << " ranks, " << nodes << " nodes";
        payload_depends |= layer(seed, ranks, nodes, Wire::payload) != one;
      }
    }
  }
  EXPECT_TRUE(payload_depends) << "the rows are too easy to add: any order gives the same";
}

}  // namespace
}  // namespace turnout::core
