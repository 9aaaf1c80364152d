// What this installation is and what it finds on this machine.
#pragma once
#include <string>

namespace turnout::tools {

/// Lines: the version, then each GPU or why none can be used.
std::string about();

}  // namespace turnout::tools
