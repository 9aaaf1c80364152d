// Leveled lines on stderr, or wherever the caller's callback puts them.
#pragma once
#include <optional>
#include <string>
#include <string_view>

#include "turnout/log.h"

namespace turnout::util {

using turnout::LogCallback;
using turnout::LogLevel;

/// Whether log() writes lines of this level: who has to build a long one asks first.
bool admits(LogLevel level);
/// Writes line_of(...) if TURNOUT_LOG admits the level (default warn).
void log(LogLevel level, std::string_view text, int rank = -1);
/// As log(), but a text is written once per process, whatever the rank.
void log_once(LogLevel level, std::string_view text, int rank = -1);

/// As the public one.
void set_log_callback(LogCallback callback, std::optional<LogLevel> most = {});

std::string_view name(LogLevel level);
/// "turnout [rank r] <level>: <text>\n"; without "[rank r]" for rank -1.
std::string line_of(LogLevel level, std::string_view text, int rank);

}  // namespace turnout::util
