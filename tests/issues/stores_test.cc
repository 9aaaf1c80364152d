// Groups that form under one name of one store, again and again: stores that cannot erase, jobs started anew beside a store that lives on.
#include <gtest/gtest.h>

#include <array>
#include <map>
#include <mutex>
#include <thread>

#include "turnout/turnout.hpp"

namespace turnout {
namespace {

using namespace std::chrono_literals;

/// Keeps every key for ever, and remembers which were set to other bytes than before.
class LastingStore final : public Store {
 public:
  void set(const std::string& key, std::span<const std::byte> value) override {
    std::vector<std::byte> bytes(value.begin(), value.end());
    {
      std::lock_guard lock(mutex_);
      const auto [at, is_new] = values_.try_emplace(key, bytes);
      if (!is_new && at->second != bytes) ++num_changed_;
      at->second = std::move(bytes);
    }
    changed_.notify_all();
  }
  std::optional<std::vector<std::byte>> get(const std::string& key, std::chrono::milliseconds timeout) override {
    std::unique_lock lock(mutex_);
    if (!changed_.wait_for(lock, timeout, [&] { return values_.contains(key); })) return std::nullopt;
    return values_[key];
  }
  int num_changed() {
    std::lock_guard lock(mutex_);
    return num_changed_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<std::string, std::vector<std::byte>> values_;
  int num_changed_ = 0;
};

const BufferConfig kConfig{.num_experts = 4, .hidden = 4, .dtype = DType::fp32, .max_tokens_per_rank = 1, .max_topk = 2};

/// A dispatch whose rows name the ranks that sent them.
void use(Communicator& communicator) {
  Buffer buffer(communicator, kConfig);
  std::array<float, 4> x{};
  x.fill(static_cast<float>(communicator.rank()));
  const std::array<int32_t, 2> ids = {0, 3};
  const DispatchResult result = buffer.dispatch(
      {.x = TensorView::dense(x.data(), DType::fp32, {1, 4}), .topk_idx = TensorView::dense(const_cast<int32_t*>(ids.data()), DType::i32, {1, 2})});
  const int last = communicator.num_ranks() - 1;
  const bool has_rows = communicator.rank() == 0 || communicator.rank() == last;
  EXPECT_EQ(result.num_rows.as<int64_t>()[0], has_rows ? communicator.num_ranks() : 0);
}

void run(int num_ranks, const std::function<void(int)>& body) {
  std::vector<std::jthread> threads;
  for (int rank = 0; rank < num_ranks; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        body(rank);
      } catch (const Error& e) {
        ADD_FAILURE() << "rank " << rank << ": " << e.what();
      }
    });
  }
}

CommunicatorOptions over(const std::string& transport, std::chrono::milliseconds timeout = 20s) {
  CommunicatorOptions options;
  options.transport = transport;
  options.timeout = timeout;
  return options;
}

void use_one_name_again(const std::shared_ptr<Store>& store, const std::string& transport) {
  for (const int num_ranks : {2, 2, 3, 2}) {
    run(num_ranks, [&](int rank) {
      Communicator communicator = Communicator::from_store(store, rank, num_ranks, "world", over(transport));
      communicator.barrier();
      use(communicator);
    });
  }
  run(2, [&](int rank) {  // both alive
    Communicator one = Communicator::from_store(store, rank, 2, "world", over(transport));
    Communicator other = Communicator::from_store(store, rank, 2, "world", over(transport));
    use(one);
    use(other);
  });
}

TEST(OneNameOfOneStore, AStoreThatCannotErase) {
  for (const char* transport : {"inproc", "shm"}) {
    auto store = std::make_shared<LastingStore>();
    use_one_name_again(store, transport);
    EXPECT_EQ(store->num_changed(), 0) << "keys are written once";
  }
}

TEST(OneNameOfOneStore, AStoreOfThreads) {
  for (const char* transport : {"inproc", "shm"}) use_one_name_again(thread_store(), transport);
}

