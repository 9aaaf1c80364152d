// CUDA graphs: every call with a capacity is captured, and a replay delivers what the inputs say by then.
#include <ctime>

#include "cuda/replay.h"
#include "support/errors.h"

namespace turnout::testing {
namespace {

using support::expect_says;
using support::message_of;
using Clock = std::chrono::steady_clock;

constexpr Layout kLayouts[] = {Layout::rank_major, Layout::expert_major, Layout::expert_slab};
constexpr Mode kModes[] = {Mode::throughput, Mode::low_latency};
/// Virtual ranks capture in threads of one process: none of them may spoil another's capture.
constexpr cudaStreamCaptureMode kOwn = cudaStreamCaptureModeThreadLocal;

using Graphs = GpuTest;

TEST_P(Graphs, EveryCallIsReplayedWithOtherRoutings) {
  int num_graphs = 0;
  for (Layout layout : kLayouts) {
    for (Mode mode : kModes) {
      for (Quantize quantize : {Quantize::none, Quantize::fp8_e4m3, Quantize::fp8_e4m3_ue8m0}) {
        const ReplayShape shape{layout, mode, quantize};
        const Routings routings(1000 + static_cast<uint64_t>(num_graphs++), num_ranks(), shape, 4);
        run_virtual_ranks(num_ranks(), [&](Communicator& comm) {
          SCOPED_TRACE(std::string(name(layout)) + " " + std::string(name(mode)) + " " + std::string(name(quantize)));
          const auto place = GetParam().place_of(comm.rank());
          Buffer buffer(comm, config_for({&routings}, {}, place->device()));
          CapturedCalls calls(buffer, routings, shape, *place, kOwn);
          comm.barrier();
          for (size_t v : {size_t{0}, size_t{1}, size_t{2}, size_t{3}, size_t{1}, size_t{0}}) {
            calls.replay(v);
            place->finish();
            buffer.check();
            calls.expect(v);
          }
          comm.barrier();
        });
        if (HasFailure()) return;
      }
    }
  }
  saw("%d graphs of %d calls, each replayed 6 times with 4 routings, %s", num_graphs, CapturedCalls::kNumCalls, name(GetParam()).c_str());
}

TEST_P(Graphs, SeveralTokenCountsAndEagerCallsMixOnOneBuffer) {
  std::deque<Routings> routings;
  std::vector<ReplayShape> shapes;
  uint64_t seed = 50;
  for (int64_t tokens : {1, 8, 24}) {
    shapes.push_back({kLayouts[seed % 3], kModes[seed % 2], seed % 2 ? Quantize::fp8_e4m3 : Quantize::none, tokens});
    routings.emplace_back(seed++, num_ranks(), shapes.back(), 3);
  }
  std::vector<const Routings*> all;
  for (const Routings& r : routings) all.push_back(&r);
  run_virtual_ranks(num_ranks(), [&](Communicator& comm) {
    const auto place = GetParam().place_of(comm.rank());
    Buffer buffer(comm, config_for(all, {}, place->device()));
    std::deque<CapturedCalls> graphs;
    for (size_t i = 0; i < all.size(); ++i) graphs.emplace_back(buffer, routings[i], shapes[i], *place, kOwn);
    comm.barrier();
    Random random(7);
    int num_replays = 0, num_eager = 0;
    for (int step = 0; step < 40; ++step) {
      const auto which = static_cast<size_t>(random.below(3)), variant = static_cast<size_t>(random.below(3));
      const Expected& e = routings[which].variant(variant);
      if (random.chance(0.6)) {
        SCOPED_TRACE("step " + std::to_string(step));
        graphs[which].replay(variant);
        place->finish();
        buffer.check();
        graphs[which].expect(variant);
        ++num_replays;
        continue;
      }
      RunChoices run;
      run.mode = kModes[random.below(2)];
      RankArguments eager(e.p, comm.rank(), run);
      eager.move_to(*place);
      const DispatchResult result = buffer.dispatch(eager.dispatch);
      place->finish();
      buffer.check();
      expect_dispatch(result, e.received[static_cast<size_t>(comm.rank())], e.p.dispatch, *place);
      ++num_eager;
    }
    if (comm.rank() == 0) saw("3 graphs on one Buffer: %d replays and %d eager calls between them", num_replays, num_eager);
    comm.barrier();
  });
}

/// An earlier result that is released while its stream is captured must not tie later calls to the capture.
TEST_P(Graphs, AResultMayBeReleasedDuringACapture) {
  const ReplayShape shape;
  const Routings routings(77, num_ranks(), shape, 2);
  run_virtual_ranks(num_ranks(), [&](Communicator& comm) {
    const auto place = GetParam().place_of(comm.rank()), other = GetParam().place_of(comm.rank());
    const Expected& e = routings.variant(0);
    Buffer buffer(comm, config_for({&routings}, {}, place->device()));
    RankArguments arguments(e.p, comm.rank(), {});
    arguments.move_to(*place);
    DispatchResult early = buffer.dispatch(arguments.dispatch);
    place->finish();
    {
      Capture capture(static_cast<cudaStream_t>(place->stream().native), kOwn);
      early.release();
      cuda_ok(cudaGraphDestroy(capture.end()), "cudaGraphDestroy");
    }
    comm.barrier();
    // The block that was released is taken again, by another stream and by the same.
    for (CudaPlace* at : {other.get(), place.get(), other.get()}) {
      RankArguments again(e.p, comm.rank(), {});
      again.move_to(*at);
      const DispatchResult result = buffer.dispatch(again.dispatch);
      at->finish();
      buffer.check();
      expect_dispatch(result, e.received[static_cast<size_t>(comm.rank())], e.p.dispatch, *at);
      comm.barrier();
    }
  });
}

TEST_P(Graphs, ExactSizeIsRefusedAndTheBufferWorksAfterwards) {
  const ReplayShape shape;
  const Routings routings(3, num_ranks(), shape, 1);
  run_virtual_ranks(num_ranks(), [&](Communicator& comm) {
    const auto place = GetParam().place_of(comm.rank());
    const Expected& e = routings.variant(0);
    Buffer buffer(comm, config_for({&routings}, {}, place->device()));
    RankArguments arguments(e.p, comm.rank(), {});
    arguments.move_to(*place);
    place->finish();
    DispatchArgs exact = arguments.dispatch;
    exact.capacity.reset();
    {
      Capture capture(static_cast<cudaStream_t>(place->stream().native), kOwn);
      const std::string message = message_of<InvalidArgument>([&] { buffer.dispatch(exact); });
      expect_says(message, {"exact", "captured", "capacity"});
      if (comm.rank() == 0) saw(message);
      cuda_ok(cudaGraphDestroy(capture.end()), "cudaGraphDestroy");
    }
    comm.barrier();
    const DispatchResult result = buffer.dispatch(arguments.dispatch);
    place->finish();
    buffer.check();
    expect_dispatch(result, e.received[static_cast<size_t>(comm.rank())], e.p.dispatch, *place);
  });
}

TEST_P(Graphs, ABufferIsNotMadeDuringACapture) {
  // Of the program's own streams some wait for the default stream, and some do not.
  for (unsigned flags : {cudaStreamNonBlocking, cudaStreamDefault}) {
    run_virtual_ranks(num_ranks(), [&](Communicator& comm) {
      const auto place = GetParam().place_of(comm.rank());
      BufferConfig config;
      config.num_experts = 4;
      config.hidden = 16;
      config.max_tokens_per_rank = 4;
      config.device = place->device();
      cudaStream_t stream = nullptr;
      cuda_ok(cudaStreamCreateWithFlags(&stream, flags), "cudaStreamCreate");
      comm.barrier();
      {
        Capture capture(stream, cudaStreamCaptureModeThreadLocal);
        const std::string message = message_of<InvalidArgument>([&] { Buffer buffer(comm, config); });
        expect_says(message, {"captur", "before"});
        if (comm.rank() == 0) saw("stream of flags %u: %s", flags, message.c_str());
        comm.barrier();
      }
      comm.barrier();
      Buffer buffer(comm, config);
      cuda_ok(cudaStreamDestroy(stream), "cudaStreamDestroy");
    });
  }
}

/// One rank does not launch its graph: the others' replay ends with the deadline, and after recover() the same graphs work.
TEST_P(Graphs, AReplayThatWaitsInVainEndsAndWorksAfterRecover) {
  if (num_ranks() < 2) GTEST_SKIP() << "nobody to wait for";
  const ReplayShape shape;
  const Routings routings(9, num_ranks(), shape, 2);
  run_virtual_ranks(num_ranks(), [&](Communicator& comm) {
    const auto place = GetParam().place_of(comm.rank());
    RunChoices run;
    run.timeout = std::chrono::milliseconds(500);
    Buffer buffer(comm, config_for({&routings}, run, place->device()));
    CapturedCalls calls(buffer, routings, shape, *place, kOwn);
    comm.barrier();
    const int absent = comm.num_ranks() - 1;
    const auto start = Clock::now();
    if (comm.rank() != absent) {
      calls.replay(0);
      place->finish();
      const double took = std::chrono::duration<double>(Clock::now() - start).count();
      EXPECT_LT(took, 1.5);
      try {
        buffer.check();
        ADD_FAILURE() << "nothing was thrown";
      } catch (const PeerTimeout& error) {
        EXPECT_EQ(error.record().peers, std::vector<int>{absent});
        if (comm.rank() == 0) saw("replay of 5 calls ended after %.3f s (deadline 0.5): %s", took, error.what());
      }
    }
    comm.barrier();
    buffer.recover();
    for (size_t v : {size_t{1}, size_t{0}}) {
      calls.replay(v);
      place->finish();
      buffer.check();
      calls.expect(v);
    }
    comm.barrier();
  });
}

double seconds_of(clockid_t clock) {
  timespec t{};
  clock_gettime(clock, &t);
  return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}

/// Nothing of ours runs on the host when a graph is replayed: all time that this process spends outside the launching thread.
TEST(GraphsOfOneRank, TakeNoHostTimeOfOurs) {
  if (const std::string reason = lacking(1); !reason.empty()) GTEST_SKIP() << reason;
  const ReplayShape shape;
  const Routings routings(11, 1, shape, 1);
  run_virtual_ranks(1, [&](Communicator& comm) {
    CudaPlace place(0);
    Buffer buffer(comm, config_for({&routings}, {}, place.device()));
    CapturedCalls calls(buffer, routings, shape, place, cudaStreamCaptureModeGlobal);
    calls.replay(0);
    place.finish();
    const auto stream = static_cast<cudaStream_t>(place.stream().native);
    constexpr int kReplays = 5000;
    // The launching thread sleeps while the GPU works, so that the other threads are seen.
    const double process = seconds_of(CLOCK_PROCESS_CPUTIME_ID), own = seconds_of(CLOCK_THREAD_CPUTIME_ID), wall = seconds_of(CLOCK_MONOTONIC);
    double launching = 0;
    for (int i = 0; i < kReplays; ++i) {
      const double start = seconds_of(CLOCK_MONOTONIC);
      calls.launch_only();
      launching += seconds_of(CLOCK_MONOTONIC) - start;
      if (i % 50 == 49) cuda_ok(cudaStreamSynchronize(stream), "replays");
    }
    const double others = (seconds_of(CLOCK_PROCESS_CPUTIME_ID) - process) - (seconds_of(CLOCK_THREAD_CPUTIME_ID) - own);
    saw("%d replays of a graph of %d kernels: %.2f us each; cudaGraphLaunch %.2f us of host time; all other threads of the process %.3f us", kReplays,
        calls.num_nodes(), 1e6 * (seconds_of(CLOCK_MONOTONIC) - wall) / kReplays, 1e6 * launching / kReplays, 1e6 * others / kReplays);
    EXPECT_LT(1e6 * others / kReplays, 1.0);
    buffer.check();
    calls.expect(0);
  });
}

INSTANTIATE_TEST_SUITE_P(Cuda, Graphs, ::testing::Values(Placement{1, 1}, Placement{2, 1}, Placement{3, 1}, Placement{2, 2}), placement_name);

}  // namespace
}  // namespace turnout::testing
