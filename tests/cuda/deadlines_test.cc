// What one rank gives up all ranks give up, soon: whatever they wait for themselves, on whatever lane, in whatever way; and after recover()
// all goes on.
#include <array>

#include "cuda/one_call.h"
#include "support/errors.h"

namespace turnout::testing {
namespace {

using support::expect_says;
using support::message_of;
using Clock = std::chrono::steady_clock;
using namespace std::chrono_literals;

enum class Way { eager, graph, exact };
std::string name(Way way) { return way == Way::eager ? "eager" : way == Way::graph ? "graph" : "exact"; }

/// A rank with one call on each of two lanes: as it is, as a graph of three dispatches, or one whose host waits for counts.
class TwoLanes {
 public:
  TwoLanes(Communicator& comm, const Routings& routings, Mode mode, Way way, CudaPlace& place)
      : way_(way), place_(place), stream_(static_cast<cudaStream_t>(place.stream().native)) {
    RunChoices run;
    run.mode = mode;
    BufferConfig config = config_for({&routings}, run, place.device());
    config.num_lanes = 2;
    // Rank 0 has little patience, the others have much.
    config.timeouts.timeout = config.timeouts.busy_timeout = comm.rank() == 0 ? 250ms : std::chrono::milliseconds(600s);
    buffer_ = std::make_unique<Buffer>(comm, config);
    call_ = std::make_unique<Call>(routings.variant(0), comm.rank(), place, run);
    if (way == Way::exact) call_->arguments.dispatch.capacity.reset();
    if (way != Way::graph) return;
    for (int lane : {0, 1}) {
      Capture capture(stream_, cudaStreamCaptureModeThreadLocal);
      for (int i = 0; i < 3; ++i) result_of(lane) = buffer_->dispatch(on(lane));
      graphs_[static_cast<size_t>(lane)] = Graph(capture.end(), stream_);
    }
  }
  /// Ends when the call has ended, well or not.
  void call(int lane) {
    if (way_ == Way::graph) {
      graphs_[static_cast<size_t>(lane)].launch(stream_);
    } else {
      result_of(lane) = buffer_->dispatch(on(lane));
    }
    place_.finish();
    buffer_->check();
  }
  void expect_round(int lane) {
    call(lane);
    if (way_ != Way::exact) call_->expect(result_of(lane));  // the oracle's has a capacity
  }
  Buffer& buffer() { return *buffer_; }

