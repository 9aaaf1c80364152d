// Leveled lines on stderr, or wherever the caller's callback puts them.
#pragma once
#include <functional>
#include <string_view>

namespace turnout::util {

enum class LogLevel { error, warn, info, debug };

/// Writes "turnout [rank r] <level>: <text>" if TURNOUT_LOG admits the level (default warn); without "[rank r]" for rank -1.
void log(LogLevel level, std::string_view text, int rank = -1);
/// As log(), but a text is written once per process, whatever the rank.
void log_once(LogLevel level, std::string_view text, int rank = -1);

/// Receives the lines of every level that TURNOUT_LOG admits, without the prefix. Calls come one at a time, from any
/// thread; it must not throw or log.
using LogCallback = std::function<void(LogLevel level, std::string_view text, int rank)>;
/// Lines go to `callback` instead of stderr; empty: stderr again.
void set_log_callback(LogCallback callback);

std::string_view name(LogLevel level);

}  // namespace turnout::util
