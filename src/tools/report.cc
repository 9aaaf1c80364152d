#include "tools/report.h"

#include <sys/utsname.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <ctime>
#include <fstream>
#include <iostream>
#include <nlohmann/json.hpp>
#include <thread>

#include "turnout/error.h"

namespace turnout::tools {

namespace {

using Json = nlohmann::ordered_json;

template <class T>
Json optional_json(const std::optional<T>& value) {
  return value ? Json(*value) : Json(nullptr);
}

Json to_json_value(const ReportCase& c) {
  return {{"library", c.library},
          {"op", c.op},
          {"mode", c.mode},
          {"layout", c.layout},
          {"dtype", c.dtype},
          {"input_dtype", c.input_dtype},
          {"tokens", c.tokens},
          {"hidden", c.hidden},
          {"top_k", c.top_k},
          {"experts", c.experts},
          {"ranks", c.ranks},
          {"nodes", c.nodes},
          {"transport", c.transport},
          {"placement", c.placement},
          {"launch", c.launch},
          {"result", c.result},
          {"size", c.size},
          {"wire", c.wire},
          {"routing", c.routing},
          {"seed", c.seed},
          {"l2", c.l2},
          {"skew_us", optional_json(c.skew_us)},
          {"p50_us", optional_json(c.p50_us)},
          {"p99_us", optional_json(c.p99_us)},
          {"kernel_us", optional_json(c.kernel_us)},
          {"n_calls", c.n_calls},
          {"limit_us", optional_json(c.limit_us)},
          {"limit_kind", c.limit_kind},
          {"remote_bytes", c.remote_bytes},
          {"total_bytes", c.total_bytes},
          {"sms", optional_json(c.sms)},
          {"verified", c.verified}};
}

/// First line that `command` prints, without its end; empty if it fails.
std::string first_line_of(const char* command) {
  std::string line;
  if (FILE* pipe = popen(command, "r")) {
    std::array<char, 256> buffer;
    if (std::fgets(buffer.data(), buffer.size(), pipe)) line = buffer.data();
    if (pclose(pipe) != 0) line.clear();
  }
  while (!line.empty() && (line.back() == '\n' || line.back() == '\r')) line.pop_back();
  return line;
}

std::string value_in(const char* path, const std::string& key) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    if (line.compare(0, key.size(), key) != 0) continue;
    const size_t at = line.find_first_not_of(" \t:", key.size());
    return at == std::string::npos ? "" : line.substr(at);
  }
  return "";
}

}  // namespace

std::optional<double> ReportCase::ratio() const {
  if (!p50_us || !limit_us || *limit_us <= 0) return std::nullopt;
  return *p50_us / *limit_us;
}

ReportHost describe_host() {
  ReportHost host;
  host.cpu = value_in("/proc/cpuinfo", "model name");
  utsname system{};
  if (uname(&system) == 0) host.kernel = std::string(system.sysname) + " " + system.release + " " + system.machine;
  host.compiler = "g++ " __VERSION__;
  host.cores = static_cast<int>(std::thread::hardware_concurrency());
  host.memory_gib = static_cast<double>(sysconf(_SC_PHYS_PAGES)) * static_cast<double>(sysconf(_SC_PAGE_SIZE)) / 0x1p30;
  host.memory_gib = std::round(host.memory_gib * 10) / 10;
  double load = 0;
  if (getloadavg(&load, 1) == 1) host.load = load;
  const std::string flags = " " + value_in("/proc/cpuinfo", "flags") + " ";
  for (const char* isa : {"avx512f", "avx2"}) {
    if (host.isa.empty() && flags.find(std::string(" ") + isa + " ") != std::string::npos) host.isa = isa;
  }
  return host;
}

Report new_report(std::string command) {
  Report report;
  const std::time_t now = std::time(nullptr);
  std::tm utc{};
  gmtime_r(&now, &utc);
  std::array<char, 32> date;
  std::strftime(date.data(), date.size(), "%Y-%m-%dT%H:%M:%SZ", &utc);
  report.date = date.data();
  report.command = std::move(command);
  report.tree = first_line_of("git rev-parse HEAD:src 2>/dev/null");
  if (!report.tree.empty()) {
    report.tree_cuda = first_line_of("git ls-tree -r HEAD include src/core src/util src/transport src/engine src/api | git hash-object --stdin");
  }
  report.host = describe_host();
  return report;
}

