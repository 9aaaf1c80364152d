// Epochs and waits. Every wait has a deadline and looks at the abort words; what expires leaves a record and ends the kernel
// cleanly. A wait that returns false has been given up: the caller skips what it waited for and goes on to its end.
#pragma once
#include "engine/cuda/args.h"
#include "engine/cuda/device/ptx.cuh"
#include "engine/cuda/host_link.h"

/// A kernel whose first microseconds count says that it calls what waits seldom do (defined before this is included): else the code of each
/// wait lies between what comes before and after it, and has to be fetched.
#ifdef TURNOUT_WAITS_CALL
#define TURNOUT_SELDOM __noinline__ inline
#else
#define TURNOUT_SELDOM __forceinline__
#endif

namespace turnout::engine::cuda {

/// Built to measure what deadlines cost (docs/bench.md), and for nothing else: waits that look at what they wait for alone, and never end.
#ifdef TURNOUT_BARE_WAITS
inline constexpr bool kBareWaits = true;
#else
inline constexpr bool kBareWaits = false;
#endif
template <class Ready>
__device__ __forceinline__ bool wait_bare(Ready ready) {
#pragma unroll 1
  while (!ready()) continue;
  return true;
}

/// What the host says of `peer`: kGone and the like.
__device__ __forceinline__ uint32_t said_of_peer(const Common& c, int peer) { return *reinterpret_cast<volatile uint32_t*>(&c.host->peers[peer]); }

/// The arena's status word: written by any rank that gives up; the Buffer is aborted while it is above control->generation.
__device__ __forceinline__ uint64_t* status_of(const Common& c, int rank) { return reinterpret_cast<uint64_t*>(c.team.base[rank] + c.arena.status); }

/// Through the host reads of one line take turns of a microsecond, so thousands of threads do not look at it: whoever waits for a peer does,
/// now and then (`looks`), all others look at what has been seen.
__device__ __forceinline__ void note_status(const Common& c, uint64_t status) { *reinterpret_cast<volatile uint64_t*>(&c.control->status) = status; }
__device__ __forceinline__ bool is_aborted(const Common& c, bool looks = false) {
  if constexpr (kBareWaits) return false;
  const uint64_t generation = c.control->generation;
  if (c.through_host && !looks) return *reinterpret_cast<const volatile uint64_t*>(&c.control->status) > generation;
  const uint64_t status = load_relaxed(status_of(c, c.team.rank));
  if (status <= generation) return false;
  note_status(c, status);
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

/// The same for a record that ends the Buffer: it takes the place of one that a single call left and that nobody has read yet.
__device__ inline bool write_last_record(const Common& c, const DeviceRecord& why) {
  auto* state = reinterpret_cast<unsigned long long*>(&c.host->record.state);
  for (unsigned long long was = 0, seen; (seen = atomicCAS_system(state, was, ~0ull)) != was; was = seen) {
    if (seen == ~0ull || seen == kExpired || seen == kLostPeer) return false;
  }
  copy_record(c, why, &c.host->record);
  return true;
}

/// A wait has expired: everybody stops. Records come first, then the status words.
__device__ inline void give_up(const Common& c, const DeviceRecord& why) {
  const bool first = write_last_record(c, why);
  const uint64_t next = c.control->generation + 1;
  for (int r = 0; r < c.team.num_ranks; ++r) {
    if (r != c.team.rank && has_ended(said_of_peer(c, r))) continue;
    if (first && r != c.team.rank) copy_record(c, why, reinterpret_cast<DeviceRecord*>(c.team.base[r] + c.arena.status + kAbortRecordOffset));
    store_release(status_of(c, r), next);
  }
  __threadfence_system();
  note_status(c, next);
  *reinterpret_cast<volatile uint64_t*>(&c.host->status) = next;
}

/// Why a call fails. The host may read (and forget) the record while kernels of the call still run, so the first reason of a call is its
/// only one: another would be raised by the next call.
__device__ inline void write_reason(const Common& c, const DeviceRecord& why) {
  const auto epoch = static_cast<uint32_t>(why.epoch);
  if (atomicExch(&c.lane_control->told, epoch) != epoch) write_record(c, why);
}

/// This call fails, here as on all other ranks, and the next ones do not: kernels of the call do nothing more.
__device__ inline void fail_call(const Common& c, const DeviceRecord& why) {
  write_reason(c, why);
  const auto epoch = static_cast<uint32_t>(why.epoch);
  *reinterpret_cast<volatile uint32_t*>(&c.lane_control->failed_of[epoch % static_cast<uint32_t>(c.arena.depth)]) = epoch;
  *reinterpret_cast<volatile uint32_t*>(&c.lane_control->failed) = epoch;
  __threadfence();
}
/// The same of what a header or an offer says.
__device__ TURNOUT_SELDOM void fail_call(const Common& c, uint64_t state, int peer, uint32_t epoch, int64_t value = 0) {
  DeviceRecord r{};
  r.state = state;
  r.peer = peer;
  r.epoch = epoch;
  r.value = value;
  fail_call(c, r);
}
/// Of a call whose receiving part runs behind later calls, the last one that failed may be one of those.
__device__ __forceinline__ bool has_failed(const Common& c, uint32_t epoch) {
  if (*reinterpret_cast<const volatile uint32_t*>(&c.lane_control->failed) == epoch) return true;
  return c.back != 0 &&
         *reinterpret_cast<const volatile uint32_t*>(&c.lane_control->failed_of[epoch % static_cast<uint32_t>(c.arena.depth)]) == epoch;
}

struct Call {
  uint32_t epoch;
  int copy;
};
__device__ __forceinline__ Call call_of(const Common& c) {
  const bool own = c.own_epoch && c.back != 0;
  const uint32_t epoch = own ? *c.own_epoch : c.lane_control->epoch[blockIdx.x % kMaxChannels] + 1 - static_cast<uint32_t>(c.back);
  return {epoch, static_cast<int>(epoch % static_cast<uint32_t>(c.arena.depth))};
}
/// Whether nothing should be done: the Buffer is aborted, or the call has failed.
__device__ __forceinline__ bool is_over(const Common& c, Call call) {
  const bool failed = has_failed(c, call.epoch);  // all loads at once
  return is_aborted(c) || failed;
}
/// At the end of the kernel that ends the sending part of a call. Blocks read their word when they start, and each word is
/// advanced by one block only; a block that starts late reads words that only it advances if the grid does not exceed them.
__device__ __forceinline__ void advance_epoch(const Common& c, uint32_t epoch) {
  for (unsigned i = blockIdx.x + threadIdx.x * gridDim.x; i < kMaxChannels; i += blockDim.x * gridDim.x) c.lane_control->epoch[i] = epoch;
  if (c.own_epoch && blockIdx.x == 0 && threadIdx.x == 0) *c.own_epoch = epoch;
}

/// Tickets of the call after this one are nobody's now.
__device__ __forceinline__ void clear_next_tickets(const Common& c, Call call) {
  if (blockIdx.x == 0 && threadIdx.x < LaneControl::kNumTickets) {
    c.lane_control->tickets[call.copy + 1 == c.arena.depth ? 0 : call.copy + 1][threadIdx.x] = 0;
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

/// Whether this thread looks at what the host says of `peer`: one at a time does, for all that wait for that rank. Host words lie across
/// PCIe: when every warp that waits reads them, the answers take a millisecond, and this rank is late in the next call.
__device__ __forceinline__ bool may_look(const Common& c, int peer, uint64_t now) {
  auto* next = reinterpret_cast<unsigned long long*>(&c.lane_control->next_look[peer]);
  const unsigned long long due = *reinterpret_cast<const volatile unsigned long long*>(next);
  return now >= due && atomicCAS(next, due, static_cast<unsigned long long>(now + 10'000)) == due;
}

/// A wait gives up: it took too long, or the peer is lost, as the host `said`.
__device__ TURNOUT_SELDOM void end_wait(const Common& c, Phase phase, int peer, uint32_t epoch, uint32_t said, int64_t seen) {
  DeviceRecord r{};
  r.state = is_lost(said) ? kLostPeer : kExpired;
  r.value = said;
  r.peer = peer;
  r.phase = static_cast<int32_t>(phase);
  r.epoch = epoch;
  r.expected = epoch;
  r.seen = seen;
  give_up(c, r);
}

/// What a wait looks at now and then. Returns when to look next, with kWaitOver (and the reason behind it) once it has to end after one more
/// poll: a peer that has done its part may be gone before this block gets to look again; 0: it ends at once, others have given up.
inline constexpr uint64_t kWaitOver = 1;
inline constexpr int kSaidShift = 1, kSaidMask = 7, kWaitBits = 4;
__device__ TURNOUT_SELDOM uint64_t look_around(const Common& c, Phase phase, int peer, uint32_t epoch, bool inside, bool if_failed, uint64_t start,
                                               uint64_t next_look) {
  if (is_aborted(c) || (if_failed && has_failed(c, epoch))) return 0;
  const uint64_t now = clock_ns();
  if (now < next_look) return next_look;
  const bool looks = may_look(c, peer, now);
  if (looks && c.through_host && is_aborted(c, true)) return 0;
  if (looks && *reinterpret_cast<volatile uint64_t*>(&c.host->abort) > c.control->generation) {
    store_relaxed(status_of(c, c.team.rank), c.control->generation + 1);
    note_status(c, c.control->generation + 1);
    *reinterpret_cast<volatile uint64_t*>(&c.host->status) = c.control->generation + 1;
    return 0;
  }
  // What other blocks of this rank wait for is a peer: their waits are to expire first, and to name it.
  const uint64_t more = phase == Phase::local_blocks ? c.control->busy_ns : 0;
  uint32_t said = looks ? said_of_peer(c, peer) : 0;
  const uint64_t limit = (inside || said == kSilent ? c.control->timeout_ns : c.control->busy_ns) + more;
  const bool over = is_lost(said) || now - start > limit;
  if (over && !looks) said = said_of_peer(c, peer);
  return (now + 10'000) >> kWaitBits << kWaitBits | static_cast<uint64_t>(said) << kSaidShift | (over ? kWaitOver : 0);
}

/// Polls `ready` until it is true. `seen` (any callable) says what was seen last, for the record.
/// `inside`: the peer is inside the call already, so `timeout` holds and not `busy_timeout`. `if_failed`: a call that has failed ends it.
template <class Ready, class Seen>
__device__ __forceinline__ bool wait_until(const Common& c, Phase phase, int peer, uint32_t epoch, bool inside, Ready ready, Seen seen,
                                           bool if_failed = true) {
  if (ready()) return true;
  if constexpr (kBareWaits) return wait_bare(ready);
  const uint64_t start = clock_ns();
  uint64_t next_look = (start + 50'000) >> kWaitBits << kWaitBits;
#pragma unroll 1
  for (uint32_t i = 1;; ++i) {
    if (c.through_host && phase != Phase::local_blocks) __nanosleep(kHostPollNs);  // looks take their part of the link
    if (ready()) return true;
    if (next_look & kWaitOver) {
      end_wait(c, phase, peer, epoch, static_cast<uint32_t>(next_look >> kSaidShift) & kSaidMask, static_cast<int64_t>(seen()));
      return false;
    }
    if (i % 64) continue;
    next_look = look_around(c, phase, peer, epoch, inside, if_failed, start, next_look);
    if (next_look == 0) return false;
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
__device__ __forceinline__ bool wait_word(const Common& c, Phase phase, int peer, uint32_t epoch, bool inside, const uint4* p, uint4* word,
                                          bool if_failed = true) {
  return wait_until(
      c, phase, peer, epoch, inside,
      [&] {
        *word = load_word(p);
        return word->w == epoch;
      },
      [&] { return word->w; }, if_failed);
}
/// Until another block of this GPU has got on (acquire). `inside`: that block waits for no peer that may not have come yet.
__device__ __forceinline__ bool wait_local(const Common& c, uint32_t epoch, const uint32_t* flag, bool inside = true) {
  uint32_t v = 0;
  return wait_until(
      c, Phase::local_blocks, c.team.rank, epoch, inside,
      [&] {
        v = load_acquire_gpu(flag);
        return v == epoch;
      },
      [&] { return v; });
}

}  // namespace turnout::engine::cuda
