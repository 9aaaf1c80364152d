// Rows that have arrived in memory of the host, brought by bulk loads: few warps, each with many rows under way. An answer from there takes
// 2 us, and 10 while the link is busy; looks at signals in one line take turns. So a warp looks at the signals of all its rows at once.
#pragma once
#include "engine/cuda/throughput/move_send.cuh"

namespace turnout::engine::cuda::move {

#ifdef TURNOUT_HAS_BULK
/// The ring of a warp: lane j looks after stage j.
class Taker {
 public:
  __device__ Taker(const DispatchArgs& a, const MoveShape& p, Shared& sh, std::byte* all, Call call)
      : a_(a),
        p_(p),
        sh_(sh),
        ring_(all + static_cast<int64_t>(warp_id()) * p.take_ring * p.stage_bytes),
        full_(sh.take + warp_id() * p.take_ring),
        call_(call),
        tickets_(&a.common.lane_control->tickets[call.copy][kRowTicket], num_items(), p.receivers * p.takers, p.take_ring) {}

  /// Until no tickets are left; `lay_out(row, source, stage)` gets each row. False: given up.
  template <class LayOut>
  __device__ __forceinline__ bool run(LayOut lay_out) {
    for (;;) {
      take();
      if (!__any_sync(kFull, row_ >= 0)) return true;
      look();
      unsigned here = __ballot_sync(kFull, loads_ && barrier_test(full_ + lane_id(), phase_));
      if (!here) {  // nothing to do but to wait for what was asked for first, or for a row
        const unsigned loading = __ballot_sync(kFull, loads_);
        if (!loading) {
          if (!wait()) return false;
          continue;
        }
        if (__any_sync(kFull, row_ >= 0 && !loads_)) continue;
        const int first = __ffs(static_cast<int>(loading)) - 1;
        barrier_wait(full_ + first, __shfl_sync(kFull, phase_, first));
        here = 1u << first;
      }
      if (here >> lane_id() & 1) loads_ = false, phase_ ^= 1;
      for (unsigned left = here; left; left &= left - 1) {
        const int j = __ffs(static_cast<int>(left)) - 1;
        lay_out(__shfl_sync(kFull, row_, j), __shfl_sync(kFull, source_, j), ring_ + static_cast<int64_t>(j) * p_.stage_bytes);
      }
      if (here >> lane_id() & 1) row_ = -1;
    }
  }

 private:
  __device__ int num_items() const {
    const int me = a_.common.team.rank, ranks = a_.common.team.num_ranks;
    int most = 0;
    for (int s = 0; s < ranks; ++s) most = s == me ? most : max(most, sh_.begins[s + 1] - sh_.begins[s]);
    return most * (ranks - 1);
  }

  /// Stages that are free get rows.
  __device__ void take() {
    const Common& c = a_.common;
    const int me = c.team.rank, others = c.team.num_ranks - 1;
    unsigned free = __ballot_sync(kFull, lane_id() < p_.take_ring && row_ < 0);
    if (!more_ || !free) return;
    bulk_wait_read<0>();
    __syncwarp();
    while (free) {
      const int item = tickets_.take();
      more_ = item >= 0;
      if (!more_) return;
      const int s = (me + 1 + item % others) % c.team.num_ranks, i = item / others, row = sh_.begins[s] + i;
      if (row >= sh_.begins[s + 1]) continue;
      if (lane_id() == __ffs(static_cast<int>(free)) - 1) {
        row_ = row;
        source_ = s;
        item_ = item;
        signal_ = reinterpret_cast<const uint64_t*>(c.team.base[me] + c.arena.row_at(c.lane, call_.copy, s, i));
      }
      free &= free - 1;
    }
  }

  /// Rows that have arrived are asked for.
  __device__ void look() {
    const bool waits = row_ >= 0 && !loads_;
    const bool came = waits && static_cast<uint32_t>(load_acquire(signal_) >> 32) == call_.epoch;
    if (!__any_sync(kFull, came)) return;
    fence_global_to_bulk();
    if (came) load();
    loads_ = loads_ || came;
    __syncwarp();
  }
  __device__ void load() {
    const std::byte* block = a_.common.team.base[a_.common.team.rank] + a_.block;
    std::byte* stage = ring_ + static_cast<int64_t>(lane_id()) * p_.stage_bytes;
    uint64_t* full = full_ + lane_id();
    auto bytes = static_cast<uint32_t>(a_.x_bytes + a_.scale_bytes);
    for (int s = 0; s < a_.num_side; ++s) bytes += static_cast<uint32_t>(a_.side[s].bytes);
    barrier_expect(full, bytes);
    const int64_t row = row_;
    bulk_load(stage, block + row * a_.x_block_stride, static_cast<uint32_t>(a_.x_bytes), full);
    if (a_.scale_bytes) bulk_load(stage + p_.scales_at, block + p_.block_scales + row * a_.scale_bytes, static_cast<uint32_t>(a_.scale_bytes), full);
#pragma unroll 1
    for (int s = 0; s < a_.num_side; ++s)
      bulk_load(stage + p_.side_at[s], block + p_.block_side[s] + row * a_.side[s].bytes, static_cast<uint32_t>(a_.side[s].bytes), full);
  }

  /// For the row whose turn came first. False: given up.
  __device__ bool wait() {
    const int mine = row_ >= 0 ? item_ : INT_MAX, first = __reduce_min_sync(kFull, mine);
    bool good = true;
    if (mine == first) good = wait_signal(a_.common, Phase::rows, source_, call_.epoch, true, signal_, nullptr);
    return __all_sync(kFull, good);
  }

  const DispatchArgs& a_;
  const MoveShape& p_;
  Shared& sh_;
  std::byte* ring_;
  uint64_t* full_;
  Call call_;
  Tickets tickets_;
  bool more_ = true;
  // Of this lane's stage.
  int row_ = -1, source_ = 0, item_ = 0;
  const uint64_t* signal_ = nullptr;
  bool loads_ = false;
  uint32_t phase_ = 0;
};
#endif

}  // namespace turnout::engine::cuda::move
