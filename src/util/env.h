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

/// The variables as they were when first asked for.
struct Env {
  LogLevel log_level = LogLevel::warn;
  std::string transport;        ///< TURNOUT_TRANSPORT
  std::optional<int> node_id;   ///< TURNOUT_NODE_ID
  std::optional<int> rank, num_ranks, local_rank;
  std::string root, job, secret, secret_file, interface;
  std::optional<int> port;
  int64_t bootstrap_timeout_ms = 0, timeout_ms = 0, busy_timeout_ms = 0;
  std::optional<int64_t> spin_us;
  std::optional<int> num_threads;
  std::string cpu_isa;
};

/// Throws: InvalidArgument naming the variable, its value and what would do. Unknown TURNOUT_* variables are logged once.
const Env& env();

/// Reads the table with `lookup` in place of getenv (tests).
Env read_env(const std::function<const char*(const char*)>& lookup);

struct EnvVariable {
  std::string_view name, type, default_value, sentence;
};
std::span<const EnvVariable> env_table();
/// docs/env.md.
std::string env_page();
/// Names of `given` that begin with TURNOUT_ and are not in the table, each with the nearest known name.
std::vector<std::string> unknown_variables(const std::vector<std::string>& given);

}  // namespace turnout::util
