// Where a row goes in a receive region, and whether it is admitted. Slots are computed, not raced for. 64-bit throughout.
#pragma once
#include <cassert>
#include <cstddef>
#include <cstdint>
#include <span>

#include "core/host_device.h"
#include "core/math.h"

namespace turnout::core {

/// No capacity: everything is admitted.
inline constexpr int64_t kExact = -1;

/// begins[i] = counts[0] + ... + counts[i - 1]; begins has one entry more, the total. For rank_major, counts[s] are the rows of
/// source s at a destination: its i-th token row has slot begins[s] + i.
TURNOUT_HOST_DEVICE constexpr void exclusive_prefix(std::span<const int64_t> counts, std::span<int64_t> begins) {
  int64_t sum = 0;
  for (size_t i = 0; i < counts.size(); ++i) {
    begins[i] = sum;
    sum += counts[i];
  }
  begins[counts.size()] = sum;
}

/// The groups of expert_major: each starts at a multiple of `alignment`; the last offset is the padded total.
TURNOUT_HOST_DEVICE constexpr void group_offsets(std::span<const int64_t> counts, int64_t alignment, std::span<int64_t> offsets) {
  offsets[0] = 0;
  for (size_t e = 0; e < counts.size(); ++e) offsets[e + 1] = offsets[e] + align_up(counts[e], alignment);
}

/// Flat row of the `i`-th row of local expert `e` in a slab.
TURNOUT_HOST_DEVICE constexpr int64_t slab_row(int64_t e, int64_t i, int64_t capacity) { return e * capacity + i; }

/// How many of the `count` rows of a source a rank_major destination admits, if its rows begin at slot `begin`.
TURNOUT_HOST_DEVICE constexpr int64_t admitted_rows(int64_t begin, int64_t count, int64_t capacity) {
  if (capacity == kExact || begin + count <= capacity) return count;
  return begin < capacity ? capacity - begin : 0;
}

/// A slab admits the first `capacity` rows of each expert; `rows` has been admitted so far.
TURNOUT_HOST_DEVICE constexpr bool admits_slab(int64_t rows, int64_t capacity) { return rows < capacity; }

/// Admission to expert_major, asked in (source, token, k) order. What counts is the padded total: a row costs a whole
/// `alignment` if it opens one, else nothing. The first that does not fit ends admission, so that what is dropped does not
/// depend on which experts happen to have padding left.
struct PaddedAdmission {
  int64_t capacity = kExact;
  int64_t alignment = 1;
  int64_t padded_rows = 0;
  bool full = false;

  /// `rows`: admitted so far to the expert of the row.
  TURNOUT_HOST_DEVICE constexpr bool admit(int64_t rows) {
    const int64_t cost = rows % alignment == 0 ? alignment : 0;
    if (capacity != kExact && padded_rows + cost > capacity) full = true;
    if (!full) padded_rows += cost;
    return !full;
  }
};

}  // namespace turnout::core
