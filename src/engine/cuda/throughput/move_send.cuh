// The sending part of a dispatch by bulk copies: a few warps of a block drive rings of rows in shared memory. Who sends a token's row is
// decided by ticket; where it goes has been decided by the plan.
#pragma once
#include "engine/cuda/device/announce.cuh"
#include "engine/cuda/device/bulk_rows.cuh"
#include "engine/cuda/device/dispatch.cuh"
#include "engine/cuda/device/tickets.cuh"
#include "engine/cuda/specialize.h"

namespace turnout::engine::cuda::move {

inline constexpr int kThreads = 384;

#ifdef TURNOUT_HAS_BULK
inline constexpr int kWarps = kThreads / 32, kAnnouncer = kWarps - 1;
inline constexpr int kMostPushers = kWarps - 1, kMostStages = 96;
static_assert(kWarps * kMostWorkRing <= kThreads);
inline constexpr int kQueue = 256;  ///< at least 64 for each row that is written but not yet posted
using Queue = AnnounceQueue<kMostPushers, kQueue>;

struct Shared {
  alignas(8) uint64_t full[kMostStages];
  uint64_t own[kWarps * kMostWorkRing];             ///< the same of warps that lay out rows
  uint64_t take[kMostStages];                       ///< and of warps that take rows from memory of the host
  uint64_t admitted;                                ///< a warp has looked whether the ids of received rows are here:
  bool is_admitted;                                 ///< what it has found
  std::byte *block[kMaxRanks], *scales[kMaxRanks];  ///< where this rank's rows go
  int32_t begin[kMaxRanks];
  Offer offers[kMaxRanks];
  int32_t begins[kMaxRanks + 1], from[kMaxRanks];
  FirstWords told;
  int role;  ///< of this block: of who sends, or straight, of who waits for the others
  Queue queue;
};

__device__ inline void clear(const MoveShape& p, Shared& sh, std::byte* ring) {
  sh.queue.init();
  if (threadIdx.x == 0) barrier_init(&sh.admitted, 1);
  for (int i = static_cast<int>(threadIdx.x); i < kMaxRanks; i += kThreads) sh.begin[i] = 0;
  for (int i = static_cast<int>(threadIdx.x); i < kMostStages; i += kThreads) barrier_init(&sh.full[i], 1), barrier_init(&sh.take[i], 1);
  for (int i = static_cast<int>(threadIdx.x); i < kWarps * kMostWorkRing; i += kThreads) barrier_init(&sh.own[i], 1);
  for (int i = static_cast<int>(threadIdx.x) * 16; i < p.zero_bytes; i += kThreads * 16) *reinterpret_cast<uint4*>(ring + p.zero_at + i) = uint4{};
  fence_shared_to_bulk();
}

inline constexpr int kFirstBegins = 128;
static_assert(kMaxRanks < kFirstBegins && kFirstBegins + kMaxRanks < kThreads - kMaxChunks);

/// What a block needs to know to send, once the plan kernel has found it out; all of it is asked for at once. Places of pairs may come later
/// (kPlaced). False: given up, as when `good` is false.
__device__ inline bool set_up(const DispatchArgs& a, const MoveShape& p, Shared& sh, bool good, Call call) {
  const Common& c = a.common;
  const int thread = static_cast<int>(threadIdx.x);
  if (!a.chained) {
    if (!__syncthreads_and(good && !is_over(c, call) && !(a.cached && is_broken(a.routing)))) return false;
    for (int d = thread; d <= c.team.num_ranks; d += kThreads) {
      sh.begins[d] = __ldcg(&a.routing.recv_begin[d]);
      if (d < c.team.num_ranks) sh.begin[d] = __ldcg(&a.routing.send_begin[d]);
    }
  } else if (thread >= kThreads - kMaxChunks) {  // warps of their own for each kind of wait
    const int chunk = thread - (kThreads - kMaxChunks);
    if (chunk < p.num_chunks) good = good && wait_local(c, call.epoch, &a.flags[kRowsPlaced + chunk]);
  } else if (thread >= kFirstBegins && !c.through_host) {
    good = good && read_begins(c, call, thread - kFirstBegins, kThreads - kMaxChunks - kFirstBegins, sh.begin, sh.from, &sh.told);
  } else if (thread >= kFirstBegins && thread - kFirstBegins <= c.team.num_ranks) {
    const int d = thread - kFirstBegins;
    uint4 w{};
    good = good && wait_word(c, Phase::local_blocks, c.team.rank, call.epoch, false, reinterpret_cast<const uint4*>(a.begins) + d, &w);
    sh.begins[d] = static_cast<int32_t>(w.y);
    if (d < c.team.num_ranks) sh.begin[d] = static_cast<int32_t>(w.x);
  }
  if (thread < c.team.num_ranks) {
    good = good && wait_offer(c, call, thread, &sh.offers[thread], a.chained ? Phase::local_blocks : Phase::offer);
    sh.block[thread] = offered_block(c, thread, sh.offers[thread]);
    sh.scales[thread] = sh.block[thread] + block_offsets(a, sh.offers[thread].rows).scales;
  }
  if (!a.chained || c.through_host) return __syncthreads_and(good);
  if (!__syncthreads_and(good) || !all_agree(c, sh.told)) return false;
  if (thread <= c.team.num_ranks) {
    int64_t begin = 0;
#pragma unroll 1
    for (int s = 0; s < thread; ++s) begin += sh.from[s];
    sh.begins[thread] = static_cast<int32_t>(min(begin, a.block_rows));
  }
  __syncthreads();
  return true;
}

/// Writes a row that lies in a stage to all ranks that get it; returns how many entries it has put behind `count`. Lane k takes the
/// token's k-th entry. The warp must commit.
template <bool kAnnounce>
__device__ __forceinline__ uint32_t send_stage(const DispatchArgs& a, const MoveShape& p, Shared& sh, const std::byte* stage, uint32_t count) {
  const auto* index = reinterpret_cast<const int32_t*>(stage + p.index_at);
  const auto* ranks = reinterpret_cast<const int32_t*>(stage + p.index_at + p.index_room);
  const int me = a.common.team.rank;
  uint32_t put = 0;
  for (int k0 = 0; k0 < a.num_topk; k0 += 32) {
    const int k = k0 + lane_id();
    const int at = k < a.num_topk ? index[k] : -1;
    const int d = at >= 0 ? ranks[k] : 0;
    const int64_t row = static_cast<int64_t>(sh.begin[d]) + at;
    const bool goes = at >= 0 && (a.straight || d != me) && row < sh.offers[d].rows;
    if (kAnnounce) {
      const bool told = goes && !sh.offers[d].rows_stay();
      const unsigned all = __ballot_sync(kFull, told);
      const auto n = static_cast<uint32_t>(__popc(all));
      sh.queue.wait_room(warp_id(), count + put, n);
      if (told) sh.queue.put(warp_id(), count + put + static_cast<uint32_t>(__popc(all & ((1u << lane_id()) - 1))), d, at);
      put += n;
    }
    if (!goes) continue;
    const int64_t rows = sh.offers[d].rows;
    bulk_store(sh.block[d] + row * a.x_block_stride, stage, static_cast<uint32_t>(a.x_bytes));
    if (a.scale_bytes) bulk_store(sh.scales[d] + row * a.scale_bytes, stage + p.scales_at, static_cast<uint32_t>(a.scale_bytes));
    int64_t at_side = core::align_up(rows * a.scale_bytes, 128);
#pragma unroll 1
    for (int s = 0; s < a.num_side; ++s) {
      bulk_store(sh.scales[d] + at_side + row * a.side[s].bytes, stage + p.side_at[s], static_cast<uint32_t>(a.side[s].bytes));
      at_side = core::align_up(at_side + rows * a.side[s].bytes, 128);
    }
  }
  return put;
}

/// Where the plan has placed a token's rows, on the way through registers to a stage: loaded when the row is asked for, put down when
/// the next one is.
struct Index {
  int at[2], rank[2];
  std::byte* stage = nullptr;

