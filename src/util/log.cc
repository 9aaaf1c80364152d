// One lock, one line per write: lines of several threads do not mix.
#include "util/log.h"

#include <cstdio>
#include <mutex>
#include <set>

#include "util/env.h"

namespace turnout::util {

namespace {

struct Logger {
  std::mutex mutex;
  std::set<std::string> seen;
  std::function<void(LogLevel, std::string_view)> callback;
};

Logger& logger() {
  static Logger instance;
  return instance;
}

constexpr const char* kNames[] = {"error", "warn", "info", "debug"};

}  // namespace

void log(LogLevel level, std::string_view text) {
  if (static_cast<int>(level) > static_cast<int>(env().log_level)) return;
  std::lock_guard lock(logger().mutex);
  if (logger().callback) return logger().callback(level, text);
  std::fprintf(stderr, "turnout %s: %.*s\n", kNames[static_cast<int>(level)], static_cast<int>(text.size()), text.data());
}

void log_once(LogLevel level, const std::string& text) {
  {
    std::lock_guard lock(logger().mutex);
    if (!logger().seen.insert(text).second) return;
  }
  log(level, text);
}

void set_log_callback(std::function<void(LogLevel, std::string_view)> callback) {
  std::lock_guard lock(logger().mutex);
  logger().callback = std::move(callback);
}

}  // namespace turnout::util
