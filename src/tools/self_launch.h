// bench, demo and selftest run over several processes: the command starts itself once per rank.
#pragma once
#include <functional>
#include <string>
#include <vector>

#include "tools/command_line.h"
#include "turnout/communicator.h"

namespace turnout::tools {

/// Most ranks that bench, demo and selftest run over.
inline constexpr int kMostRanks = 256;

enum class Placement { processes, threads };

/// "processes" or "threads". Throws: InvalidArgument.
Placement placement_from(const std::string& text);

/// Runs `body` on every rank and returns the exit status of the whole: 0 if every rank returned 0. Ranks of
/// several processes return alike: all 0, or none.
///   under a launcher   this process is one of its ranks; `num_ranks` is not used
///   processes          this program again, `num_ranks` times, with the same arguments (through `turnout launch`)
///   threads            virtual ranks of this process
int run_ranks(int num_ranks, Placement placement, const CommandLine& command_line, const std::function<int(Communicator&)>& body,
              const CommunicatorOptions& options = {});

}  // namespace turnout::tools
