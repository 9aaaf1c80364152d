// What looks odd and is no error: no tokens, no experts, more choices than experts, strided rows, objects that go before what
// they made, several Buffers and threads. Results are exact.
#include <cstring>
#include <numeric>
#include <optional>
#include <thread>

#include "api/small_job.h"
#include "engine/contract.h"

namespace turnout::testing {
namespace {

constexpr Layout kLayouts[] = {Layout::rank_major, Layout::expert_major, Layout::expert_slab};

TEST(NotErrors, NoTokensOnSomeOrAllRanks) {
  for (Mode mode : {Mode::throughput, Mode::low_latency}) {
    for (Layout layout : kLayouts) {
      for (int with_tokens : {0, 1, 3}) {
        run_virtual_ranks(3, [&](Communicator& comm) {
          Buffer buffer(comm, small_config());
          Tokens tokens(comm.rank(), comm.rank() < with_tokens ? 3 : 0);
          if (tokens.T == 0) {
            tokens.args.x = dense(nullptr, DType::fp32, {0, 8});
            tokens.args.topk_idx = dense(nullptr, DType::i64, {0, 2});
            tokens.args.topk_weights = dense(nullptr, DType::fp32, {0, 2});
          }
          tokens.args.mode = mode;
          tokens.args.layout = layout;
          if (layout == Layout::expert_slab) tokens.args.capacity = 9;
          const DispatchResult rows = buffer.dispatch(tokens.args);
          if (with_tokens == 0) {
            EXPECT_EQ(*read<int64_t>(rows.num_rows), 0);
          }
          const CombineResult sum = buffer.combine(back_of(rows));
          EXPECT_EQ(sum.x.shape[0], tokens.T);
          for (int64_t t = 0; t < tokens.T; ++t) {
            const float terms = layout == Layout::rank_major ? static_cast<float>(num_destinations(tokens, t, 6, 3)) : 2.0f;
            EXPECT_EQ(read_row(sum.x, t)[0], terms * Tokens::value(comm.rank(), t));
          }
          expect_works(buffer);
        });
      }
    }
  }
}

/// The oracle, for one kind of routing and every number of ranks.
void expect_kind(RoutingKind kind, const std::function<void(RandomLimits&)>& change = nullptr) {
  for (int num_ranks : {1, 2, 3, 4, 5, 7, 8}) {
    for (uint64_t seed = 1; seed <= 4; ++seed) {
      RandomLimits limits;
      limits.num_ranks = num_ranks;
      limits.kinds = {kind};
      if (change) change(limits);
      RunChoices run;
      if (!on_host()) {
        run.place = [](int) { return surroundings().make_place(); };
        run.receive_bytes = size_t{64} << 20;
        run.timeout = std::chrono::seconds(5);
      }
      run.mode = seed % 2 ? Mode::throughput : Mode::low_latency;
      expect_matches_reference(seed * 1000 + static_cast<uint64_t>(num_ranks), limits, run);
      if (::testing::Test::HasFailure()) return;
    }
  }
}
TEST(NotErrors, AllTokensToOneExpert) { expect_kind(RoutingKind::one_expert); }
TEST(NotErrors, NoExpertAnywhere) { expect_kind(RoutingKind::all_none); }
TEST(NotErrors, MoreChoicesThanExperts) {
  expect_kind(RoutingKind::uniform, [](RandomLimits& l) {
    l.max_experts = 2;
    l.max_topk = 9;
  });
}
TEST(NotErrors, TheSameExpertTwice) { expect_kind(RoutingKind::duplicates); }

TEST(NotErrors, UnevenNodes) {
  CommunicatorOptions options;
  options.node_of_rank = {0, 1, 1, 1, 0, 2, 1};
  run_virtual_ranks(
      7,
      [](Communicator& comm) {
        EXPECT_EQ(comm.num_nodes(), 3);
        const int locals[] = {0, 0, 1, 2, 1, 0, 3};
        EXPECT_EQ(comm.local_rank(), locals[comm.rank()]);
        Buffer buffer(comm, small_config());
        expect_works(buffer);
      },
      options);
}

TEST(NotErrors, FourBuffersOnTwoCommunicatorsFromTwoThreads) {
  if (!on_host()) GTEST_SKIP() << "more kernels that wait for each other than one GPU holds at once";
  auto store = thread_store();
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < 3; ++rank) {
    ranks.emplace_back([&, rank] {
      std::vector<std::thread> threads;
      for (int c = 0; c < 2; ++c) {
        threads.emplace_back([&, c] {
          Communicator comm = Communicator::from_store(store, rank, 3, "group " + std::to_string(c));
          Buffer one(comm, small_config()), two(comm, small_config());
          for (int i = 0; i < 20; ++i) {
            expect_works(one);
            expect_works(two);
          }
        });
      }
      for (auto& thread : threads) thread.join();
    });
  }
  for (auto& rank : ranks) rank.join();
}

TEST(NotErrors, LanesFromSeveralThreads) {
  if (!on_host()) GTEST_SKIP() << "more kernels that wait for each other than one GPU holds at once";
  run_on_transports(2, [](Communicator& comm) {
    BufferConfig config = small_config();
    config.num_lanes = 3;
    config.num_threads = 2;
    Buffer buffer(comm, config);
    std::vector<std::thread> threads;
    for (int lane = 0; lane < 3; ++lane) {
      threads.emplace_back([&, lane] {
        for (int i = 0; i < 20; ++i) expect_works(buffer, lane);
      });
    }
    for (auto& thread : threads) thread.join();
  });
}

/// Rings of four records: what is sent on one lane stays unread until its wait(), which every rank does in another order.
TEST(NotErrors, RanksThatWaitForLanesInDifferentOrders) {
  run_virtual_ranks(3, [](Communicator& comm) {
    BufferConfig config = small_config();
    config.num_lanes = 3;
    config.max_tokens_per_rank = 200;
    config.staging_bytes = 1;
    config.hidden = 64;
    Buffer buffer(comm, config);
    std::vector<std::unique_ptr<Tokens>> tokens;
    std::vector<PendingDispatch> pending;
    for (int lane = 0; lane < 3; ++lane) {
      tokens.push_back(std::make_unique<Tokens>(comm.rank(), 200, 2, 64));
      tokens.back()->args.lane = lane;
      tokens.back()->args.layout = Layout::expert_major;
      pending.push_back(buffer.dispatch_async(tokens.back()->args));
    }
    for (int i = 0; i < 3; ++i) pending[static_cast<size_t>((i + comm.rank()) % 3)].wait();
  });
}

TEST(NotErrors, OneHandleFourTimesInATrainingStep) {
  for (Layout layout : {Layout::expert_major, Layout::expert_slab}) {
    run_virtual_ranks(3, [&](Communicator& comm) {
      Buffer buffer(comm, small_config());
      Tokens tokens(comm.rank());
      for (size_t i = 0; i < tokens.weights.size(); ++i) tokens.weights[i] = static_cast<float>(i % 3) + 0.5f;
      tokens.args.layout = layout;
      if (layout == Layout::expert_slab) tokens.args.capacity = 9;
      const DispatchResult x = buffer.dispatch(tokens.args);
      CombineArgs forward = back_of(x);
      forward.apply = CombineWeights::source;
      const CombineResult y = buffer.combine(forward);

      Tokens grad(comm.rank());
      for (float& v : grad.x) v += 1.0f;
      grad.args.topk_idx = grad.args.topk_weights = TensorView();
      grad.args.handle = &x.handle;
      const DispatchResult dy = buffer.dispatch(grad.args);
      // Gradient of each weight: the dot product of its row's output with the gradient.
      const int64_t num_rows = x.topk_weights.num_elements();
      Shared<float> dot(static_cast<size_t>(num_rows));
      const TensorView xs = here().get(x.x), dys = here().get(dy.x);
      for (int64_t i = 0; i < num_rows; ++i) {
        const auto* a = reinterpret_cast<const float*>(result_row(xs, i));
        const auto* b = reinterpret_cast<const float*>(result_row(dys, i));
        for (int h = 0; h < 8; ++h) dot[static_cast<size_t>(i)] += a[h] * b[h];
      }
      CombineArgs backward = back_of(dy);
      backward.handle = &x.handle;
      backward.side = dense(dot.data(), DType::fp32, {num_rows});
      const CombineResult dx = buffer.combine(backward);
      for (int64_t t = 0; t < 3; ++t) {
        const float v = Tokens::value(comm.rank(), t),
                    w = tokens.weights[static_cast<size_t>(2 * t)] + tokens.weights[static_cast<size_t>(2 * t + 1)];
        EXPECT_EQ(read_row(y.x, t)[3], v * w);
        EXPECT_EQ(read_row(dx.x, t)[3], 2 * (v + 1));
        for (int k = 0; k < 2; ++k) EXPECT_EQ(read<float>(dx.side)[2 * t + k], 8 * v * (v + 1));
      }
    });
  }
}

TEST(NotErrors, ExpertsThatMoveBetweenCalls) {
  run_virtual_ranks(3, [](Communicator& comm) {
    Buffer buffer(comm, small_config());
    Tokens tokens(comm.rank());
    const DispatchResult before = buffer.dispatch(tokens.args);
    buffer.set_expert_to_rank({2, 2, 2, 2, 2, 2});
    EXPECT_EQ(buffer.num_local_experts(), comm.rank() == 2 ? 6 : 0);
    const DispatchResult after = buffer.dispatch(tokens.args);
    EXPECT_EQ(*read<int64_t>(after.num_rows), comm.rank() == 2 ? 9 : 0);
    const CombineResult old = buffer.combine(back_of(before)), now = buffer.combine(back_of(after));  // handles keep their map
    for (int64_t t = 0; t < 3; ++t) {
      EXPECT_EQ(read_row(now.x, t)[0], Tokens::value(comm.rank(), t));
      EXPECT_EQ(read_row(old.x, t)[0], Tokens::value(comm.rank(), t) * static_cast<float>(num_destinations(tokens, t, 6, 3)));
    }
    // A map that differs raises at the next call, everywhere.
    buffer.set_expert_to_rank(comm.rank() == 1 ? std::vector<int>{0, 0, 1, 1, 2, 2} : std::vector<int>{0, 1, 2, 0, 1, 2});
    expect_says(message_of<InvalidArgument>([&] { buffer.dispatch(tokens.args); }), {"disagree", "expert map", "rank 1 = "});
    buffer.set_expert_to_rank({0, 0, 1, 1, 2, 2});
    expect_works(buffer);
  });
}

TEST(NotErrors, SubGroups) {
  run_virtual_ranks(5, [](Communicator& comm) {
    const std::vector<int> even = {0, 2, 4}, odd = {1, 3};
    const bool is_even = comm.rank() % 2 == 0;
    Communicator group = comm.sub_group(is_even ? even : odd, is_even ? "even" : "odd");
    EXPECT_EQ(group.num_ranks(), is_even ? 3 : 2);
    EXPECT_EQ(group.rank(), comm.rank() / 2);
    Buffer inner(group, small_config()), outer(comm, small_config());
    expect_works(inner);
    expect_works(outer);
    expect_works(inner);
  });
}

TEST(NotErrors, ResultsAndHandlesOutliveTheirBuffer) {
  auto store = thread_store();
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < 2; ++rank) {
    ranks.emplace_back([&, rank] {
      DispatchResult rows;
      CombineResult sum;
      Handle handle;
      {
        Communicator comm = Communicator::from_store(store, rank, 2);
        Buffer buffer(comm, small_config());
        Tokens tokens(rank);
        rows = buffer.dispatch(tokens.args);
        sum = buffer.combine(back_of(rows));
        handle = rows.handle;
      }
      EXPECT_TRUE(rows.is_lease);
      EXPECT_EQ(handle.num_tokens(), 3);
      EXPECT_EQ(handle.num_topk(), 2);
      EXPECT_EQ(handle.layout(), Layout::rank_major);
      EXPECT_EQ(handle.num_rows(), rows.x.shape[0]);
      EXPECT_EQ(read_row(rows.x, 0)[7], rank == 0 ? Tokens::value(0, 0) : Tokens::value(0, 1));
      EXPECT_EQ(read_row(sum.x, 2)[7], Tokens::value(rank, 2) * (rank == 0 ? 2.0f : 1.0f));
    });
  }
  for (auto& thread : ranks) thread.join();
}

}  // namespace
}  // namespace turnout::testing
