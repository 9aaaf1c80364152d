// One lock, one line per write: lines of several threads do not mix.
#include "util/log.h"

#include <fmt/format.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <set>
#include <string>

#include "util/env.h"

namespace turnout::util {

namespace {

struct Logger {
  std::mutex mutex;
  std::set<std::string, std::less<>> seen;
  LogCallback callback;
};

// Never destroyed: threads of ours and of the caller may log while the process ends.
Logger& logger() {
  static Logger& instance = *std::make_unique<Logger>().release();
  return instance;
}

/// What TURNOUT_LOG says. Not from env(): that logs, and may throw.
LogLevel most_of_environment() {
  static const LogLevel most = read_log_level([](const char* name) -> const char* { return std::getenv(name); });  // NOLINT(concurrency-mt-unsafe)
  return most;
}

/// What TURNOUT_LOG says, or whoever set a callback.
std::atomic<LogLevel>& most_admitted() {
  static std::atomic<LogLevel> most = most_of_environment();
  return most;
}

}  // namespace

bool admits(LogLevel level) { return level <= most_admitted().load(std::memory_order_relaxed); }

std::string_view name(LogLevel level) {
  constexpr std::string_view kNames[] = {"error", "warn", "info", "debug"};
  return kNames[static_cast<int>(level)];
}

std::string line_of(LogLevel level, std::string_view text, int rank) {
  const std::string who = rank >= 0 ? fmt::format("turnout [rank {}] ", rank) : "turnout ";
  return fmt::format("{}{}: {}\n", who, name(level), text);
}

void log(LogLevel level, std::string_view text, int rank) {
  if (!admits(level)) return;
  std::lock_guard lock(logger().mutex);
  if (logger().callback) return logger().callback(level, text, rank);
  const std::string line = line_of(level, text, rank);
  std::fwrite(line.data(), 1, line.size(), stderr);
}

void log_once(LogLevel level, std::string_view text, int rank) {
  if (!admits(level)) return;
  {
    std::lock_guard lock(logger().mutex);
    if (!logger().seen.emplace(text).second) return;
  }
  log(level, text, rank);
}

void set_log_callback(LogCallback callback, std::optional<LogLevel> most) {
  std::lock_guard lock(logger().mutex);
  most_admitted() = callback && most ? *most : most_of_environment();
  logger().callback = std::move(callback);
}

}  // namespace turnout::util