  __device__ __forceinline__ void load(const DispatchArgs& a, int64_t token, std::byte* to) {
    stage = to;
    for (int h = 0; h < 2; ++h) {
      const int k = h * 32 + lane_id();
      at[h] = k < a.num_topk ? __ldcg(a.routing.send_index + token * a.num_topk + k) : -1;
      rank[h] = k < a.num_topk ? __ldcg(a.routing.dest + token * a.num_topk + k) : -1;
    }
  }
  __device__ __forceinline__ void put(const DispatchArgs& a, const MoveShape& p) {
    if (!stage) return;
    for (int h = 0; h < 2; ++h) {
      const int k = h * 32 + lane_id();
      if (k >= a.num_topk) continue;
      reinterpret_cast<int32_t*>(stage + p.index_at)[k] = at[h];
      reinterpret_cast<int32_t*>(stage + p.index_at + p.index_room)[k] = rank[h];
    }
    stage = nullptr;
    __syncwarp();
  }
};

/// Starts to bring a token's row into a stage.
__device__ __forceinline__ void load_stage(const DispatchArgs& a, const MoveShape& p, std::byte* stage, uint64_t* full, int64_t token) {
  if (lane_id() == 0) {
    barrier_expect(full, static_cast<uint32_t>(p.row_bytes));
    bulk_load(stage, p.from + token * p.from_stride, static_cast<uint32_t>(a.x_bytes), full);
    if (a.scale_bytes) bulk_load(stage + p.scales_at, a.fp8_scales + token * a.scale_bytes, static_cast<uint32_t>(a.scale_bytes), full);
#pragma unroll 1
    for (int s = 0; s < a.num_side; ++s) {
      bulk_load(stage + p.side_at[s], a.side[s].src + token * a.side[s].src_stride, static_cast<uint32_t>(a.side[s].bytes), full);
    }
  }
  __syncwarp();
}

/// What a warp knows of the kernel that quantises ahead. It asks for tokens in ascending order.
struct Quantised {
  int parts = 0;

