#include "tools/selftest_table.h"

#include <array>
#include <map>
#include <optional>
#include <utility>

namespace turnout::tools {

namespace {

constexpr std::array kColumns = {"wires", "dtypes", "to fp8", "fresh", "cached", "deferred", "resident", "graph"};

size_t column_of(const TestCase& c) {
  if (c.way != Way::plain) return 2 + static_cast<size_t>(c.way);
  if (c.quantize != Quantize::none) return 2;
  return c.dtype == DType::bf16 ? 0 : 1;
}

std::string number(const std::optional<double>& value, const char* format) {
  std::array<char, 32> text{};
  if (!value) return "-";
  std::snprintf(text.data(), text.size(), format, *value);
  return text.data();
}

}  // namespace

void print_correctness(std::FILE* out, const std::vector<TestCase>& cases, const std::vector<bool>& good) {
  struct Count {
    int right = 0, tried = 0;
  };
  std::map<std::pair<Mode, Layout>, std::array<Count, kColumns.size()>> lines;
  for (size_t i = 0; i < cases.size(); ++i) {
    Count& count = lines[{cases[i].mode, cases[i].layout}][column_of(cases[i])];
    ++count.tried;
    count.right += good[i];
  }
  std::fprintf(out, "\nequal to the reference, bit for bit (right/tried)\n%-12s %-13s", "mode", "layout");
  for (const char* column : kColumns) std::fprintf(out, " %8s", column);
  std::fprintf(out, "\n");
  for (const auto& [group, counts] : lines) {
    std::fprintf(out, "%-12s %-13s", std::string(name(group.first)).c_str(), std::string(name(group.second)).c_str());
    for (const Count& count : counts) {
      std::fprintf(out, " %8s", count.tried ? (std::to_string(count.right) + "/" + std::to_string(count.tried)).c_str() : "-");
    }
    std::fprintf(out, "\n");
  }
}

void print_speed(std::FILE* out, const Report& report) {
  if (report.cases.empty()) return;
  std::fprintf(out, "\nspeed, median of the slowest rank%s\n%-9s %-12s %-13s %-16s %-6s %11s %11s %8s\n",
               report.link_GBps ? (", link " + number(report.link_GBps, "%.0f") + " GB/s per direction").c_str() : "", "op", "mode", "layout",
               "tokens x hidden", "launch", "p50 us", "limit us", "x limit");
  std::string kind;
  for (const ReportCase& c : report.cases) {
    const std::string shape = std::to_string(c.tokens) + " x " + std::to_string(c.hidden);
    std::fprintf(out, "%-9s %-12s %-13s %-16s %-6s %11s %11s %8s %s\n", c.op.c_str(), c.mode.c_str(), c.layout.c_str(), shape.c_str(),
                 c.launch.c_str(), number(c.p50_us, "%.1f").c_str(), number(c.limit_us, "%.1f").c_str(), number(c.ratio(), "%.2f").c_str(),
                 c.dtype == c.input_dtype ? c.dtype.c_str() : (c.input_dtype + " -> " + c.dtype).c_str());
    if (kind.empty()) kind = c.limit_kind;
  }
  std::fprintf(out, "limit: %s\n", kind.empty() ? "none here: ranks share a GPU, or rank 0 does not see all of them" : kind.c_str());
}

}  // namespace turnout::tools
