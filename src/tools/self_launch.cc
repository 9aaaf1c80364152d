#include "tools/self_launch.h"

#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstring>

#include "turnout/error.h"

namespace turnout::tools {

namespace {

std::string this_executable() {
  std::string self(4096, '\0');
  const ssize_t n = readlink("/proc/self/exe", self.data(), self.size() - 1);
  if (n <= 0) throw TransportError(std::string("cannot find this program to start it again: ") + std::strerror(errno));
  self.resize(static_cast<size_t>(n));
  return self;
}

/// Replaces this process by `turnout launch -n N -- turnout ARGUMENTS`; the launched ones see its environment and run the body.
[[noreturn]] void become_launcher(int num_ranks, const CommandLine& command_line) {
  std::vector<std::string> program = command_line.program;
  if (program.empty()) program.push_back(this_executable());
  std::vector<std::string> words = program;
  words.insert(words.end(), {"launch", "-n", std::to_string(num_ranks), "--"});
  words.insert(words.end(), program.begin(), program.end());
  words.insert(words.end(), command_line.arguments.begin(), command_line.arguments.end());
  std::vector<char*> argv;
  for (std::string& word : words) argv.push_back(word.data());
  argv.push_back(nullptr);
  execvp(argv[0], argv.data());
  throw TransportError("cannot start " + program[0] + ": " + std::strerror(errno));
}

}  // namespace

Placement placement_from(const std::string& text) {
  if (text == "processes") return Placement::processes;
  if (text == "threads") return Placement::threads;
  throw InvalidArgument("--placement " + text + " is unknown: use processes or threads");
}

int run_ranks(int num_ranks, Placement placement, const CommandLine& command_line, const std::function<int(Communicator&)>& body,
              const CommunicatorOptions& options) {
  if (num_ranks < 1 || num_ranks > kMostRanks) {
    throw InvalidArgument("--ranks " + std::to_string(num_ranks) + ": it must be 1 to " + std::to_string(kMostRanks));
  }
  if (launch_info_from_env().launcher != "none") {
    Communicator communicator = Communicator::from_env(options);
    const int status = body(communicator);
    // A launcher ends the others when one fails: not before rank 0 has told why.
    std::fflush(stdout);
    if (status != 0) communicator.barrier();
    return status;
  }
  if (placement == Placement::processes && num_ranks > 1) become_launcher(num_ranks, command_line);
  std::atomic<int> worst{0};
  run_virtual_ranks(
      num_ranks,
      [&](Communicator& communicator) {
        if (const int status = body(communicator)) worst = status;
      },
      options);
  return worst;
}

}  // namespace turnout::tools
