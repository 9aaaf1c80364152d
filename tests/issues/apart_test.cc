// Ranks that are not at the same: of another release, with another configuration, other arguments, another call, another lane, another map,
// or one call fewer. All ranks are told, in a table, as threads and as processes, in both modes; and unless a rank is missing all go on.
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <string>
#include <vector>

#include "api/small_job.h"
#include "engine/cpu/header.h"
#include "support/sanitizer.h"
#include "transport/processes.h"

namespace turnout::testing {
namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;
using transport::testing::Family;
using transport::testing::require;

constexpr int kRanks = 3;
using Body = std::function<void(Communicator&, Mode)>;

/// Runs `body` on ranks that are threads, over each transport, and on ranks that are processes; in both modes.
void everywhere(const Body& body) {
  for (Mode mode : {Mode::throughput, Mode::low_latency}) {
    SCOPED_TRACE(std::string(name(mode)));
    run_on_transports(kRanks, [&](Communicator& comm) { body(comm, mode); });
    if (kThreadSanitizer || ::testing::Test::HasFailure()) continue;  // it does not follow forked ranks
    Family family(kRanks, [&](const std::shared_ptr<Store>& store, int rank) {
      CommunicatorOptions options;
      options.transport = "shm";
      Communicator comm = Communicator::from_store(store, rank, kRanks, "apart", options);
      body(comm, mode);
      std::fflush(stdout);
      require(!::testing::Test::HasFailure(), "a comparison failed");
      comm.barrier();
    });
    family.expect_success();
  }
}

BufferConfig hasty(std::chrono::milliseconds timeout) {
  BufferConfig config = small_config();
  config.timeouts.timeout = config.timeouts.busy_timeout = timeout;
  return config;
}

struct Job {
  Job(Communicator& comm, Mode mode_, const BufferConfig& config = small_config()) : rank(comm.rank()), mode(mode_), buffer(comm, config), t(rank) {
    t.args.mode = mode;
  }
  DispatchResult dispatch() { return buffer.dispatch(t.args); }
  CombineResult combine(const DispatchResult& rows) {
    CombineArgs back = back_of(rows);
    back.mode = mode;
    return buffer.combine(back);
  }
  void round() { combine(dispatch()); }
  const int rank;
  const Mode mode;
  Buffer buffer;
  Tokens t;
};

TEST(Apart, OfAnotherConfiguration) {
  everywhere([](Communicator& comm, Mode mode) {
    BufferConfig config = small_config();
    config.max_tokens_per_rank += comm.rank() == 1;
    expect_says(message_of<InvalidArgument>([&] { Buffer buffer(comm, config); }),
                {"disagree", "max_tokens_per_rank:", "rank 0 = 4", "rank 1 = 5", "rank 2 = 4"});
    Job(comm, mode).round();
  });
}

TEST(Apart, OfOtherArguments) {
  everywhere([](Communicator& comm, Mode mode) {
    Job job(comm, mode);
    job.t.args.capacity = 7 + comm.rank() % 2;
    expect_says(message_of<InvalidArgument>([&] { job.dispatch(); }), {"disagree", "capacity:", "rank 0 = 7", "rank 1 = 8", "rank 2 = 7"});
    job.t.args.capacity.reset();
    const DispatchResult rows = job.dispatch();
    CombineArgs back = back_of(rows);
    back.mode = mode;
    back.wire = comm.rank() == 1 ? Wire::fp32 : Wire::payload;
    expect_says(message_of<InvalidArgument>([&] { job.buffer.combine(back); }), {"wire:", "rank 0 = payload", "rank 1 = fp32", "rank 2 = payload"});
    job.round();
  });
}

TEST(Apart, OfAnotherMode) {
  everywhere([](Communicator& comm, Mode mode) {
    Job job(comm, mode);
    const Mode other = mode == Mode::throughput ? Mode::low_latency : Mode::throughput;
    if (comm.rank() == 1) job.t.args.mode = other;
    const std::string common = std::string(name(mode)), odd = std::string(name(other));
    expect_says(message_of<InvalidArgument>([&] { job.dispatch(); }), {"mode:", "rank 0 = " + common, "rank 1 = " + odd, "rank 2 = " + common});
    job.t.args.mode = mode;
    job.round();
  });
}

// Calls in another order: a dispatch meets a combine, the way back of one dispatch that of another.
TEST(Apart, InTheOrderOfCalls) {
  everywhere([](Communicator& comm, Mode mode) {
    Job job(comm, mode);
    const DispatchResult one = job.dispatch(), two = job.dispatch();
    const auto other = [&] {
      if (comm.rank() == 1) job.dispatch();
      else job.combine(one);
    };
    expect_says(message_of<InvalidArgument>(other), {"call:", "rank 0 = combine", "rank 1 = dispatch", "rank 2 = combine"});
    for (const bool first : {true, false}) {
      const bool takes_one = first == (comm.rank() != 1);
      expect_says(message_of<InvalidArgument>([&] { job.combine(takes_one ? one : two); }), {"handle:", "rank 0 = 0.", "rank 1 = 0."});
    }
    job.round();
  });
}

// Who leaves a call out is found out by the next call of another kind, or by the last: the error says how many calls each has made.
TEST(Apart, InTheNumberOfCalls) {
  everywhere([](Communicator& comm, Mode mode) {
    Job job(comm, mode, hasty(400ms));
    for (int i = 0; i < 2; ++i) job.round();
    if (comm.rank() != 1) {
      expect_says(message_of<PeerTimeout>([&] { job.dispatch(); }),
                  {"waited for rank 1", "has not made this call", "calls made on lane 0: rank 0 = 5, rank 1 = 4, rank 2 = 5", "recover()"});
    }
    comm.barrier();
    expect_says(message_of<PeerTimeout>([&] { job.dispatch(); }), {"calls made on lane 0: rank 0 = 5, rank 1 = 4, rank 2 = 5"});
    comm.barrier();
    job.buffer.recover();
    job.round();
    // The same of one that has closed its Buffer meanwhile.
    if (comm.rank() == 1) job.buffer.close();
    else expect_says(message_of<PeerFailed>([&] { job.dispatch(); }), {"peer is closed", "calls made on lane 0", "rank 1 = "});
    comm.barrier();
  });
}

TEST(Apart, OnAnotherLane) {
  everywhere([](Communicator& comm, Mode mode) {
    BufferConfig config = hasty(60s);
    config.timeouts.timeout = 300ms;
    config.num_lanes = 2;
    Job job(comm, mode, config);
    job.round();
    job.t.args.lane = comm.rank() == 1;
    const auto start = Clock::now();
    expect_says(message_of<PeerTimeout>([&] { job.dispatch(); }), {"has come to a call on lane", "do the ranks give different lanes?"});
    EXPECT_LT(Clock::now() - start, 10s);
    comm.barrier();
    job.buffer.recover();
    job.t.args.lane = 0;
    job.round();
  });
}

// The generation of the map of experts.
TEST(Apart, OfAnotherMap) {
  everywhere([](Communicator& comm, Mode mode) {
    Job job(comm, mode);
    const std::vector<int> before = {0, 0, 1, 1, 2, 2}, after = {2, 0, 1, 1, 0, 2};
    job.buffer.set_expert_to_rank(comm.rank() == 1 ? after : before);
    expect_says(message_of<InvalidArgument>([&] { job.dispatch(); }), {"expert map:", "rank 0 = #", "rank 1 = #", "before different calls"});
    job.buffer.set_expert_to_rank(after);
    job.round();
  });
}

constexpr const char* kNext = "9.9.9";

/// What one of two releases says to the other, which it takes for the next.
class OfAnotherRelease final : public Store {
 public:
  explicit OfAnotherRelease(std::shared_ptr<Store> store) : store_(std::move(store)) {}
  void set(const std::string& key, std::span<const std::byte> value) override { store_->set(key, changed(value)); }
  std::optional<std::vector<std::byte>> get(const std::string& key, std::chrono::milliseconds timeout) override {
    auto value = store_->get(key, timeout);
    if (value) value = changed(*value);
    return value;
  }

