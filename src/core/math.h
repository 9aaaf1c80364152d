// Rounding of sizes, 64-bit throughout: offsets of large buffers exceed 2^31.
#pragma once
#include <cstdint>

#include "core/host_device.h"

namespace turnout::core {

TURNOUT_HOST_DEVICE constexpr int64_t ceil_div(int64_t n, int64_t by) { return (n + by - 1) / by; }
/// The smallest multiple of `to` that is at least `n`.
TURNOUT_HOST_DEVICE constexpr int64_t align_up(int64_t n, int64_t to) { return ceil_div(n, to) * to; }
static_assert(align_up(129, 128) == 256 && align_up(128, 128) == 128 && align_up(0, 128) == 0);

}  // namespace turnout::core
