// Where the library's lines go.
#pragma once
#include <cstdint>
#include <functional>
#include <optional>
#include <string_view>

#include "turnout/visibility.h"

namespace turnout {
inline namespace v0 {

enum class LogLevel : uint8_t { error, warn, info, debug };

/// Receives lines, without a prefix. `rank`: who speaks; -1: the process. Calls come one at a time, from any thread, also from threads of
/// the library and from within calls: it must not throw, log, or wait for what another thread holds that is in a call.
using LogCallback = std::function<void(LogLevel level, std::string_view text, int rank)>;

/// Lines of this process go to `callback` instead of stderr; empty: to stderr again. `most`: lines up to this level, whatever TURNOUT_LOG
/// says; absent: those that TURNOUT_LOG admits. Returns once no other thread is in the callback of before.
TURNOUT_API void set_log_callback(LogCallback callback, std::optional<LogLevel> most = {});

}  // namespace v0
}  // namespace turnout
