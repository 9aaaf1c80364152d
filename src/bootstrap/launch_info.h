// What the environment of each launcher says, read through a function so that tests need not change the process's own.
#pragma once
#include <functional>
#include <string>
#include <string_view>

#include "turnout/bootstrap.h"

namespace turnout::bootstrap {

using Lookup = std::function<const char*(const char*)>;

/// The process's environment.
const char* process_environment(const char* name);

/// launch_info_from_env() over any environment.
LaunchInfo launch_info(const Lookup& lookup);

/// The first host of Slurm's notation: "node[003-007,12],other" -> "node003".
std::string first_host(std::string_view node_list);

}  // namespace turnout::bootstrap
