// How many blocks, warps and stages of a ring each kind of call gets. One SM stores about 50 GB/s in all, local and remote together,
// and the link takes 363 GB/s (docs/design/overview.md, section 6): everything here follows from these two and from measurements.
#pragma once
#include <algorithm>
#include <climits>
#include <cstdint>

#include "engine/cuda/args.h"
#include "engine/cuda/host_link.h"

namespace turnout::engine::cuda {

/// Shared memory of a block for its rings of rows.
inline constexpr int kRingBytes = 196 * 1024;

/// The bulk form of a move kernel: what a row is in shared memory, and who does what.
struct MoveShape {
  const std::byte* from = nullptr;  ///< rows of x, or what they have been quantised to
  int64_t from_stride = 0;
  int row_bytes = 0;  ///< what bulk loads bring
  int scales_at = 0;  ///< quantised: behind the row
  int side_at[kMaxSide] = {};
  int64_t block_scales = 0, block_side[kMaxSide] = {};  ///< offsets in this rank's block
  int64_t block_idx = 0, block_pair = 0, block_weights = 0;
  int index_at = 0;  ///< positions of the token's rows, then (index_room further) their ranks
  int index_room = 0;
  int stage_bytes = 0;
  int zero_at = 0;  ///< in the ring: zeros for padding, as many as the widest piece has
  int zero_bytes = 0;
  int senders = 1;                       ///< blocks that only send, until everything is sent; straight: all
  int pushers = 1, push_ring = 2;        ///< warps of a sender, stages of each
  int workers = 1, work_ring = 2;        ///< warps that lay rows out
  int receivers = 0;                     ///< through the host: blocks that take rows from there (the first, and those that sent), else 0: all
  int takers = 0, take_ring = 0;         ///< warps of a receiver that do, stages of each
  int num_chunks = 1, chunk_tokens = 1;  ///< how the plan has cut this rank's tokens
};

inline constexpr int kMostWorkRing = 3;

/// SMs of a move kernel where the user names no number: straight rows saturate the link with 14 to 16, and 20 to 64 are slower; a
/// layout by experts is limited by its own stores, about one SM for each 50 GB/s of them.
inline int default_move_sms(const DispatchArgs& a) { return a.common.through_host ? kHostMoveSms : a.straight ? 16 : 132; }

/// Warps that issue bulk copies: one issues a row in about 0.5 us.
inline int issuing_warps(int row_bytes) { return row_bytes >= 12000 ? 2 : row_bytes >= 9000 ? 3 : row_bytes >= 5000 ? 5 : 8; }

inline MoveShape move_shape(const DispatchArgs& a, int blocks) {
  const auto up = [](int64_t n, int64_t to) { return static_cast<int>((n + to - 1) / to * to); };
  MoveShape p;
  p.num_chunks = num_chunks(a.num_tokens);
  p.chunk_tokens = static_cast<int>(chunk_tokens(a.num_tokens));
  p.from = a.fp8 ? a.fp8 : a.x;
  p.from_stride = a.fp8 ? a.x_block_stride : a.x_stride;
  int at = up(a.x_bytes, 16), widest = at;
  p.scales_at = at;
  at += up(a.scale_bytes, 16);
  for (int s = 0; s < a.num_side; ++s) {
    p.side_at[s] = at;
    at += up(a.side[s].bytes, 16);
    widest = std::max(widest, up(a.side[s].bytes, 16));
  }
  p.row_bytes = p.index_at = at;
  p.index_room = up(a.num_topk * 4, 16);
  const BlockOffsets offsets = block_offsets(a, a.block_rows);
  p.block_scales = offsets.scales;
  p.block_idx = offsets.idx;
  p.block_pair = offsets.pair;
  p.block_weights = offsets.weights;
  for (int s = 0; s < a.num_side; ++s) p.block_side[s] = side_offset(a, offsets, a.block_rows, s);
  p.stage_bytes = up(at + 2 * p.index_room, 128);
  const bool pads = !a.straight && a.layout == Layout::expert_major && a.alignment > 1;
  p.zero_bytes = pads ? std::max(widest, up(a.scale_bytes, 16)) : 0;
  const int stages = (kRingBytes - p.zero_bytes) / p.stage_bytes;
  p.zero_at = stages * p.stage_bytes;
  p.pushers = std::max(1, std::min(issuing_warps(at), stages / 4));
  // Deep queues become latency where rows are announced one by one.
  p.push_ring = std::clamp(stages / p.pushers, 1, a.straight ? 12 : 6);
  p.workers = std::clamp(stages / 2, 1, 8);
  p.work_ring = std::clamp(stages / p.workers, 1, kMostWorkRing);
  // Every row is stored once for the link and about top-k times by those who lay it out; 17 of 132 keep the link busy.
  p.senders = a.straight ? blocks : std::clamp((blocks + 4) / 8, 1, 32);
  if (a.common.through_host) {
    p.senders = std::min(kHostSenders, p.senders);
    p.receivers = kHostReceivers;
    p.takers = std::clamp(issuing_warps(at), 1, std::min(stages, p.workers));
    p.take_ring = std::clamp(stages / p.takers, 1, kHostTakeRing);
    p.push_ring = std::min(p.push_ring, kHostPushRing);
  }
  return p;
}

/// The bulk form of a combine: a ring of rows in each block, and how far it runs ahead with what others wait for.
struct CombineShape {
  int stages = 0, stage_bytes = 0;
  int push_stages = 0;  ///< behind these, for partial sums that are rows of y as they are; 0: none are, or all go through registers
  int batch = 8;        ///< items whose rows a block looks up together; fewer where a block has few, so that sending and receiving mix
  int lead = 900;       ///< tokens by which partial sums for other ranks are ahead of own tokens: about 40 us
};
inline constexpr int kMostCombineStages = 32, kMostPushStages = 5;
/// Where more blocks share the rows, each has few, and registers carry them as fast.
inline constexpr int kMostPushBlocks = 47;

inline CombineShape combine_shape(const CombineArgs& a, int blocks) {
  CombineShape p;
  p.batch = std::clamp(256 / blocks, 2, 8);
  p.stage_bytes = static_cast<int>((a.hidden * 2 + 127) / 128 * 128);
  p.stages = std::min(kMostCombineStages, kRingBytes / std::max(p.stage_bytes, 1));
  if (a.common.through_host) p.batch = kHostBatch, p.lead = kHostLead;
  const bool as_they_are = a.layout == Layout::rank_major && a.apply != CombineWeights::rows;
  if (as_they_are && !a.common.through_host && blocks <= kMostPushBlocks && p.stages >= 8) {
    p.push_stages = std::min(kMostPushStages, p.stages / 3);
    p.stages -= p.push_stages;
    if (blocks >= 32) p.batch = std::min(p.batch, 4);  // 215 us instead of 232 on 32 blocks
  }
  return p;
}

}  // namespace turnout::engine::cuda
