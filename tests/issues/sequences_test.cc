// Orders of calls that others' buffers did not survive, and ours did not at first.
#include <atomic>
#include <thread>

#include "issues/job.h"

namespace turnout::testing {
namespace {

constexpr Mode kModes[] = {Mode::throughput, Mode::low_latency};

RandomProblem uniform(int num_ranks, int64_t num_tokens, Layout layout, uint64_t seed, int64_t hidden = 48) {
  return problem_of(
      num_ranks, 7, 3, hidden, layout, [&](int rank) { return uniform_ids(rank + static_cast<int>(seed), num_tokens, 3, 7); }, seed);
}

BufferConfig roomy(const Problem& problem, int max_outstanding = 4) {
  BufferConfig c = config_of(problem.p, {});
  c.max_tokens_per_rank = std::max<int64_t>(c.max_tokens_per_rank, 128);
  c.max_outstanding = max_outstanding;
  return c;
}

// DeepEP#580 (dispatch, dispatch, combine, combine shared scratch), DeepEP#513 (a third call in flight hung), prime-rl#3411 (two
// combines in flight corrupted each other).
TEST(Issues, CallsInFlightDoNotShareAnything) {
  for (Layout layout : {Layout::rank_major, Layout::expert_major}) {
    const Problem one(uniform(3, 20, layout, 1)), two(uniform(3, 9, layout, 2));
    run_virtual_ranks(3, [&](Communicator& comm) {
      Buffer buffer(comm, roomy(one));
      for (Mode mode : kModes) {
        const int rank = comm.rank();
        RankArguments first(one.p, rank, {.mode = mode}), second(two.p, rank, {.mode = mode});
        PendingDispatch a = buffer.dispatch_async(first.dispatch), b = buffer.dispatch_async(second.dispatch);
        const DispatchResult rows_b = b.wait(), rows_a = a.wait();
        one.expect_rows(rows_a, rank);
        two.expect_rows(rows_b, rank);
        PendingCombine sum_a = buffer.combine_async(one.back(rank, rows_a.handle)), sum_b = buffer.combine_async(two.back(rank, rows_b.handle));
        PendingDispatch c = buffer.dispatch_async(first.dispatch);
        two.expect_sums(sum_b.wait(), rank);
        one.expect_rows(c.wait(), rank);
        one.expect_sums(sum_a.wait(), rank);
      }
    });
  }
}

// FastDeploy#3182, uccl#993: changing from one mode to the other needed a clean call, which raced. sglang#11666: the mode was global.
TEST(Issues, ModesMixWithoutACleanCall) {
  const Problem problem(uniform(3, 12, Layout::rank_major, 3));
  run_problem(problem, [&](Communicator&, Buffer& buffer) {
    for (int i = 0; i < 40; ++i) expect_round(buffer, problem, kModes[i * i % 3 % 2]);
  });
}

// DeepEP#93, DeepEP#152: offsets depended on the size of the call, so batches of 1, 2, 4, ... read each other's bytes as counts.
TEST(Issues, BatchesOfEverySizeShareABuffer) {
  std::vector<std::unique_ptr<Problem>> batches;
  for (int64_t tokens : {1, 2, 4, 8, 16, 33, 64, 128}) {
    batches.push_back(std::make_unique<Problem>(uniform(2, tokens, Layout::expert_major, static_cast<uint64_t>(tokens))));
  }
  run_virtual_ranks(2, [&](Communicator& comm) {
    Buffer buffer(comm, roomy(*batches[0]));
    for (Mode mode : kModes) {
      for (size_t i = 0; i < 24; ++i) expect_round(buffer, *batches[i * 5 % batches.size()], mode);
    }
  });
}

// DeepEP#621: only rank 0 has choices, all others -1, of experts 0 and 1; rows were wrong in some of a thousand rounds.
// mori#80, mori#342: a call right after the other, without a barrier, overwrote what a peer still read.
TEST(Issues, AThousandRoundsInARowAreAllRight) {
  const Problem problem(problem_of(4, 8, 2, 64, Layout::rank_major, [](int rank) {
    std::vector<int64_t> ids;
    for (int t = 0; t < 6; ++t) ids.insert(ids.end(), {rank == 0 ? 0 : -1, rank == 0 ? 1 : -1});
    return ids;
  }));
  for (const char* transport : {"inproc", "shm"}) {
    run_problem(problem,
                [&](Communicator&, Buffer& buffer) {
                  for (int i = 0; i < 500; ++i) expect_round(buffer, problem, Mode::low_latency);
                },
                {.transport = transport});
  }
}

// sgl-kernel-npu#801: the second dispatch on a Buffer, that of the backward pass, crashed. Both passes, twice, by one handle.
TEST(Issues, AHandleServesBothPassesAgainAndAgain) {
  for (Layout layout : {Layout::rank_major, Layout::expert_major}) {
    const Problem problem(uniform(3, 10, layout, 5));
    run_problem(problem, [&](Communicator& comm, Buffer& buffer) {
      RankArguments arguments(problem.p, comm.rank(), {});
      const Handle handle = buffer.dispatch(arguments.dispatch).handle;
      arguments.dispatch.topk_idx = TensorView();
      arguments.dispatch.handle = &handle;
      for (int pass = 0; pass < 4; ++pass) {
        arguments.dispatch.mode = kModes[pass % 2];
        problem.expect_rows(buffer.dispatch(arguments.dispatch), comm.rank());
        problem.expect_sums(buffer.combine(problem.back(comm.rank(), handle)), comm.rank());
      }
    });
  }
}

// Found here (commit 87a2c24): a pending call read the caller's handle when it was waited for.
TEST(Issues, TheHandleOfAPendingCallMayGo) {
  const Problem problem(uniform(2, 10, Layout::expert_major, 6));
  run_problem(problem, [&](Communicator& comm, Buffer& buffer) {
    const int rank = comm.rank();
    RankArguments arguments(problem.p, rank, {});
    auto handle = std::make_unique<Handle>(buffer.dispatch(arguments.dispatch).handle);
    DispatchArgs cached = arguments.dispatch;
    cached.topk_idx = TensorView();
    cached.handle = handle.get();
    auto back = std::make_unique<CombineArgs>(problem.back(rank, *handle));
    PendingDispatch rows = buffer.dispatch_async(cached);
    PendingCombine sums = buffer.combine_async(*back);
    cached = DispatchArgs();
    back.reset();
    handle.reset();
    problem.expect_rows(rows.wait(), rank);
    problem.expect_sums(sums.wait(), rank);
  });
}

// Found here (commit d1a366d): a call that failed while it was issued kept its lane locked. vllm#46509: one rank gave up, the others
// stayed in their kernels for ever.
TEST(Issues, ACallThatFailsWhileItIsIssuedLeavesItsLaneFree) {
  for (const char* transport : {"inproc", "shm"}) {
    CommunicatorOptions options;
    options.transport = transport;
    run_virtual_ranks(
        3,
        [](Communicator& comm) {
          BufferConfig config = small_config();
          config.timeouts.timeout = config.timeouts.busy_timeout = std::chrono::milliseconds(300);
          Buffer buffer(comm, config);
          expect_works(buffer);
          comm.barrier();
          if (comm.rank() != 2) {
            Tokens tokens(comm.rank());
            EXPECT_THROW(buffer.dispatch_async(tokens.args).wait(), Error);
            const auto start = std::chrono::steady_clock::now();
            EXPECT_THROW(buffer.dispatch_async(tokens.args).wait(), Error);
            EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::milliseconds(250)) << "sticky, so at once";
          }
          comm.barrier();
          buffer.recover();
          expect_works(buffer);
        },
        options);
  }
}

// Found here (commit b06baa1): a peer that had sent its rows and left was reported as gone before they had landed. DeepEP#292,
// sglang#33578: a destructor that was collective hung whoever left first.
TEST(Issues, WhatAPeerSentBeforeItLeftArrives) {
  for (const char* transport : {"inproc", "shm"}) {
    auto store = thread_store();
    std::atomic<bool> left{false};
    const Problem problem(uniform(2, 30, Layout::expert_major, 7));
    std::vector<std::thread> ranks;
    for (int rank = 0; rank < 2; ++rank) {
      ranks.emplace_back([&, rank] {
        CommunicatorOptions options;
        options.transport = transport;
        RankArguments arguments(problem.p, rank, {});
        {
          Communicator comm = Communicator::from_store(store, rank, 2, transport, options);
          Buffer buffer(comm, config_of(problem.p, {}));
          if (rank == 1) {
            problem.expect_rows(buffer.dispatch(arguments.dispatch), rank);
          } else {
            PendingDispatch pending = buffer.dispatch_async(arguments.dispatch);
            left.wait(false);
            problem.expect_rows(pending.wait(), rank);
          }
        }
        if (rank == 1) {
          left = true;
          left.notify_all();
        }
      });
    }
    for (auto& rank : ranks) rank.join();
  }
}

// Found here by the soak: the copy of a refused call was free at once, so a header that was still on its way landed on that of a
// later call. (vllm#21306: the second layer hung, and nothing said which call who was at.)
TEST(Issues, WhatIsOnItsWayForARefusedCallDoesNotReachALaterOne) {
  for (uint64_t seed = 1; seed <= 40; ++seed) {
    CommunicatorOptions options;
    options.transport = "inproc";
    options.scheduler_seed = seed;
    run_virtual_ranks(
        3,
        [&](Communicator& comm) {
          BufferConfig config = small_config();
          config.max_outstanding = 1;
          Buffer buffer(comm, config);
          Random random(seed);
          for (int i = 0; i < 40; ++i) {
            Tokens tokens(comm.rank());
            tokens.args.mode = kModes[random.below(2)];
            tokens.args.layout = random.chance(0.5) ? Layout::rank_major : Layout::expert_major;
            if (comm.rank() == random.below(3)) tokens.args.topk_idx = TensorView();
            message_of<InvalidArgument>([&] { buffer.dispatch(tokens.args); });
            if (random.chance(0.3)) expect_works(buffer);
          }
        },
        options);
  }
}

// Found here: rows that had left early for a call that then had no room on one rank landed on those of a later call.
TEST(Issues, WhatIsOnItsWayForACallWithoutRoomDoesNotReachALaterOne) {
  for (uint64_t seed = 1; seed <= 40; ++seed) {
    CommunicatorOptions options;
    options.transport = "inproc";
    options.scheduler_seed = seed;
    const Problem problem(uniform(3, 3, Layout::expert_major, seed));
    run_virtual_ranks(
        3,
        [&](Communicator& comm) {
          Buffer buffer(comm, roomy(problem, 1));
          Random random(seed);
          for (int i = 0; i < 30; ++i) {
            RankArguments arguments(problem.p, comm.rank(), {.mode = Mode::low_latency});
            const bool has_room = random.below(3) != comm.rank();
            if (!has_room) arguments.dispatch.out = TensorView::dense(nullptr, DType::bf16, {0, 48});
            expect_says(message_of<InvalidArgument>([&] { buffer.dispatch(arguments.dispatch); }),
                        {has_room ? "has no room" : "out has room for 0 rows"});
            if (random.chance(0.5)) expect_round(buffer, problem, Mode::low_latency);
          }
        },
        options);
  }
}

// Found here (commit 9fdd577): `out` of a full expert_major result was refused although it had room for the capacity.
TEST(Issues, OutOfAFullResultNeedsItsCapacity) {
  RandomProblem p = uniform(2, 12, Layout::expert_major, 8);
  p.dispatch.capacity = 10;
  const Problem problem(p);
  run_problem(problem, [&](Communicator& comm, Buffer& buffer) {
    RankArguments arguments(p, comm.rank(), {});
    core::Bytes out(10 * 48 * 2);
    arguments.dispatch.out = TensorView::dense(out.data(), DType::bf16, {10, 48});
    const DispatchResult rows = buffer.dispatch(arguments.dispatch);
    problem.expect_rows(rows, comm.rank());
    EXPECT_GT(*rows.num_dropped.as<int64_t>(), 0);
  });
}

// uccl#878: eight groups beside pipeline stages crashed after some steps; one group alone never did.
TEST(Issues, ManyGroupsLiveSideBySide) {
  run_virtual_ranks(8, [](Communicator& comm) {
    const int rank = comm.rank();
    std::vector<Communicator> groups;
    groups.push_back(comm.sub_group(std::vector<int>{rank / 2 * 2, rank / 2 * 2 + 1}, "pairs"));
    groups.push_back(comm.sub_group(rank % 2 ? std::vector<int>{1, 3, 5, 7} : std::vector<int>{0, 2, 4, 6}, "strides"));
    groups.push_back(comm.sub_group(rank < 3 ? std::vector<int>{0, 1, 2} : std::vector<int>{3, 4, 5, 6, 7}, "uneven"));
    std::vector<Buffer> buffers;
    for (Communicator& group : groups) buffers.emplace_back(group, small_config());
    for (int round = 0; round < 10; ++round) {
      for (Buffer& buffer : buffers) expect_works(buffer);
    }
  });
}

}  // namespace
}  // namespace turnout::testing
