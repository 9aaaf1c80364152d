// What a Handle holds: where this rank's tokens went, and what this rank's rows are. Ordinary memory, immutable once made.
#pragma once
#include <cstdint>
#include <memory>
#include <vector>

#include "core/routing.h"
#include "turnout/types.h"

namespace turnout::engine {
class DeviceRouting;
}

namespace turnout {
inline namespace v0 {
namespace internal {

struct Routing {
  /// Of a Buffer on a device: its arrays are there, and of those below only what shapes need is filled in.
  std::shared_ptr<const engine::DeviceRouting> device;

  // Who made it.
  uint64_t buffer = 0;  ///< serial number of the Buffer in this process
  int64_t id = 0;       ///< the same on all ranks: lane and epoch of the dispatch
  std::shared_ptr<const core::ExpertMap> experts;

  // Source side: T tokens of this rank.
  int64_t num_tokens = 0;
  int num_topk = 0;
  bool has_weights = false;
  std::vector<int32_t> topk_idx;     ///< [T, K], -1 = none
  std::vector<float> topk_weights;   ///< [T, K] if has_weights
  std::vector<int64_t> send_begin;   ///< [R + 1] into send_tokens
  std::vector<int32_t> send_tokens;  ///< tokens for each destination rank, ascending
  std::vector<int64_t> sent;         ///< [R] rows that each destination admitted: the first so many of its list

  // Receive side: rank_major rows of this rank, by (source rank, token).
  Layout layout = Layout::rank_major;
  int64_t capacity = -1;  ///< -1: exact
  int alignment = 1;
  std::vector<int64_t> recv_begin;      ///< [R + 1]: rows of each source
  std::vector<int32_t> recv_idx;        ///< [N, K] local expert or -1
  std::vector<float> recv_weights;      ///< [N, K] (0 where not local) if has_weights
  std::vector<int64_t> position;        ///< expert layouts, [N, K]: row of the result (slab: flat), -1: none or dropped
  std::vector<float> row_weights;       ///< expert_major [rows], slab [Le * C]: weight of each result row
  std::vector<int32_t> expert_counts;   ///< [Le] admitted rows, padding not counted
  std::vector<int64_t> expert_offsets;  ///< [Le + 1]
  std::vector<int32_t> sorted_rows;     ///< rank_major
  int64_t num_rows = 0;                 ///< real rows of the result (expert_major: padding included; slab: sum of counts)
  int64_t num_dropped = 0;

  int64_t num_recv() const { return recv_begin.empty() ? 0 : recv_begin.back(); }
  int num_local_experts() const { return static_cast<int>(expert_counts.size()); }
  /// First dimension of row arrays: capacity if given, else the rows (slab: Le * C).
  int64_t result_rows() const {
    if (layout == Layout::expert_slab) return capacity * num_local_experts();
    return capacity >= 0 ? capacity : num_rows;
  }
};

}  // namespace internal
}  // namespace v0
}  // namespace turnout
