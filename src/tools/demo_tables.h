// The two tables that the demo prints.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/routing.h"

namespace turnout::tools {

/// Rows of each expert, by rank, as bars.
void print_load(const core::ExpertMap& experts, int topk, const std::vector<std::vector<int64_t>>& loads);

/// Rows from each rank (line) to each rank (column), of `row_bytes` each.
void print_traffic(size_t row_bytes, const std::vector<std::vector<int64_t>>& traffic);

}  // namespace turnout::tools
