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
/// fails the others are ended: SIGTERM, then SIGKILL after two seconds. SIGINT, SIGTERM and SIGHUP are passed on; the second
/// one kills. Nothing that the ranks start outlives this process, even if it is killed itself.
/// Returns the status of the rank that failed first (128 + signal if it was killed; 124 after the timeout; 127 or 126 if the
/// command cannot be run), else 0.
/// REQUIRES: no other thread takes the signals above. Throws: InvalidArgument (no command, no ranks), TransportError (no more processes).
int run_launch(const LaunchOptions& options);

}  // namespace turnout::tools
