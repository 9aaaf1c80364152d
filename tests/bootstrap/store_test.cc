// Collective steps over a store, ranks as threads.
#include <gtest/gtest.h>

#include <atomic>
#include <barrier>
#include <mutex>
#include <set>

#include "bootstrap/ranks.h"

namespace turnout {
namespace {

using namespace std::chrono_literals;
using testing_ranks::bytes;
using testing_ranks::run;
using testing_ranks::text;

/// Counts the keys that are there.
class CountingStore final : public Store {
 public:
  void set(const std::string& key, std::span<const std::byte> value) override {
    {
      std::lock_guard lock(mutex_);
      keys_.insert(key);
    }
    inner_->set(key, value);
  }
  std::optional<std::vector<std::byte>> get(const std::string& key, std::chrono::milliseconds timeout) override { return inner_->get(key, timeout); }
  void erase(const std::string& key) override {
    std::lock_guard lock(mutex_);
    keys_.erase(key);
    inner_->erase(key);
  }
  size_t num_keys() {
    std::lock_guard lock(mutex_);
    return keys_.size();
  }

 private:
  std::mutex mutex_;
  std::set<std::string> keys_;
  std::shared_ptr<Store> inner_ = thread_store();
};

class Steps : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, Steps, testing::Values(1, 2, 3, 4, 5, 7, 8));

TEST_P(Steps, GatherBytesOfAllRanksInOrder) {
  const int n = GetParam();
  auto store = thread_store();
  run(n, [&](int rank) {
    auto bootstrap = store_bootstrap(store, rank, n, "w");
    EXPECT_EQ(bootstrap->rank(), rank);
    EXPECT_EQ(bootstrap->num_ranks(), n);
    for (int round = 0; round < 20; ++round) {
      const std::string mine(static_cast<size_t>(rank * round), static_cast<char>('a' + rank));
      const auto all = bootstrap->all_gather("sizes", bytes(mine));
      ASSERT_EQ(all.size(), static_cast<size_t>(n));
      for (int peer = 0; peer < n; ++peer) {
        EXPECT_EQ(text(all[static_cast<size_t>(peer)]), std::string(static_cast<size_t>(peer * round), static_cast<char>('a' + peer)));
      }
    }
  });
}

TEST_P(Steps, ABarrierHoldsEveryRank) {
  const int n = GetParam();
  auto store = thread_store();
  std::atomic<int> arrived = 0;
  run(n, [&](int rank) {
    auto bootstrap = store_bootstrap(store, rank, n, "w");
    for (int round = 1; round <= 20; ++round) {
      ++arrived;
      bootstrap->barrier("round");
      EXPECT_GE(arrived, n * round);
      bootstrap->barrier("seen");
    }
  });
}

TEST_P(Steps, ALongJobDoesNotGrow) {
  const int n = GetParam();
  auto store = std::make_shared<CountingStore>();
  run(n, [&](int rank) {
    auto bootstrap = store_bootstrap(store, rank, n, "w");
    for (int round = 0; round < 200; ++round) {
      bootstrap->all_gather("step", {});
      EXPECT_LE(store->num_keys(), static_cast<size_t>(5 * n));  // two steps, and what it took to begin
    }
  });
  EXPECT_EQ(store->num_keys(), static_cast<size_t>(n + n + 2 * (n - 1)));
}

TEST_P(Steps, GroupsOfAnyShapeDoNotMix) {
  const int n = GetParam();
  auto store = thread_store();
  run(n, [&](int rank) {
    auto world = store_bootstrap(store, rank, n, "w");
    std::vector<int> alike, everybody;
    for (int peer = 0; peer < n; ++peer) {
      if (peer % 2 == rank % 2) alike.push_back(peer);
      everybody.push_back(peer);
    }
    for (int again = 0; again < 3; ++again) {
      auto half = world->sub_group(alike, "parity");
      auto all_again = world->sub_group(everybody, "parity");
      EXPECT_EQ(half->num_ranks(), static_cast<int>(alike.size()));
      EXPECT_EQ(alike[static_cast<size_t>(half->rank())], rank);
      const auto values = half->all_gather("who", bytes(std::to_string(rank)));
      for (size_t i = 0; i < alike.size(); ++i) EXPECT_EQ(text(values[i]), std::to_string(alike[i]));
      all_again->barrier("end");
    }
  });
}

TEST_P(Steps, AMissingRankIsNamedOnAllOthers) {
  const int n = GetParam();
  if (n < 2) return;  // needs somebody else
  auto store = thread_store();
  const int absent = n / 2;
  std::atomic<int> told = 0;
  run(n, [&](int rank) {
    // One impatient rank: the others learn from it long before their own deadline.
    auto bootstrap = store_bootstrap(store, rank, n, "w", rank == (absent + 1) % n ? 100ms : 60s);
    bootstrap->barrier("hello");
    if (rank == absent) return;
    const auto start = std::chrono::steady_clock::now();
    try {
      bootstrap->all_gather("window handles", {});
      ADD_FAILURE() << "rank " << rank << " did not notice";
    } catch (const PeerTimeout& e) {
      ++told;
      EXPECT_EQ(e.record().peers, std::vector<int>{absent});
      EXPECT_EQ(e.record().rank, rank);
      EXPECT_EQ(e.record().phase, "window handles");
      EXPECT_EQ(e.record().epoch, 2u);
      EXPECT_NE(std::string(e.what()).find("step 2: window handles"), std::string::npos) << e.what();
      EXPECT_NE(std::string(e.what()).find("missing ranks [" + std::to_string(absent) + "]"), std::string::npos) << e.what();
    }
    EXPECT_LT(std::chrono::steady_clock::now() - start, 30s);
  });
  EXPECT_EQ(told, n - 1);
}

TEST(StoreBootstrap, WhoComesAfterTheDeadlineIsToldToo) {
  auto store = thread_store();
  EXPECT_THROW(store_bootstrap(store, 0, 2, "w", 20ms)->barrier("meet"), PeerTimeout);
  try {
    store_bootstrap(store, 1, 2, "w", 60s)->barrier("meet");
    FAIL() << "rank 0 has given up";
  } catch (const PeerTimeout& e) {
    EXPECT_EQ(e.record().peers, std::vector<int>{1});
  }
}

TEST_P(Steps, RanksAtDifferentStepsAllLearnBothNames) {
  const int n = GetParam();
  if (n < 2) return;  // needs somebody else
  auto store = thread_store();
  run(n, [&](int rank) {
    auto bootstrap = store_bootstrap(store, rank, n, "w");
    try {
      bootstrap->barrier(rank == n - 1 ? "recover" : "dispatch");
      ADD_FAILURE() << "rank " << rank << " did not notice";
    } catch (const InvalidArgument& e) {
      EXPECT_NE(std::string(e.what()).find("'recover'"), std::string::npos) << e.what();
      EXPECT_NE(std::string(e.what()).find("'dispatch'"), std::string::npos) << e.what();
    }
  });
}

TEST(StoreBootstrap, RefusesArgumentsThatCannotBe) {
  auto store = thread_store();
  EXPECT_THROW(store_bootstrap(store, 2, 2, "w"), InvalidArgument);
  EXPECT_THROW(store_bootstrap(store, -1, 2, "w"), InvalidArgument);
  EXPECT_THROW(store_bootstrap(store, 0, 0, "w"), InvalidArgument);
  EXPECT_THROW(store_bootstrap(nullptr, 0, 1, "w"), InvalidArgument);
  auto world = store_bootstrap(store, 1, 4, "w");
  EXPECT_THROW(world->sub_group(std::vector<int>{0, 2}, "g"), InvalidArgument);
  EXPECT_THROW(world->sub_group(std::vector<int>{1, 1}, "g"), InvalidArgument);
  EXPECT_THROW(world->sub_group(std::vector<int>{2, 1}, "g"), InvalidArgument);
  EXPECT_THROW(world->sub_group(std::vector<int>{1, 4}, "g"), InvalidArgument);
  EXPECT_THROW(world->sub_group(std::vector<int>{}, "g"), InvalidArgument);
}

}  // namespace
}  // namespace turnout
