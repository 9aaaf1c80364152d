// Leveled lines on stderr, or wherever the caller's callback puts them.
#pragma once
#include <functional>
#include <string>
#include <string_view>

namespace turnout::util {

enum class LogLevel { error, warn, info, debug };

/// Writes "turnout <level>: <text>" if TURNOUT_LOG admits the level (default warn).
void log(LogLevel level, std::string_view text);
/// As log(), but a text is written once per process.
void log_once(LogLevel level, const std::string& text);
/// Lines go to `callback` instead of stderr; empty: stderr again.
void set_log_callback(std::function<void(LogLevel, std::string_view)> callback);

}  // namespace turnout::util
