#include "tools/demo_tables.h"

#include <algorithm>
#include <cstdio>
#include <string>

namespace turnout::tools {

void print_load(const core::ExpertMap& experts, int topk, const std::vector<std::vector<int64_t>>& loads) {
  int64_t most = 1, total = 0, num_experts = 0;
  for (const auto& rank : loads) {
    num_experts += static_cast<int64_t>(rank.size());
    for (const int64_t n : rank) most = std::max(most, n), total += n;
  }
  std::printf("\nLoad: rows per expert (a word goes to %d; even would be %ld)\n", topk, static_cast<long>(total / std::max<int64_t>(num_experts, 1)));
  for (size_t r = 0; r < loads.size(); ++r) {
    for (size_t e = 0; e < loads[r].size(); ++e) {
      const auto bar = static_cast<size_t>(loads[r][e] * 60 / most);
      std::printf("  rank %2zu expert %2d %7ld %s\n", r, experts.experts_of(static_cast<int>(r))[e], static_cast<long>(loads[r][e]),
                  std::string(bar, '#').c_str());
    }
  }
}

void print_traffic(size_t row_bytes, const std::vector<std::vector<int64_t>>& traffic) {
  constexpr size_t kMostColumns = 8;
  const size_t columns = std::min(traffic.size(), kMostColumns);
  std::printf("\nTraffic: words sent from a rank (line) to a rank (column), each once%s\n  from \\ to",
              columns < traffic.size() ? ", first ranks only" : "");
  for (size_t to = 0; to < columns; ++to) std::printf(" %8zu", to);
  std::printf("\n");
  int64_t remote = 0, total = 0;
  for (size_t from = 0; from < traffic.size(); ++from) {
    if (from < columns) std::printf("  %9zu", from);
    for (size_t to = 0; to < traffic[from].size(); ++to) {
      if (from < columns && to < columns) std::printf(" %8ld", static_cast<long>(traffic[from][to]));
      total += traffic[from][to];
      if (from != to) remote += traffic[from][to];
    }
    if (from < columns) std::printf("\n");
  }
  const double mega = static_cast<double>(row_bytes) / 1e6;
  std::printf("  %ld rows (%.2f MB) moved, %ld of them (%.2f MB) between ranks\n", static_cast<long>(total), static_cast<double>(total) * mega,
              static_cast<long>(remote), static_cast<double>(remote) * mega);
}

}  // namespace turnout::tools
