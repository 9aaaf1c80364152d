// What was wrong and nobody was told, or not all, or too late, or in no words: found by a user who tried to break it.
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

#include "api/small_job.h"

namespace turnout::testing {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using Clock = std::chrono::steady_clock;

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr bool kSanitized = true;
#else
constexpr bool kSanitized = false;
#endif

CommunicatorOptions within(milliseconds timeout) {
  CommunicatorOptions options;
  options.timeout = timeout;
  return options;
}

/// Runs `body` for each rank of a store, on threads: what run_virtual_ranks() would not allow.
void on_threads(int num_threads, const std::function<void(int)>& body) {
  std::vector<std::thread> threads;
  for (int rank = 0; rank < num_threads; ++rank) threads.emplace_back(body, rank);
  for (auto& thread : threads) thread.join();
}

// TURNOUT_BOOTSTRAP_TIMEOUT_MS was a row of a table and nothing else. The environment is read once per process: hence processes.
TEST(Told, TheEnvironmentsDeadlineOfTheBootstrapIsTaken) {
  if (kSanitized) GTEST_SKIP() << "starts processes";
  ::testing::FLAGS_gtest_death_test_style = "threadsafe";
  const auto says = [](const std::function<void()>& body) {
    setenv("TURNOUT_BOOTSTRAP_TIMEOUT_MS", "250", 1);
    for (const char* name : {"TURNOUT_RANK", "TURNOUT_NUM_RANKS"}) unsetenv(name);
    try {
      body();
    } catch (const PeerTimeout& e) {
      std::exit(std::string(e.what()).find("250 ms") != std::string::npos ? 0 : 1);
    }
    std::exit(2);
  };
  EXPECT_EXIT(says([] { Communicator::from_store(thread_store(), 0, 2); }), ::testing::ExitedWithCode(0), "");
  EXPECT_EXIT(says([] { store_bootstrap(thread_store(), 0, 2, "world")->barrier("step"); }), ::testing::ExitedWithCode(0), "");
  EXPECT_EXIT(says([] {
                setenv("TURNOUT_RANK", "1", 1);
                setenv("TURNOUT_NUM_RANKS", "2", 1);
                setenv("TURNOUT_PORT", "1", 1);
                setenv("TURNOUT_SECRET", "sixteen letters!", 1);
                Communicator::from_env();
              }),
              ::testing::ExitedWithCode(0), "");
}

TEST(Told, ATimeoutThatIsNoneIsRefused) {
  expect_says(message_of<InvalidArgument>([] { Communicator::from_store(thread_store(), 0, 1, "world", within(milliseconds(-1))); }),
              {"timeout is -1 ms", "TURNOUT_BOOTSTRAP_TIMEOUT_MS"});
}

// One rank was told that ranks disagree; the others waited for it.
TEST(Told, AllRanksLearnThatTheyDisagreeAboutNodes) {
  struct Case {
    std::vector<std::vector<int>> given;
    std::string words;
  };
  for (const Case& c : std::vector<Case>{{{{0, 0, 1}, {0, 0, 1}, {0, 1, 1}}, "rank 0 was given {0, 0, 1}, rank 2 {0, 1, 1}"},
                                         {{{0, 0, 0}, {0, 0, 0}, {0, 0, 1}}, "rank 2 {0, 0, 1}"},
                                         {{{0, 0, 1}, {}, {0, 0, 1}}, "rank 1 nothing"},
                                         {{{0, 0, 1}, {0, 0}, {0, 0, 1}}, "node_of_rank of rank 1 has 2 entries for 3 ranks"}}) {
    const auto store = thread_store();
    on_threads(3, [&](int rank) {
      CommunicatorOptions options = within(seconds(20));
      options.node_of_rank = c.given[static_cast<size_t>(rank)];
      const auto start = Clock::now();
      expect_says(message_of<InvalidArgument>([&] { Communicator::from_store(store, rank, 3, "world", options); }), {"node_of_rank", c.words});
      EXPECT_LT(Clock::now() - start, seconds(10));
    });
  }
}

// Ranks that were told different numbers of ranks heard of silence only.
TEST(Told, RanksThatDisagreeAboutTheirNumberLearnBothNumbers) {
  const auto store = thread_store();
  on_threads(2, [&](int rank) {
    const int mine = 2 + rank, theirs = 3 - rank;
    const auto start = Clock::now();
    expect_says(message_of<InvalidArgument>([&] { Communicator::from_store(store, rank, mine, "world", within(seconds(20))); }),
                {"rank " + std::to_string(rank) + " was told that there are " + std::to_string(mine),
                 "rank " + std::to_string(1 - rank) + " that there are " + std::to_string(theirs)});
    EXPECT_LT(Clock::now() - start, seconds(10));
  });
}

// Different lanes on two ranks were told after half an hour.
TEST(Told, RanksThatWaitOnDifferentLanesAreToldSoon) {
  if (!on_host()) GTEST_SKIP() << "of the CPU engine";
  for (Mode mode : {Mode::throughput, Mode::low_latency}) {
    run_on_transports(2, [&](Communicator& comm) {
      BufferConfig config = small_config();
      config.num_lanes = 3;
      config.timeouts.timeout = milliseconds(300);
      config.timeouts.busy_timeout = seconds(60);
      Buffer buffer(comm, config);
      expect_works(buffer, 1);
      Tokens tokens(comm.rank());
      tokens.args.mode = mode;
      tokens.args.lane = comm.rank() == 0 ? 2 : 1;
      const auto start = Clock::now();
      const std::string words = message_of<PeerTimeout>([&] { buffer.dispatch(tokens.args); });
      expect_says(words, {"has come to a call on lane", "do the ranks give different lanes?"});
      EXPECT_LT(Clock::now() - start, seconds(20));
      buffer.recover();
      expect_works(buffer, 2);
    });
  }
}

// But lanes of different threads may be late to each other: that is what busy_timeout is for.
TEST(Told, LanesOfDifferentThreadsMayBeLate) {
  if (!on_host()) GTEST_SKIP() << "of the CPU engine";
  std::atomic<int> waiting{0};
  run_virtual_ranks(2, [&](Communicator& comm) {
    BufferConfig config = small_config();
    config.num_lanes = 2;
    config.timeouts.timeout = milliseconds(200);
    config.timeouts.busy_timeout = seconds(60);
    Buffer buffer(comm, config);
    on_threads(2, [&](int lane) { expect_works(buffer, lane); });
    on_threads(2, [&](int lane) {
      if (lane != comm.rank()) {  // rank 0 comes late on lane 1, rank 1 on lane 0
        while (waiting.load() < 2) std::this_thread::yield();
        const auto enough = Clock::now() + milliseconds(700);
        while (Clock::now() < enough) std::this_thread::yield();
      } else {
        ++waiting;
      }
      expect_works(buffer, lane);
    });
  });
}

// A vector of running threads unwound, and the process was gone.
TEST(Told, ASystemWithoutThreadsIsAnError) {
  if (kSanitized) GTEST_SKIP() << "sanitizers need address space of their own";
  ::testing::FLAGS_gtest_death_test_style = "threadsafe";
  const auto limited = [] {
    size_t pages = 0;
    std::ifstream("/proc/self/statm") >> pages;
    const rlim_t bytes = pages * 4096 + (rlim_t{160} << 20);
    const rlimit limit{bytes, bytes};
    setrlimit(RLIMIT_AS, &limit);
    std::atomic<int> ran{0};
    try {
      run_virtual_ranks(
          200, [&](Communicator&) { ++ran; }, within(seconds(5)));
    } catch (const TransportError& e) {
      std::exit(ran == 0 && std::string(e.what()).find("of 200 threads") != std::string::npos ? 0 : 1);
    }
    std::exit(2);
  };
  EXPECT_EXIT(limited(), ::testing::ExitedWithCode(0), "");
}

TEST(Told, WhatIsNullIsRefused) {
  expect_says(message_of<InvalidArgument>([] { Communicator::from_bootstrap(nullptr); }), {"bootstrap is null"});
  expect_says(message_of<InvalidArgument>([] { Communicator::from_store(nullptr, 0, 1); }), {"store is null"});
  expect_says(message_of<InvalidArgument>([] { store_bootstrap(nullptr, 0, 1, "world"); }), {"store is null"});
  expect_says(message_of<InvalidArgument>([] { run_virtual_ranks(1, nullptr); }), {"body is empty"});
  Communicator one = Communicator::from_store(thread_store(), 0, 1);
  Communicator two = Communicator::from_store(thread_store(), 0, 1);
  const Communicator taken = std::move(two);
  expect_says(message_of<InvalidArgument>([&] { Buffer(two, small_config()); }), {"moved from"});
  Buffer buffer(one, small_config());
  Tokens tokens(0);
  for (TensorView DispatchArgs::*view : {&DispatchArgs::x, &DispatchArgs::topk_idx, &DispatchArgs::topk_weights}) {
    DispatchArgs args = tokens.args;
    (args.*view).data = nullptr;
    expect_says(message_of<InvalidArgument>([&] { buffer.dispatch(args); }), {"null data"});
  }
  expect_says(message_of<InvalidArgument>([&] { buffer.combine({}); }), {"handle is empty"});
  PendingDispatch moved = buffer.dispatch_async(tokens.args);
  const PendingDispatch kept = std::move(moved);
  message_of<InvalidArgument>([&] { moved.wait(); });
}

// A result that no memory holds came out as std::bad_alloc.
TEST(Told, ACapacityBeyondAllMemoryIsRefusedWithItsBytes) {
  if (!on_host()) GTEST_SKIP() << "a GPU's memory is another matter";
  for (Layout layout : {Layout::rank_major, Layout::expert_major, Layout::expert_slab}) {
    run_virtual_ranks(3, [&](Communicator& comm) {
      BufferConfig config = small_config();
      config.hidden = 1 << 16;
      Buffer buffer(comm, config);
      for (ResultKind kind : {ResultKind::automatic, ResultKind::fresh}) {
        Tokens tokens(comm.rank());
        tokens.args.layout = layout;
        tokens.args.capacity = INT32_MAX;
        tokens.args.result = kind;
        std::vector<float> rows(3 << 16);
        tokens.args.x = TensorView::dense(rows.data(), DType::fp32, {3, 1 << 16});
        expect_says(message_of<InvalidArgument>([&] { buffer.dispatch(tokens.args); }), {"capacity is 2147483647", "bytes"});
      }
      expect_works(buffer);
    });
  }
}

// A handle keeps its layout, capacity and alignment: what was given beside it was ignored.
TEST(Told, WhatContradictsAHandleIsRefused) {
  run_virtual_ranks(2, [](Communicator& comm) {
    Buffer buffer(comm, small_config());
    Tokens tokens(comm.rank());
    tokens.args.layout = Layout::expert_major;
    tokens.args.expert_alignment = 4;
    const DispatchResult first = buffer.dispatch(tokens.args);
    Tokens again(comm.rank());
    again.args.topk_idx = again.args.topk_weights = TensorView();
    again.args.handle = &first.handle;
    const auto refused = [&](const std::function<void(DispatchArgs&)>& change, const std::vector<std::string>& words) {
      DispatchArgs args = again.args;
      change(args);
      expect_says(message_of<InvalidArgument>([&] { settled(buffer, buffer.dispatch(args)); }), words);
    };
    refused([](DispatchArgs& a) { a.layout = Layout::expert_slab; }, {"layout is expert_slab", "handle was made with expert_major"});
    refused([](DispatchArgs& a) { a.capacity = 7; }, {"capacity is 7", "an exact size"});
    refused([](DispatchArgs& a) { a.expert_alignment = 8; }, {"expert_alignment is 8", "handle was made with 4"});
    DispatchArgs same = again.args;
    same.layout = Layout::expert_major;
    same.expert_alignment = 4;
    for (const DispatchArgs& args : {again.args, same}) {
      EXPECT_EQ(buffer.dispatch(args).handle.num_rows(), first.handle.num_rows());
    }
    settle(buffer);
  });
}

// "No lease was free" was the first line that two of three examples printed.
TEST(Told, TheDefaultReceiveRegionHoldsResultsOfTheLargestLayout) {
  if (!on_host()) GTEST_SKIP() << "of the CPU engine";
  for (int ranks : {1, 2, 3, 4, 8}) {
    run_virtual_ranks(ranks, [&](Communicator& comm) {
      for (int64_t tokens_per_rank : {1, 50, 300}) {
        BufferConfig config = small_config();
        config.num_experts = 16;
        config.max_topk = 4;
        config.max_tokens_per_rank = tokens_per_rank;
        Buffer buffer(comm, config);
        std::vector<DispatchResult> held;
        for (Layout layout : {Layout::expert_major, Layout::rank_major}) {
          Tokens tokens(comm.rank(), tokens_per_rank, 4, 8, 16);
          tokens.args.layout = layout;
          held.push_back(buffer.dispatch(tokens.args));
          EXPECT_TRUE(held.back().is_lease) << ranks << " ranks, " << tokens_per_rank << " tokens";
        }
        EXPECT_EQ(buffer.num_fresh_results(), 0u);
      }
    });
  }
}

}  // namespace
}  // namespace turnout::testing
