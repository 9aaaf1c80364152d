// Groups of any size, depth and name, made and destroyed any number of times, in any store: what a fresh user found not to hold.
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstring>
#include <functional>
#include <map>
#include <mutex>
#include <numeric>
#include <string>
#include <thread>

#include "turnout/turnout.hpp"

namespace turnout {
namespace {

using namespace std::chrono_literals;

/// A caller's store: one cell per key, so that 300 threads do not wake each other; it remembers how long keys get and how many there are.
class CallersStore final : public Store {
 public:
  void set(const std::string& key, std::span<const std::byte> value) override {
    std::lock_guard lock(mutex_);
    longest_ = std::max(longest_, key.size());
    values_[key].assign(value.begin(), value.end());
    most_ = std::max(most_, values_.size());
    if (const auto waiting = waiting_.find(key); waiting != waiting_.end()) waiting->second.notify_all();
  }
  std::optional<std::vector<std::byte>> get(const std::string& key, std::chrono::milliseconds timeout) override {
    std::unique_lock lock(mutex_);
    longest_ = std::max(longest_, key.size());
    if (!values_.contains(key)) waiting_[key].wait_for(lock, timeout, [&] { return values_.contains(key); });
    const auto found = values_.find(key);
    if (found == values_.end()) return std::nullopt;
    return found->second;
  }
  void erase(const std::string& key) override {
    std::lock_guard lock(mutex_);
    values_.erase(key);
  }
  size_t longest() {
    std::lock_guard lock(mutex_);
    return longest_;
  }
  size_t most_keys() {
    std::lock_guard lock(mutex_);
    return most_;
  }
  size_t num_keys() {
    std::lock_guard lock(mutex_);
    return values_.size();
  }

 private:
  std::mutex mutex_;
  std::map<std::string, std::vector<std::byte>> values_;
  std::map<std::string, std::condition_variable> waiting_;
  size_t longest_ = 0, most_ = 0;
};

constexpr size_t kLongestKey = 160;

void run(int num_ranks, const std::function<void(int)>& body) {
  std::vector<std::jthread> threads;
  for (int rank = 0; rank < num_ranks; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        body(rank);
      } catch (const std::exception& e) {
        ADD_FAILURE() << "rank " << rank << ": " << std::string(e.what()).substr(0, 400);
      }
    });
  }
}

