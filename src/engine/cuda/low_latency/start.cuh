// How the one kernel of a low-latency call keeps the rule that blocks wait only for blocks that have started or for remote
// senders: work is given out by block index, which needs no atomic; before a block waits it looks whether all others have
// started, and sends what those owe that have not. A row that is sent twice is the same words twice.
#pragma once
#include "engine/cuda/device/header.cuh"
#include "engine/cuda/device/rows.cuh"

namespace turnout::engine::cuda::low_latency {

__device__ __forceinline__ int thread() { return static_cast<int>(threadIdx.x); }
__device__ __forceinline__ int num_threads() { return static_cast<int>(blockDim.x); }
__device__ __forceinline__ int block() { return static_cast<int>(blockIdx.x); }
__device__ __forceinline__ int num_blocks() { return static_cast<int>(gridDim.x); }

/// Block 0 tells the others what this rank does and checks what they say; rows are for the rest, if there is a rest.
__device__ __forceinline__ int num_workers() { return num_blocks() > 1 ? num_blocks() - 1 : 1; }
__device__ __forceinline__ int worker_of(int block_index) { return num_blocks() > 1 ? block_index - 1 : 0; }

/// A wait that has expired in this block. The waits of these kernels are many and inlined; what an expiry takes is written down
/// here and told to everybody in one place, at the end of the kernel, so that the code of waiting stays small.
struct Expired {
  uint32_t claimed;
  int32_t phase, peer;
  uint32_t seen, said;  ///< said: of the peer, by the host (kGone and the like)
};
__device__ __forceinline__ Expired& expired() {
  __shared__ Expired e;
  return e;
}

/// What a wait that lasts knows, in one word that stays in a register: since when, what the host said of the peer, and whether it ends
/// after one more look (kWaitOver and the like).
using Waited = uint64_t;
inline constexpr Waited kGivenUp = ~Waited{0};  ///< it ends at once: others have given up
__device__ __forceinline__ bool looks_once_more(Waited w) { return (w & kWaitOver) != 0; }
__device__ __forceinline__ uint32_t said_in(Waited w) { return static_cast<uint32_t>(w >> kSaidShift) & kSaidMask; }

/// Looks at all that may end a wait, now and then; 0 at first. Not inlined: what every call goes through is to be short.
__device__ __noinline__ inline Waited keep_waiting(const Common& c, int peer, uint32_t epoch, bool inside, Waited waited) {
  if (is_aborted(c) || *reinterpret_cast<const volatile uint32_t*>(&c.lane_control->failed) == epoch) return kGivenUp;
  if (*reinterpret_cast<const volatile uint32_t*>(&expired().claimed)) return kGivenUp;  // by another warp of this block
  const uint64_t now = clock_ns();
  uint64_t start = waited >> kWaitBits << kWaitBits;
  if (start == 0) start = now >> kWaitBits << kWaitBits;
  uint32_t said = said_in(waited);
  bool over = false;
  if (now - start >= 50'000) {
    const bool looks = may_look(c, peer, now);
    if (looks && *reinterpret_cast<volatile uint64_t*>(&c.host->abort) > c.control->generation) {
      store_relaxed(status_of(c, c.team.rank), c.control->generation + 1);
      *reinterpret_cast<volatile uint64_t*>(&c.host->status) = c.control->generation + 1;
      return kGivenUp;
    }
    if (looks) said = said_of_peer(c, peer);
    over = is_lost(said) || now - start > (inside || said == kSilent ? c.control->timeout_ns : c.control->busy_ns);
    if (over && !looks) said = said_of_peer(c, peer);
  }
  return start | static_cast<uint64_t>(said) << kSaidShift | (over ? kWaitOver : 0);
}
/// Of a wait that has expired: the first of a block is written down.
__device__ __noinline__ inline void note_expired(Phase phase, int peer, uint32_t seen, uint32_t said) {
  if (atomicExch(&expired().claimed, 1u) == 0) expired() = {1, static_cast<int32_t>(phase), peer, seen, said};
}

/// wait_until() for these kernels.
template <class Ready, class Seen>
__device__ __forceinline__ bool wait_for(const Common& c, Phase phase, int peer, uint32_t epoch, bool inside, Ready ready, Seen seen) {
  if constexpr (kBareWaits) return wait_bare(ready);
  Waited waited = 0;
#pragma unroll 1
  for (uint32_t i = 0;; ++i) {
    if (ready()) return true;
    if (looks_once_more(waited)) {  // it has not come since either
      note_expired(phase, peer, static_cast<uint32_t>(seen()), said_in(waited));
      return false;
    }
    if (i % 64 != 63) continue;
    waited = keep_waiting(c, peer, epoch, inside, waited);
    if (waited == kGivenUp) return false;
  }
}
__device__ __forceinline__ bool wait_for_word(const Common& c, Phase phase, int peer, uint32_t epoch, bool inside, const uint4* p, uint4* word) {
  return wait_for(
      c, phase, peer, epoch, inside,
      [&] {
        *word = load_word(p);
        return word->w == epoch;
      },
      [&] { return word->w; });
}
/// At the start, before a barrier.
__device__ __forceinline__ void clear_expired() {
  if (thread() == 0) expired().claimed = 0;
}
__device__ __noinline__ inline void report_expired(const Common& c, uint32_t epoch) {
  decltype(HostWords::record) r{};
  r.state = is_lost(expired().said) ? kLostPeer : kExpired;
  r.value = expired().said;
  r.peer = expired().peer;
  r.phase = expired().phase;
  r.epoch = r.expected = epoch;
  r.seen = expired().seen;
  give_up(c, r);
}
__device__ __forceinline__ void tell_expired(const Common& c, uint32_t epoch) {
  if (thread() == 0 && expired().claimed) report_expired(c, epoch);
}
/// The end of a kernel, after a barrier.
__device__ __forceinline__ void end_kernel(const Common& c, uint32_t epoch) {
  tell_expired(c, epoch);
  if (c.last_of_send) advance_epoch(c, epoch);
}

struct Start {
  Call call;
  bool over;  ///< nothing should be done
};
/// What a kernel must know first, asked for and not looked at: the loads do not wait for each other, nor what comes after for them.
struct Asked {
  uint32_t before, failed;
  uint64_t status, generation;
};
__device__ __forceinline__ Asked ask_start(const Common& c) {
  Asked a;
  a.before = *reinterpret_cast<const volatile uint32_t*>(&c.lane_control->epoch[block() % kMaxChannels]);
  a.failed = *reinterpret_cast<const volatile uint32_t*>(&c.lane_control->failed);
  a.status = load_relaxed(status_of(c, c.team.rank));
  a.generation = *reinterpret_cast<const volatile uint64_t*>(&c.control->generation);
  return a;
}
/// `lane` and `depth`: what `c` says, too, but perhaps not as soon.
__device__ __forceinline__ Start start_of(const Common& c, LaneControl* lane, uint32_t depth, const Asked& asked) {
  const uint32_t epoch = asked.before + 1;
  const Call call{epoch, static_cast<int>(epoch % depth)};
  if (thread() == 0) *reinterpret_cast<volatile uint32_t*>(&lane->started[block()]) = epoch;
  clear_next_tickets(c, call);
  clear_expired();
  const bool over = asked.failed == epoch || asked.status > asked.generation;
  return {call, over && is_over(c, call)};
}
__device__ __forceinline__ Start start_of(const Common& c, const Asked& asked) {
  return start_of(c, c.lane_control, static_cast<uint32_t>(c.arena.depth), asked);
}

/// The same for a kernel that only receives, maybe behind later calls: words of the lane that those use stay as they are.
__device__ __forceinline__ Start start_of_receive(const Common& c) {
  const Call call = call_of(c);
  clear_expired();
  return {call, is_over(c, call)};
}

/// Whether this thread's block does the sending part of block `b`, which has not started; of all that could, one does. Where few SMs are
/// free a call would otherwise be sent once by every block.
__device__ __forceinline__ bool take_over(const Common& c, int b, uint32_t epoch) { return atomicExch(&c.lane_control->started[b], epoch) != epoch; }
__device__ __forceinline__ bool has_started(const Common& c, int b, uint32_t epoch) {
  return *reinterpret_cast<const volatile uint32_t*>(&c.lane_control->started[b]) == epoch;
}
/// Blocks start within microseconds of each other, unless others hold the GPU.
inline constexpr uint64_t kStartTime = 20'000;

/// For one warp: the next block from `next` on that has not started, -1: none. `first`: they have some time for it.
__device__ __forceinline__ int next_unstarted(const Common& c, uint32_t epoch, int next, bool first) {
  if (first) {
    const uint64_t begin = clock_ns();
#pragma unroll 1
    for (bool late = false; !late;) {
      bool all = true;
#pragma unroll 1
      for (int b = lane_id(); b < num_blocks(); b += 32) all = all && has_started(c, b, epoch);
      if (__all_sync(kFull, all)) return -1;
      late = __any_sync(kFull, clock_ns() - begin > kStartTime);
    }
  }
#pragma unroll 1
  for (; next < num_blocks(); ++next) {
    if (__any_sync(kFull, !has_started(c, next, epoch))) return next;
  }
  return -1;
}

/// Of a thread: whether the blocks that it looks at have started.
__device__ __forceinline__ bool have_started(const Common& c, uint32_t epoch) {
  bool all = true;
#pragma unroll 1
  for (int i = thread(); i < num_blocks(); i += num_threads()) all = has_started(c, i, epoch) && all;
  return all;
}
/// The same with some patience: true as soon as they have. `seen`: what started[thread()] was when it was asked for last.
__device__ __forceinline__ bool have_started_soon(const Common& c, uint32_t epoch, uint32_t seen) {
  bool all = thread() >= num_blocks() || (seen == epoch && num_blocks() <= num_threads());
#pragma unroll 1
  for (int looks = 0; !all && looks < 16; ++looks) all = have_started(c, epoch);
  return all;
}
/// For a block: calls `send(b)` for itself and then for those that have not started. It may say what have_started() said some time
/// after its start, so that the answer needs not be waited for. `meanwhile()` asks for what comes next. One loop, so that the code of
/// sending is there once. Not `waits`: nobody is waited for afterwards, so each block does its own part.
template <class Send, class Meanwhile>
__device__ __forceinline__ void send_for_all(const Common& c, uint32_t epoch, Send send, Meanwhile meanwhile, bool waits = true) {
  int next = 0;
#pragma unroll 1
  for (int b = block();;) {
    const bool all = send(b);
    if (b == block()) {
      meanwhile();
      if (!waits || !__syncthreads_or(!all)) return;
      __shared__ int found;
      if (warp_id() == 0) {
        const int unstarted = next_unstarted(c, epoch, 0, true);
        if (lane_id() == 0) found = unstarted;
      }
      __syncthreads();
      next = found;
      if (next < 0) return;
    } else {
      ++next;
    }
    // From here on all blocks in doubt are served; one that has started since sends the same.
    while (next < num_blocks() && !__syncthreads_or(thread() == 0 && !has_started(c, next, epoch) && take_over(c, next, epoch))) ++next;
    if (next >= num_blocks()) break;
    b = next;
  }
  __syncthreads();
}

__device__ __forceinline__ const uint4* header_words(const Common& c, Call call, int source) {
  return reinterpret_cast<const uint4*>(c.team.base[c.team.rank] + c.arena.header_at(c.lane, call.copy, source));
}

/// What this rank told when it sent. The map of experts may be another by now.
__device__ inline void read_facts(const Common& c, Call call, FactWords* facts) {
#pragma unroll 1
  for (int i = thread(); i < FactWords::kNum; i += num_threads()) {
    const uint4 word = load_word(header_words(c, call, c.team.rank) + i / kWordPayload);
    facts->words[i] = i % kWordPayload == 0 ? word.x : i % kWordPayload == 1 ? word.y : word.z;
  }
  __syncthreads();
}

/// The header of a call without counts, by one warp.
__device__ __noinline__ inline void send_facts(const Common& c, Call call, bool refused, FactWords* facts) {
  constexpr int kNum = (HeaderInts::kRows + kWordPayload - 1) / kWordPayload;
  if (lane_id() == 0) fill_facts(c, call.epoch, refused, 0, facts);
  __syncwarp();
#pragma unroll 1
  for (int i = lane_id(); i < kNum * c.team.num_ranks; i += 32) {
    const int rank = i / kNum, w = i % kNum;
    uint32_t p[kWordPayload];
#pragma unroll 1
    for (int j = 0; j < kWordPayload; ++j) p[j] = w * kWordPayload + j < HeaderInts::kRows ? facts->words[w * kWordPayload + j] : 0;
    store_word(reinterpret_cast<uint4*>(c.team.base[rank] + c.arena.header_at(c.lane, call.copy, c.team.rank)) + w,
               uint4{p[0], p[1], p[2], call.epoch});
  }
}

/// Whether all ranks take part with the same facts, for one warp; a block that hears no does nothing more. Block 0 makes the record.
static_assert(HeaderInts::kHash == 0 && HeaderInts::kRefused == 2, "the first word of a header says it all");
__device__ __forceinline__ bool all_agree(const Common& c, Call call) {
  bool good = true;
  uint4 mine{};
#pragma unroll 1
  for (int at = 0; at < c.team.num_ranks && good; at += 32) {
    const int s = at + lane_id();
    uint4 theirs{};
    if (s < c.team.num_ranks) good = wait_for_word(c, Phase::counts, s, call.epoch, false, header_words(c, call, s), &theirs);
    if (at == 0) good = wait_for_word(c, Phase::counts, c.team.rank, call.epoch, false, header_words(c, call, c.team.rank), &mine) && good;
    if (s < c.team.num_ranks) good = good && theirs.x == mine.x && theirs.y == mine.y && theirs.z == 0;
    good = __all_sync(kFull, good);
  }
  return good;
}

}  // namespace turnout::engine::cuda::low_latency
