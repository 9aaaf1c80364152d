// How this program was started, so that it can be started again once per rank.
#pragma once
#include <string>
#include <vector>

namespace turnout::tools {

struct CommandLine {
  std::vector<std::string> program{};    ///< what the arguments were given to; empty: this executable
  std::vector<std::string> arguments{};  ///< "bench", "-n", "4", ...
};

}  // namespace turnout::tools
