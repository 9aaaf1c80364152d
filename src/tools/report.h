// What a measurement says, and its one writer to JSON: the versioned schema of `--json` and of records/ (docs/bench.md).
#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace turnout::tools {

inline constexpr int kReportSchema = 1;

/// One measured shape. Empty optionals are null: not measured, or of no meaning here.
struct ReportCase {
  std::string library = "turnout";  ///< or the rival beside it: openmpi, ...
  std::string op;                   ///< dispatch, combine
  std::string mode, layout, dtype, input_dtype;
  int64_t tokens = 0, hidden = 0;
  int top_k = 0, experts = 0, ranks = 0, nodes = 1;
  std::string transport, placement;
  std::string launch = "eager", result, size, wire, routing;
  uint64_t seed = 0;
  std::string l2 = "warm";
  std::optional<double> skew_us, p50_us, p99_us, kernel_us;
  int64_t n_calls = 0;
  std::optional<double> limit_us;
  std::string limit_kind;
  int64_t remote_bytes = 0;  ///< payload bytes that cross between ranks, all ranks together
  int64_t total_bytes = 0;   ///< the same with rows that stay on their rank
  std::optional<int> sms;
  bool verified = false;

  std::optional<double> ratio() const;
};

struct ReportTests {
  int passed = 0, failed = 0, skipped = 0;
  std::vector<std::string> names;
};

struct ReportHost {
  std::string cpu, kernel, compiler;
  int cores = 0;
  double memory_gib = 0, load = 0;  ///< load: of the last minute, when the run began
  std::string isa;                  ///< widest vector instructions: avx512f, avx2, or ""
  std::string gpu;                  ///< number, name and driver, where GPUs were used; else the report has no such word
};
ReportHost describe_host();

struct Report {
  std::string date, command, tree, tree_cuda;
  ReportHost host;
  std::optional<double> link_GBps;
  std::vector<ReportCase> cases;
  ReportTests tests;
};

/// A report with date, trees and host of this run.
Report new_report(std::string command);

/// Throws: InvalidArgument if the file cannot be written. "-" is standard output.
void write_report(const Report& report, const std::string& path);
std::string to_json(const Report& report);

/// What keeps `json` from being a report of this schema, in words; empty if nothing.
std::vector<std::string> report_problems(const std::string& json);

/// The q-quantile (0 to 1) of `values`: the smallest value that at least q of them do not exceed. REQUIRES: not empty.
double quantile(std::vector<double> values, double q);

/// A line on stderr that is redrawn, where stderr is a terminal; else nothing.
class Progress {
 public:
  Progress(std::string label, int64_t total, bool wanted = true);
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;
  void at(int64_t done);

 private:
  std::string label_;
  int64_t total_;
  int shown_ = -1;
  bool enabled_;
};

}  // namespace turnout::tools
