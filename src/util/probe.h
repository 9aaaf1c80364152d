// Places where a test build holds the engine up, counts its steps or ends it: there tests/engine/probed/util/probe.h stands in for this
// file. Here nothing happens, and the compiler drops the calls.
#pragma once
#include <chrono>

#include "util/probe_step.h"

namespace turnout::util::probe {

constexpr void at(Step) {}
/// After a poll that found nothing: whether a test has passed the time in its own way, so that it is time for the next poll.
constexpr bool idle() { return false; }
inline std::chrono::steady_clock::time_point now() { return std::chrono::steady_clock::now(); }

}  // namespace turnout::util::probe
