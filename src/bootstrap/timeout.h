// The longest deadline: clocks count nanoseconds in 64 bits, and what is meant to be for ever would be over at once.
#pragma once
#include <chrono>
#include <string>

#include "turnout/error.h"

namespace turnout::bootstrap {

inline constexpr std::chrono::milliseconds kLongestTimeout = std::chrono::hours(365 * 24);

/// Throws: InvalidArgument with both times.
inline void check_timeout(const char* what, std::chrono::milliseconds timeout) {
  if (timeout <= kLongestTimeout) return;
  throw InvalidArgument(std::string(what) + ": timeout is " + std::to_string(timeout.count()) + " ms, but must be at most a year (" +
                        std::to_string(kLongestTimeout.count()) + ")");
}

}  // namespace turnout::bootstrap
