// Collective steps over any store of bytes. Step n of a group publishes one key per rank and reads all of them; keys of
// step n - 2 are erased, because a rank that publishes for step n has read everything of step n - 2 and so have all others
// whose keys of step n - 1 it has seen.
#include <condition_variable>
#include <cstring>
#include <map>
#include <mutex>

#include "turnout/bootstrap.h"

namespace turnout {
inline namespace v0 {

Store::~Store() = default;
void Store::erase(const std::string&) {}
Bootstrap::~Bootstrap() = default;

namespace {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

class ThreadStore final : public Store {
 public:
  void set(const std::string& key, std::span<const std::byte> value) override {
    {
      std::lock_guard lock(mutex_);
      values_[key].assign(value.begin(), value.end());
    }
    changed_.notify_all();
  }
  std::optional<std::vector<std::byte>> get(const std::string& key, milliseconds timeout) override {
    std::unique_lock lock(mutex_);
    const bool there = changed_.wait_until(lock, Clock::now() + timeout, [&] { return values_.contains(key); });
    if (!there) return std::nullopt;
    return values_[key];
  }
  void erase(const std::string& key) override {
    std::lock_guard lock(mutex_);
    values_.erase(key);
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<std::string, std::vector<std::byte>> values_;
};

class StoreBootstrap final : public Bootstrap {
 public:
  StoreBootstrap(std::shared_ptr<Store> store, int rank, int num_ranks, std::string name, milliseconds timeout)
      : store_(std::move(store)), rank_(rank), num_ranks_(num_ranks), name_(std::move(name)), timeout_(timeout) {
    if (num_ranks < 1 || rank < 0 || rank >= num_ranks) {
      throw InvalidArgument("store_bootstrap: rank is " + std::to_string(rank) + " of " + std::to_string(num_ranks) + " ranks");
    }
    if (!store_) throw InvalidArgument("store_bootstrap: store is null");
  }

  int rank() const override { return rank_; }
  int num_ranks() const override { return num_ranks_; }

  std::vector<std::vector<std::byte>> all_gather(std::string_view step, std::span<const std::byte> mine) override {
    const uint64_t number = ++step_;
    publish(number, step, mine);
    const auto deadline = Clock::now() + timeout_;
    std::vector<std::vector<std::byte>> all(static_cast<size_t>(num_ranks_));
    std::vector<int> missing;
    std::string mismatch;
    for (int peer = 0; peer < num_ranks_; ++peer) {
      const auto left = std::chrono::duration_cast<milliseconds>(deadline - Clock::now());
      auto value = store_->get(key(number, peer), std::max(left, milliseconds(0)));
      if (!value) {
        missing.push_back(peer);
        continue;
      }
      std::string their_step;
      all[static_cast<size_t>(peer)] = unpack(*value, their_step);
      if (their_step != step) mismatch += "\n  rank " + std::to_string(peer) + " is at '" + their_step + "'";
    }
    if (!mismatch.empty()) {
      throw InvalidArgument("bootstrap step " + std::to_string(number) + " of '" + name_ + "': ranks are at different steps; this rank (" +
                            std::to_string(rank_) + ") is at '" + std::string(step) + "'" + mismatch);
    }
    if (!missing.empty()) expire(number, step, missing);
    if (number > 2) store_->erase(key(number - 2, rank_));
    return all;
  }

  void barrier(std::string_view step) override { all_gather(step, {}); }

  std::unique_ptr<Bootstrap> sub_group(std::span<const int> members, std::string_view name) override {
    int my_index = -1;
    std::string group = name_ + "/" + std::string(name);
    for (size_t i = 0; i < members.size(); ++i) {
      if (members[i] < 0 || members[i] >= num_ranks_ || (i > 0 && members[i] <= members[i - 1])) {
        throw InvalidArgument("sub_group: members must be ascending ranks, 0 to " + std::to_string(num_ranks_ - 1) + "; members[" + std::to_string(i) +
                              "] is " + std::to_string(members[i]));
      }
      if (members[i] == rank_) my_index = static_cast<int>(i);
      group += "." + std::to_string(members[i]);
    }
    if (my_index < 0) throw InvalidArgument("sub_group: members do not hold this rank (" + std::to_string(rank_) + ")");
    // The same members may form a group of the same name again: each has its own keys.
    group += "#" + std::to_string(++groups_[group]);
    return std::make_unique<StoreBootstrap>(store_, my_index, static_cast<int>(members.size()), group, timeout_);
  }

 private:
  std::string key(uint64_t number, int peer) const { return "turnout/" + name_ + "/" + std::to_string(number) + "/" + std::to_string(peer); }

  void publish(uint64_t number, std::string_view step, std::span<const std::byte> mine) {
    std::vector<std::byte> value(sizeof(uint32_t) + step.size() + mine.size());
    const auto length = static_cast<uint32_t>(step.size());
    std::memcpy(value.data(), &length, sizeof length);
    std::memcpy(value.data() + sizeof length, step.data(), step.size());
    if (!mine.empty()) std::memcpy(value.data() + sizeof length + step.size(), mine.data(), mine.size());
    store_->set(key(number, rank_), value);
  }

  static std::vector<std::byte> unpack(const std::vector<std::byte>& value, std::string& step) {
    uint32_t length = 0;
    if (value.size() >= sizeof length) std::memcpy(&length, value.data(), sizeof length);
    if (value.size() < sizeof length + length) throw TransportError("bootstrap: a value in the store is cut short");
    step.assign(reinterpret_cast<const char*>(value.data()) + sizeof length, length);
    return {value.begin() + static_cast<int64_t>(sizeof length + length), value.end()};
  }

  [[noreturn]] void expire(uint64_t number, std::string_view step, const std::vector<int>& missing) const {
    WaitRecord record;
    record.rank = rank_;
    record.peers = missing;
    record.call = "bootstrap";
    record.epoch = number;
    record.phase = std::string(step);
    record.expected = static_cast<uint64_t>(num_ranks_);
    record.seen = static_cast<uint64_t>(num_ranks_) - missing.size();
    std::string ranks;
    for (int peer : missing) ranks += (ranks.empty() ? "" : ", ") + std::to_string(peer);
    throw PeerTimeout("bootstrap step " + std::to_string(number) + " '" + std::string(step) + "' of '" + name_ + "': rank " + std::to_string(rank_) +
                          " has waited " + std::to_string(timeout_.count()) + " ms; missing ranks: " + ranks + " of " + std::to_string(num_ranks_),
                      record);
  }

  std::shared_ptr<Store> store_;
  const int rank_, num_ranks_;
  const std::string name_;
  const milliseconds timeout_;
  uint64_t step_ = 0;
  std::map<std::string, int> groups_;
};

}  // namespace

std::unique_ptr<Bootstrap> store_bootstrap(std::shared_ptr<Store> store, int rank, int num_ranks, std::string name, milliseconds timeout) {
  return std::make_unique<StoreBootstrap>(std::move(store), rank, num_ranks, std::move(name), timeout);
}

std::shared_ptr<Store> thread_store() { return std::make_shared<ThreadStore>(); }

}  // namespace v0
}  // namespace turnout
