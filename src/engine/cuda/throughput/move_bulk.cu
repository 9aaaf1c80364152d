// Rows of a dispatch by bulk copies (TMA). Straight: every block sends; a few threads drive rings of rows, who copies a row is
// decided by ticket. Else a few blocks only send, so that the fences of their announcers wait for the link alone and rows arrive
// early; all others lay rows out as they arrive, and their own rank's rows from x, which wait for nobody's rows: with the padding they
// fill the time until the first rows come. The bits are those of move.cu.
#include "engine/cuda/kernels.h"
#include "engine/cuda/launch.h"
#include "engine/cuda/throughput/bulk.h"
#include "engine/cuda/throughput/move_send.cuh"

namespace turnout::engine::cuda {
namespace {

using move::kThreads;

#ifdef TURNOUT_HAS_BULK
using namespace move;

/// Lays out one row at all its places; lane k knows the k-th (and the one 32 further).
__device__ __forceinline__ void place_stage(const DispatchArgs& a, const MoveShape& p, const std::byte* stage, const int (&to)[2], uint64_t policy) {
  // What lies beside rows shares lines with its neighbours, which come later: those lines stay in L2 until they are full.
  for (int h = 0; h < 2; ++h) {
    if (to[h] < 0) continue;
    bulk_store(a.out_x + to[h] * a.out_stride, stage, static_cast<uint32_t>(a.x_bytes), policy);
    if (a.scale_bytes) bulk_store(a.out_scales + to[h] * a.scale_bytes, stage + p.scales_at, static_cast<uint32_t>(a.scale_bytes));
#pragma unroll 1
    for (int s = 0; s < a.num_side; ++s) {
      bulk_store(a.side[s].out + static_cast<int64_t>(to[h]) * a.side[s].bytes, stage + p.side_at[s], static_cast<uint32_t>(a.side[s].bytes));
    }
  }
}

/// Where entry k of an own token goes, once all counts are known: what the admit kernel will write to `position`.
__device__ __forceinline__ int own_place(const DispatchArgs& a, int row, int64_t token, int k) {
  const Routing& r = a.routing;
  const int64_t pair = token * a.num_topk + k;
  const int dest = __ldcg(r.dest + pair), id = __ldcg(r.topk_idx + pair), index = __ldcg(r.pair_index + pair);
  if (dest != a.common.team.rank) return -1;
  const int e = __ldg(a.common.experts->local + id);
  const int64_t nth = static_cast<int64_t>(__ldcg(r.expert_base + dest * a.num_local + e)) + index;
  return is_admitted(a, nth, row, k, __ldcg(r.cut), __ldcg(r.cut + 1)) ? static_cast<int>(__ldcg(r.expert_offsets + e) + nth) : -1;
}

/// A warp lays out rows of one kind, those that stay (kOwn) or those that arrive, until no tickets are left. False: given up.
template <bool kOwn>
__device__ bool lay_out(const DispatchArgs& a, const MoveShape& p, const Shared& sh, std::byte* my, int warps, int* slot, Call call) {
  const Common& c = a.common;
  const int me = c.team.rank, others = c.team.num_ranks - 1;
  if (!kOwn && a.chained) wait_for_previous();  // for the places of what arrives
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
    const int64_t token = kOwn ? __ldcg(a.routing.own_tokens + i) : -1;
    int to[2] = {lane_id() == 0 ? row : -1, -1};
    for (int h = 0; h < 2 && a.layout != Layout::rank_major; ++h) {
      const int k = h * 32 + lane_id();
      if (k >= a.num_topk) to[h] = -1;
      else if (kOwn && a.chained) to[h] = own_place(a, row, token, k);
      else to[h] = __ldcg(a.routing.position + static_cast<int64_t>(row) * a.num_topk + k);
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
    if (kOwn) fetch_token(a, p, token, stage);
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
  const uint64_t policy = evict_first_policy();
  for (int e = index; e < a.num_local; e += count) {
    const int64_t end = __ldcg(a.routing.expert_offsets + e + 1);
    for (int64_t i = __ldcg(a.routing.expert_offsets + e) + __ldcg(a.routing.expert_counts + e) + first; i < end; i += lanes) {
      bulk_store(a.out_x + i * a.out_stride, zeros, static_cast<uint32_t>(a.x_bytes), policy);
      if (a.scale_bytes) bulk_store(a.out_scales + i * a.scale_bytes, zeros, static_cast<uint32_t>(a.scale_bytes));
#pragma unroll 1
      for (int s = 0; s < a.num_side; ++s) bulk_store(a.side[s].out + i * a.side[s].bytes, zeros, static_cast<uint32_t>(a.side[s].bytes));
    }
  }
  bulk_commit();
}

/// `index` of `count` blocks that pad groups; -1: this one does not.
__device__ void receive_part(const DispatchArgs& a, const MoveShape& p, const Shared& sh, std::byte* ring, int index, int count, Call call) {
  const int warp = warp_id(), warps = static_cast<int>(gridDim.x) * p.workers;
  const bool counted = a.chained && threadIdx.x == 0 ? wait_local(a.common, call.epoch, &a.flags[kCounted]) : true;
  if (!__syncthreads_and(counted)) return;
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
  __syncthreads();
  FirstRows first;
  const bool loads = sends && a.quantize == Quantize::none && warp_id() < p.pushers;
  if (loads) first.load(a, p, sh, ring, call);
  const bool ready = set_up(a, sh, call);
  if (!ready && loads) first.drop(p, sh);
  if (ready) {
    if (sends) send_part(a, p, sh, ring, &first, call);
    if (kSend && a.layout == Layout::rank_major) signal_channel(c, call);
    if (kReceive && a.straight) {
      if (is_last_to_start(c, call)) wait_channels(a, sh.offers, sh.begins, call);
    } else if (kReceive) {
      const bool all = !kSend || senders == blocks;
      if (all) receive_part(a, p, sh, ring, static_cast<int>(blockIdx.x), blocks, call);
      else receive_part(a, p, sh, ring, role - senders, blocks - senders, call);
    }
  }
  if (a.chained) wait_for_previous();
  __syncthreads();
  if (kReceive && blockIdx.x == 0 && !a.cached && is_over(c, call)) clear_counts(a);
  if (kSend && c.last_of_send) advance_epoch(c, call.epoch);
#endif
}

bool aligned(const void* p, int64_t a = 0, int64_t b = 0) {
  return (reinterpret_cast<uintptr_t>(p) | static_cast<uintptr_t>(a) | static_cast<uintptr_t>(b)) % 16 == 0;
}

}  // namespace

bool can_move_bulk(const DispatchArgs& a) {
  if (!has_bulk() || a.round != 0 || a.block_rows != a.total_rows || a.x_bytes == 0 || a.num_tokens >= 1 << 25 || a.block_rows >= 1 << 25)
    return false;
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