 private:
  DispatchResult& result_of(int lane) { return results_[static_cast<size_t>(lane)]; }
  DispatchArgs on(int lane) const {
    DispatchArgs args = call_->arguments.dispatch;
    args.lane = lane;
    return args;
  }
  const Way way_;
  CudaPlace& place_;
  const cudaStream_t stream_;
  std::unique_ptr<Buffer> buffer_;
  std::unique_ptr<Call> call_;
  std::array<DispatchResult, 2> results_;
  std::array<Graph, 2> graphs_;
};

class Deadlines : public GpuTest {};

/// Rank 0 waits on lane 0 for all others. The last rank makes no call; those between wait on lane 1, for ranks 0 and the last.
void expect_all_learn(const Placement& placement, Mode mode, Way way) {
  ReplayShape shape;
  shape.mode = mode;
  const Routings routings(61, placement.num_ranks, shape, 1);
  std::atomic<int64_t> expired{0};
  std::atomic<double> latest{0};
  run_virtual_ranks(placement.num_ranks, [&](Communicator& comm) {
    const auto place = placement.place_of(comm.rank());
    TwoLanes ranks(comm, routings, mode, way, *place);
    const bool makes_none = comm.rank() == comm.num_ranks() - 1;
    for (int round = 0; round < 2; ++round) {
      for (int lane : {0, 1}) ranks.expect_round(lane);
      expired = 0;
      comm.barrier();
      const auto since = [&] { return 1e-9 * static_cast<double>((Clock::now().time_since_epoch()).count() - expired.load()); };
      const auto raises = [&](const std::function<void()>& body, const char* what) {
        try {
          body();
          ADD_FAILURE() << what << " of rank " << comm.rank() << " raised nothing";
        } catch (const PeerTimeout& e) {
          EXPECT_EQ(e.record().rank, 0) << e.what();
          EXPECT_EQ(e.record().lane, 0) << e.what();
          EXPECT_EQ(e.record().peer_state, "busy") << e.what();
          expect_says(e.what(), {"calls made on lane 0: rank 0 = ", ", rank 1 = "});
          if (comm.rank() == 1 && round == 0) saw("%s %s: %s", std::string(turnout::name(mode)).c_str(), name(way).c_str(), e.what());
        }
      };
      if (comm.rank() == 0) {
        raises([&] { ranks.call(0); }, "the call that expires");
        expired = Clock::now().time_since_epoch().count();
      } else if (!makes_none) {
        raises([&] { ranks.call(1); }, "the call on another lane");
        while (expired == 0) std::this_thread::yield();
        latest = std::max(latest.load(), since());
        EXPECT_LT(since(), 1.0);
      } else {
        while (expired == 0) std::this_thread::yield();
        raises([&] { ranks.buffer().check(); }, "check()");
      }
      // Sticky, on all ranks and lanes, and nobody waits.
      comm.barrier();
      const auto start = Clock::now();
      for (int lane : {0, 1}) raises([&] { ranks.call(lane); }, "the call after it");
      EXPECT_LT(Clock::now() - start, 1s);
      comm.barrier();
      ranks.buffer().recover();
    }
    for (int lane : {1, 0}) ranks.expect_round(lane);
    comm.barrier();
  });
  saw("%s %s %s: the others knew %.3f ms after rank 0 (allowed 1 s)", name(placement).c_str(), std::string(turnout::name(mode)).c_str(),
      name(way).c_str(), 1e3 * latest.load());
}

TEST_P(Deadlines, WhatOneRankGivesUpAllGiveUpWithinASecond) {
  for (Mode mode : {Mode::throughput, Mode::low_latency}) {
    for (Way way : {Way::eager, Way::graph, Way::exact}) {
      SCOPED_TRACE(std::string(turnout::name(mode)) + " " + name(way));
      expect_all_learn(GetParam(), mode, way);
      if (HasFailure()) return;
    }
  }
}

/// A rank that makes the dispatch but not the combine is waited for there.
TEST_P(Deadlines, ACombineThatOneRankDoesNotMakeEnds) {
  for (Mode mode : {Mode::throughput, Mode::low_latency}) {
    ReplayShape shape;
    shape.mode = mode;
    const Routings routings(62, num_ranks(), shape, 1);
    run_virtual_ranks(num_ranks(), [&](Communicator& comm) {
      SCOPED_TRACE(std::string(turnout::name(mode)));
      const auto place = GetParam().place_of(comm.rank());
      RunChoices run;
      run.mode = mode;
      run.timeout = 500ms;
      Buffer buffer(comm, config_for({&routings}, run, place->device()));
      Call call(routings.variant(0), comm.rank(), *place, run);
      const int last = comm.num_ranks() - 1;
      for (int round = 0; round < 2; ++round) {
        const DispatchResult rows = buffer.dispatch(call.arguments.dispatch);
        place->finish();
        buffer.check();
        call.expect(rows);
        comm.barrier();
        CombineArgs back = call.back;
        back.handle = &rows.handle;
        if (round == 0 && comm.rank() != last) {
          try {
            buffer.combine(back);
            place->finish();
            buffer.check();
            ADD_FAILURE() << "rank " << comm.rank() << " did not wait";
          } catch (const PeerTimeout& e) {
            EXPECT_EQ(e.record().peers, std::vector<int>{last}) << e.what();
            EXPECT_EQ(e.record().call, "combine") << e.what();
            expect_says(e.what(), {"calls made on lane 0: rank 0 = 2", "rank " + std::to_string(last) + " = 1"});
            EXPECT_EQ(e.record().peer_state, "busy") << e.what();
          }
        }
        comm.barrier();
        if (round == 0) {
          EXPECT_NE(message_of<PeerTimeout>([&] { buffer.check(); }).find("rank " + std::to_string(last)), std::string::npos);
          comm.barrier();
          buffer.recover();
          continue;
        }
        const CombineResult sum = buffer.combine(back);
        place->finish();
        buffer.check();
        call.expect(sum);
      }
      comm.barrier();
    });
    if (HasFailure()) return;
  }
}

INSTANTIATE_TEST_SUITE_P(Cuda, Deadlines, ::testing::Values(Placement{4, 1}, Placement{4, 2}), placement_name);

}  // namespace
}  // namespace turnout::testing
