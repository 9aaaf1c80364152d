// From a configuration to the arena of a GPU: the one sizing function, for required_bytes() and the constructor alike.
#pragma once
#include <algorithm>

#include "engine/cuda/layout.h"
#include "engine/cuda/low_latency/format.h"
#include "turnout/config.h"

namespace turnout::engine::cuda {

/// Rows that arrive at a rank in a call with a balanced routing.
inline int64_t balanced_rows(const BufferConfig& c, int num_ranks) { return c.max_tokens_per_rank * std::max(1, std::min(c.max_topk, num_ranks)); }

inline int64_t row_stride_of(const BufferConfig& c) {
  const int64_t row = c.hidden * static_cast<int64_t>(size_of(c.dtype));
  const int64_t scales = core::ceil_div(c.hidden, 128) * 4;
  return core::align_up(row, 128) + core::align_up(scales, 128) + core::align_up(static_cast<int64_t>(c.max_side_bytes), 128) + c.max_topk * 12;
}

/// Staging of low_latency rows, for as many tokens as such calls gain from: more is what throughput is for.
inline void add_low_latency(const BufferConfig& c, ArenaShape& s) {
  constexpr int64_t kTokens = 512, kShortTokens = 2048, kShortRow = 4096, kMostRow = 60 * 1024, kMostBytes = int64_t{768} << 20;
  const int64_t row = c.hidden * static_cast<int64_t>(size_of(c.dtype));
  if (row > kMostRow) return;
  s.ll_dispatch_bytes = ll_dispatch_bytes(row, static_cast<int64_t>(c.max_side_bytes), c.max_topk);
  s.ll_combine_bytes = ll_combine_bytes(row, c.max_topk);
  s.ll_combine_copies = std::min(s.num_ranks, c.max_topk);
  const int64_t token = s.depth * (s.num_ranks * core::align_up(static_cast<int64_t>(s.ll_dispatch_bytes), 128) +
                                   s.ll_combine_copies * core::align_up(static_cast<int64_t>(s.ll_combine_bytes), 128));
  s.ll_tokens = std::min({c.max_tokens_per_rank, row <= kShortRow ? kShortTokens : kTokens, kMostBytes / token});
}

/// Rows of low_latency calls in whole lines, where all ranks know that such are never seen in part (Engine). All sizes stay as they are.
inline void use_lines(const BufferConfig& c, ArenaShape& s) {
  const int64_t row = c.hidden * static_cast<int64_t>(size_of(c.dtype));
  if (s.ll_tokens > 0) s.ll_combine_lines = ll_combine_lines_at(row, c.max_topk);
}

inline ArenaShape arena_shape(const BufferConfig& c, int num_ranks) {
  ArenaShape s;
  s.num_ranks = num_ranks;
  s.num_lanes = c.num_lanes;
  s.depth = c.max_outstanding + 1;
  s.header_ints = header_ints_of(num_ranks, c.num_experts);  // a later map may give a rank every expert
  s.max_tokens = c.max_tokens_per_rank;
  add_low_latency(c, s);
  s.receive_bytes = c.receive_bytes;
  if (!s.receive_bytes) {
    // A result, what a call stages beside it, and the partial sums of a combine.
    const size_t block = static_cast<size_t>(balanced_rows(c, num_ranks)) * static_cast<size_t>(row_stride_of(c) + 512) + (1u << 20);
    s.receive_bytes = 3 * block;
  }
  return s;
}

/// Whether Mode::automatic is low_latency: where all calls of the Buffer are small.
inline bool prefers_low_latency(const BufferConfig& c, int num_ranks) {
  constexpr int64_t kMostBytes = 4 << 20;
  const ArenaShape s = arena_shape(c, num_ranks);
  return s.ll_tokens >= c.max_tokens_per_rank && c.max_tokens_per_rank * c.hidden * static_cast<int64_t>(size_of(c.dtype)) <= kMostBytes;
}

}  // namespace turnout::engine::cuda
