// BufferConfig: the facts of a Buffer that all ranks must agree on, and how much memory they cost.
#pragma once
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "turnout/error.h"
#include "turnout/types.h"

namespace turnout {
inline namespace v0 {

/// Most experts a token may choose.
inline constexpr int kMaxTopk = 64;

/// Deadlines of a wait. A living peer that has not arrived at the call has `busy_timeout`; a silent one, or one that is
/// inside the call and does not get on, has `timeout`; so has one that waits on another lane (docs/design/api.md). Each is 1 ms to a year.
struct Timeouts {
  std::chrono::milliseconds timeout{60'000};
  std::chrono::milliseconds busy_timeout{30 * 60'000};
  /// A line naming the ranks waited for is logged this often.
  std::chrono::milliseconds report_every{30'000};
};

/// Agreed by all ranks when a Buffer is made; a difference raises InvalidArgument on all ranks with a table.
struct TURNOUT_API BufferConfig {
  int num_experts = 0;              ///< physical experts, 1 or more; need not be divisible by the ranks
  int64_t hidden = 0;               ///< widest row, in elements of `dtype`; any number >= 1
  DType dtype = DType::bf16;        ///< widest row type: rows of any call have at most hidden * size_of(dtype) bytes
  int64_t max_tokens_per_rank = 0;  ///< most tokens a rank gives to one dispatch
  int max_topk = 8;                 ///< most experts per token, at most kMaxTopk
  size_t max_side_bytes = 0;        ///< most bytes of side arrays per row, all together (fused scales come on top)

  /// Owner of each expert; empty: in order, the first num_experts % num_ranks ranks hold one more.
  std::vector<int> expert_to_rank{};
  /// Logical number of each physical expert; empty: every expert is its own.
  std::vector<int> replica_of{};

  int num_lanes = 1;        ///< independent sequences of calls
  int max_outstanding = 2;  ///< calls of a lane that may be in flight at once, the one being waited for included
  /// Receive region, where leases lie. 0, on a CPU: room for max_outstanding results (two at least), and for one more per further lane,
  /// each of a balanced routing in expert_major without alignment at max_tokens_per_rank and max_topk: that many tokens times experts,
  /// an eighth and four deviations of chance more. A slab takes local experts x capacity rows: give it here. 0, on a GPU: a
  /// rank_major result, and what calls stage beside it.
  size_t receive_bytes = 0;
  size_t staging_bytes = 0;  ///< staging per peer, lane and outstanding call; 0: chosen from row size and ranks

  /// Where tokens and results live: {cpu, 0}, or a GPU of this process. The kind is the same on all ranks; with a GPU every
  /// tensor of a call is in its memory, and calls are in order of their stream.
  Device device{};

  // Local choices: need not agree.
  int num_threads = 1;  ///< threads that move rows in a call, this one included
  Timeouts timeouts{};
  /// Writes pages of the receive region before the first call (first touch costs many times a copy).
  bool touch_pages = false;

  /// Throws: InvalidArgument naming the field, its value and what would do.
  void validate(int num_ranks) const;
};

/// Bytes of symmetric memory that each rank of a Buffer takes, signals included, in whole pages: exactly what the constructor
/// allocates. (Results that are not leases come from the allocator, when they are needed.)
/// Throws: InvalidArgument as BufferConfig::validate.
TURNOUT_API size_t required_bytes(const BufferConfig& config, int num_ranks);

}  // namespace v0
}  // namespace turnout
