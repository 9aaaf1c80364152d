// From a configuration to the arena of a GPU: the one sizing function, for required_bytes() and the constructor alike.
#pragma once
#include <algorithm>

#include "engine/cuda/layout.h"
#include "turnout/config.h"

namespace turnout::engine::cuda {

/// Rows that arrive at a rank in a call with a balanced routing.
inline int64_t balanced_rows(const BufferConfig& c, int num_ranks) { return c.max_tokens_per_rank * std::max(1, std::min(c.max_topk, num_ranks)); }

inline int64_t row_stride_of(const BufferConfig& c) {
  const int64_t row = c.hidden * static_cast<int64_t>(size_of(c.dtype));
  const int64_t scales = core::ceil_div(c.hidden, 128) * 4;
  return core::align_up(row, 128) + core::align_up(scales, 128) + core::align_up(static_cast<int64_t>(c.max_side_bytes), 128) + c.max_topk * 12;
}

inline ArenaShape arena_shape(const BufferConfig& c, int num_ranks) {
  ArenaShape s;
  s.num_ranks = num_ranks;
  s.num_lanes = c.num_lanes;
  s.depth = c.max_outstanding + 1;
  s.header_ints = header_ints_of(num_ranks, c.num_experts);  // a later map may give a rank every expert
  s.max_tokens = c.max_tokens_per_rank;
  s.receive_bytes = c.receive_bytes;
  if (!s.receive_bytes) {
    // A result, what a call stages beside it, and the partial sums of a combine.
    const size_t block = static_cast<size_t>(balanced_rows(c, num_ranks)) * static_cast<size_t>(row_stride_of(c) + 512) + (1u << 20);
    s.receive_bytes = 3 * block;
  }
  return s;
}

}  // namespace turnout::engine::cuda
