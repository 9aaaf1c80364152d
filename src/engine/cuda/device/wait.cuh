// Epochs and waits. Every wait has a deadline and looks at the abort words; what expires leaves a record and ends the kernel
// cleanly. A wait that returns false has been given up: the caller skips what it waited for and goes on to its end.
#pragma once
#include "engine/cuda/args.h"
#include "engine/cuda/device/ptx.cuh"

namespace turnout::engine::cuda {

/// The arena's status word: written by any rank that gives up; the Buffer is aborted while it is above control->generation.
__device__ __forceinline__ uint64_t* status_of(const Common& c, int rank) { return reinterpret_cast<uint64_t*>(c.team.base[rank] + c.arena.status); }

__device__ __forceinline__ bool is_aborted(const Common& c) {
  const uint64_t generation = c.control->generation, status = load_relaxed(status_of(c, c.team.rank));
  if (status <= generation) return false;
  *reinterpret_cast<volatile uint64_t*>(&c.host->status) = status;  // the host sees only its own words
  return true;
}

__device__ inline void copy_record(const Common& c, const DeviceRecord& why, volatile DeviceRecord* r) {
  r->finder = c.team.rank;
  r->peer = why.peer;
  r->lane = c.lane;
  r->call = static_cast<int32_t>(c.facts.kind);
  r->phase = why.phase;
  r->k = why.k;
  r->epoch = why.epoch;
  r->expected = why.expected;
  r->seen = why.seen;
  r->value = why.value;
  __threadfence_system();
  r->state = why.state;
  __threadfence_system();
}

/// One record is enough: the first to claim it writes it. False: somebody has.
__device__ inline bool write_record(const Common& c, const DeviceRecord& why) {
  if (atomicCAS_system(reinterpret_cast<unsigned long long*>(&c.host->record.state), 0ull, ~0ull) != 0ull) return false;
  copy_record(c, why, &c.host->record);
  return true;
}

/// A wait has expired: everybody stops. Records come first, then the status words.
__device__ inline void give_up(const Common& c, const DeviceRecord& why) {
  const bool first = write_record(c, why);
  const uint64_t next = c.control->generation + 1;
  for (int r = 0; r < c.team.num_ranks; ++r) {
    // Memory of a process that has ended may be gone with it.
    if (r != c.team.rank && *reinterpret_cast<volatile uint32_t*>(&c.host->lost[r]) == kGone) continue;
    if (first && r != c.team.rank) copy_record(c, why, reinterpret_cast<DeviceRecord*>(c.team.base[r] + c.arena.status + kAbortRecordOffset));
    store_release(status_of(c, r), next);
  }
  __threadfence_system();
  *reinterpret_cast<volatile uint64_t*>(&c.host->status) = next;
}

/// This call fails, here as on all other ranks, and the next ones do not: kernels of the call do nothing more.
__device__ inline void fail_call(const Common& c, const DeviceRecord& why) {
  write_record(c, why);
  *reinterpret_cast<volatile uint32_t*>(&c.lane_control->failed) = static_cast<uint32_t>(why.epoch);
  __threadfence();
}

struct Call {
  uint32_t epoch;
  int copy;
};
__device__ __forceinline__ Call call_of(const Common& c) {
  const uint32_t epoch = c.lane_control->epoch[blockIdx.x % kMaxChannels] + 1 - static_cast<uint32_t>(c.back);
  return {epoch, static_cast<int>(epoch % static_cast<uint32_t>(c.arena.depth))};
}
/// Whether nothing should be done: the Buffer is aborted, or the call has failed.
__device__ __forceinline__ bool is_over(const Common& c, Call call) {
  const uint32_t failed = *reinterpret_cast<const volatile uint32_t*>(&c.lane_control->failed);  // all loads at once
  return is_aborted(c) || failed == call.epoch;
}
/// At the end of the kernel that ends the sending part of a call. Blocks read their word when they start, and each word is
/// advanced by one block only; a block that starts late reads words that only it advances if the grid does not exceed them.
__device__ __forceinline__ void advance_epoch(const Common& c, uint32_t epoch) {
  for (unsigned i = blockIdx.x + threadIdx.x * gridDim.x; i < kMaxChannels; i += blockDim.x * gridDim.x) c.lane_control->epoch[i] = epoch;
}

/// Tickets of the call after this one are nobody's now.
__device__ __forceinline__ void clear_next_tickets(const Common& c, Call call) {
  if (blockIdx.x == 0 && threadIdx.x < LaneControl::kNumTickets) {
    c.lane_control->tickets[(call.copy + 1) % c.arena.depth][threadIdx.x] = 0;
  }
}
/// Roles go to blocks in the order in which they start. The whole block calls it.
__device__ __forceinline__ int take_role(const Common& c, Call call, int ticket) {
  __shared__ int role;
  if (threadIdx.x == 0) role = static_cast<int>(atomicAdd(&c.lane_control->tickets[call.copy][ticket], 1u));
  __syncthreads();
  const int mine = role;
  __syncthreads();
  return mine;
}

/// A 64-bit signal: the epoch above, a value below.
__device__ __forceinline__ uint64_t signal_of(uint32_t epoch, uint32_t value) { return static_cast<uint64_t>(epoch) << 32 | value; }

/// Polls `ready` until it is true. `seen` (any callable) says what was seen last, for the record.
/// `inside`: the peer is inside the call already, so `timeout` holds and not `busy_timeout`.
template <class Ready, class Seen>
__device__ __forceinline__ bool wait_until(const Common& c, Phase phase, int peer, uint32_t epoch, bool inside, Ready ready, Seen seen) {
  if (ready()) return true;
  const uint64_t start = clock_ns();
  uint64_t next_look = start + 50'000;
  const uint64_t limit = inside ? c.control->timeout_ns : c.control->busy_ns;
  for (uint32_t i = 1;; ++i) {
    if (ready()) return true;
    if (i % 64) continue;
    if (is_aborted(c) || *reinterpret_cast<const volatile uint32_t*>(&c.lane_control->failed) == epoch) return false;
    const uint64_t now = clock_ns();
    if (now < next_look) continue;
    next_look = now + 10'000;  // host words lie across PCIe
    if (*reinterpret_cast<volatile uint64_t*>(&c.host->abort) > c.control->generation) {
      store_relaxed(status_of(c, c.team.rank), c.control->generation + 1);
      *reinterpret_cast<volatile uint64_t*>(&c.host->status) = c.control->generation + 1;
      return false;
    }
    const uint32_t lost = *reinterpret_cast<volatile uint32_t*>(&c.host->lost[peer]);
    if (lost != 0 || now - start > limit) {
      DeviceRecord r{};
      r.state = lost ? kLostPeer : kExpired;
      r.value = lost;
      r.peer = peer;
      r.phase = static_cast<int32_t>(phase);
      r.epoch = epoch;
      r.expected = epoch;
      r.seen = static_cast<int64_t>(seen());
      give_up(c, r);
      return false;
    }
  }
}

/// Until 64-bit signal `p` of `peer` shows the epoch (acquire); `value` is its lower half.
__device__ __forceinline__ bool wait_signal(const Common& c, Phase phase, int peer, uint32_t epoch, bool inside, const uint64_t* p, uint32_t* value) {
  uint64_t v = 0;
  const bool came = wait_until(
      c, phase, peer, epoch, inside,
      [&] {
        v = load_acquire(p);
        return static_cast<uint32_t>(v >> 32) == epoch;
      },
      [&] { return v >> 32; });
  if (value) *value = static_cast<uint32_t>(v);
  return came;
}
/// Until a flagged word shows the epoch.
__device__ __forceinline__ bool wait_word(const Common& c, Phase phase, int peer, uint32_t epoch, bool inside, const uint4* p, uint4* word) {
  return wait_until(
      c, phase, peer, epoch, inside,
      [&] {
        *word = load_word(p);
        return word->w == epoch;
      },
      [&] { return word->w; });
}
/// Until another block of this GPU has got on (acquire).
__device__ __forceinline__ bool wait_local(const Common& c, uint32_t epoch, const uint32_t* flag) {
  uint32_t v = 0;
  return wait_until(
      c, Phase::local_blocks, c.team.rank, epoch, true,
      [&] {
        v = load_acquire_gpu(flag);
        return v == epoch;
      },
      [&] { return v; });
}

}  // namespace turnout::engine::cuda
