// `turnout launch`: N processes of this machine as the ranks of one job.
#pragma once
#include <string>
#include <vector>

namespace turnout::tools {

struct LaunchOptions {
  int num_ranks = 1;
  std::vector<std::string> command;
  bool tag = false;      ///< each line of output begins with "[rank] "
  double timeout_s = 0;  ///< 0: none
};

/// Starts the command once per rank with the TURNOUT_* variables of docs/launch.md and a fresh secret, and waits. When a rank
/// fails the others are ended: SIGTERM, then SIGKILL after two seconds. SIGINT and SIGTERM go to all. Nothing outlives this process.
/// Returns the status of the rank that failed first (128 + signal if it was killed; 124 after the timeout), else 0.
/// Throws: InvalidArgument (no command, no ranks), TransportError (a process cannot be started).
int run_launch(const LaunchOptions& options);

}  // namespace turnout::tools
