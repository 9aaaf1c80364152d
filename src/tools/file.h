// The whole content of a file that a user named.
#pragma once
#include <string>

namespace turnout::tools {

/// `what` names its purpose in messages: "text", "routing". Throws: InvalidArgument (no regular file, not readable, over 1 GiB).
std::string read_file(const std::string& path, const std::string& what);

}  // namespace turnout::tools
