// The scheduler keeps the contract, finds a protocol that asks for more, and decides by its seed alone.
#include "transport/inproc/scheduler.h"

#include <algorithm>

#include "ranks.h"
#include "transport/inproc/inproc.h"

namespace turnout::transport::testing {

namespace {

struct Event {
  bool is_signal;
  size_t at;  ///< offset or index
  uint64_t value;
  size_t num_bytes;
  bool operator==(const Event&) const = default;
};

std::vector<Event> drain(Scheduler& scheduler, int destination) {
  std::vector<Event> events;
  wait_until(
      [&] {
        return !scheduler.deliver(
            destination,
            [&](size_t offset, const std::byte*, size_t n) {
              events.push_back({false, offset, 0, n});
            },
            [&](int, int index, uint64_t value) {
              events.push_back({true, static_cast<size_t>(index), value, 0});
            });
      },
      "everything landed");
  return events;
}

void issue(Scheduler& scheduler, int source, int destination, uint64_t step) {
  const std::vector<std::byte> bytes(50 + step % 13);
  scheduler.put(source, destination, step * 100, bytes.data(), bytes.size());
  scheduler.signal(source, destination, static_cast<int>(step % 3), step);
}

/// Two signals a round. The careless receiver takes the second for a sign that the first has come.
bool survives(uint64_t seed, bool careful) {
  std::atomic<bool> right{true};
  run_ranks(2, [&](Bootstrap& bootstrap) {
    const auto transport = make_inproc(bootstrap, seed);
    const auto window = transport->open("toy", 64, 3);
    for (uint64_t round = 1; round <= 20; ++round) {
      if (transport->rank() == 0) {
        window->signal(1, 0, round);
        window->signal(1, 1, round);
        wait_signal(*window, 2, round);
      } else {
        wait_signal(*window, 1, round);
        if (careful) wait_signal(*window, 0, round);
        if (window->read(0) < round) right = false;
        window->signal(0, 2, round);
      }
    }
  });
  return right;
}

/// Raises the signal before the put that it should publish, or after.
bool publishes(uint64_t seed, bool put_first) {
  std::atomic<bool> right{true};
  run_ranks(2, [&](Bootstrap& bootstrap) {
    const auto transport = make_inproc(bootstrap, seed);
    const auto window = transport->open("toy", 64, 2);
    for (uint64_t round = 1; round <= 20; ++round) {
      if (transport->rank() == 0) {
        if (put_first) window->put(1, 0, &round, sizeof round);
        window->signal(1, 0, round);
        if (!put_first) window->put(1, 0, &round, sizeof round);
        wait_signal(*window, 1, round);
      } else {
        wait_signal(*window, 0, round);
        uint64_t found = 0;
        std::memcpy(&found, window->local(), sizeof found);
        if (found != round) right = false;
        window->signal(0, 1, round);
      }
    }
  });
  return right;
}

constexpr uint64_t kSeeds = 20;

}  // namespace

TEST(Scheduler, AProtocolThatNeedsTwoSignalsInOrderIsCaught) {
  EXPECT_TRUE(survives(0, false)) << "without the scheduler two signals keep their order, so the mistake is not seen";
  int caught = 0;
  for (uint64_t seed = 1; seed <= kSeeds; ++seed) caught += survives(seed, false) ? 0 : 1;
  EXPECT_GT(caught, 0);
  for (uint64_t seed = 1; seed <= kSeeds; ++seed) EXPECT_TRUE(survives(seed, true)) << "seed " << seed;
}

TEST(Scheduler, AProtocolThatSignalsBeforeItPutsIsCaught) {
  int caught = 0;
  for (uint64_t seed = 1; seed <= kSeeds; ++seed) caught += publishes(seed, false) ? 0 : 1;
  EXPECT_GT(caught, 0);
  for (uint64_t seed = 1; seed <= kSeeds; ++seed) EXPECT_TRUE(publishes(seed, true)) << "seed " << seed;
}

TEST(Scheduler, OneSeedDecidesAlikeWhateverOthersDo) {
  const auto landings = [](uint64_t seed, bool busy) {
    Scheduler scheduler(seed, 3);
    for (uint64_t step = 1; step <= 200; ++step) {
      issue(scheduler, 0, 1, step);
      if (busy) {
        issue(scheduler, 2, 0, step);
        if (step % 5 == 0) drain(scheduler, 0);
      }
    }
    return drain(scheduler, 1);
  };
  for (uint64_t seed = 1; seed <= kSeeds; ++seed) {
    EXPECT_EQ(landings(seed, false), landings(seed, true)) << "seed " << seed;
    EXPECT_NE(landings(seed, false), landings(seed + 1, false)) << "seed " << seed;
  }
}

TEST(Scheduler, EverythingLandsOnceAndNoSignalBeforeItsPuts) {
  for (uint64_t seed = 1; seed <= 100; ++seed) {
    Scheduler scheduler(seed, 2);
    for (uint64_t step = 1; step <= 60; ++step) issue(scheduler, 0, 1, step);
    std::vector<size_t> landed(61);
    std::vector<uint64_t> signals(3);
    size_t num_signals = 0;
    for (const Event& event : drain(scheduler, 1)) {
      if (!event.is_signal) {
        landed[event.at / 100] += event.num_bytes;
        continue;
      }
      ++num_signals;
      EXPECT_GT(event.value, signals[event.at]) << "seed " << seed;
      signals[event.at] = event.value;
      for (uint64_t step = 1; step <= event.value; ++step) ASSERT_EQ(landed[step], 50 + step % 13) << "seed " << seed << ", signal " << event.value;
    }
    EXPECT_EQ(num_signals, 60u);
  }
}

}  // namespace turnout::transport::testing
