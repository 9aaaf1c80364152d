// What a Handle holds: where this rank's tokens went, and what this rank's rows are. Ordinary memory, immutable once made.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>

#include "core/routing.h"
#include "engine/arena.h"
#include "turnout/types.h"

namespace turnout::engine {
class DeviceRouting;
}

namespace turnout {
inline namespace v0 {
namespace internal {

struct Routing {
  Routing() {}
  Routing(const Routing&) = delete;
  Routing& operator=(const Routing&) = delete;

 private:
  // The arrays of a small call lie in the object itself: one allocation for all of them.
  using Memory = engine::Arena<3584>;
  Memory memory_;

 public:
  /// Of a Buffer on a device: its arrays are there, and of those below only what shapes need is filled in.
  std::shared_ptr<const engine::DeviceRouting> device;

  template <class T>
  using Array = engine::ArenaVector<T, Memory>;

  // Who made it.
  uint64_t buffer = 0;  ///< serial number of the Buffer in this process
  int64_t id = 0;       ///< the same on all ranks: lane and epoch of the dispatch
  std::shared_ptr<const core::ExpertMap> experts;

  // Source side: T tokens of this rank.
  int64_t num_tokens = 0;
  int num_topk = 0;
  bool has_weights = false;
  Array<int32_t> topk_idx{&memory_};     ///< [T, K], -1 = none
  Array<float> topk_weights{&memory_};   ///< [T, K] if has_weights
  Array<int64_t> send_begin{&memory_};   ///< [R + 1] into send_tokens
  Array<int32_t> send_tokens{&memory_};  ///< tokens for each destination rank, ascending
  Array<int64_t> sent{&memory_};         ///< [R] rows that each destination admitted: the first so many of its list

  // Receive side: rank_major rows of this rank, by (source rank, token).
  Layout layout = Layout::rank_major;
  int64_t capacity = -1;  ///< -1: exact
  int alignment = 1;
  Array<int64_t> recv_begin{&memory_};      ///< [R + 1]: rows of each source
  Array<int32_t> recv_idx{&memory_};        ///< [N, K] local expert or -1
  Array<float> recv_weights{&memory_};      ///< [N, K] (0 where not local) if has_weights
  Array<int64_t> position{&memory_};        ///< expert layouts, [N, K]: row of the result (slab: flat), -1: none or dropped
  Array<float> row_weights{&memory_};       ///< expert_major [rows], slab [Le * C]: weight of each result row
  Array<int32_t> expert_counts{&memory_};   ///< [Le] admitted rows, padding not counted
  Array<int64_t> expert_offsets{&memory_};  ///< [Le + 1]
  Array<int32_t> sorted_rows{&memory_};     ///< rank_major
  int64_t num_rows = 0;                     ///< real rows of the result (expert_major: padding included; slab: sum of counts)
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