  /// Until the row of `token` can be loaded by bulk copies. False: given up.
  __device__ __forceinline__ bool wait(const DispatchArgs& a, int token, Call call) {
    if (!a.fp8 || !a.chained) return true;
    const int part = ahead_part(a.num_tokens, token);
    if (part < parts) return true;
    bool good = true;
    if (lane_id() == 0) good = wait_local(a.common, call.epoch, &a.flags[kQuantised + part]);
    if (!__shfl_sync(kFull, good, 0)) return false;
    fence_global_to_bulk();
    parts = part + 1;
    return true;
  }
};

/// The first rows of a warp that sends: on their way to the ring before it is known where they go.
struct FirstRows {
  static constexpr int kMost = 2;
  Tickets tickets;
  Quantised quantised;
  int token[kMost] = {-1, -1}, num = 0;
  Index index[kMost];

  __device__ __forceinline__ void load(const DispatchArgs& a, const MoveShape& p, Shared& sh, std::byte* ring, Call call) {
    tickets =
        Tickets(&a.common.lane_control->tickets[call.copy][kTokenTicket], static_cast<int>(a.num_tokens), p.senders * p.pushers, a.straight ? 16 : 8);
#pragma unroll
    for (int j = 0; j < kMost; ++j) {
      if (j >= max(1, p.push_ring / 2)) break;
      token[j] = tickets.take();
      if (token[j] < 0 || !quantised.wait(a, token[j], call)) break;
      const int stage = warp_id() * p.push_ring + j;
      load_stage(a, p, ring + static_cast<int64_t>(stage) * p.stage_bytes, &sh.full[stage], token[j]);
      num = j + 1;
    }
  }
  /// Where they go, as soon as this rank has placed them: before it knows what the others send. False: given up.
  __device__ __forceinline__ bool find(const DispatchArgs& a, const MoveShape& p, std::byte* ring, Call call) {
    bool good = true;
#pragma unroll
    for (int j = 0; j < kMost; ++j) {
      if (j >= num) break;
      if (a.chained && lane_id() == 0) good = good && wait_local(a.common, call.epoch, &a.flags[kRowsPlaced + token[j] / p.chunk_tokens]);
      good = __shfl_sync(kFull, good, 0);
      if (good) index[j].load(a, token[j], ring + static_cast<int64_t>(warp_id() * p.push_ring + j) * p.stage_bytes);
    }
    return good;
  }
  /// Instead of sending them: no copy may be under way when the block ends.
  __device__ __forceinline__ void drop(const MoveShape& p, Shared& sh) const {
    for (int j = 0; j < num; ++j) barrier_wait(&sh.full[warp_id() * p.push_ring + j], 0);
  }
};

/// A warp sends rows until no tickets are left.
template <bool kAnnounce>
__device__ __forceinline__ void push_rows(const DispatchArgs& a, const MoveShape& p, Shared& sh, std::byte* ring, FirstRows& first, Call call) {
  const int warp = warp_id(), depth = p.push_ring, ahead = max(1, depth / 2);
  const int first_stage = warp * depth;
  Tickets& tickets = first.tickets;
  int issued = first.num, stored = 0, in = first.num == depth ? 0 : first.num, out = 0;
  uint32_t phase = 0, count = 0, one_ago = 0, two_ago = 0;
  Index index;
#pragma unroll
  for (int j = 0; j < FirstRows::kMost; ++j) first.index[j].put(a, p);
  // To ask for a row is to wait for where the one before it goes: the first rows leave before the ring is full.
  for (;;) {
    for (int n = stored == 0 ? 2 : 0; n < 2 && issued - stored < ahead; ++n) {
      const int token = tickets.take();
      if (token < 0 || !first.quantised.wait(a, token, call)) break;
      bulk_wait_read_at_most(depth - ahead - 1);
      __syncwarp();
      std::byte* stage = ring + static_cast<int64_t>(first_stage + in) * p.stage_bytes;
      load_stage(a, p, stage, &sh.full[first_stage + in], token);
      index.put(a, p);
      index.load(a, token, stage);
      in = in + 1 == depth ? 0 : in + 1;
      ++issued;
    }
    if (stored == issued) break;
    barrier_wait(&sh.full[first_stage + out], phase);
    if (stored + 1 == issued) index.put(a, p);
    const uint32_t two = two_ago;
    two_ago = one_ago;
    one_ago = count;
    count += send_stage<kAnnounce>(a, p, sh, ring + static_cast<int64_t>(first_stage + out) * p.stage_bytes, count);
    bulk_commit();
    ++stored;
    out = out + 1 == depth ? 0 : out + 1;
    phase ^= out == 0;
    if (kAnnounce && two_ago != two) {  // the row before the one before: complete copies are visible to the threads that wait
      bulk_wait<2>();
      __syncwarp();
      if (lane_id() == 0) sh.queue.post(warp, two_ago);
    }
  }
  if (kAnnounce) {  // nothing follows the last rows: each is told as it is complete
    bulk_wait<1>();
    __syncwarp();
    if (lane_id() == 0) sh.queue.post(warp, one_ago);
  }
  bulk_wait<0>();
  __syncwarp();
  if (kAnnounce && lane_id() == 0) sh.queue.post(warp, count | Queue::kDone);
}

__device__ __forceinline__ void send_part(const DispatchArgs& a, const MoveShape& p, Shared& sh, std::byte* ring, FirstRows* first, Call call) {
  // Who lays rows out wants to know of each.
  bool all_stay = true;
#pragma unroll 1
  for (int d = 0; d < a.common.team.num_ranks; ++d) all_stay = all_stay && (d == a.common.team.rank || sh.offers[d].rows_stay());
  if (warp_id() < p.pushers) {
    if (all_stay) push_rows<false>(a, p, sh, ring, *first, call);
    else push_rows<true>(a, p, sh, ring, *first, call);
  } else if (!all_stay && warp_id() == kAnnouncer) {
    sh.queue.announce(a.common, call, p.pushers);
  }
  __syncthreads();
}
#endif

}  // namespace turnout::engine::cuda::move
