// Ranks that are processes, one of which dies: all others are told within a second, and what they have of the GPU stays usable.
#include "cuda/gpu_processes.h"
#include "cuda/one_call.h"
#include "cuda/user_kernels.h"

namespace turnout::testing {
namespace {

using Clock = std::chrono::steady_clock;
using namespace std::chrono_literals;

int64_t now_ns() { return std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now().time_since_epoch()).count(); }

constexpr int kMostRanks = 4;

struct Moments {
  std::atomic<int64_t> told[kMostRanks] = {};
};

CommunicatorOptions over_shm() {
  CommunicatorOptions options;
  options.transport = "shm";
  options.timeout = 20s;
  return options;
}

/// Rounds until one raises; how many had ended before.
int play_until_told(Buffer& buffer, Call& call, CudaPlace& place, const std::function<void(int)>& before) {
  for (int round = 0;; ++round) {
    before(round);
    const DispatchResult rows = buffer.dispatch(call.arguments.dispatch);
    CombineArgs back = call.back;
    back.handle = &rows.handle;
    const CombineResult sum = buffer.combine(back);
    place.finish();
    buffer.check();
    call.expect(rows);
    call.expect(sum);
  }
}

/// Memory, kernels and a Buffer of those who are left, in the same contexts and while the old Buffer is still there.
void expect_context_is_usable(const std::shared_ptr<Store>& store, int rank, int survivors, CudaPlace& place, Mode mode) {
  void* p = nullptr;
  cuda_ok(cudaMalloc(&p, size_t{32} << 20), "cudaMalloc");
  cuda_ok(cudaMemset(p, 1, size_t{32} << 20), "cudaMemset");
  spin(static_cast<cudaStream_t>(place.stream().native), 10us);
  place.finish();
  cuda_ok(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  cuda_ok(cudaFree(p), "cudaFree");
  Communicator left = Communicator::from_store(store, rank, survivors, "those who are left", over_shm());
  ReplayShape shape;
  shape.mode = mode;
  const Routings routings(72, survivors, shape, 1);
  RunChoices run;
  run.mode = mode;
  Buffer buffer(left, config_for({&routings}, run, place.device()));
  Call call(routings.variant(0), rank, place, run);
  for (int round = 0; round < 3; ++round) {
    const DispatchResult rows = buffer.dispatch(call.arguments.dispatch);
    place.finish();
    buffer.check();
    call.expect(rows);
  }
  left.barrier();
}

enum class Where { in_a_call, between_calls };

void expect_death_is_told(const Placement& placement, Mode mode, Where where) {
  ReplayShape shape;
  shape.mode = mode;
  const int victim = placement.num_ranks - 1;
  const Routings routings(71, placement.num_ranks, shape, 1);
  Pipe middle, killed;
  SharedBy<Moments> moments;
  Family family(placement.num_ranks, [&](const std::shared_ptr<Store>& store, int rank) {
    Communicator comm = Communicator::from_store(store, rank, placement.num_ranks, "world", over_shm());
    const auto place = placement.place_of(rank);
    load_user_kernels();
    RunChoices run;
    run.mode = mode;
    run.timeout = 60s;
    Buffer buffer(comm, config_for({&routings}, run, place->device()));
    Call call(routings.variant(0), rank, *place, run);
    comm.barrier();
    const auto before = [&](int round) {
      if (rank != victim || round != 5) return;
      // In its stream the call waits behind a kernel of the user, or is not made.
      if (where == Where::in_a_call) {
        spin(static_cast<cudaStream_t>(place->stream().native), 5s);
        buffer.dispatch(call.arguments.dispatch);
      }
      middle.say('m');
      while (true) pause();
    };
    try {
      play_until_told(buffer, call, *place, before);
    } catch (const PeerFailed& e) {
      moments->told[rank] = now_ns();
      require(e.record().peers == std::vector<int>{victim} && e.record().peer_state == "gone", e.what());
      if (rank == 0) saw(e.what());
    }
    require(!::testing::Test::HasFailure(), "a comparison failed");
    killed.hear();
    expect_context_is_usable(store, rank, placement.num_ranks - 1, *place, mode);
    std::fflush(stdout);
  });
  ASSERT_EQ(middle.hear(), 'm');
  const int64_t killed_at = now_ns();
  family.kill(victim);
  const int64_t gone_at = now_ns();  // the driver takes down what the process had before it is gone
  double latest = 0;
  for (int rank = 0; rank < victim; ++rank) killed.say('k');
  for (int rank = 0; rank < victim; ++rank) {
    EXPECT_EQ(family.join(rank), 0) << "rank " << rank;
    EXPECT_GT(moments->told[rank], killed_at) << "rank " << rank;
    latest = std::max(latest, 1e-9 * static_cast<double>(moments->told[rank] - gone_at));
  }
  saw("%s %s, killed %s: gone %.3f s after the kill, the last rank was told %.3f s later (deadline 60 s, allowed 1 s); then a Buffer of the others "
      "worked",
      name(placement).c_str(), std::string(name(mode)).c_str(), where == Where::in_a_call ? "in a call" : "between calls",
      1e-9 * static_cast<double>(gone_at - killed_at), latest);
  EXPECT_LT(latest, 1.0);
}

class CudaLostPeer : public GpuTest {};

TEST_P(CudaLostPeer, ADeathIsToldToAllWithinASecondAndContextsStayUsable) {
  // Processes take seconds to start: each placement has half of the cases.
  for (Mode mode : {Mode::throughput, Mode::low_latency}) {
    const Where where = (GetParam().num_gpus == 1) == (mode == Mode::throughput) ? Where::in_a_call : Where::between_calls;
    SCOPED_TRACE(std::string(name(mode)) + (where == Where::in_a_call ? " in a call" : " between calls"));
    expect_death_is_told(GetParam(), mode, where);
    if (HasFailure()) return;
  }
}

/// A process that was stopped for longer than the deadline finds the Buffer aborted when it goes on, and recover() makes all whole.
TEST_P(CudaLostPeer, AStoppedProcessComesBackAndAllRecover) {
  const Placement placement = GetParam();
  const Mode mode = placement.num_gpus == 1 ? Mode::low_latency : Mode::throughput;
  ReplayShape shape;
  shape.mode = mode;
  const int victim = placement.num_ranks - 1;
  const Routings routings(73, placement.num_ranks, shape, 1);
  Pipe middle, expired;
  Family family(placement.num_ranks, [&](const std::shared_ptr<Store>& store, int rank) {
    Communicator comm = Communicator::from_store(store, rank, placement.num_ranks, "world", over_shm());
    const auto place = placement.place_of(rank);
    RunChoices run;
    run.mode = mode;
    BufferConfig config = config_for({&routings}, run, place->device());
    config.timeouts.timeout = 1500ms;
    config.timeouts.busy_timeout = 60s;
    Buffer buffer(comm, config);
    Call call(routings.variant(0), rank, *place, run);
    comm.barrier();
    try {
      play_until_told(buffer, call, *place, [&](int round) {
        if (rank != victim || round != 5) return;
        middle.say('m');
        raise(SIGSTOP);
      });
    } catch (const PeerTimeout& e) {
      require(e.record().peers == std::vector<int>{victim} && e.record().peer_state == "silent", e.what());
    }
    if (rank != victim) expired.say('e');
    buffer.recover();
    for (int round = 0; round < 3; ++round) {
      const DispatchResult rows = buffer.dispatch(call.arguments.dispatch);
      place->finish();
      buffer.check();
      call.expect(rows);
    }
    require(!::testing::Test::HasFailure(), "a comparison failed");
    comm.barrier();
  });
  ASSERT_EQ(middle.hear(), 'm');
  for (int rank = 0; rank < victim; ++rank) ASSERT_EQ(expired.hear(), 'e');
  family.send(victim, SIGCONT);
  family.expect_success();
}

INSTANTIATE_TEST_SUITE_P(Cuda, CudaLostPeer, ::testing::Values(Placement{3, 1}, Placement{3, 2}), placement_name);

}  // namespace
}  // namespace turnout::testing
