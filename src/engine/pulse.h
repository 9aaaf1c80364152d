// How long the hearts of peers have not been seen to beat, for whoever decides what a peer is called: silent, or busy or alive.
#pragma once
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <optional>
#include <vector>

#include "transport/transport.h"

namespace turnout::engine {

/// A peer whose time is over is called silent if its heart has not beaten for so long: several beats, and not all of the time it had, which
/// began before its heart was first looked at.
inline std::chrono::milliseconds silent_after(std::chrono::milliseconds timeout) {
  return std::clamp<std::chrono::milliseconds>(timeout / 2, 3 * transport::kHeartbeat + transport::kHeartbeat / 2, 10 * transport::kHeartbeat);
}

/// Of a thread that looks at all hearts again and again. Time in which it did not look counts as one beat at most: this whole process may
/// have been stopped then.
class Pulse {
 public:
  using Duration = std::chrono::steady_clock::duration;
  explicit Pulse(int num_ranks) : hearts_(static_cast<size_t>(num_ranks)) {}
  /// `beats`: what the counter of `peer` says now; `passed`: since the last look at it. Returns for how long it has said that.
  Duration look(int peer, uint64_t beats, Duration passed) {
    Heart& heart = hearts_[static_cast<size_t>(peer)];
    heart.quiet = heart.beats == beats ? heart.quiet + std::min<Duration>(passed, transport::kHeartbeat) : Duration::zero();
    heart.beats = beats;
    return heart.quiet;
  }

 private:
  struct Heart {
    std::optional<uint64_t> beats;
    Duration quiet{};
  };
  std::vector<Heart> hearts_;
};

}  // namespace turnout::engine