TEST(OneNameOfOneStore, SubGroupsOfTheSecond) {
  auto store = std::make_shared<LastingStore>();
  for (int round = 0; round < 2; ++round) {
    run(3, [&](int rank) {
      Communicator world = Communicator::from_store(store, rank, 3, "world", over("auto"));
      if (rank == 1) return;
      const std::array<int, 2> members = {0, 2};
      Communicator pair = world.sub_group(members);
      use(pair);
    });
  }
}

/// What a rank of an earlier job did before it was ended: its values lie in the store.
void leave_a_try(const std::shared_ptr<Store>& store, int rank, int num_ranks) {
  EXPECT_THROW(Communicator::from_store(store, rank, num_ranks, "world", over("auto", 30ms)), PeerTimeout);
}

TEST(AJobStartedAnew, RanksHaveTriedDifferentlyOften) {
  for (int absent = 0; absent < 3; ++absent) {
    auto store = std::make_shared<LastingStore>();
    for (int job = 0; job < 2; ++job) {
      for (int rank = 0; rank < 3; ++rank) {
        for (int n = 0; rank != absent && n <= rank; ++n) leave_a_try(store, rank, 3);
      }
      // The first may find the notes of those that gave up before any of the new job has begun; then all begin.
      std::atomic<int> begun = 0;
      run(3, [&](int rank) {
        ++begun;
        while (begun < 3) std::this_thread::yield();
        Communicator communicator = Communicator::from_store(store, rank, 3, "world", over("auto"));
        use(communicator);
      });
    }
  }
}

/// Ends without a note, as a process that is killed: its store answers no more.
class Killed final : public Store {
 public:
  Killed(std::shared_ptr<Store> inner, int num_sets) : inner_(std::move(inner)), left_(num_sets) {}
  void set(const std::string& key, std::span<const std::byte> value) override {
    if (left_-- <= 0) throw TransportError("killed");
    inner_->set(key, value);
  }
  std::optional<std::vector<std::byte>> get(const std::string& key, std::chrono::milliseconds timeout) override {
    if (left_ <= 0) throw TransportError("killed");
    return inner_->get(key, timeout);
  }

 private:
  std::shared_ptr<Store> inner_;
  std::atomic<int> left_;
};

TEST(AJobStartedAnew, AfterRanksWereKilledAnywhere) {
  auto store = std::make_shared<LastingStore>();
  for (int num_sets = 1; num_sets <= 12; ++num_sets) {
    run(3, [&](int rank) {
      auto dying = std::make_shared<Killed>(store, num_sets + rank * 3);
      try {
        Communicator::from_store(dying, rank, 3, "world", over("shm", 200ms));
      } catch (const Error&) {  // with enough of them it comes about
      }
    });
    run(3, [&](int rank) {
      Communicator communicator = Communicator::from_store(store, rank, 3, "world", over("auto"));
      use(communicator);
    });
  }
}

TEST(OneNameOfOneStore, RanksThatCountDifferently) {
  for (const std::array<int, 3>& counts : {std::array{2, 3, 3}, std::array{3, 2, 3}}) {
    auto store = std::make_shared<LastingStore>();
    const auto start = std::chrono::steady_clock::now();
    run(3, [&](int rank) {
      const int count = counts[static_cast<size_t>(rank)];
      try {
        Communicator::from_store(store, rank, count, "world", over("auto"));
        ADD_FAILURE() << "rank " << rank;
      } catch (const InvalidArgument& e) {
        EXPECT_NE(std::string(e.what()).find("ranks disagree about their number"), std::string::npos) << e.what();
      } catch (const Error& e) {
        ADD_FAILURE() << "rank " << rank << ": " << e.what();
      }
    });
    EXPECT_LT(std::chrono::steady_clock::now() - start, 10s);
  }
}

}  // namespace
}  // namespace turnout
