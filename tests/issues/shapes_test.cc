// Shapes that other libraries had constants for.
#include <sys/mman.h>

#include <atomic>

#include "issues/job.h"

namespace turnout::testing {
namespace {

constexpr Layout kLayouts[] = {Layout::rank_major, Layout::expert_major};

// DeepEP#154, DeepEP#329, DeepEP#413 (hidden % 128), sglang#19468 (3072), Paddle#74710 (1536), vllm#27122 (2880), nccl#2103 (1024):
// widths were compiled in, one by one.
TEST(Issues, AnyHiddenIsTaken) {
  for (int64_t hidden : {1, 7, 64, 72, 127, 1000, 1024, 1536, 2048, 2880, 3072, 4096, 6144, 7168, 7169}) {
    SCOPED_TRACE(hidden);
    expect_both_modes(problem_of(2, 4, 2, hidden, Layout::rank_major, [](int rank) { return uniform_ids(rank, 3, 2, 4); }));
  }
}

// DeepEP#593: fp8 asked for hidden % 512 although its blocks have 128.
TEST(Issues, Fp8NeedsNoMultipleOfAnything) {
  for (int64_t hidden : {1, 64, 128, 129, 384, 640, 2880}) {
    for (Quantize quantize : {Quantize::fp8_e4m3, Quantize::fp8_e4m3_ue8m0}) {
      SCOPED_TRACE(std::to_string(hidden) + " " + std::string(name(quantize)));
      RandomProblem p = problem_of(2, 4, 2, hidden, Layout::expert_major, [](int rank) { return uniform_ids(rank, 3, 2, 4); });
      p.dispatch.quantize = quantize;
      expect_both_modes(p);
    }
  }
}

// DeepEP#403, TRT-LLM#17984, sgl-kernel-npu#812 (limits of 9, then 10, then 16), nccl#2103 (22).
TEST(Issues, AnyTopkUpToTheLimitIsTaken) {
  for (int topk : {1, 2, 8, 9, 10, 16, 17, 22, 32, 33, 64}) {
    for (Layout layout : kLayouts) {
      SCOPED_TRACE(topk);
      expect_both_modes(problem_of(3, 64, topk, 40, layout, [&](int rank) { return uniform_ids(rank, 5, topk, 64); }));
    }
  }
}

// DeepEP#255, DeepEP#90, DeepEP#464, DeepEP#50 (numbers of ranks compiled in), TransformerEngine#3036 (4 at least), DeepSpeed#8213 (one
// rank took another path), vllm#52435 (256 experts over 3), awsome-distributed-ai#1240 (128 over 24: experts 120 to 127 belonged to nobody).
TEST(Issues, ExpertsAreSharedOutOverAnyNumberOfRanksAndNoneIsLost) {
  struct {
    int ranks, experts;
  } const cases[] = {{1, 8}, {2, 5}, {3, 256}, {5, 12}, {6, 7}, {7, 128}, {24, 128}, {9, 4}};
  for (const auto& c : cases) {
    SCOPED_TRACE(std::to_string(c.experts) + " experts on " + std::to_string(c.ranks) + " ranks");
    // Together the tokens of all ranks choose every expert.
    const RandomProblem p = problem_of(c.ranks, c.experts, 2, 16, Layout::expert_major, [&](int rank) {
      std::vector<int64_t> ids;
      for (int64_t e = rank; e < c.experts; e += c.ranks) ids.insert(ids.end(), {e, (e + 1) % c.experts});
      return ids;
    });
    const Problem problem(p);
    std::atomic<int64_t> num_experts{0}, num_rows{0};
    run_problem(problem, [&](Communicator& comm, Buffer& buffer) {
      expect_round(buffer, problem, Mode::throughput);
      num_experts += buffer.num_local_experts();
      RankArguments arguments(p, comm.rank(), {});
      const DispatchResult rows = buffer.dispatch(arguments.dispatch);
      for (int e = 0; e < buffer.num_local_experts(); ++e) {
        EXPECT_EQ(rows.expert_counts.as<int32_t>()[e], 2) << "local expert " << e << " of rank " << comm.rank();
        num_rows += rows.expert_counts.as<int32_t>()[e];
      }
    });
    EXPECT_EQ(num_experts, c.experts);
    EXPECT_EQ(num_rows, 2 * c.experts);
  }
}

// DeepEP#300, DeepEP#114, DeepEP#226: the library's own defaults were invalid at some sizes.
TEST(Issues, DefaultsAreValidAtEverySize) {
  for (int ranks : {1, 2, 3, 7, 8, 64, 72, 144, 160, 161, 1024, 4096}) {
    for (int64_t tokens : {0, 1, 128, 8192, 131072}) {
      BufferConfig c;
      c.num_experts = 256;
      c.hidden = 7168;
      c.max_tokens_per_rank = tokens;
      EXPECT_GT(required_bytes(c, ranks), 0u) << ranks << " ranks, " << tokens << " tokens";
    }
  }
}

// vllm#39213, sglang#6449, DeepEP#489, DeepEP#454, DeepSpeed#8590: 32 bits of address. The second expert's rows begin beyond 4 GiB of
// its slab, and the rows of x are 2 GiB apart; pages that nobody touches cost nothing.
TEST(Issues, RowsLieBeyondFourGigabytes) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "sanitizers keep notes on every page of a slab";
#endif
  constexpr int64_t kHidden = 1 << 16, kCapacity = 70'000, kTokens = 3, kStride = int64_t{1} << 31;
  run_virtual_ranks(2, [&](Communicator& comm) {
    BufferConfig c = small_config();
    c.num_experts = 4;
    c.dtype = DType::u8;
    c.hidden = 4 * kHidden;
    c.receive_bytes = size_t{12} << 30;
    Buffer buffer(comm, c);
    const size_t num_bytes = static_cast<size_t>(kStride) * kTokens;
    void* memory = mmap(nullptr, num_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    ASSERT_NE(memory, MAP_FAILED);
    auto* x = static_cast<unsigned char*>(memory);
    for (int64_t t = 0; t < kTokens; ++t) std::memset(x + t * kStride, static_cast<int>(10 * comm.rank() + t + 1), kHidden);
    const std::vector<int64_t> ids = {1, 3, 3, 1, 1, 3};
    DispatchArgs args;
    args.x = TensorView::matrix(x, DType::u8, kTokens, kHidden, kStride);
    args.topk_idx = TensorView::dense(ids.data(), DType::i64, {kTokens, 2});
    args.layout = Layout::expert_slab;
    args.capacity = kCapacity;
    args.result = ResultKind::lease;
    const DispatchResult rows = buffer.dispatch(args);
    ASSERT_EQ(rows.expert_counts.as<int32_t>()[1], 6);
    for (int64_t i = 0; i < 6; ++i) {
      const auto* row = reinterpret_cast<const unsigned char*>(result_row(rows.x, kCapacity + i));
      const auto want = static_cast<unsigned char>(10 * (i / 3) + i % 3 + 1);
      EXPECT_GT(row - rows.x.as<unsigned char>(), int64_t{1} << 32);
      ASSERT_TRUE(row[0] == want && row[kHidden - 1] == want) << "row " << i;
    }
    munmap(memory, num_bytes);
  });
}

// nccl#2088, uccl#924, sglang#5285: low-latency memory that grew with experts x ranks x tokens. What the design page promises.
TEST(Issues, MemoryFollowsWhatArrives) {
  BufferConfig c;
  c.num_experts = 256;
  c.hidden = 7168;
  c.max_tokens_per_rank = 128;
  EXPECT_LE(required_bytes(c, 64), size_t{250} << 20);
  c.max_tokens_per_rank = 4096;
  c.num_experts = 256;
  const size_t few = required_bytes(c, 64);
  c.num_experts = 2048;
  EXPECT_LT(required_bytes(c, 64), few + few / 10) << "experts alone cost next to nothing";
}

// DeepEP#165, srt-slurm#42: one number and no advice. Both numbers are named, and the Buffer goes on.
TEST(Issues, MoreTokensThanConfiguredNamesBothNumbers) {
  run_virtual_ranks(2, [](Communicator& comm) {
    Buffer buffer(comm, small_config());
    Tokens tokens(comm.rank(), comm.rank() == 1 ? 5 : 3);
    const std::string what = message_of<InvalidArgument>([&] { buffer.dispatch(tokens.args); });
    expect_says(what, comm.rank() == 1 ? std::vector<std::string>{"5", "4", "max_tokens_per_rank"} : std::vector<std::string>{"rank 1"});
    expect_works(buffer);
  });
}

}  // namespace
}  // namespace turnout::testing
