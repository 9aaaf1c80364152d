// A lane: an independent sequence of calls, and the one place where anything waits.
#pragma once
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "engine/cpu/call.h"

namespace turnout::engine {

class Lane {
 public:
  Lane(std::shared_ptr<Context> context, int index) : context_(std::move(context)), index_(index) {}

  /// Held through every step of a call of this lane.
  std::mutex mutex;

  int index() const { return index_; }
  /// The lanes of the same Buffer: a wait moves theirs, too, lest ranks that wait on different lanes wait for each other.
  void set_siblings(std::vector<Lane*> siblings) { siblings_ = std::move(siblings); }
  /// The epoch of the next call. REQUIRES: mutex is held, here and below.
  uint64_t take_epoch() { return next_epoch_++; }
  uint64_t next_epoch() const { return next_epoch_; }
  uint64_t first_epoch() const { return first_epoch_; }
  /// The experts of new routings.
  const std::shared_ptr<const core::ExpertMap>& experts() {
    if (context_->num_maps.load(std::memory_order_acquire) != num_maps_) [[unlikely]]
      refresh_experts();
    return experts_;
  }
  /// Calls issued and not yet finished.
  int num_outstanding() const { return static_cast<int>(calls_.size()); }

  /// Puts the call among the outstanding ones.
  void add(std::shared_ptr<Call> call) { calls_.push_back(std::move(call)); }
  /// Takes the call, which is done or has failed, from among them. Who goes on using it keeps what comes back.
  std::shared_ptr<Call> remove(const Call* call);
  /// The call of `epoch`, if it has failed and is closing; else null.
  std::shared_ptr<const Call> closing_call(uint64_t epoch) const;

  enum class Until { sent, done };
  /// Moves all outstanding calls until `call` is sent or done. On failure the call is given up, removed, and the reason
  /// thrown: InvalidArgument (ranks disagree or one refused), PeerTimeout and PeerFailed (the Buffer is aborted).
  void drive(Call& call, Until until);
  /// One round of progress over all outstanding calls: true if anything moved. A call that fails keeps its failure.
  bool progress_all();

  /// Drives every outstanding call until it is done or has failed; they stay until waited for. Throws as drive() when the Buffer aborts.
  void finish_all();
  /// The Buffer is closed: gives every outstanding call up.
  void abandon();

  /// Forgets every outstanding call and starts again at `epoch`, the same on all ranks.
  void restart(uint64_t epoch);

 private:
  using Clock = std::chrono::steady_clock;
  struct Patience {
    Clock::time_point since = Clock::now();  ///< of the last progress
    Clock::time_point reported = since;
    std::optional<Clock::time_point> gone_since;  ///< when some peer was first found gone
    bool looks_once_more = false;                 ///< has been gone long enough
    std::vector<uint64_t> heartbeats;             ///< when the wait became slow
    std::vector<Clock::time_point> beat_at;       ///< when a heartbeat last moved
  };
  void refresh_experts();
  void fail(Call& call);
  void stop_peers(const Call& call);
  bool progress_siblings();
  /// The lane on which `peer` has come to a call that this rank has not made; -1 if there is none.
  int crossed_lane(int peer) const;
  std::string calls_made() const;
  void check_patience(const Call& call, Patience& patience);
  [[noreturn]] void expire(const Call& call, const Waiting& waiting, const std::vector<int>& peers, const std::string& state, Clock::duration waited,
                           bool gone);

  std::shared_ptr<Context> context_;
  const int index_;
  uint64_t next_epoch_ = 1, first_epoch_ = 1;
  std::vector<std::shared_ptr<Call>> calls_;
  std::vector<std::shared_ptr<Call>> closing_;  ///< removed ones whose copy may not be used again yet
  std::vector<Lane*> siblings_;
  std::shared_ptr<const core::ExpertMap> experts_;  ///< Context::experts as of
  uint64_t num_maps_ = 0;                           ///< this Context::num_maps
};

}  // namespace turnout::engine
