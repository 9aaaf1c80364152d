// `turnout selftest`: is this installation right on this machine? Every mode, layout, size and wire against the reference.
#pragma once
#include <optional>
#include <string>
#include <vector>

#include "tools/command_line.h"

namespace turnout::tools {

struct SelftestOptions {
  int ranks = 3;
  std::string placement = "processes";
  std::string transport = "auto";
  std::string device = "cpu";
  std::optional<std::string> json;
  bool verbose = false;
  CommandLine command_line;
};

/// Returns the exit status: 1 if anything was wrong.
int run_selftest(const SelftestOptions& options);

}  // namespace turnout::tools
