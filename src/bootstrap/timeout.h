// Deadlines of the bootstrap: the default, and the longest one: clocks count nanoseconds in 64 bits, and what is meant to be for ever would be over
// at once.
#pragma once
#include <chrono>
#include <memory>
#include <string>

#include "turnout/bootstrap.h"
#include "turnout/error.h"
#include "util/env.h"

namespace turnout::bootstrap {

inline constexpr std::chrono::milliseconds kLongestTimeout = std::chrono::hours(365 * 24);

/// `timeout`, or what the environment says for 0. Throws: InvalidArgument with both times.
inline std::chrono::milliseconds checked_timeout(const char* what, std::chrono::milliseconds timeout) {
  if (timeout.count() == 0) return std::chrono::milliseconds(util::env().bootstrap_timeout_ms);
  if (timeout.count() > 0 && timeout <= kLongestTimeout) return timeout;
  throw InvalidArgument(std::string(what) + ": timeout is " + std::to_string(timeout.count()) + " ms, but must be 1 to a year (" +
                        std::to_string(kLongestTimeout.count()) + "), or 0 for TURNOUT_BOOTSTRAP_TIMEOUT_MS");
}

/// As store_bootstrap, but the time of the first step began at `start`: what came before it counts, too.
std::unique_ptr<Bootstrap> store_bootstrap_since(std::chrono::steady_clock::time_point start, std::shared_ptr<Store> store, int rank, int num_ranks,
                                                 const std::string& name, std::chrono::milliseconds timeout);

}  // namespace turnout::bootstrap
