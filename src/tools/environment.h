// What the command-line tools take from the environment (docs/env.md).
#pragma once
#include "turnout/config.h"
#include "util/env.h"

namespace turnout::tools {

inline int default_num_threads() { return util::env().num_threads.value_or(1); }

inline void apply_environment(BufferConfig& config) {
  config.timeouts.timeout = std::chrono::milliseconds(util::env().timeout_ms);
  config.timeouts.busy_timeout = std::chrono::milliseconds(util::env().busy_timeout_ms);
  config.num_threads = default_num_threads();
}

}  // namespace turnout::tools
