// `turnout bench`: verify one shape against the reference, time it, measure the limit beside it, report.
#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "tools/command_line.h"
#include "turnout/communicator.h"
#include "turnout/types.h"

namespace turnout::tools {

struct BenchOptions {
  int ranks = 2;
  std::string placement = "processes";
  std::optional<std::string> model;  ///< gives hidden, top-k and experts
  int64_t tokens = 2048;             ///< per rank
  int64_t hidden = 7168;
  int topk = 8, experts = 256;
  std::string dtype = "bf16";  ///< bf16 fp16 fp32 fp64, or fp8, fp8-ue8m0: bf16 rows quantised on their way
  std::string mode = "auto", layout = "rank_major", op = "both", size = "exact", result = "lease", wire = "payload";
  std::optional<int64_t> capacity;  ///< with size capacity: rows per rank, or per expert for a slab; none: what this routing needs
  std::string routing = "uniform";
  uint64_t seed = 1;
  std::string device = "cpu", launch = "eager";
  int num_sms = 0;  ///< of calls on a GPU; 0: the library chooses
  int num_threads = 1;
  int iterations = 0;  ///< 0: as many as fit into `seconds`
  double seconds = 1.5;
  std::string transport = "auto";
  std::optional<std::string> json;
  size_t arena_mib = 64;  ///< of `op` construct
  CommandLine command_line;
};

/// Throws: InvalidArgument. Returns the exit status: 1 if a result was wrong.
int run_bench(const BenchOptions& options);

// The words of the options, shared with demo and selftest. Throw: InvalidArgument naming what there is.
Mode mode_from(const std::string& text);
Layout layout_from(const std::string& text);
Wire wire_from(const std::string& text);

}  // namespace turnout::tools
