// Ranks that are processes, on two GPUs and two on one: the contract of the engine, and graphs whose peer is killed. The test itself
// never starts the driver, so that its children may.
#include "cuda/gpu_processes.h"
#include "cuda/replay.h"
#include "cuda/small_calls.h"
#include "cuda/user_kernels.h"

namespace turnout::testing {
namespace {

using Clock = std::chrono::steady_clock;
using namespace std::chrono_literals;

class CudaProcesses : public GpuTest {};

TEST_P(CudaProcesses, EqualTheOracle) {
  const auto start = Clock::now();
  // Processes of one GPU take turns on it: few problems there.
  const uint64_t last = num_ranks() > GetParam().num_gpus ? 4 : 16;
  const Placement placement = GetParam();
  RandomLimits limits;
  limits.num_ranks = num_ranks();
  limits.several_nodes = false;
  std::deque<Expected> all;
  for (uint64_t seed = 1; seed <= last; ++seed) all.emplace_back(seed + 1, random_problem(seed, limits));
  Family family(num_ranks(), as_rank(num_ranks(), [&](Communicator& comm) {
                  for (size_t i = 0; i < 2 * all.size(); ++i) {
                    const size_t at = i % all.size();
                    RunChoices run;
                    run.mode = i < all.size() ? Mode::throughput : Mode::low_latency;
                    SCOPED_TRACE("seed " + std::to_string(at + 1) + " " + std::string(name(run.mode)) + " rank " + std::to_string(comm.rank()));
                    run.receive_bytes = size_t{64} << 20;
                    run.timeout = 8s;
                    run.async = at % 3 == 1;
                    run.repeats = at % 3 == 2 ? 3 : 1;
                    run.y_in_lease = at % 2 == 0;
                    run.place = [&](int rank) { return placement.place_of(rank); };
                    play_rank(comm, all[at], run);
                    if (::testing::Test::HasFailure()) return;
                  }
                }));
  family.expect_success();
  saw("%d problems over processes, %s, %.1f s", static_cast<int>(2 * all.size()), name(placement).c_str(),
      std::chrono::duration<double>(Clock::now() - start).count());
}

/// Replays with torch's default way of capturing, which forbids much to the whole process meanwhile.
TEST_P(CudaProcesses, GraphsAreReplayedWithOtherRoutings) {
  const Placement placement = GetParam();
  const int num_replays = placement.num_ranks > placement.num_gpus ? 2 : 8;
  const auto play = [&](Communicator& comm, const Routings& routings, const ReplayShape& shape) {
    const auto place = placement.place_of(comm.rank());
    Buffer buffer(comm, config_for({&routings}, {}, place->device()));
    CapturedCalls calls(buffer, routings, shape, *place, cudaStreamCaptureModeGlobal, Receive::resident);
    for (int i = 0; i < num_replays; ++i) {
      calls.replay(static_cast<size_t>(i) % 3);
      place->finish();
      buffer.check();
      calls.expect(static_cast<size_t>(i) % 3);
    }
  };
  const ReplayShape shape{Layout::expert_major, Mode::throughput, Quantize::fp8_e4m3, 24};
  const ReplayShape quick{Layout::expert_major, Mode::low_latency, Quantize::fp8_e4m3, 24};
  const Routings routings(21, num_ranks(), shape, 3), quick_routings(21, num_ranks(), quick, 3);
  Family family(num_ranks(), as_rank(num_ranks(), [&](Communicator& comm) {
                  play(comm, routings, shape);
                  play(comm, quick_routings, quick);
                }));
  family.expect_success();
}

struct Times {
  std::atomic<int64_t> killed{0}, ended{0}, again{0};
};
int64_t now_ns() { return std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now().time_since_epoch()).count(); }

constexpr int kCalls = 60;
constexpr auto kDeadline = 2s;

/// 30 dispatches and combines; `half` runs when 30 calls are recorded.
Graph capture_calls(Buffer& buffer, const Expected& e, Mode mode, CudaPlace& place, std::deque<DispatchResult>& kept, std::deque<CombineResult>& sums,
                    std::deque<RankArguments>& inputs, const std::function<void(cudaStream_t)>& half) {
  const auto stream = static_cast<cudaStream_t>(place.stream().native);
  RunChoices run;
  run.mode = mode;
  inputs.emplace_back(e.p, buffer.rank(), run);
  inputs.back().move_to(place);
  const Handle none;
  CombineArgs back = combine_args(e.p, e.combine, e.received, buffer.rank(), none);
  back.mode = mode;
  back.y = place.put(back.y);
  back.weights = place.put(back.weights);
  back.side = place.put(back.side);
  back.stream = place.stream();
  place.finish();
  Capture capture(stream, cudaStreamCaptureModeGlobal);
  for (int i = 0; i < kCalls / 2; ++i) {
    if (i == kCalls / 4) half(stream);
    DispatchResult result = buffer.dispatch(inputs.back().dispatch);
    back.handle = &result.handle;
    sums.push_back(buffer.combine(back));
    kept.clear();  // the graph uses its blocks again
    kept.push_back(std::move(result));
  }
  return Graph(capture.end(), stream);
}

void expect_killed_peer_ends_the_graph(const Placement& placement, Mode mode) {
  const Routings routings(31, 2, {}, 1);
  const Expected& e = routings.variant(0);
  Pipe middle, killed;
  SharedBy<Times> times;
  Family family(2, as_rank(2, [&](Communicator& comm) {
                  const int rank = comm.rank();
                  const auto place = placement.place_of(rank);
                  load_user_kernels();
                  const MappedWords flag(1);
                  RunChoices run;
                  run.timeout = kDeadline;
                  Buffer buffer(comm, config_for({&routings}, run, place->device()));
                  std::deque<DispatchResult> kept;
                  std::deque<CombineResult> sums;
                  std::deque<RankArguments> inputs;
                  const Graph whole = capture_calls(buffer, e, mode, *place, kept, sums, inputs, [](cudaStream_t) {});
                  // Rank 1 stops in the middle of its graph, and is killed there.
                  const Graph halted = capture_calls(buffer, e, mode, *place, kept, sums, inputs, [&](cudaStream_t stream) {
                    if (rank == 0) return;
                    mark(stream, flag.at(0), 1);
                    spin(stream, 3s);
                  });
                  const auto stream = static_cast<cudaStream_t>(place->stream().native);
                  const auto start = Clock::now();
                  whole.launch(stream);
                  place->finish();
                  buffer.check();
                  const double undisturbed = std::chrono::duration<double, std::micro>(Clock::now() - start).count();
                  comm.barrier();
                  halted.launch(stream);
                  if (rank == 1) {
                    flag.wait(0, 1, "the middle of the graph");
                    middle.say('m');
                    pause();
                  }
                  place->finish();
                  times->ended = now_ns();
                  std::string text;
                  try {
                    buffer.check();
                  } catch (const Error& error) {
                    text = error.what();
                  }
                  require(text.find("rank 1") != std::string::npos, "the error does not name rank 1: " + text);
                  // All that follows ends at once, the rest of a graph included.
                  const int64_t again = now_ns();
                  whole.launch(stream);
                  place->finish();
                  times->again = now_ns() - again;
                  saw("undisturbed replay of %d calls %.0f us; after the kill: %s", kCalls, undisturbed, text.c_str());
                  killed.hear();
                  _exit(0);  // there is no barrier with the dead
                }));
  ASSERT_EQ(middle.hear(), 'm');
  times->killed = now_ns();
  family.kill(1);
  killed.say('k');
  EXPECT_EQ(family.join(0), 0);
  const double took = 1e-9 * static_cast<double>(times->ended - times->killed), again = 1e-3 * static_cast<double>(times->again);
  saw("%s %s: the replay ended %.3f s after the kill (deadline 2 s, allowed 3 s); the next replay of %d calls took %.0f us", name(placement).c_str(),
      std::string(name(mode)).c_str(), took, kCalls, again);
  EXPECT_LT(took, 3.0);
  EXPECT_LT(again, 100'000.0);
}

TEST_P(CudaProcesses, AKilledPeerEndsAGraphOfSixtyCalls) {
  if (num_ranks() != 2) GTEST_SKIP() << "for two ranks";
  for (Mode mode : {Mode::throughput, Mode::low_latency}) {
    SCOPED_TRACE(std::string(name(mode)));
    expect_killed_peer_ends_the_graph(GetParam(), mode);
    if (HasFailure()) return;
  }
}

/// Rank 1 never comes: its process is stopped, which ends the wait after `timeout`, or it lives, and has `busy_timeout`.
void expect_absent_peer_is(const std::string& state, const Placement& placement, Mode mode) {
  const Routings routings(41, 2, {}, 1);
  const bool stops = state == "silent";
  Pipe here, go;
  Family family(2, as_rank(2, [&](Communicator& comm) {
                  const auto place = placement.place_of(comm.rank());
                  RunChoices run;
                  run.mode = mode;
                  BufferConfig config = config_for({&routings}, run, place->device());
                  config.timeouts.timeout = stops ? 2s : 30s;
                  config.timeouts.busy_timeout = stops ? 30s : 2s;
                  Buffer buffer(comm, config);
                  RankArguments arguments(routings.variant(0).p, comm.rank(), run);
                  arguments.move_to(*place);
                  const auto call = [&] {
                    buffer.dispatch(arguments.dispatch);
                    place->finish();
                    buffer.check();
                  };
                  comm.barrier();
                  call();
                  comm.barrier();
                  if (comm.rank() == 1) {
                    here.say('h');
                    while (true) pause();
                  }
                  go.hear();
                  const auto start = Clock::now();
                  try {
                    call();
                    require(false, "the call ended");
                  } catch (const PeerTimeout& e) {
                    require(e.record().peer_state == state && e.record().peers == std::vector<int>{1}, "expected " + state + ": " + e.what());
                    saw("%s after %.2f s: %s", state.c_str(), std::chrono::duration<double>(Clock::now() - start).count(), e.what());
                  }
                  require(Clock::now() - start < 10s, "too late");
                  _exit(0);  // there is no barrier with who does not come
                }));
  ASSERT_EQ(here.hear(), 'h');
  if (stops) family.send(1, SIGSTOP);
  go.say('g');
  EXPECT_EQ(family.join(0), 0);
}

TEST_P(CudaProcesses, APeerThatDoesNotComeIsSilentIfItIsStoppedAndElseBusy) {
  if (num_ranks() != 2) GTEST_SKIP() << "for two ranks";
  for (Mode mode : {Mode::throughput, Mode::low_latency}) {
    for (const char* state : {"silent", "busy"}) {
      SCOPED_TRACE(std::string(name(mode)) + " " + state);
      expect_absent_peer_is(state, GetParam(), mode);
      if (HasFailure()) return;
    }
  }
}

/// With memcheck, which sees only here what one GPU writes into another's memory.
TEST_P(CudaProcesses, SmallCallsOfEveryKind) {
  const Placement placement = GetParam();
  if (placement.num_ranks != 2) GTEST_SKIP() << "for two ranks";
  std::deque<SmallCall> calls;
  for (size_t i = 0; i < SmallCall::kNum; ++i) calls.emplace_back(i, 2);
  Family family(2, as_rank(2, [&](Communicator& comm) {
                  for (const SmallCall& call : calls) {
                    SCOPED_TRACE(call.what() + " rank " + std::to_string(comm.rank()));
                    RunChoices run = call.run;
                    run.place = [&](int rank) { return placement.place_of(rank); };
                    play_rank(comm, call.e, run);
                    if (::testing::Test::HasFailure()) return;
                  }
                }));
  family.expect_success();
}

INSTANTIATE_TEST_SUITE_P(Cuda, CudaProcesses, ::testing::Values(Placement{2, 2}, Placement{2, 1}, Placement{4, 2}), placement_name);

}  // namespace
}  // namespace turnout::testing
