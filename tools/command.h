// What the program `turnout` and `python -m turnout` do.
#pragma once
#include <string>
#include <vector>

namespace turnout::tools {

/// Parses and runs; prints what went wrong. `program`: words that start this program again; empty: the executable itself.
/// Returns the exit status: 2 for a mistake of the caller, 3 for what went wrong otherwise, else the command's own.
int main_of(int argc, char** argv, std::vector<std::string> program = {});

}  // namespace turnout::tools