std::vector<int> first(int num_ranks) {
  std::vector<int> ranks(static_cast<size_t>(num_ranks));
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

/// Every member says its number.
void expect_meets(Bootstrap& group) {
  const int rank = group.rank();
  const auto all = group.all_gather("who", std::as_bytes(std::span(&rank, 1)));
  ASSERT_EQ(all.size(), static_cast<size_t>(group.num_ranks()));
  for (size_t peer = 0; peer < all.size(); ++peer) {
    int said = -1;
    std::memcpy(&said, all[peer].data(), std::min(all[peer].size(), sizeof said));
    EXPECT_EQ(said, static_cast<int>(peer));
  }
}

TEST(Groups, OfThreeHundredRanks) {
  constexpr int kRanks = 300;
  auto store = std::make_shared<CallersStore>();
  run(kRanks, [&](int rank) {
    const auto world = store_bootstrap(store, rank, kRanks, "world", 120s);
    world->barrier("hello");
    const auto all = world->sub_group(first(kRanks), "all");
    expect_meets(*all);
    const auto again = all->sub_group(first(kRanks), "all");
    std::vector<int> alike;
    for (int peer = rank % 2; peer < kRanks; peer += 2) alike.push_back(peer);
    const auto half = again->sub_group(alike, "parity");  // its parent has made no step
    expect_meets(*half);
  });
  EXPECT_LE(store->longest(), kLongestKey);
}

TEST(Groups, OneInTheOtherAHundredAndTwentyDeep) {
  for (const bool parents_meet : {true, false}) {
    auto store = std::make_shared<CallersStore>();
    run(2, [&](int rank) {
      std::vector<std::unique_ptr<Bootstrap>> groups;
      groups.push_back(store_bootstrap(store, rank, 2, "world", 60s));
      for (int depth = 0; depth < 120; ++depth) {
        if (parents_meet) groups.back()->barrier("hello");
        groups.push_back(groups.back()->sub_group(first(2), "inner"));
      }
      expect_meets(*groups.back());
    });
    EXPECT_LE(store->longest(), kLongestKey);
  }
}

TEST(Groups, OfLongNames) {
  for (const size_t length : {64, 65, 1000, 2000, 100'000}) {
    auto store = std::make_shared<CallersStore>();
    run(2, [&](int rank) {
      // Names that differ at their end only are different groups, of one store at one time.
      std::string name(length, 'n'), other = name;
      other.back() = 'm';
      const auto world = store_bootstrap(store, rank, 2, name, 60s), beside = store_bootstrap(store, rank, 2, other, 60s);
      world->barrier("one");
      beside->barrier("another");
      const auto group = world->sub_group(first(2), name), different = world->sub_group(first(2), other);
      group->barrier("one");
      different->barrier("another");
      expect_meets(*group);
      expect_meets(*world);
    });
    EXPECT_LE(store->longest(), kLongestKey) << length;
  }
}

TEST(Groups, ACommunicatorOfALongNameOverTcp) {
  run(2, [](int rank) {
    const std::string name(2000, 'n');
    LaunchInfo info;
    info.rank = info.local_rank = rank;
    info.num_ranks = 2;
    info.root_address = "127.0.0.1";
    info.port = 20000 + getpid() % 10000;
    info.job = "groups-" + std::to_string(getpid());
    Communicator world = Communicator::from_store(tcp_store(info), rank, 2, name);
    Communicator group = world.sub_group(first(2), name);
    group.barrier();
  });
}

/// Groups come and go: the keys are as many as after the first ones. What the last groups left is swept up by the next.
void cycle(int num_cycles, int num_ranks, const std::function<void(Communicator&, int)>& make_one) {
  auto store = std::make_shared<CallersStore>();
  size_t before = 0;
  size_t most = 0;
  std::atomic<int> arrived = 0;
  const auto meet = [&](int round) {  // outside of the store
    ++arrived;
    while (arrived < num_ranks * round) std::this_thread::yield();
  };
  run(num_ranks, [&](int rank) {
    Communicator world = Communicator::from_store(store, rank, num_ranks, "world");
    for (int i = 0; i < 10; ++i) make_one(world, i);
    meet(1);
    if (rank == 0) before = store->num_keys();
    if (rank == 0) most = store->most_keys();
    meet(2);
    for (int i = 0; i < num_cycles; ++i) make_one(world, 10 + i);
    for (int i = 0; i < 5; ++i) {  // what was not ready for the broom is, once all have met
      meet(3 + i);
      make_one(world, 10 + num_cycles + i);
    }
    meet(8);
    if (rank == 0) {
      EXPECT_LE(store->num_keys(), before);
      EXPECT_LE(store->most_keys(), 3 * most);  // also while ranks are at different cycles
    }
    meet(9);
  });
}

TEST(Groups, ThousandsDoNotPileUpInTheStore) {
  cycle(1000, 2, [](Communicator& world, int) { const Communicator group = world.sub_group(first(2)); });
}

TEST(Groups, OfEverNewNamesDoNotPileUpInTheStore) {
  cycle(100, 3, [](Communicator& world, int number) {
    Communicator group = world.sub_group(first(3), "group " + std::to_string(number));
    group.barrier();
    const Communicator inner = group.sub_group(first(3));
    if (world.rank() == 2) return;
    const Communicator pair = world.sub_group(first(2), std::to_string(number));
  });
}

// A rank that has seen a step must not take from the others what they have not read yet.
TEST(Groups, WhoLeavesEarlyTakesNothingAway) {
  auto store = std::make_shared<CallersStore>();
  run(3, [&](int rank) {
    const auto world = store_bootstrap(store, rank, 3, "world", 60s);
    world->barrier("hello");
    for (int round = 0; round < 200; ++round) {
      const auto group = world->sub_group(first(3), "group");
      expect_meets(*group);
    }
  });
}

TEST(Groups, RanksThatGiveDifferentMembersAreToldSo) {
  auto store = std::make_shared<CallersStore>();
  std::atomic<int> told = 0;
  run(3, [&](int rank) {
    const auto world = store_bootstrap(store, rank, 3, "world", 300ms);
    world->barrier("hello");
    const std::vector<int> members = rank == 1 ? std::vector<int>{1, 2} : std::vector<int>{0, 1, 2};
    const auto group = world->sub_group(members, "group");
    try {
      group->barrier("meet");
      ADD_FAILURE() << "rank " << rank << " did not notice";
    } catch (const PeerTimeout& e) {
      const std::string words = e.what();
      EXPECT_NE(words.find("the same members"), std::string::npos) << words;
      told += words.find(rank == 1 ? "rank 2 is forming 'group' of ranks 0 to 2, this rank 'group' of ranks 1, 2"
                                   : "rank 1 is forming 'group' of ranks 1, 2, this rank 'group' of ranks 0 to 2") != std::string::npos;
      if (told == 0) std::cerr << words << "\n";
    }
  });
  EXPECT_EQ(told, 3);
}

}  // namespace
}  // namespace turnout
