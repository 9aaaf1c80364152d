// The tree of a sum, as data: in which order the terms of a token are added, and where the sum so far is rounded.
//
//   experts in k order within a rank             -> rank partial, rounded to the wire form, the source's own rank too
//   rank partials, ranks ascending within a node -> with several nodes: node partial, rounded to the wire form, own too
//   node partials, nodes by their lowest rank    -> one rounding to the dtype of the result
//   (wire rows: all rows in k order over all ranks, one rounding at the end)
//
// A sum starts at its first term; it has no zero to add to. Terms are multiplied by their weight and then added, each step
// rounded. NaN is canonical after each rounding. An fp8 partial is worth e4m3 * scale, rounded to fp32. Ranks and nodes without terms have no
// partial. Every engine, mode and path follows this tree, so all agree bit for bit.
#pragma once
#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

#include "core/host_device.h"
#include "core/math.h"
#include "core/scale.h"
#include "core/topology.h"
#include "turnout/types.h"

namespace turnout::core {

/// How a partial sum looks when it crosses a link.
struct WireForm {
  DType dtype = DType::bf16;
  bool block_scaled = false;  ///< one fp32 scale per kScaleBlock elements
  friend constexpr bool operator==(const WireForm&, const WireForm&) = default;

  TURNOUT_HOST_DEVICE constexpr int64_t num_scales(int64_t hidden) const { return block_scaled ? ceil_div(hidden, kScaleBlock) : 0; }
  TURNOUT_HOST_DEVICE constexpr int64_t row_bytes(int64_t hidden) const {
    return hidden * static_cast<int64_t>(size_of(dtype)) + num_scales(hidden) * int64_t{4};
  }
};

/// Of partial sums; of single rows for Wire::rows.
TURNOUT_HOST_DEVICE constexpr WireForm wire_form(Wire wire, DType payload) {
  if (wire == Wire::fp32) return {DType::fp32, false};
  if (wire == Wire::fp8) return {DType::fp8_e4m3, true};
  return {payload, false};
}

/// Sums run in float64 for float64 payloads, whatever the wire; in fp32 for all others.
TURNOUT_HOST_DEVICE constexpr bool sums_in_double(DType payload) { return payload == DType::fp64; }

/// A plain combine of rank_major rows: a row is its rank's partial already, and where the wire is its own form its bits stay.
TURNOUT_HOST_DEVICE constexpr bool row_is_partial(Layout layout, bool weighted, Wire wire) {
  return layout == Layout::rank_major && !weighted && wire == Wire::payload;
}

/// A sum that starts at its first term. T: float or double.
template <class T>
struct RunningSum {
  T value{};
  bool started = false;

  TURNOUT_HOST_DEVICE constexpr void add(T term) {
    value = started ? value + term : term;
    started = true;
  }
  TURNOUT_HOST_DEVICE constexpr void add(T term, T weight) {
    const T product = term * weight;
    add(product);
  }
};

/// One row of a token that takes part in its sum.
struct SumTerm {
  int rank = 0;            ///< where the row is
  int k = 0;               ///< rank_major, one row per rank: any
  int64_t row = 0;         ///< whatever finds the row
  bool ends_rank = false;  ///< round to the wire form after this term: the rank partial is complete
  bool ends_node = false;  ///< and round what was added of the node: its partial is complete
  friend constexpr bool operator==(const SumTerm&, const SumTerm&) = default;
};

/// Puts the terms of one token (those present: dropped ones are left out before) in order and marks the roundings.
inline void order_sum(std::span<SumTerm> terms, const Topology& topology, Wire wire) {
  const bool tree = wire != Wire::rows;
  std::stable_sort(terms.begin(), terms.end(), [&](const SumTerm& a, const SumTerm& b) {
    if (tree && topology.node_of(a.rank) != topology.node_of(b.rank)) return topology.node_of(a.rank) < topology.node_of(b.rank);
    if (tree && a.rank != b.rank) return a.rank < b.rank;
    return a.k < b.k;
  });
  for (size_t i = 0; i < terms.size(); ++i) {
    const bool last = i + 1 == terms.size();
    terms[i].ends_rank = tree && (last || terms[i + 1].rank != terms[i].rank);
    terms[i].ends_node = tree && topology.num_nodes() > 1 && (last || topology.node_of(terms[i + 1].rank) != topology.node_of(terms[i].rank));
  }
}

}  // namespace turnout::core
