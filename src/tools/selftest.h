// `turnout selftest`: is this installation right on this machine, and as fast as the machine is? Every mode, layout, size, dtype, wire
// and way to call against the reference, then speed beside its limit.
#pragma once
#include <optional>
#include <string>

#include "tools/command_line.h"

namespace turnout::tools {

struct SelftestOptions {
  int ranks = 0;          ///< 0: as many as GPUs, or on a CPU 2 to 4
  std::string placement;  ///< empty: processes; threads where two ranks share the only GPU
  std::string transport = "auto";
  std::string device = "auto";  ///< auto: GPUs where all ranks can use them, else the CPU
  double seconds = 0.4;         ///< for each operation that is timed; 0: none is
  double max_ratio = 0;         ///< fail where a throughput call takes more than this many times its limit; 0: never
  bool corrupt = false;         ///< change one bit of a row: must fail
  std::optional<std::string> json;
  bool verbose = false;
  CommandLine command_line;
};

/// Returns the exit status: 1 if anything was wrong.
int run_selftest(const SelftestOptions& options);

}  // namespace turnout::tools
