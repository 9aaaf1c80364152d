// Collective steps over any store of bytes. Step n of a group publishes one key per rank and reads all of them. A rank
// that has published for step n has finished step n - 1; so who has seen every key of step n erases its own of step n - 1. What a
// sub-group's last step leaves is swept up later (garbage.h).
// A rank that gives up writes the list of missing ranks under their keys: who waits for them learns it at once, by any store.
#include <algorithm>
#include <condition_variable>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <utility>

#include "bootstrap/attempts.h"
#include "bootstrap/garbage.h"
#include "bootstrap/group_name.h"
#include "bootstrap/step_value.h"
#include "bootstrap/timeout.h"
#include "core/bytes.h"
#include "turnout/bootstrap.h"
#include "util/process.h"

namespace turnout {
inline namespace v0 {

Store::~Store() = default;
void Store::erase(const std::string&) {}
Bootstrap::~Bootstrap() = default;

namespace {

using bootstrap::Kind;
using bootstrap::pack;
using bootstrap::unpack;
using bootstrap::Value;
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
    const bool there = changed_.wait_until(lock, Clock::now() + std::min(timeout, bootstrap::kLongestTimeout), [&] { return values_.contains(key); });
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

std::vector<int> unpack_ranks(const std::vector<std::byte>& bytes) {
  std::vector<int> ranks(bytes.size() / sizeof(int));
  core::copy_bytes(ranks.data(), bytes.data(), ranks.size() * sizeof(int));
  return ranks;
}

std::string list(const std::vector<int>& ranks) {
  std::string text;
  for (int rank : ranks) text += (text.empty() ? "" : ", ") + std::to_string(rank);
  return text;
}

/// What a sub-group knows of where it comes from.
struct Origin {
  std::string prefix;        ///< of the keys of the group, which nobody has used; where it is empty, the ranks agree on one at the first step
  std::vector<int> members;  ///< in ranks of the parent
  std::string forming;       ///< key under which each rank of the parent says what it is forming: this and the rank; may be empty
  std::string words;         ///< what is said there
  std::shared_ptr<bootstrap::Garbage> garbage;
};

class StoreBootstrap final : public Bootstrap {
 public:
  /// `name` is for messages, `key_name` for keys.
  StoreBootstrap(std::shared_ptr<Store> store, int rank, int num_ranks, std::string name, std::string key_name, milliseconds timeout,
                 Origin origin = {})
      : store_(std::move(store)),
        rank_(rank),
        num_ranks_(num_ranks),
        name_(std::move(name)),
        key_name_(std::move(key_name)),
        prefix_(origin.prefix),
        garbage_(origin.garbage ? origin.garbage : std::make_shared<bootstrap::Garbage>()),
        origin_(std::move(origin)),
        timeout_(bootstrap::checked_timeout("store_bootstrap", timeout)) {
    if (num_ranks < 1 || rank < 0 || rank >= num_ranks) {
      throw InvalidArgument("store_bootstrap: rank is " + std::to_string(rank) + " of " + std::to_string(num_ranks) + " ranks");
    }
    if (!store_) throw InvalidArgument("store_bootstrap: store is null");
  }
  ~StoreBootstrap() override {
    if (origin_.prefix.empty() || !process_.is_this()) return;
    try {
      leave();
    } catch (...) {  // a store that is gone holds nothing
    }
  }

  /// The time of the next step began then.
  void begun_at(Clock::time_point start) { begun_ = start; }
  int rank() const override { return rank_; }
  int num_ranks() const override { return num_ranks_; }

  std::vector<std::vector<std::byte>> all_gather(std::string_view step, std::span<const std::byte> mine) override {
    if (!process_.is_this()) {
      throw InvalidArgument("bootstrap: " + std::string(step) + " (group '" + name_ +
                            "'): this process is a child, made by fork(), of the one that is rank " + std::to_string(rank_) +
                            ": start ranks as programs of their own, or make the Communicator after fork()");
    }
    const uint64_t number = ++step_;
    const bool is_first = number == 1;
    complete_ = false;
    if (is_first && !origin_.forming.empty()) ask(number, step, [&] { store_->set(forming(rank_), bytes_of_words()); });
    const auto start = std::exchange(begun_, std::nullopt).value_or(Clock::now());
    const auto arrive = [&] { store_->set(key(number, rank_), pack(Kind::arrived, num_ranks_, step, mine)); };
    if (prefix_.empty()) meet(number, step, start, arrive);
    else ask(number, step, arrive);
    std::vector<std::vector<std::byte>> all(static_cast<size_t>(num_ranks_));
    all[static_cast<size_t>(rank_)].assign(mine.begin(), mine.end());
    std::vector<int> missing;
    for (int peer = 0; peer < num_ranks_; ++peer) {
      if (peer == rank_) continue;
      const auto value = ask(number, step, [&] { return read(key(number, peer), start + timeout_, !missing.empty()); });
      if (!value) {
        missing.push_back(peer);
        continue;
      }
      Value theirs = unpack(*value);
      if (theirs.num_ranks != num_ranks_) miscount(number, step, peer, theirs.num_ranks);
      if (theirs.step != step) differ(number, step, peer, theirs.step);
      if (theirs.kind == Kind::given_up) throw expired(number, step, unpack_ranks(theirs.bytes), start, false);
      all[static_cast<size_t>(peer)] = std::move(theirs.bytes);
    }
    if (!missing.empty()) {
      tell_others(number, step, missing);
      throw expired(number, step, missing, start, true);
    }
    if (!is_first) store_->erase(key(number - 1, rank_));
    else if (!origin_.forming.empty()) store_->erase(forming(rank_));
    complete_ = true;
    return all;
  }

  void barrier(std::string_view step) override { all_gather(step, {}); }

  std::unique_ptr<Bootstrap> sub_group(std::span<const int> members, std::string_view name) override {
    int my_index = -1;
    for (size_t i = 0; i < members.size(); ++i) {
      if (members[i] < 0 || members[i] >= num_ranks_ || (i > 0 && members[i] <= members[i - 1])) {
        throw InvalidArgument("sub_group: members must be ascending ranks, 0 to " + std::to_string(num_ranks_ - 1) + "; members[" +
                              std::to_string(i) + "] is " + std::to_string(members[i]));
      }
      if (members[i] == rank_) my_index = static_cast<int>(i);
    }
    if (my_index < 0) throw InvalidArgument("sub_group: members do not hold this rank (" + std::to_string(rank_) + ")");
    // The same members may form a group of the same name again: each has its own keys.
    const int use = ++groups_[bootstrap::sub_name("", name, members, 0)];
    const std::string key_name = bootstrap::sub_name(prefix_.empty() ? key_name_ : prefix_, name, members, use);
    std::string shown = bootstrap::shown_name(name_ + "/" + std::string(name));
    garbage_->sweep(*store_);
    Origin origin;
    origin.garbage = garbage_;
    origin.members.assign(members.begin(), members.end());
    if (!prefix_.empty()) {
      origin.prefix = "turnout/" + key_name;
      origin.forming = prefix_ + "/forming/" + std::to_string(++num_sub_groups_) + "/";
      origin.words = "'" + bootstrap::shown_name(std::string(name)) + "' of ranks " + bootstrap::shown_ranks(members);
      if (use > 1) origin.words += ", for the " + std::to_string(use) + ". time";
    }
    const int num_members = static_cast<int>(members.size());
    return std::make_unique<StoreBootstrap>(store_, my_index, num_members, std::move(shown), key_name, timeout_, std::move(origin));
  }

 private:
  std::string key(uint64_t number, int peer) const { return bootstrap::step_key(prefix_, number, peer); }
  static std::span<const std::byte> bytes_of(const uint64_t& number) { return std::as_bytes(std::span(&number, 1)); }
  std::string forming(int peer) const { return origin_.forming + std::to_string(origin_.members[static_cast<size_t>(peer)]); }
  std::span<const std::byte> bytes_of_words() const { return std::as_bytes(std::span(origin_.words.data(), origin_.words.size())); }

  /// This rank is done with the group: tells its rank 0, whose next sub-group sweeps up what is left of this one. Looks for nothing and waits
  /// for nobody.
  void leave() {
    store_->set(bootstrap::Garbage::word(prefix_, rank_), pack(complete_ ? Kind::arrived : Kind::given_up, num_ranks_, "", bytes_of(step_)));
    if (rank_ == 0) garbage_->add(prefix_, num_ranks_);
  }

  /// Why a sub-group may not come about: ranks form another one. Empty for what is no sub-group, or has come about.
  std::string why_not_formed(uint64_t number, const std::vector<int>& missing) const {
    if (number > 1 || origin_.members.empty()) return "";
    std::vector<int> ranks;
    for (const int peer : missing) ranks.push_back(peer < num_ranks_ ? origin_.members[static_cast<size_t>(peer)] : peer);
    std::string text = "; in the group that sub_group was called on, they are [" + bootstrap::shown_ranks(ranks) +
                       "]: all members must give the same members and name, in the same order of calls";
    try {
      for (size_t i = 0; i < missing.size() && !origin_.forming.empty(); ++i) {
        const auto words = missing[i] < num_ranks_ ? store_->get(forming(missing[i]), milliseconds(1)) : std::nullopt;
        if (!words) continue;
        const std::string theirs(reinterpret_cast<const char*>(words->data()), words->size());
        if (theirs == origin_.words) continue;
        return text + "; rank " + std::to_string(ranks[i]) + " is forming " + theirs + ", this rank " + origin_.words;
      }
    } catch (...) {  // what is being reported matters more
    }
    return text;
  }

  /// The first step: which of the groups that have used this name is this one (attempts.h)? And arrives at it.
  void meet(uint64_t number, std::string_view step, Clock::time_point start, const std::function<void()>& arrive) {
    const std::string name = "turnout/" + key_name_;
    const auto begin = [&](uint64_t attempt) {
      prefix_ = name + "@" + std::to_string(attempt);
      arrive();
    };
    try {
      // The others look for rank 0 in the step while it waits for the last of them.
      const auto agree = [&] { return bootstrap::Attempts(*store_, name, rank_, num_ranks_).agree(start + timeout_, begin); };
      const auto outcome = ask(number, step, agree);
      if (outcome.other_count != 0 && rank_ != 0) miscount(number, step, 0, outcome.other_count);
      if (!outcome.missing.empty()) {
        if (rank_ == 0) tell_others(number, step, outcome.missing);
        throw expired(number, step, outcome.missing, start, outcome.ours);
      }
      if (rank_ != 0) ask(number, step, [&] { begin(outcome.attempt); });
    } catch (...) {
      prefix_.clear();  // what comes next is a new attempt
      step_ = 0;
      throw;
    }
  }

  /// What a store that fails has to say, with the step that it failed.
  template <class Request>
  auto ask(uint64_t number, std::string_view step, const Request& request) const -> decltype(request()) {
    try {
      return request();
    } catch (const PeerTimeout& e) {
      WaitRecord record = e.record();
      record.epoch = number;
      record.phase = std::string(step);
      throw PeerTimeout(head(number, step) + ": " + e.what(), record);
    } catch (const TransportError& e) {
      throw TransportError(head(number, step) + ": " + e.what());
    }
  }

  std::string head(uint64_t number, std::string_view step) const {
    return "bootstrap step " + std::to_string(number) + ": " + std::string(step) + " (group '" + name_ + "')";
  }

  /// Once somebody is missing, a store that has gone adds nothing: the ranks known to be missing are the better news.
  std::optional<std::vector<std::byte>> read(const std::string& name, Clock::time_point deadline, bool lenient) {
    const auto left = std::chrono::ceil<milliseconds>(deadline - Clock::now());
    try {
      return store_->get(name, std::max(left, milliseconds(1)));
    } catch (const TransportError&) {
      if (!lenient) throw;
    } catch (const PeerTimeout&) {
      if (!lenient) throw;
    }
    return std::nullopt;
  }

  /// Those who wait for a missing rank find the list under its key; those who come late find it under ours.
  void tell_others(uint64_t number, std::string_view step, const std::vector<int>& missing) {
    try {
      const auto note = pack(Kind::given_up, num_ranks_, step, std::as_bytes(std::span(missing)));
      store_->set(key(number, rank_), note);
      for (int peer : missing) store_->set(key(number, peer), note);
    } catch (const Error&) {  // what is being reported matters more
    }
  }

  [[noreturn]] void differ(uint64_t number, std::string_view step, int peer, const std::string& their_step) const {
    throw InvalidArgument("bootstrap step " + std::to_string(number) + " of '" + name_ + "': ranks are at different steps; rank " +
                          std::to_string(rank_) + " is at '" + std::string(step) + "', rank " + std::to_string(peer) + " at '" + their_step +
                          "': all ranks must make the same collective calls in the same order");
  }

  [[noreturn]] void miscount(uint64_t number, std::string_view step, int peer, int theirs) const {
    throw InvalidArgument(head(number, step) + ": ranks disagree about their number: rank " + std::to_string(rank_) + " was told that there are " +
                          std::to_string(num_ranks_) + ", rank " + std::to_string(peer) + " that there are " + std::to_string(theirs));
  }

  PeerTimeout expired(uint64_t number, std::string_view step, const std::vector<int>& missing, Clock::time_point start, bool ours) const {
    WaitRecord record;
    record.rank = rank_;
    record.peers = missing;
    record.call = "bootstrap";
    record.epoch = number;
    record.phase = std::string(step);
    record.expected = static_cast<uint64_t>(num_ranks_);
    record.seen = static_cast<uint64_t>(num_ranks_) - missing.size();
    record.peer_state = "silent";
    const auto waited = std::chrono::duration_cast<milliseconds>(Clock::now() - start).count();
    return PeerTimeout(head(number, step) + ": missing ranks [" + list(missing) + "] of " + std::to_string(num_ranks_) + "; rank " +
                           std::to_string(rank_) + " waited " + std::to_string(waited) + " ms, the deadline is " + std::to_string(timeout_.count()) +
                           " ms" + (ours ? "" : " (another rank reached it first)") + why_not_formed(number, missing),
                       record);
  }

  std::shared_ptr<Store> store_;
  const int rank_, num_ranks_;
  const std::string name_, key_name_;
  std::string prefix_;
  const std::shared_ptr<bootstrap::Garbage> garbage_;  ///< of all groups that come from one
  const Origin origin_;
  const util::Process process_;
  const milliseconds timeout_;
  std::optional<Clock::time_point> begun_;
  uint64_t step_ = 0;
  bool complete_ = true;  ///< the last step came about on this rank
  uint64_t num_sub_groups_ = 0;
  std::map<std::string, int> groups_;
};

}  // namespace

std::unique_ptr<Bootstrap> store_bootstrap(std::shared_ptr<Store> store, int rank, int num_ranks, std::string name, milliseconds timeout) {
  const std::string key_name = bootstrap::short_name(name);
  return std::make_unique<StoreBootstrap>(std::move(store), rank, num_ranks, bootstrap::shown_name(std::move(name)), key_name, timeout);
}

std::shared_ptr<Store> thread_store() { return std::make_shared<ThreadStore>(); }

}  // namespace v0

std::unique_ptr<Bootstrap> bootstrap::store_bootstrap_since(Clock::time_point start, std::shared_ptr<Store> store, int rank, int num_ranks,
                                                            const std::string& name, milliseconds timeout) {
  auto made = std::make_unique<StoreBootstrap>(std::move(store), rank, num_ranks, shown_name(name), short_name(name), timeout);
  made->begun_at(start);
  return made;
}

}  // namespace turnout
