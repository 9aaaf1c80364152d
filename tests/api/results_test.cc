// What results are made of: strided inputs and outputs, bf16 weights, fused fp8, arrival counters, memory of the caller's.
#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <thread>

#include "api/small_job.h"
#include "engine/contract.h"
#include "util/log.h"

namespace turnout::testing {
namespace {

std::vector<std::byte> bytes_of(const TensorView& t) {
  std::vector<std::byte> bytes;
  if (t.ndim == 3) {
    for (int64_t i = 0; i < t.shape[0] * t.shape[1]; ++i) {
      const std::byte* row = result_row(t, i);
      bytes.insert(bytes.end(), row, row + static_cast<size_t>(t.shape[2]) * size_of(t.dtype));
    }
    return bytes;
  }
  for (int64_t i = 0; i < t.shape[0]; ++i) bytes.insert(bytes.end(), t.row(i), t.row(i) + static_cast<size_t>(t.shape[1]) * size_of(t.dtype));
  return bytes;
}

/// Rows `stride` elements apart, with something else between them.
struct Strided {
  explicit Strided(const TensorView& dense, int64_t stride) : memory(static_cast<size_t>(dense.shape[0] * stride), 77.0f) {
    for (int64_t i = 0; i < dense.shape[0]; ++i)
      std::memcpy(&memory[static_cast<size_t>(i * stride)], dense.row(i), static_cast<size_t>(dense.shape[1]) * 4);
    view = TensorView::matrix(memory.data(), DType::fp32, dense.shape[0], dense.shape[1], stride);
  }
  std::vector<float> memory;
  TensorView view;
};

TEST(Results, StridesChangeNothing) {
  for (Layout layout : {Layout::rank_major, Layout::expert_major}) {
    run_virtual_ranks(3, [&](Communicator& comm) {
      Buffer buffer(comm, small_config());
      Tokens tokens(comm.rank());
      tokens.args.layout = layout;
      const DispatchResult want = buffer.dispatch(tokens.args);
      const CombineResult want_sum = buffer.combine(back_of(want));

      const Strided x(tokens.args.x, 11);
      std::vector<float> out(512, -7.0f);
      tokens.args.x = x.view;
      tokens.args.out = TensorView::matrix(out.data(), DType::fp32, want.x.shape[0] + 2, 8, 13);
      const DispatchResult got = buffer.dispatch(tokens.args);
      EXPECT_EQ(got.x.data, out.data());
      EXPECT_EQ(got.x.strides[0], 13);
      EXPECT_EQ(bytes_of(got.x), bytes_of(want.x));
      for (int64_t i = 0; i < want.x.shape[0]; ++i) {
        for (int64_t gap = 8; gap < 13; ++gap) ASSERT_EQ(out[static_cast<size_t>(13 * i + gap)], -7.0f) << "written between rows";
      }
      std::vector<float> sum(64, -7.0f);
      CombineArgs back = back_of(got);
      back.out = TensorView::matrix(sum.data(), DType::fp32, 3, 8, 12);
      const CombineResult got_sum = buffer.combine(back);
      EXPECT_EQ(got_sum.x.data, sum.data());
      EXPECT_EQ(bytes_of(got_sum.x), bytes_of(want_sum.x));
      for (size_t i = 0; i < sum.size(); ++i) {
        const bool between = i % 12 >= 8 || i >= 36;
        ASSERT_TRUE(!between || sum[i] == -7.0f) << "written between rows";
      }
    });
  }
}

TEST(Results, StridedSlabIntoOutAndBack) {
  run_virtual_ranks(2, [](Communicator& comm) {
    Buffer buffer(comm, small_config());
    Tokens tokens(comm.rank());
    tokens.args.layout = Layout::expert_slab;
    tokens.args.capacity = 6;
    const DispatchResult want = buffer.dispatch(tokens.args);
    std::vector<float> out(static_cast<size_t>(3 * 6 * 8), -7.0f);
    tokens.args.out = TensorView::dense(out.data(), DType::fp32, {3, 6, 8});
    const DispatchResult got = buffer.dispatch(tokens.args);
    EXPECT_EQ(got.x.data, out.data());
    EXPECT_FALSE(got.is_lease);
    const CombineResult a = buffer.combine(back_of(want)), b = buffer.combine(back_of(got));
    EXPECT_EQ(bytes_of(a.x), bytes_of(b.x));
  });
}

/// An offer takes all of the receive region, and what arrives keeps no more than it needs: without rows, too.
TEST(Results, ALeaseIsCutToWhatArrived) {
  run_virtual_ranks(2, [](Communicator& comm) {
    BufferConfig config = small_config();
    config.max_tokens_per_rank = 200;
    config.receive_bytes = 16384;
    Buffer buffer(comm, config);
    for (int64_t expert : {0, 3}) {  // of rank 0, of rank 1: the other one has no rows
      Tokens tokens(comm.rank());
      std::fill(tokens.ids.begin(), tokens.ids.end(), expert);
      const DispatchResult held = buffer.dispatch(tokens.args);
      EXPECT_EQ(*held.num_rows.as<int64_t>(), comm.rank() == expert / 3 ? 6 : 0);
      Tokens more(comm.rank());
      EXPECT_TRUE(buffer.dispatch(more.args).is_lease);
    }
    EXPECT_EQ(buffer.num_fresh_results(), 0u);
  });
}

TEST(Results, WeightsInBf16AreTheirFp32Values) {
  run_virtual_ranks(2, [](Communicator& comm) {
    Buffer buffer(comm, small_config());
    Tokens tokens(comm.rank());
    std::vector<uint16_t> narrow;
    for (size_t i = 0; i < tokens.weights.size(); ++i) {
      tokens.weights[i] = 0.25f + static_cast<float>(i);
      uint32_t bits;
      std::memcpy(&bits, &tokens.weights[i], 4);
      narrow.push_back(static_cast<uint16_t>(bits >> 16));
    }
    tokens.args.layout = Layout::expert_major;
    const DispatchResult wide = buffer.dispatch(tokens.args);
    tokens.args.topk_weights = TensorView::dense(narrow.data(), DType::bf16, {3, 2});
    const DispatchResult got = buffer.dispatch(tokens.args);
    const int64_t n = wide.topk_weights.shape[0];
    ASSERT_EQ(got.topk_weights.shape[0], n);
    EXPECT_EQ(std::memcmp(got.topk_weights.data, wide.topk_weights.data, static_cast<size_t>(n) * 4), 0);
    CombineArgs back = back_of(got);
    back.apply = CombineWeights::source;
    const CombineResult source = buffer.combine(back);
    std::vector<uint16_t> rows;
    for (int64_t i = 0; i < n; ++i) {
      uint32_t bits;
      std::memcpy(&bits, got.topk_weights.as<float>() + i, 4);
      rows.push_back(static_cast<uint16_t>(bits >> 16));
    }
    back.apply = CombineWeights::rows;
    back.weights = TensorView::dense(rows.data(), DType::bf16, {n});
    const CombineResult by_row = buffer.combine(back);
    EXPECT_EQ(bytes_of(source.x), bytes_of(by_row.x));
  });
}

TEST(Results, Fp8IsTheRuleOfTheCore) {
  for (Quantize quantize : {Quantize::fp8_e4m3, Quantize::fp8_e4m3_ue8m0}) {
    run_virtual_ranks(2, [&](Communicator& comm) {
      BufferConfig config = small_config();
      config.hidden = 200;  // a whole block and a short one
      Buffer buffer(comm, config);
      Tokens tokens(comm.rank(), 1, 1, 200);
      tokens.ids[0] = comm.rank() == 0 ? 5 : 0;  // to the other rank
      for (size_t i = 0; i < 200; ++i) tokens.x[i] = i < 128 ? 448.0f : static_cast<float>(i % 7) * 0.5f;
      tokens.x[199] = 3.5f;
      tokens.args.quantize = quantize;
      const DispatchResult rows = buffer.dispatch(tokens.args);
      ASSERT_EQ(*rows.num_rows.as<int64_t>(), 1);
      EXPECT_EQ(rows.x.dtype, DType::fp8_e4m3);
      EXPECT_EQ(rows.x_scales.shape[1], 2);
      const auto* q = reinterpret_cast<const uint8_t*>(rows.x.row(0));
      EXPECT_EQ(q[0], 0x7e);  // 448
      if (quantize == Quantize::fp8_e4m3) {
        EXPECT_EQ(rows.x_scales.dtype, DType::fp32);
        EXPECT_EQ(rows.x_scales.as<float>()[0], 1.0f);
        EXPECT_EQ(rows.x_scales.as<float>()[1], 3.5f / 448.0f);
        EXPECT_EQ(q[199], 0x7e);
      } else {
        EXPECT_EQ(rows.x_scales.dtype, DType::ue8m0);
        EXPECT_EQ(rows.x_scales.as<uint8_t>()[0], 127);      // 2^0
        EXPECT_EQ(rows.x_scales.as<uint8_t>()[1], 127 - 7);  // 1/128 is a power of two already
        EXPECT_EQ(q[199], 0x7e);                             // 3.5 * 128 = 448
      }
    });
  }
}

TEST(Results, TwoRunsAreBitwiseEqual) {
  const auto run = [](uint64_t scheduler_seed) {
    std::vector<std::vector<std::byte>> sums(4);
    const RandomProblem p = random_problem(77, {.num_ranks = 4,
                                                .max_tokens = 60,
                                                .zero_tokens = 0.0,
                                                .kinds = {RoutingKind::zipf},
                                                .layouts = {Layout::expert_major},
                                                .dtypes = {DType::bf16},
                                                .capacity = false,
                                                .quantize = false});
    CommunicatorOptions options;
    options.transport = "inproc";
    options.scheduler_seed = scheduler_seed;
    run_virtual_ranks(
        4,
        [&](Communicator& comm) {
          Buffer buffer(comm, config_of(p, {}));
          RankArguments args(p, comm.rank(), {});
          const DispatchResult rows = buffer.dispatch(args.dispatch);
          sums[static_cast<size_t>(comm.rank())] = bytes_of(buffer.combine(back_of(rows)).x);
        },
        options);
    return sums;
  };
  const auto first = run(0);
  EXPECT_FALSE(first[0].empty());
  EXPECT_EQ(run(0), first);
  EXPECT_EQ(run(5), first);
  EXPECT_EQ(run(6), first);
}

TEST(Results, ArrivalCountersGrowWithoutACallOfOurs) {
  for (Mode mode : {Mode::throughput, Mode::low_latency}) {
    run_virtual_ranks(3, [&](Communicator& comm) {
      BufferConfig config = small_config();
      config.max_tokens_per_rank = 300;
      Buffer buffer(comm, config);
      Tokens tokens(comm.rank(), 300);
      tokens.args.mode = mode;
      tokens.args.receive = Receive::resident;
      PendingDispatch pending = buffer.dispatch_async(tokens.args);
      const TensorView arrived = pending.arrived();
      ASSERT_EQ(arrived.num_elements(), 3);
      std::vector<int64_t> expected;
      for (int source = 0; source < 3; ++source) {
        const Tokens theirs(source, 300);
        int64_t rows = 0;
        for (int64_t t = 0; t < 300; ++t) {
          const int64_t a = theirs.ids[static_cast<size_t>(2 * t)] / 2, b = theirs.ids[static_cast<size_t>(2 * t + 1)] / 2;
          rows += a == comm.rank() || b == comm.rank();
        }
        expected.push_back(rows);
      }
      const auto give_up = std::chrono::steady_clock::now() + std::chrono::seconds(20);
      std::vector<int64_t> last(3, 0);
      while (last != expected && std::chrono::steady_clock::now() < give_up) {
        for (size_t source = 0; source < 3; ++source) {
          const int64_t now = std::atomic_ref(arrived.as<int64_t>()[source]).load(std::memory_order_acquire);
          ASSERT_GE(now, last[source]);
          ASSERT_LE(now, expected[source]);
          last[source] = now;
        }
        std::this_thread::yield();
      }
      EXPECT_EQ(last, expected);
      const DispatchResult rows = pending.wait();
      EXPECT_EQ(*rows.num_rows.as<int64_t>(), expected[0] + expected[1] + expected[2]);
      for (size_t source = 0; source < 3; ++source) EXPECT_EQ(rows.arrived.as<int64_t>()[source], expected[source]);
      expect_works(buffer);
    });
  }
}

class Counting : public Allocator {
 public:
  void* allocate(size_t num_bytes) override {
    ++num_live;
    ++num_calls;
    return std::aligned_alloc(64, (num_bytes + 63) / 64 * 64);
  }
  void deallocate(void* data, size_t) noexcept override {
    --num_live;
    std::free(data);
  }
  std::atomic<int> num_live{0}, num_calls{0};
};

TEST(Results, FreshOnesComeFromTheCallersAllocator) {
  std::vector<Counting> allocators(2);
  run_virtual_ranks(2, [&](Communicator& comm) {
    Counting& allocator = allocators[static_cast<size_t>(comm.rank())];
    std::optional<Buffer> buffer(std::in_place, comm, small_config(), &allocator);
    Tokens tokens(comm.rank());
    tokens.args.result = ResultKind::fresh;
    DispatchResult rows = buffer->dispatch(tokens.args);
    EXPECT_FALSE(rows.is_lease);
    EXPECT_EQ(allocator.num_live, 1);
    CombineResult sum = buffer->combine(back_of(rows));
    EXPECT_EQ(allocator.num_live, 2);
    rows.release();
    EXPECT_EQ(allocator.num_live, 1);
    buffer.reset();
    EXPECT_EQ(reinterpret_cast<const float*>(sum.x.row(2))[0], Tokens::value(comm.rank(), 2) * (comm.rank() == 0 ? 2.0f : 1.0f));
    sum.release();
    EXPECT_EQ(allocator.num_live, 0);
    EXPECT_EQ(allocator.num_calls, 2);
  });
}

/// Counted each time, said once per Buffer.
TEST(Results, TheFirstOneWithoutALeaseIsLogged) {
  std::vector<std::string> lines;  // the log calls back one at a time
  util::set_log_callback([&](util::LogLevel level, std::string_view text, int rank) {
    if (rank == 1) lines.push_back(std::string(util::name(level)) + ": " + std::string(text));
  });
  run_virtual_ranks(2, [](Communicator& comm) {
    BufferConfig config = small_config();
    config.receive_bytes = 4096;
    Buffer buffer(comm, config);
    Tokens tokens(comm.rank());
    const DispatchResult lease = buffer.dispatch(tokens.args);
    EXPECT_TRUE(lease.is_lease);
    EXPECT_EQ(buffer.num_fresh_results(), 0u);
    for (Layout layout : {Layout::rank_major, Layout::expert_major, Layout::expert_slab}) {
      tokens.args.layout = layout;
      tokens.args.capacity = 6;
      EXPECT_FALSE(buffer.dispatch(tokens.args).is_lease);
    }
    EXPECT_EQ(buffer.num_fresh_results(), 3u);
    tokens.args.result = ResultKind::fresh;  // asked for
    std::vector<float> out(96);
    buffer.dispatch(tokens.args);
    tokens.args.result = ResultKind::automatic;
    tokens.args.out = TensorView::dense(out.data(), DType::fp32, {12, 8});
    tokens.args.capacity = 4;
    buffer.dispatch(tokens.args);
    EXPECT_EQ(buffer.num_fresh_results(), 3u);
  });
  util::set_log_callback({});
  ASSERT_EQ(lines.size(), 1u);
  support::expect_says(lines[0], {"warn: dispatch: no lease was free", "4096", "receive_bytes", "num_fresh_results()"});
}

TEST(Log, ACallbackOfTheCallersGetsTheLevelsThatItAsksFor) {
  for (const LogLevel most : {LogLevel::warn, LogLevel::info, LogLevel::debug}) {
    std::vector<std::string> lines;  // the log calls back one at a time
    set_log_callback([&](LogLevel level, std::string_view text, int rank) { lines.push_back(util::line_of(level, text, rank)); }, most);
    run_virtual_ranks(2, [](Communicator& comm) { Buffer(comm, small_config()); });
    set_log_callback({});
    ASSERT_EQ(lines.size(), most == LogLevel::warn ? 0u : most == LogLevel::info ? 1u : 3u);
    if (most == LogLevel::warn) continue;
    support::expect_says(lines[0], {"turnout [rank 0] info: 2 ranks over "});
    if (most == LogLevel::debug) support::expect_says(lines[2], {"debug: Buffer: 6 experts, 4 tokens of 8 fp32", "KiB of symmetric memory"});
  }
}

TEST(Results, TailsBecomeZero) {
  for (Layout layout : {Layout::rank_major, Layout::expert_major, Layout::expert_slab}) {
    run_virtual_ranks(2, [&](Communicator& comm) {
      Buffer buffer(comm, small_config());
      Tokens tokens(comm.rank());
      tokens.args.layout = layout;
      tokens.args.capacity = 14;
      const DispatchResult want = buffer.dispatch(tokens.args);
      const bool slab = layout == Layout::expert_slab;
      const int64_t groups = slab ? 3 : 1, stride = slab ? 8 : 11;
      std::vector<float> out(static_cast<size_t>(groups * 14 * stride), -7.0f);
      tokens.args.out = slab ? TensorView::dense(out.data(), DType::fp32, {3, 14, 8}) : TensorView::matrix(out.data(), DType::fp32, 14, 8, stride);
      tokens.args.zero_tail = true;
      const DispatchResult got = buffer.dispatch(tokens.args);
      int64_t filled = 0;
      for (int64_t row = 0; row < groups * 14; ++row) {
        const int64_t present = slab ? want.expert_counts.as<int32_t>()[row / 14] : *want.num_rows.as<int64_t>();
        const bool is_there = row % 14 < present;
        filled += is_there;
        for (int64_t h = 0; h < stride; ++h) {
          const float at = out[static_cast<size_t>(row * stride + h)];
          if (h >= 8) ASSERT_EQ(at, -7.0f) << "written between rows";
          else ASSERT_EQ(at == 0, !is_there) << "row " << row;
        }
      }
      EXPECT_GT(filled, 0);
      EXPECT_LT(filled, groups * 14);
    });
  }
}

}  // namespace
}  // namespace turnout::testing
