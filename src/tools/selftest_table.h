// The table at the end of a selftest: what was right, and how fast.
#pragma once
#include <cstdio>
#include <string>
#include <vector>

#include "tools/report.h"
#include "tools/selftest_cases.h"

namespace turnout::tools {

/// Right and tried, by mode and layout (lines) and by what a case is about (columns).
void print_correctness(std::FILE* out, const std::vector<TestCase>& cases, const std::vector<bool>& good);

/// A line for each timed call, beside its limit.
void print_speed(std::FILE* out, const Report& report);

}  // namespace turnout::tools