std::string to_json(const Report& r) {
  Json cases = Json::array();
  for (const ReportCase& c : r.cases) cases.push_back(to_json_value(c));
  Json json = {{"schema", kReportSchema},
               {"date", r.date},
               {"command", r.command},
               {"tree", r.tree},
               {"tree_cuda", r.tree_cuda},
               {"host",
                {{"cpu", r.host.cpu},
                 {"cores", r.host.cores},
                 {"memory_gib", r.host.memory_gib},
                 {"kernel", r.host.kernel},
                 {"compiler", r.host.compiler},
                 {"isa", r.host.isa},
                 {"load", r.host.load}}},
               {"link_GBps", optional_json(r.link_GBps)},
               {"cases", cases},
               {"tests", {{"passed", r.tests.passed}, {"failed", r.tests.failed}, {"skipped", r.tests.skipped}, {"names", r.tests.names}}}};
  if (!r.host.gpu.empty()) json["host"]["gpu"] = r.host.gpu;
  return json.dump(1, ' ', false, Json::error_handler_t::replace) + "\n";
}

void write_report(const Report& report, const std::string& path) {
  const std::string text = to_json(report);
  if (path == "-") {
    if (!(std::cout << text << std::flush)) throw TransportError("cannot write the report to standard output");
    return;
  }
  std::ofstream file(path, std::ios::binary);
  if (!file || !(file << text) || !file.flush()) throw InvalidArgument("cannot write the report to " + path);
}

std::vector<std::string> report_problems(const std::string& text) {
  std::vector<std::string> problems;
  const Json json = Json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!json.is_object()) return {"it is not a JSON object"};
  // The writer is the schema: whatever an empty report has must be here, of the same kind or null.
  Report model;
  model.cases.emplace_back();
  model.host.gpu = "1 x GPU";
  const auto compare = [&](const auto& self, const Json& want, const Json& have, const std::string& where) -> void {
    for (const auto& [key, value] : want.items()) {
      const std::string at = where.empty() ? key : where + "." + key;
      if (!have.contains(key)) {
        if (at != "host.gpu") problems.push_back(at + " is missing");
      } else if (value.is_object() && have[key].is_object()) {
        self(self, value, have[key], at);
      } else if (!value.is_null() && !(value.is_number() && have[key].is_number()) && value.type() != have[key].type()) {
        problems.push_back(at + " is a " + have[key].type_name() + ", not a " + value.type_name());
      } else if (value.is_null() && !have[key].is_null() && !have[key].is_number()) {
        problems.push_back(at + " is a " + std::string(have[key].type_name()) + ", not a number or null");
      }
    }
    for (const auto& [key, value] : have.items()) {
      if (!want.contains(key)) problems.push_back((where.empty() ? key : where + "." + key) + " is unknown");
    }
  };
  const Json want = Json::parse(to_json(model));
  compare(compare, want, json, "");
  if (json.contains("schema") && json["schema"] != kReportSchema) problems.push_back("schema is not " + std::to_string(kReportSchema));
  if (json.contains("cases") && json["cases"].is_array()) {
    for (size_t i = 0; i < json["cases"].size(); ++i) compare(compare, want["cases"][0], json["cases"][i], "cases[" + std::to_string(i) + "]");
  }
  return problems;
}

double quantile(std::vector<double> values, double q) {
  const auto rank = static_cast<int64_t>(std::ceil(q * static_cast<double>(values.size()))) - 1;
  const int64_t at = std::clamp<int64_t>(rank, 0, static_cast<int64_t>(values.size()) - 1);
  std::nth_element(values.begin(), values.begin() + at, values.end());
  return values[static_cast<size_t>(at)];
}

Progress::Progress(std::string label, int64_t total, bool wanted)
    : label_(std::move(label)), total_(total), enabled_(wanted && total > 0 && isatty(STDERR_FILENO)) {
  at(0);
}

void Progress::at(int64_t done) {
  constexpr int kWidth = 30;
  if (!enabled_) return;
  const int percent = static_cast<int>(std::min(done, total_) * 100 / total_);
  if (percent == shown_) return;
  shown_ = percent;
  const int full = percent * kWidth / 100;
  std::fprintf(stderr, "\r%-32.32s [%s%s] %3d%%", label_.c_str(), std::string(static_cast<size_t>(full), '#').c_str(),
               std::string(static_cast<size_t>(kWidth - full), '.').c_str(), percent);
  std::fflush(stderr);
}

Progress::~Progress() {
  if (enabled_) std::fprintf(stderr, "\r%80s\r", "");
}

}  // namespace turnout::tools
