// Any environment, as lines NAME=VALUE, either names a place in a job that can be or is refused in words.
#include <cstdint>
#include <cstdlib>
#include <map>
#include <string>

#include "bootstrap/launch_info.h"
#include "turnout/error.h"
#include "util/env.h"

namespace {

/// A refusal says more than that there is one.
void expect_words(const std::string& what) {
  if (what.size() < 20) std::abort();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace turnout;
  std::map<std::string, std::string> variables;
  const std::string text(reinterpret_cast<const char*>(data), size);
  for (size_t at = 0; at < text.size();) {
    const size_t end = std::min(text.find('\n', at), text.size());
    const std::string line = text.substr(at, end - at);
    const size_t equals = line.find('=');
    if (equals != std::string::npos) variables[line.substr(0, equals)] = line.substr(equals + 1);
    at = end + 1;
  }
  const auto lookup = [&](const char* name) -> const char* {
    const auto it = variables.find(name);
    return it == variables.end() ? nullptr : it->second.c_str();
  };
  util::read_log_level(lookup);
  try {
    const util::Env env = util::read_env(lookup);
    if (env.bootstrap_timeout_ms < 1 || env.timeout_ms < 1 || env.busy_timeout_ms < 1 || env.port.value_or(1) < 1) std::abort();
  } catch (const InvalidArgument& e) {
    expect_words(e.what());
  }
  for (const std::string& line : util::aliases_in_use(lookup)) expect_words(line);
  try {
    const LaunchInfo info = bootstrap::launch_info(lookup);
    if (info.num_ranks < 1 || info.rank < 0 || info.rank >= info.num_ranks || info.local_rank < 0) std::abort();
    if (info.port < 1 || info.port > 65535 || info.root_address.empty() || info.launcher.empty() || info.job.empty()) std::abort();
  } catch (const InvalidArgument& e) {
    expect_words(e.what());
  }
  std::vector<std::string> names;
  for (const auto& [name, value] : variables) names.push_back(name);
  for (const std::string& line : util::unknown_variables(names)) expect_words(line);
  bootstrap::first_host(text);
  return 0;
}
