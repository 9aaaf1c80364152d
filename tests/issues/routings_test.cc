// Routings that others lost rows of, or fell over.
#include <cstdlib>

#include "issues/job.h"

namespace turnout::testing {
namespace {

constexpr Mode kModes[] = {Mode::throughput, Mode::low_latency};
constexpr Layout kLayouts[] = {Layout::rank_major, Layout::expert_major};

// DeepEP#447, xtuner#1799, Automodel#3680: a rank that received nothing crashed, or left the backward pass and hung the others.
// sglang#25397, uccl#901, DeepEP#374, sgl-kernel-npu#738: so did one without tokens. Here rank 1 has none and rank 2 gets none.
TEST(Issues, RanksWithoutTokensOrRowsTakePartInBothPasses) {
  for (Layout layout : kLayouts) {
    RandomProblem p = problem_of(3, 3, 2, 40, layout, [](int rank) {
      return rank == 1 ? std::vector<int64_t>{} : std::vector<int64_t>{0, 1, 1, -1};
    });
    p.with_side = true;
    const Problem problem(p);
    run_problem(problem, [&](Communicator& comm, Buffer& buffer) {
      for (Mode mode : kModes) {
        expect_round(buffer, problem, mode);
        RankArguments arguments(p, comm.rank(), {.mode = mode});
        const DispatchResult rows = buffer.dispatch(arguments.dispatch);
        EXPECT_EQ(*rows.num_rows.as<int64_t>() == 0, comm.rank() == 2);
        arguments.dispatch.topk_idx = TensorView();
        arguments.dispatch.handle = &rows.handle;
        problem.expect_rows(buffer.dispatch(arguments.dispatch), comm.rank());
      }
    });
  }
}

// DeepEP#208, DeepEP#744: numbers of tokens that differ by rank hung, or were not allowed.
TEST(Issues, RanksMayDifferInTokens) {
  for (Layout layout : kLayouts) {
    expect_both_modes(problem_of(4, 6, 2, 24, layout, [](int rank) { return uniform_ids(rank, rank * rank * 11, 2, 6); }));
  }
}

// DeepEP#427 (2304 tokens, counts wrong beyond 512), flashinfer#4637 (all to one rank's experts hung): with the smallest staging.
TEST(Issues, AllTokensToOneRankArriveThroughTheSmallestStaging) {
  for (Layout layout : kLayouts) {
    const Problem problem(problem_of(3, 6, 2, 20, layout, [](int rank) {
      std::vector<int64_t> ids;
      for (int t = 0; t < 768; ++t) ids.insert(ids.end(), {(t + rank) % 2, 1 - (t + rank) % 2});
      return ids;
    }));
    run_problem(problem,
                [&](Communicator&, Buffer& buffer) {
                  for (Mode mode : kModes) expect_round(buffer, problem, mode);
                },
                {.receive_bytes = 4096, .staging_bytes = 1});
  }
}

// InferenceX#1696: below a capacity of 256 output decoded to nonsense. DeepEP#443: a bug in dropping.
TEST(Issues, EveryCapacityKeepsTheFirstAndCountsTheRest) {
  for (Layout layout : {Layout::rank_major, Layout::expert_major, Layout::expert_slab}) {
    for (int64_t capacity = 0; capacity <= 26; ++capacity) {
      SCOPED_TRACE(std::string(name(layout)) + ", capacity " + std::to_string(capacity));
      RandomProblem p = problem_of(2, 4, 2, 16, layout, [](int rank) { return uniform_ids(rank, 12, 2, 4); });
      p.dispatch.capacity = capacity;
      expect_both_modes(p);
    }
  }
}

// ISEEKYAN/Megatron-LM#175: of an expert that was chosen twice the first weight was lost.
TEST(Issues, AnExpertChosenTwiceCountsTwice) {
  run_virtual_ranks(2, [](Communicator& comm) {
    Buffer buffer(comm, small_config());
    Tokens tokens(comm.rank());
    for (size_t i = 0; i < tokens.ids.size(); ++i) tokens.ids[i] = 4;
    for (size_t i = 0; i < tokens.weights.size(); ++i) tokens.weights[i] = i % 2 ? 0.25f : 0.5f;
    tokens.args.layout = Layout::expert_major;
    const DispatchResult rows = buffer.dispatch(tokens.args);
    CombineArgs back;
    back.y = rows.x;
    back.handle = &rows.handle;
    back.apply = CombineWeights::source;
    const CombineResult sum = buffer.combine(back);
    for (int64_t t = 0; t < 3; ++t) EXPECT_EQ(reinterpret_cast<const float*>(sum.x.row(t))[0], 0.75f * Tokens::value(comm.rank(), t));
  });
}

// vllm#46432: received ids beyond the rows were whatever had been there, and taken for experts. vllm#47733: two sentinels.
TEST(Issues, BeyondTheRowsThereAreOnlyMinusOnes) {
  run_virtual_ranks(2, [](Communicator& comm) {
    Buffer buffer(comm, small_config());
    for (Mode mode : kModes) {
      for (ResultKind result : {ResultKind::automatic, ResultKind::fresh}) {
        Tokens full(comm.rank()), few(comm.rank(), 1);
        full.args.capacity = few.args.capacity = 20;
        full.args.mode = few.args.mode = mode;
        full.args.result = few.args.result = result;
        { const DispatchResult spoils_memory = buffer.dispatch(full.args); }
        const DispatchResult rows = buffer.dispatch(few.args);
        const int64_t n = *rows.num_rows.as<int64_t>();
        ASSERT_LT(n, 20);
        for (int64_t i = 2 * n; i < 40; ++i) {
          ASSERT_EQ(rows.topk_idx.as<int32_t>()[i], -1);
          ASSERT_EQ(rows.topk_weights.as<float>()[i], 0.0f);
        }
      }
    }
    Tokens wrong(comm.rank());
    wrong.ids[0] = comm.rank() == 0 ? 6 : 0;  // the number of experts is no sentinel
    const std::string what = message_of<InvalidArgument>([&] { buffer.dispatch(wrong.args); });
    if (comm.rank() == 0) expect_says(what, {"6", "-1"});
    expect_works(buffer);
  });
}

// xtuner#2053: counts and rows came from different layouts. Here they are of one result.
TEST(Issues, CountsAreThoseOfTheRows) {
  for (int alignment : {1, 8}) {
    RandomProblem p = problem_of(3, 7, 3, 16, Layout::expert_major, [](int rank) { return uniform_ids(rank, 20, 3, 7); });
    p.dispatch.alignment = alignment;
    run_problem(Problem(p), [&](Communicator& comm, Buffer& buffer) {
      RankArguments arguments(p, comm.rank(), {});
      const DispatchResult groups = buffer.dispatch(arguments.dispatch);
      arguments.dispatch.layout = Layout::rank_major;
      arguments.dispatch.expert_alignment = 1;
      const DispatchResult ranks = buffer.dispatch(arguments.dispatch);
      int64_t padded = 0, sum = 0;
      for (int64_t e = 0; e < buffer.num_local_experts(); ++e) {
        const int32_t count = groups.expert_counts.as<int32_t>()[e];
        EXPECT_EQ(count, ranks.expert_counts.as<int32_t>()[e]);
        EXPECT_EQ(groups.expert_offsets.as<int64_t>()[e], padded);
        padded += (count + alignment - 1) / alignment * alignment;
        sum += count;
      }
      EXPECT_EQ(*groups.num_rows.as<int64_t>(), padded);
      EXPECT_EQ(ranks.sorted_rows.num_elements(), sum);
    });
  }
}

// Automodel#2676 (the loss depended on the number of ranks), Megatron-LM#1603 (and on the dispatcher: experts were added in another
// order). With wire=rows a token's sum is the same on any number of ranks, in both modes.
TEST(Issues, SumsDoNotDependOnTheNumberOfRanks) {
  constexpr int kTokens = 24, kTopk = 4, kExperts = 16, kHidden = 33;
  const std::vector<int64_t> ids = uniform_ids(0, kTokens, kTopk, kExperts);
  Random random(9);
  std::vector<float> x(size_t{kTokens} * kHidden), weights = random_floats(random, kTokens * kTopk);
  for (float& v : x) v = static_cast<float>(random.unit() * 2 - 1);
  std::vector<float> sums[8];
  int round = 0;
  for (Mode mode : kModes) {
    for (int num_ranks : {1, 2, 3, 8}) {
      std::vector<float>& all = sums[round++];
      all.resize(x.size());
      run_virtual_ranks(num_ranks, [&](Communicator& comm) {
        BufferConfig c = small_config();
        c.num_experts = kExperts;
        c.hidden = kHidden;
        c.max_tokens_per_rank = kTokens;
        c.max_topk = kTopk;
        Buffer buffer(comm, c);
        const int64_t share = kTokens / num_ranks, begin = share * comm.rank();
        DispatchArgs args;
        args.x = TensorView::dense(&x[static_cast<size_t>(begin * kHidden)], DType::fp32, {share, kHidden});
        args.topk_idx = TensorView::dense(&ids[static_cast<size_t>(begin * kTopk)], DType::i64, {share, kTopk});
        args.topk_weights = TensorView::dense(&weights[static_cast<size_t>(begin * kTopk)], DType::fp32, {share, kTopk});
        args.layout = Layout::expert_major;
        args.mode = mode;
        const DispatchResult rows = buffer.dispatch(args);
        CombineArgs back;
        back.y = rows.x;
        back.handle = &rows.handle;
        back.apply = CombineWeights::source;
        back.wire = Wire::rows;
        back.mode = mode;
        back.out = TensorView::dense(&all[static_cast<size_t>(begin * kHidden)], DType::fp32, {share, kHidden});
        buffer.combine(back);
      });
      EXPECT_EQ(all, sums[0]) << num_ranks << " ranks, " << name(mode);
    }
  }
}

/// Memory as full of NaNs as some frameworks fill it.
class NanAllocator final : public Allocator {
 public:
  void* allocate(size_t num_bytes) override {
    void* data = std::aligned_alloc(4096, (num_bytes + 8192) / 4096 * 4096);
    std::memset(data, 0xFF, num_bytes);
    return data;
  }
  void deallocate(void* data, size_t) noexcept override { std::free(data); }
};

// DeepEP#589, DeepEP#600: with memory filled with NaN results were NaN.
TEST(Issues, WhatMemoryHeldBeforeDoesNotMatter) {
  for (uint64_t seed = 1; seed <= 12; ++seed) {
    RandomLimits limits;
    limits.num_ranks = 3;
    const Problem problem(random_problem(seed, limits));
    run_virtual_ranks(3, [&](Communicator& comm) {
      NanAllocator memory;
      Buffer buffer(comm, config_of(problem.p, {}), &memory);
      RankArguments arguments(problem.p, comm.rank(), {.mode = kModes[seed % 2], .result = ResultKind::fresh});
      const DispatchResult rows = buffer.dispatch(arguments.dispatch);
      problem.expect_rows(rows, comm.rank());
      problem.expect_sums(buffer.combine(problem.back(comm.rank(), rows.handle)), comm.rank());
    });
  }
}

}  // namespace
}  // namespace turnout::testing