 private:
  static std::vector<std::byte> changed(std::span<const std::byte> value) {
    std::string text(reinterpret_cast<const char*>(value.data()), value.size());
    const std::string mine(version());
    for (size_t at = 0; (at = text.find(mine, at)) != std::string::npos; at += mine.size()) text.replace(at, mine.size(), kNext);
    const auto bytes = std::as_bytes(std::span(text));
    return {bytes.begin(), bytes.end()};
  }
  const std::shared_ptr<Store> store_;
};

/// Rank 1 is of another release: all are told so before anything else.
void expect_releases(std::shared_ptr<Store> store, int rank) {
  if (rank == 1) store = std::make_shared<OfAnotherRelease>(store);
  ASSERT_EQ(version().size(), std::string(kNext).size());
  const std::string mine(version()), one = rank == 1 ? kNext : mine, other = rank == 1 ? mine : kNext;
  const auto join = [&] { Communicator::from_store(store, rank, kRanks, "world"); };
  expect_says(message_of<InvalidArgument>(join),
              {"different releases of Turnout", "library:", "rank 0 = " + one, "rank 1 = " + other, "rank 2 = " + one});
}

TEST(Apart, OfAnotherRelease) {
  const auto store = thread_store();
  transport::testing::run_threads(kRanks, [&](int rank) { expect_releases(store, rank); });
  if (kThreadSanitizer) return;
  Family family(kRanks, [](const std::shared_ptr<Store>& shared, int rank) {
    expect_releases(shared, rank);
    std::fflush(stdout);
    require(!::testing::Test::HasFailure(), "a comparison failed");
  });
  family.expect_success();
}

TEST(Apart, ATableNamesReleasesOfCallsToo) {
  engine::CallFacts here, there;
  here.library = 1'000, there.library = 9'009'009;
  const engine::CallFacts all[] = {here, there};
  EXPECT_EQ(engine::disagreement(all), "\n  library: rank 0 = 0.1.0, rank 1 = 9.9.9");
}

// Only some ranks recover: the calls of the others go on failing, until they do, too.
TEST(Apart, InRecovering) {
  run_on_transports(kRanks, [](Communicator& comm) {
    Job job(comm, Mode::automatic, hasty(200ms));
    if (comm.rank() != 1) message_of<PeerTimeout>([&] { job.dispatch(); });
    comm.barrier();
    if (comm.rank() != 1) {
      job.buffer.recover();
    } else {
      for (int i = 0; i < 3; ++i) message_of<PeerTimeout>([&] { job.dispatch(); });
      job.buffer.recover();
    }
    job.round();
  });
}

}  // namespace
}  // namespace turnout::testing
