// Rows of a dispatch by bulk copies (TMA). Straight: every block sends; a few threads drive rings of rows, who copies a row is
// decided by ticket. Else a few blocks only send, so that the fences of their announcers wait for the link alone and rows arrive
// early; all others lay rows out as they arrive, and their own rank's rows from x. The bits are those of move.cu.
#include "engine/cuda/device/announce.cuh"
#include "engine/cuda/device/bulk_rows.cuh"
#include "engine/cuda/device/dispatch.cuh"
#include "engine/cuda/device/tickets.cuh"
#include "engine/cuda/kernels.h"
#include "engine/cuda/launch.h"
#include "engine/cuda/specialize.h"
#include "engine/cuda/throughput/bulk.h"

namespace turnout::engine::cuda {
namespace {

constexpr int kThreads = 384;

#ifdef TURNOUT_HAS_BULK
constexpr int kWarps = kThreads / 32, kAnnouncer = kWarps - 1;
constexpr int kMostPushers = kWarps - 1, kMostStages = 96;
constexpr int kQueue = 256;  ///< at least 64 for each row that is written but not yet posted
using Queue = AnnounceQueue<kMostPushers, kQueue>;

struct Shared {
  alignas(8) uint64_t full[kMostStages];
  std::byte *block[kMaxRanks], *scales[kMaxRanks];  ///< where this rank's rows go
  int32_t begin[kMaxRanks];
  Offer offers[kMaxRanks];
  int32_t begins[kMaxRanks + 1];
  Queue queue;
};

/// Chained: until the plan kernel has made its tables and placed all pairs. First one thread, so that few poll. False: given up.
__device__ bool wait_plan(const DispatchArgs& a, Call call) {
  const int chunks = num_chunks(a.num_tokens);
  bool good = threadIdx.x == 0 ? wait_local(a.common, call.epoch, &a.flags[kPlanReady]) : true;
  if (!__syncthreads_and(good)) return false;
  for (int i = static_cast<int>(threadIdx.x); good && i < chunks; i += kThreads) good = wait_local(a.common, call.epoch, &a.flags[kPlaced + i]);
  return __syncthreads_and(good);
}

__device__ void clear(const MoveShape& p, Shared& sh, std::byte* ring) {
  sh.queue.init();
  for (int i = static_cast<int>(threadIdx.x); i < kMostStages; i += kThreads) barrier_init(&sh.full[i], 1);
  for (int i = static_cast<int>(threadIdx.x) * 16; i < p.zero_bytes; i += kThreads * 16) *reinterpret_cast<uint4*>(ring + p.zero_at + i) = uint4{};
  fence_shared_to_bulk();
}

/// What a block needs to know, once the kernels before it have found it out. Those that send do not wait for the places in the result.
/// False: given up.
__device__ bool set_up(const DispatchArgs& a, Shared& sh, bool sends, Call call) {
  const Common& c = a.common;
  if (a.chained && !sends) wait_for_previous();
  if (a.chained && sends && !wait_plan(a, call)) return false;
  if (!__syncthreads_and(!is_over(c, call))) return false;
  if (!gather_offers(c, call, sh.offers)) return false;
  for (int d = static_cast<int>(threadIdx.x); d <= c.team.num_ranks; d += kThreads) {
    sh.begins[d] = __ldcg(&a.routing.recv_begin[d]);
    if (d == c.team.num_ranks) break;
    sh.block[d] = offered_block(c, d, sh.offers[d]);
    sh.scales[d] = sh.block[d] + block_offsets(a, sh.offers[d].rows).scales;
    sh.begin[d] = __ldcg(&a.routing.send_begin[d]);
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
      const unsigned all = __ballot_sync(kFull, goes);
      const auto n = static_cast<uint32_t>(__popc(all));
      sh.queue.wait_room(warp_id(), count + put, n);
      if (goes) sh.queue.put(warp_id(), count + put + static_cast<uint32_t>(__popc(all & ((1u << lane_id()) - 1))), d, at);
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
    bulk_load(stage, a.x + token * a.x_stride, static_cast<uint32_t>(a.x_bytes), full);
#pragma unroll 1
    for (int s = 0; s < a.num_side; ++s) {
      bulk_load(stage + p.side_at[s], a.side[s].src + token * a.side[s].src_stride, static_cast<uint32_t>(a.side[s].bytes), full);
    }
  }
  __syncwarp();
}

/// A warp sends rows until no tickets are left.
template <bool kAnnounce>
__device__ void push_rows(const DispatchArgs& a, const MoveShape& p, Shared& sh, std::byte* ring, Call call) {
  const int warp = warp_id(), depth = p.push_ring, ahead = max(1, depth / 2);
  const int first_stage = warp * depth;
  Tickets tickets(&a.common.lane_control->tickets[call.copy][kTokenTicket], static_cast<int>(a.num_tokens), p.senders * p.pushers,
                  kAnnounce ? 8 : 16);
  int issued = 0, stored = 0, in = 0, out = 0;
  uint32_t phase = 0, count = 0, one_ago = 0, two_ago = 0;
  Index index;
  for (;;) {
    while (issued - stored < ahead) {
      const int token = tickets.take();
      if (token < 0) break;
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
  bulk_wait<0>();
  __syncwarp();
  if (kAnnounce && lane_id() == 0) sh.queue.post(warp, count | Queue::kDone);
}

/// The same with rows quantised on their way: through registers to the stage.
template <bool kAnnounce>
__device__ void push_quantised(const DispatchArgs& a, const MoveShape& p, Shared& sh, std::byte* ring, Call call) {
  const int warp = warp_id(), depth = p.push_ring;
  Tickets tickets(&a.common.lane_control->tickets[call.copy][kTokenTicket], static_cast<int>(a.num_tokens), p.senders * p.pushers, 4);
  int slot = 0;
  uint32_t count = 0;
  for (;;) {
    const int token = tickets.take();
    if (token < 0) break;
    std::byte* stage = ring + static_cast<int64_t>(warp * depth + slot) * p.stage_bytes;
    slot = slot + 1 == depth ? 0 : slot + 1;
    bulk_wait_read_at_most(depth - 1);
    __syncwarp();
    Index index;
    index.load(a, token, stage);
    fetch_token(a, p, token, stage);
    index.put(a, p);
    fence_shared_to_bulk();
    __syncwarp();
    const uint32_t before = count;
    count += send_stage<kAnnounce>(a, p, sh, stage, count);
    bulk_commit();
    if (kAnnounce && before) {
      bulk_wait<1>();
      __syncwarp();
      if (lane_id() == 0) sh.queue.post(warp, before);
    }
  }
  bulk_wait<0>();
  __syncwarp();
  if (kAnnounce && lane_id() == 0) sh.queue.post(warp, count | Queue::kDone);
}

/// Lays out one row at all its places; lane k knows the k-th (and the one 32 further).
__device__ __forceinline__ void place_stage(const DispatchArgs& a, const MoveShape& p, const std::byte* stage, const int (&to)[2], uint64_t policy) {
  for (int h = 0; h < 2; ++h) {
    if (to[h] < 0) continue;
    bulk_store(a.out_x + to[h] * a.out_stride, stage, static_cast<uint32_t>(a.x_bytes), policy);
    if (a.scale_bytes) bulk_store(a.out_scales + to[h] * a.scale_bytes, stage + p.scales_at, static_cast<uint32_t>(a.scale_bytes), policy);
#pragma unroll 1
    for (int s = 0; s < a.num_side; ++s) {
      bulk_store(a.side[s].out + static_cast<int64_t>(to[h]) * a.side[s].bytes, stage + p.side_at[s], static_cast<uint32_t>(a.side[s].bytes), policy);
    }
  }
}

/// A warp lays out rows of one kind, those that stay (kOwn) or those that arrive, until no tickets are left. False: given up.
template <bool kOwn>
__device__ bool lay_out(const DispatchArgs& a, const MoveShape& p, const Shared& sh, std::byte* my, int warps, int* slot, Call call) {
  const Common& c = a.common;
  const int me = c.team.rank, others = c.team.num_ranks - 1;
  int most = 0;
  for (int s = 0; s < c.team.num_ranks; ++s) most = s == me ? most : max(most, sh.begins[s + 1] - sh.begins[s]);
  Tickets tickets(&c.lane_control->tickets[call.copy][kOwn ? kOwnTicket : kRowTicket], kOwn ? sh.begins[me + 1] - sh.begins[me] : most * others,
                  warps, 1);
  const uint64_t policy = evict_first_policy();
  for (;;) {
    const int item = tickets.take();
    if (item < 0) return true;
    const int s = kOwn ? me : (me + 1 + item % others) % c.team.num_ranks, i = kOwn ? item : item / others;
    const int row = sh.begins[s] + i;
    if (row >= sh.begins[s + 1]) continue;
    int to[2] = {lane_id() == 0 ? row : -1, -1};
    if (a.layout != Layout::rank_major) {
      const int32_t* position = a.routing.position + static_cast<int64_t>(row) * a.num_topk;
      for (int h = 0; h < 2; ++h) to[h] = h * 32 + lane_id() < a.num_topk ? __ldcg(position + h * 32 + lane_id()) : -1;
    }
    bool came = true;
    if (!kOwn && lane_id() == 0) {
      const std::byte* signal = c.team.base[me] + c.arena.row_at(c.lane, call.copy, s, i);
      came = wait_signal(c, Phase::rows, s, call.epoch, true, reinterpret_cast<const uint64_t*>(signal), nullptr);
    }
    if (!__shfl_sync(kFull, came, 0)) return false;
    bulk_wait_read_at_most(p.work_ring - 1);
    __syncwarp();
    std::byte* stage = my + static_cast<int64_t>(*slot) * p.stage_bytes;
    *slot = *slot + 1 == p.work_ring ? 0 : *slot + 1;
    if (kOwn) fetch_token(a, p, a.routing.own_tokens[i], stage);
    else fetch_arrived(a, p, row, stage);
    fence_shared_to_bulk();
    __syncwarp();
    place_stage(a, p, stage, to, policy);
    bulk_commit();
    if (!a.arrived) continue;
    bulk_wait<0>();
    __syncwarp();
    if (lane_id() == 0) {
      __threadfence_system();
      atomicAdd_system(reinterpret_cast<unsigned long long*>(&a.arrived[s]), 1ull);
    }
  }
}

/// Padding of expert_major groups is zero. The warps that lay no rows out do it.
__device__ void pad_groups(const DispatchArgs& a, const MoveShape& p, const std::byte* zeros, int index, int count) {
  const int lanes = (kWarps - p.workers) * 32, first = static_cast<int>(threadIdx.x) - p.workers * 32;
  for (int e = index; e < a.num_local; e += count) {
    const int64_t end = __ldcg(a.routing.expert_offsets + e + 1);
    for (int64_t i = __ldcg(a.routing.expert_offsets + e) + __ldcg(a.routing.expert_counts + e) + first; i < end; i += lanes) {
      bulk_store(a.out_x + i * a.out_stride, zeros, static_cast<uint32_t>(a.x_bytes));
      if (a.scale_bytes) bulk_store(a.out_scales + i * a.scale_bytes, zeros, static_cast<uint32_t>(a.scale_bytes));
#pragma unroll 1
      for (int s = 0; s < a.num_side; ++s) bulk_store(a.side[s].out + i * a.side[s].bytes, zeros, static_cast<uint32_t>(a.side[s].bytes));
    }
  }
  bulk_commit();
}

__device__ void send_part(const DispatchArgs& a, const MoveShape& p, Shared& sh, std::byte* ring, Call call) {
  const bool quantised = a.quantize != Quantize::none;
  if (warp_id() < p.pushers) {
    if (a.straight) quantised ? push_quantised<false>(a, p, sh, ring, call) : push_rows<false>(a, p, sh, ring, call);
    else quantised ? push_quantised<true>(a, p, sh, ring, call) : push_rows<true>(a, p, sh, ring, call);
  } else if (!a.straight && warp_id() == kAnnouncer) {
    sh.queue.announce(a.common, call, p.pushers);
  }
  if (a.straight) signal_channel(a.common, call);
  __syncthreads();
}

/// `index` of `count` blocks that pad groups; -1: this one does not.
__device__ void receive_part(const DispatchArgs& a, const MoveShape& p, const Shared& sh, std::byte* ring, int index, int count, Call call) {
  const int warp = warp_id(), warps = static_cast<int>(gridDim.x) * p.workers;
  if (warp < p.workers) {
    std::byte* my = ring + static_cast<int64_t>(warp) * p.work_ring * p.stage_bytes;
    int slot = 0;
    // Half of the warps begin with what is here already.
    bool good = true;
#pragma unroll 1
    for (int part = 0; good && part < 2; ++part) {
      good = (warp + part) % 2 == 0 ? lay_out<true>(a, p, sh, my, warps, &slot, call) : lay_out<false>(a, p, sh, my, warps, &slot, call);
    }
  } else if (p.zero_bytes && index >= 0) {
    pad_groups(a, p, ring + p.zero_at, index, count);
  }
  bulk_wait<0>();
}
#endif

template <bool kSend, bool kReceive>
__global__ void __launch_bounds__(kThreads, 1) bulk_move_kernel(const __grid_constant__ DispatchArgs a, const __grid_constant__ MoveShape p) {
#ifdef TURNOUT_HAS_BULK
  extern __shared__ __align__(128) std::byte ring[];
  __shared__ Shared sh;
  const Common& c = a.common;
  const Call call = call_of(c);
  const int blocks = static_cast<int>(gridDim.x);
  clear(p, sh, ring);
  // A block may wait only for blocks that have started: who is what goes by the order of starting.
  const int role = kSend && !a.straight ? take_role(c, call, kSendRoleTicket) : 0;
  const int senders = min(p.senders, blocks);
  const bool sends = kSend && (a.straight || role < senders);
  if (set_up(a, sh, sends, call)) {
    if (sends) send_part(a, p, sh, ring, call);
    if (kReceive && a.straight) {
      if (is_last_to_start(c, call)) wait_channels(a, sh.offers, sh.begins, call);
    } else if (kReceive) {
      if (a.chained) wait_for_previous();  // the places in the result
      const bool all = !kSend || senders == blocks;
      if (all) receive_part(a, p, sh, ring, static_cast<int>(blockIdx.x), blocks, call);
      else receive_part(a, p, sh, ring, role - senders, blocks - senders, call);
    }
  }
  if (a.chained) wait_for_previous();
  __syncthreads();
  if (kReceive && blockIdx.x == 0 && is_over(c, call)) clear_counts(a);
  if (kSend && c.last_of_send) advance_epoch(c, call.epoch);
#endif
}

bool aligned(const void* p, int64_t a = 0, int64_t b = 0) {
  return (reinterpret_cast<uintptr_t>(p) | static_cast<uintptr_t>(a) | static_cast<uintptr_t>(b)) % 16 == 0;
}

}  // namespace

bool can_move_bulk(const DispatchArgs& a) {
  if (!has_bulk() || a.first_row != 0 || a.x_bytes == 0 || a.num_tokens >= 1 << 25 || a.block_rows >= 1 << 25) return false;
  if (!aligned(a.x, a.x_stride, a.x_bytes) || !aligned(nullptr, a.x_block_stride)) return false;
  if (!a.straight && !aligned(a.out_x, a.out_stride)) return false;
  if (a.quantize != Quantize::none) {
    const bool half = a.dtype == DType::bf16 || a.dtype == DType::fp16;
    if (!half || a.hidden % 128 != 0 || a.scale_bytes % 16 != 0 || !aligned(a.out_scales)) return false;
  }
  for (int s = 0; s < a.num_side; ++s) {
    const SideArray& side = a.side[s];
    if (side.bytes == 0 || !aligned(side.src, side.src_stride, side.bytes) || (!a.straight && !aligned(side.out))) return false;
  }
  const MoveShape p = move_shape(a, 1);
  return p.zero_at / p.stage_bytes >= 4;  // rows so long that no ring holds them go the general way
}

cudaError_t launch_move_bulk(const DispatchArgs& a, bool send, bool receive, int blocks, cudaStream_t stream) {
  const MoveShape p = move_shape(a, blocks);
  const bool chained = a.chained && send && receive;
  if (send && receive) return launch_kernel(bulk_move_kernel<true, true>, blocks, kThreads, kRingBytes, stream, chained, a, p);
  if (send) return launch_kernel(bulk_move_kernel<true, false>, blocks, kThreads, kRingBytes, stream, false, a, p);
  return launch_kernel(bulk_move_kernel<false, true>, blocks, kThreads, kRingBytes, stream, false, a, p);
}

cudaError_t prepare_move_bulk() {
  for (const void* kernel :
       {reinterpret_cast<const void*>(bulk_move_kernel<true, true>), reinterpret_cast<const void*>(bulk_move_kernel<true, false>),
        reinterpret_cast<const void*>(bulk_move_kernel<false, true>)}) {
    cudaFuncAttributes unused;
    const cudaError_t bad =
        has_bulk() ? cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kRingBytes) : cudaFuncGetAttributes(&unused, kernel);
    if (bad) return bad;
  }
  return cudaSuccess;
}

}  // namespace turnout::engine::cuda
