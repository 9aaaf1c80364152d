// What one rank gives up all ranks give up, soon: on whatever lane they wait, and for whomever; later calls fail at once, until recover().
#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <functional>
#include <string>

#include "api/small_job.h"
#include "support/sanitizer.h"
#include "transport/processes.h"

namespace turnout::testing {
namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;
using transport::testing::Family;
using transport::testing::Pipe;
using transport::testing::require;

constexpr int kRanks = 4;

enum class Way { waiting, issued, resident };

DispatchResult call(Buffer& buffer, const Tokens& tokens, int lane, Way way) {
  DispatchArgs args = tokens.args;
  args.lane = lane;
  if (way == Way::waiting) return buffer.dispatch(args);
  args.receive = way == Way::issued ? Receive::deferred : Receive::resident;
  return buffer.dispatch_async(args).wait();
}

uint64_t status_of(Buffer& buffer) { return std::atomic_ref<uint64_t>(*const_cast<uint64_t*>(buffer.status_word())).load(std::memory_order_acquire); }

/// Nanoseconds of a clock that processes share.
int64_t now() { return Clock::now().time_since_epoch().count(); }

/// Rank 0 has little patience, and waits on lane 0. The last rank makes no call; those between wait on lane 1, for ranks 0 and the last.
void expect_all_learn(Communicator& comm, Mode mode, Way way) {
  BufferConfig config = small_config();
  config.num_lanes = 2;
  config.timeouts.timeout = config.timeouts.busy_timeout = comm.rank() == 0 ? 300ms : std::chrono::milliseconds(600s);
  Buffer buffer(comm, config);
  Tokens tokens(comm.rank());
  tokens.args.mode = mode;
  const auto raises = [&](const std::function<void()>& body) {
    try {
      body();
      ADD_FAILURE() << "nothing was raised on rank " << comm.rank();
    } catch (const PeerTimeout& e) {
      EXPECT_EQ(e.record().rank, 0) << e.what();
      EXPECT_EQ(e.record().lane, 0) << e.what();
      EXPECT_EQ(e.record().peer_state, "busy") << e.what();
    }
  };
  for (int round = 0; round < 2; ++round) {
    for (int lane : {0, 1}) call(buffer, tokens, lane, way);
    comm.barrier();
    int64_t ended = 0;
    if (comm.rank() == 0) raises([&] { call(buffer, tokens, 0, way); });
    else if (comm.rank() < kRanks - 1) raises([&] { call(buffer, tokens, 1, way); });
    else
      while (status_of(buffer) == 0) usleep(100);  // it sees it without a call
    ended = now();
    raises([&] { buffer.check(); });
    int64_t first = ended, last = ended;
    for (const auto& bytes : comm.all_gather(std::as_bytes(std::span(&ended, 1)))) {
      int64_t theirs = 0;
      std::memcpy(&theirs, bytes.data(), sizeof theirs);
      first = std::min(first, theirs), last = std::max(last, theirs);
    }
    if (comm.rank() == 0 && round == 0) {
      std::printf("[   SAW    ] %s %s: %.1f ms between the first rank that knew and the last\n", std::string(comm.transport()).c_str(),
                  std::string(name(mode)).c_str(), 1e-6 * static_cast<double>(last - first));
      std::fflush(stdout);
    }
    EXPECT_LT(last - first, 1'000'000'000);
    const auto start = Clock::now();
    for (int lane : {1, 0}) raises([&] { call(buffer, tokens, lane, way); });
    EXPECT_LT(Clock::now() - start, 500ms);
    comm.barrier();
    buffer.recover();
  }
  for (int lane : {0, 1}) call(buffer, tokens, lane, way);
  expect_works(buffer);
}

TEST(GivenUp, ByOneRankIsGivenUpByAllWithinASecond) {
  for (Mode mode : {Mode::throughput, Mode::low_latency}) {
    for (Way way : {Way::waiting, Way::issued, Way::resident}) {
      run_on_transports(kRanks, [&](Communicator& comm) { expect_all_learn(comm, mode, way); });
      if (kThreadSanitizer || HasFailure()) continue;  // it does not follow forked ranks
      Family family(kRanks, [&](const std::shared_ptr<Store>& store, int rank) {
        CommunicatorOptions options;
        options.transport = "shm";
        Communicator comm = Communicator::from_store(store, rank, kRanks, "given up", options);
        expect_all_learn(comm, mode, way);
        std::fflush(stdout);
        require(!::testing::Test::HasFailure(), "a comparison failed");
        comm.barrier();
      });
      family.expect_success();
    }
  }
}

// A process that was stopped for longer than the deadline finds the Buffer aborted when it goes on, and recover() makes all whole.
TEST(GivenUp, AStoppedProcessComesBackAndAllRecover) {
  if (kThreadSanitizer) GTEST_SKIP() << "ThreadSanitizer does not follow forked ranks";
  for (Mode mode : {Mode::throughput, Mode::low_latency}) {
    Pipe middle, expired;
    Family family(kRanks, [&](const std::shared_ptr<Store>& store, int rank) {
      CommunicatorOptions options;
      options.transport = "shm";
      Communicator comm = Communicator::from_store(store, rank, kRanks, "stopped", options);
      BufferConfig config = small_config();
      config.timeouts.timeout = 1s;
      Buffer buffer(comm, config);
      Tokens tokens(rank);
      tokens.args.mode = mode;
      try {
        for (int round = 0;; ++round) {
          if (rank == 2 && round == 20) {
            middle.say('m');
            raise(SIGSTOP);
          }
          buffer.dispatch(tokens.args);
        }
      } catch (const PeerTimeout& e) {
        require(e.record().peers == std::vector<int>{2} && e.record().peer_state == "silent", e.what());
      }
      if (rank != 2) expired.say('e');
      buffer.recover();
      for (int i = 0; i < 4; ++i) expect_works(buffer);
      require(!::testing::Test::HasFailure(), "a comparison failed");
      comm.barrier();
    });
    ASSERT_EQ(middle.hear(), 'm');
    for (int i = 0; i < kRanks - 1; ++i) ASSERT_EQ(expired.hear(), 'e');
    family.send(2, SIGCONT);
    family.expect_success();
  }
}

}  // namespace
}  // namespace turnout::testing
