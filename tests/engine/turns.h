// Ranks that run one at a time, in an order that a seed decides: whoever has the turn runs until a step of the protocol (util/probe.h) at
// which the seed hands the turn on, or until it has nothing to do. A seed replays its run, step for step.
#pragma once
#include <algorithm>
#include <atomic>
#include <limits>
#include <memory>
#include <mutex>
#include <semaphore>
#include <string>
#include <vector>

#include "support/random_routing.h"
#include "util/probe.h"

namespace turnout::testing {

class Turns {
 public:
  Turns(uint64_t seed, int num_ranks) : random_(seed), seats_(static_cast<size_t>(num_ranks)) {
    // Half of the seeds hand the turn on by chance; the other half let the first rank of an order run, and change the order at a few steps only,
    // which finds what needs a rank to be late for long.
    by_chance_ = random_.chance(0.5);
    chance_ = random_.one_of(std::vector<double>{0.5, 0.1, 0.02});
    for (size_t rank = 0; rank < seats_.size(); ++rank) seats_[rank].priority = random_.below(1'000'000);
    for (int64_t changes = random_.between(1, 12); changes > 0; --changes) changes_.push_back(static_cast<uint64_t>(random_.below(6000)));
    std::sort(changes_.begin(), changes_.end());
  }
  Turns(const Turns&) = delete;
  Turns& operator=(const Turns&) = delete;

  /// One rank's place, while it lives: its thread runs in turn. Its end waits for all others': what a rank does to its peers when it closes its
  /// Buffer is no step.
  class Seat final : public util::probe::Hook {
   public:
    Seat(Turns& turns, int rank) : turns_(turns), rank_(static_cast<size_t>(rank)) {
      turns_.enter(rank_);
      util::probe::hook = this;
    }
    Seat(const Seat&) = delete;
    Seat& operator=(const Seat&) = delete;
    ~Seat() override {
      util::probe::hook = nullptr;
      turns_.leave(rank_);
    }
    void at(util::probe::Step step) override {
      if (!turns_.over_) turns_.step(rank_, step);
    }
    bool idle() override { return !turns_.over_ && turns_.idle(rank_); }
    /// Time passes with steps.
    std::chrono::steady_clock::time_point now() override {
      if (turns_.over_) return std::chrono::steady_clock::now();
      return std::chrono::steady_clock::time_point(std::chrono::microseconds(turns_.num_steps_));
    }

   private:
    Turns& turns_;
    const size_t rank_;
  };

  /// What went wrong first, on any rank. From here on all run as they like, and find their peers gone.
  void give_up(const std::string& why) {
    {
      std::lock_guard lock(mutex_);
      if (why_.empty()) why_ = why;
    }
    if (over_.exchange(true)) return;
    for (Seat_& seat : seats_) seat.turn.release();
  }
  const std::string& why() const { return why_; }
  uint64_t num_steps() const { return num_steps_; }
  uint64_t num_turns() const { return num_turns_; }
  /// Differs where the order of steps does.
  uint64_t trace() const { return trace_; }

 private:
  struct Seat_ {
    std::counting_semaphore<1 << 20> turn{0};
    bool active = false;
    int64_t priority = 0;
  };
  /// So many polls that found nothing, with no step in between but looks at signals: nobody will ever go on.
  static constexpr int64_t kStuck = 20'000;

  void enter(size_t rank) {
    bool is_last = false;
    {
      std::lock_guard lock(mutex_);
      seats_[rank].active = true;
      is_last = ++num_entered_ == seats_.size();
    }
    if (is_last && !over_) seats_[best()].turn.release();
    seats_[rank].turn.acquire();
  }

  void leave(size_t rank) {
    if (over_) return;
    seats_[rank].active = false;
    if (const size_t next = by_chance_ ? any_but(rank) : best(); seats_[next].active) {
      hand_to(next);
      seats_[rank].turn.acquire();
    } else {
      for (Seat_& seat : seats_) seat.turn.release();
    }
  }

  void step(size_t rank, util::probe::Step step) {
    note(rank, static_cast<uint64_t>(step));
    if (step != util::probe::Step::load) num_idle_ = 0;
    size_t next = rank;
    if (by_chance_) {
      if (random_.chance(chance_)) next = any_but(rank);
    } else if (!changes_.empty() && num_steps_ >= changes_.front()) {
      changes_.erase(changes_.begin());
      seats_[rank].priority = --lowest_;
      next = best();
    }
    pass(rank, next);
  }

  bool idle(size_t rank) {
    note(rank, 7);
    if (++num_idle_ > kStuck) {
      give_up("nobody gets on: every rank waits");
      return false;
    }
    size_t next = 0;
    if (by_chance_) {
      next = any_but(rank);
    } else {
      seats_[rank].priority = --lowest_;
      next = best();
    }
    pass(rank, next);
    return !over_;
  }

  void note(size_t rank, uint64_t what) {
    ++num_steps_;
    trace_ = (trace_ ^ (rank << 8 | what)) * 0x100000001b3ull;
  }

  /// Another rank that runs, or `rank` if there is none.
  size_t any_but(size_t rank) {
    std::vector<size_t> others;
    for (size_t other = 0; other < seats_.size(); ++other) {
      if (other != rank && seats_[other].active) others.push_back(other);
    }
    return others.empty() ? rank : random_.one_of(others);
  }
  size_t best() const {
    size_t found = 0;
    int64_t highest = std::numeric_limits<int64_t>::min();
    for (size_t rank = 0; rank < seats_.size(); ++rank) {
      if (seats_[rank].active && seats_[rank].priority > highest) highest = seats_[found = rank].priority;
    }
    return found;
  }
  void hand_to(size_t next) {
    ++num_turns_;
    seats_[next].turn.release();
  }
  void pass(size_t rank, size_t next) {
    if (next == rank) return;
    hand_to(next);
    seats_[rank].turn.acquire();
  }

  // All of this belongs to whoever has the turn.
  Random random_;
  std::vector<Seat_> seats_;
  bool by_chance_ = true;
  double chance_ = 0;
  std::vector<uint64_t> changes_;
  int64_t lowest_ = 0, num_idle_ = 0;
  uint64_t num_steps_ = 0, num_turns_ = 0, trace_ = 0xcbf29ce484222325ull;

  std::mutex mutex_;
  size_t num_entered_ = 0;
  std::string why_;
  std::atomic<bool> over_{false};
};

}  // namespace turnout::testing
