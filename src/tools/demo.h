// `turnout demo`: a Mixture-of-Experts layer on the words of a text, spread over ranks, compared with the same layer on one.
#pragma once
#include <string>
#include <vector>

#include "tools/command_line.h"

namespace turnout::tools {

struct DemoOptions {
  int ranks = 4;
  std::string placement = "processes";
  std::string text;            ///< empty: a text that Debian ships, else the README
  std::string wire = "rows";   ///< rows: compared bit for bit; others within a tolerance
  std::string dtype = "bf16";  ///< bf16 or fp32
  std::string mode = "auto";
  std::string device = "cpu";
  bool corrupt = false;  ///< flip one bit of a row on its way: the comparison must fail
  CommandLine command_line;
};

/// Throws: InvalidArgument. Returns the exit status: 1 if the layers differ.
int run_demo(const DemoOptions& options);

}  // namespace turnout::tools
