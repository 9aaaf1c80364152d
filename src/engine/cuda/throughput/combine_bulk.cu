// Combine of two-byte floats by bulk copies. In each block one warp looks up which rows come next (scout), one brings them to a ring in
// shared memory (loader), fourteen sum them, one announces what has been sent. A block first sums rows for other ranks and writes the
// partial sums to them; its own tokens come so much later that the partial sums of the others are here by then. Sums and roundings
// are those of combine.cu. On few blocks, rows that need no sum on the expert's side are sent by a warp and a ring of their own
// (combine_push.cuh), and own tokens are summed as soon as what they need has come.
//
// Items are taken by ticket in ascending order. Where one ring serves both, a token's turn comes only when the partial sums that the
// others need up to there, and some more, have been taken before it in the same ring or by other blocks. So of all that wait, the block
// with the smallest token waits for a partial sum that nobody's wait holds up: no grid is too large for the SMs that are free.
#include "engine/cuda/kernels.h"
#include "engine/cuda/launch.h"
#include "engine/cuda/throughput/bulk.h"
#include "engine/cuda/throughput/combine_push.cuh"
#include "engine/cuda/throughput/combine_rows.cuh"

namespace turnout::engine::cuda {
namespace {

using bulk::kThreads;

#ifdef TURNOUT_HAS_BULK
using namespace bulk;

/// Tells the other ranks of partial sums that all summers have written. A system fence waits for the stores of its SM: none of them
/// executes one.
__device__ void announce(const CombineArgs& a, Shared& sh, int posters, Call call) {
  const Common& c = a.common;
  uint32_t told = 0;
  for (;;) {
    const uint32_t total = sh.num_pushes, have = __reduce_min_sync(kFull, lane_id() < posters ? sh.posted[lane_id()] : ~0u);
    if (have != told) {
      __threadfence_block();
      fence_system();
      for (uint32_t i = told + static_cast<uint32_t>(lane_id()); i < have; i += 32) {
        const uint32_t to = sh.push_to[i % kPushRoom];
        std::byte* p = c.team.base[to >> 25] + c.arena.row_at(c.lane, call.copy, c.team.rank, to & ((1u << 25) - 1));
        store_relaxed(reinterpret_cast<uint64_t*>(p), signal_of(call.epoch, sh.push_mask[i % kPushRoom]));
      }
      told = have;
      __syncwarp();
      if (lane_id() == 0) sh.told = told;
    }
    if (__all_sync(kFull, told == total)) return;
  }
}

__device__ bool set_up(const CombineArgs& a, const CombineShape& p, Shared& sh, Call call) {
  const Common& c = a.common;
  const int tid = static_cast<int>(threadIdx.x);
  for (int r = tid; r <= c.team.num_ranks; r += kThreads) {
    sh.begins[r] = a.routing.recv_begin[r];
    if (r == c.team.num_ranks) break;
    sh.sent[r] = a.routing.sent[r];
    sh.send_offset[r] = a.routing.send_offset[r];
    sh.record_begin[r] = a.routing.record_begin[r];
  }
  if (tid < p.stages) barrier_init(&sh.full[tid], 1), barrier_init(&sh.empty[tid], kSummers);
  if (tid < p.push_stages) barrier_init(&sh.push_full[tid], 1);
  if (tid < 2) barrier_init(&sh.batch_full[tid], 1), barrier_init(&sh.batch_empty[tid], 1);
  if (tid < kSummers) sh.posted[tid] = 0;
  if (tid == 0) sh.told = 0, sh.num_pushes = ~0u, sh.stopped = 0;
  fence_shared_to_bulk();
  if (!__syncthreads_and(!is_over(c, call))) return false;
  return start_call(a, call, take_role(c, call, kRoleTicket), sh.offers, &sh.facts);
}
#endif

template <bool kBf16, int kEach>
__global__ void __launch_bounds__(kThreads, 1) bulk_combine_kernel(const __grid_constant__ CombineArgs a, const __grid_constant__ CombineShape p) {
#ifdef TURNOUT_HAS_BULK
  extern __shared__ __align__(128) std::byte ring[];
  __shared__ Shared sh;
  const Common& c = a.common;
  const Call call = call_of(c);
  const bool started = set_up(a, p, sh, call);
  if (started) {
    if (warp_id() == kScout) Scout(a, p, sh, call).run();
    else if (warp_id() == kLoader) Loader(a, p, sh, ring, call).run();
    else if (warp_id() == kAnnouncer) announce(a, sh, p.push_stages ? 1 : kSummers, call);
    else if (warp_id() != kPusher) Summer<kBf16, kEach>(a).run(p, sh, ring);
    else if (p.push_stages) Pusher(a, p, sh, ring + static_cast<int64_t>(p.stages) * p.stage_bytes, call).run();
  }
  if (__syncthreads_or(!started || is_over(c, call))) {
    poison(a, static_cast<int64_t>(blockIdx.x) * num_warps() + warp_id(), static_cast<int64_t>(gridDim.x) * num_warps());
  }
  __syncthreads();
  if (c.last_of_send) advance_epoch(c, call.epoch);
#endif
}

using Kernel = void (*)(CombineArgs, CombineShape);
template <bool kBf16>
Kernel kernel_of(int each) {
  return each == 1 ? bulk_combine_kernel<kBf16, 1> : each == 2 ? bulk_combine_kernel<kBf16, 2> : bulk_combine_kernel<kBf16, 3>;
}
int each_of(int64_t hidden) {
  const int64_t n = (hidden / 8 + bulk::kSumThreads - 1) / bulk::kSumThreads;
  return n <= 3 ? static_cast<int>(n) : 0;
}
bool aligned(const void* p, int64_t a) { return (reinterpret_cast<uintptr_t>(p) | static_cast<uintptr_t>(a)) % 16 == 0; }

}  // namespace

bool can_combine_bulk(const CombineArgs& a) {
  if (!has_bulk() || (a.dtype != DType::bf16 && a.dtype != DType::fp16) || a.wire != Wire::payload || a.has_side || a.node_of_rank) return false;
  if (a.num_topk > 32 || a.num_tokens >= 1 << 24 || a.hidden % 8 != 0 || a.hidden < 8 || each_of(a.hidden) == 0) return false;
  const CombineShape p = combine_shape(a, 1);
  return aligned(a.y, a.y_stride) && aligned(a.out, a.out_stride) && p.stages + p.push_stages >= 6;
}

cudaError_t launch_combine_bulk(const CombineArgs& a, int blocks, cudaStream_t stream) {
  const Kernel kernel = a.dtype == DType::bf16 ? kernel_of<true>(each_of(a.hidden)) : kernel_of<false>(each_of(a.hidden));
  return launch_kernel(kernel, blocks, kThreads, kRingBytes, stream, false, a, combine_shape(a, blocks));
}

cudaError_t prepare_combine_bulk() {
  for (const int each : {1, 2, 3}) {
    for (const Kernel kernel : {kernel_of<true>(each), kernel_of<false>(each)}) {
      if (const cudaError_t bad = load_kernel(reinterpret_cast<const void*>(kernel), has_bulk() ? kRingBytes : 0)) return bad;
    }
  }
  return cudaSuccess;
}

}  // namespace turnout::engine::cuda
