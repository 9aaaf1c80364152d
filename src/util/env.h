// Every environment variable that Turnout reads, in one table: name, type, default, a sentence. docs/env.md is printed from it.
#pragma once
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "turnout/error.h"
#include "util/log.h"

namespace turnout::util {

/// The variables as they were when first asked for; a new one is a field here and a row of the table in env.cc.
/// A variable that is set to nothing counts as absent.
struct Env {
  LogLevel log_level = LogLevel::warn;
  std::string transport;
  std::optional<int> node_id, rank, num_ranks, local_rank;
  std::string root, job, secret, secret_file, interface;
  std::optional<int> port;
  int64_t bootstrap_timeout_ms = 0, timeout_ms = 0, busy_timeout_ms = 0;
  std::optional<int64_t> spin_us, staging_bytes;
  std::optional<int> ib_service_level;
  std::optional<int> num_threads;
  std::string cpu_isa;
  std::string cuda_library, device_transport, device_memory;
  std::string tuned_file;  ///< read by Python
  bool verify = false;
};

/// Throws: InvalidArgument naming the variable, its value and what would do.
const Env& env();

/// Logs, once per process, each TURNOUT_* variable of the environment that is not in the table, and each that another library's stands for.
void report_unknown_variables();

/// Finds the value of a variable, or nullptr; getenv in env(), a table in tests.
using EnvLookup = std::function<const char*(const char*)>;
Env read_env(const EnvLookup& lookup);
/// TURNOUT_LOG alone, for the log itself: never throws, a malformed value is the default.
LogLevel read_log_level(const EnvLookup& lookup);

class EnvValue;
struct EnvVariable {
  std::string_view name, type, default_value, sentence;
  void (*read)(Env& env, const EnvValue& value);
  std::string_view alias{};  ///< of another library: read where `name` is absent
};
std::span<const EnvVariable> env_table();
/// A line for each variable whose alias is read.
std::vector<std::string> aliases_in_use(const EnvLookup& lookup);
/// docs/env.md.
std::string env_page();
/// A line for each of `names` that begins with TURNOUT_ (but TURNOUT_TEST_) and is not in the table, with the nearest known name.
std::vector<std::string> unknown_variables(const std::vector<std::string>& names);

}  // namespace turnout::util
