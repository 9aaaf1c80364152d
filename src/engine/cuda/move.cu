// Last kernel of a dispatch: rows. A warp moves a row. Where the destination says that rows stay, they have gone to their final place
// in the block that it offered, and each sending block announces once, at its end. Else rows are announced one by one, and the
// destination lays them out as they arrive. The rows that stay on a rank are laid out from x itself.
#include "engine/cuda/device/chunk.cuh"
#include "engine/cuda/device/dispatch.cuh"
#include "engine/cuda/device/tickets.cuh"
#include "engine/cuda/kernels.h"
#include "engine/cuda/launch.h"
#include "engine/cuda/throughput/bulk.h"

namespace turnout::engine::cuda {
namespace {

constexpr int kThreads = 512;

/// A row of the source's x (quantised if asked), its scales and side arrays, to places that are given.
__device__ __forceinline__ void write_row(const DispatchArgs& a, int64_t token, std::byte* x, std::byte* scales) {
  const std::byte* from = a.x + token * a.x_stride;
  if (a.quantize == Quantize::none) copy_row(x, from, a.x_bytes);
  else quantize_row(a.dtype, a.quantize, from, a.hidden, x, scales);
}

__device__ void send_row(const DispatchArgs& a, int64_t token, std::byte* block, int64_t rows, int64_t row) {
  const BlockOffsets offsets = block_offsets(a, rows);
  write_row(a, token, block + row * a.x_block_stride, block + offsets.scales + row * a.scale_bytes);
  for (int s = 0; s < a.num_side; ++s) {
    const SideArray& side = a.side[s];
    copy_row(block + side_offset(a, offsets, rows, s) + row * side.bytes, side.src + token * side.src_stride, side.bytes);
  }
}

/// Lays out one row that has arrived (or, for `token` >= 0, that never left) at row `to` of the result.
__device__ void place_row(const DispatchArgs& a, const std::byte* block, int64_t row, int64_t token, int64_t to) {
  std::byte* x = a.out_x + to * a.out_stride;
  std::byte* scales = a.out_scales + to * a.scale_bytes;
  const BlockOffsets offsets = block_offsets(a, a.block_rows);
  if (token >= 0) {
    write_row(a, token, x, scales);
  } else {
    copy_row(x, block + row * a.x_block_stride, a.x_bytes);
    if (a.scale_bytes) copy_row(scales, block + offsets.scales + row * a.scale_bytes, a.scale_bytes);
  }
  for (int s = 0; s < a.num_side; ++s) {
    const SideArray& side = a.side[s];
    const std::byte* from = token >= 0 ? side.src + token * side.src_stride : block + side_offset(a, offsets, a.block_rows, s) + row * side.bytes;
    copy_row(side.out + to * side.bytes, from, side.bytes);
  }
}

/// By ticket: a block waits for rows only when all of this rank's have been taken by blocks that have started.
__device__ void send_rows(const DispatchArgs& a, const Offer* offers, const int32_t* slots, Call call) {
  const Common& c = a.common;
  const int topk = a.num_topk, me = c.team.rank;
  Tickets tickets(&c.lane_control->tickets[call.copy][kTokenTicket], static_cast<int>(a.num_tokens), static_cast<int>(gridDim.x) * num_warps(), 16);
  for (int64_t token = tickets.take(); token >= 0; token = tickets.take()) {
    for (int k0 = 0; k0 < topk; k0 += 32) {
      const int k = k0 + lane_id();
      const int at = k < topk ? a.routing.send_index[token * topk + k] : -1;
      const int dest = at >= 0 ? a.routing.dest[token * topk + k] : -1;
      unsigned left = __ballot_sync(kFull, at >= 0 && (a.straight || dest != me));
      for (; left; left &= left - 1) {
        const int from = __ffs(left) - 1;
        const int d = __shfl_sync(kFull, dest, from), i = __shfl_sync(kFull, at, from);
        const int row = slots[d] + i;
        if (static_cast<uint32_t>(row) >= offers[d].rows) continue;
        send_row(a, token, offered_block(c, d, offers[d]), offers[d].rows, row);
        if (offers[d].rows_stay()) continue;
        __syncwarp();
        if (lane_id() == 0) {
          fence_system();
          store_release(reinterpret_cast<uint64_t*>(c.team.base[d] + c.arena.row_at(c.lane, call.copy, me, i)), signal_of(call.epoch, 0));
        }
      }
    }
  }
}

/// Rows of this round as they arrive in the own block. `first` and `step` count warps.
__device__ void receive_rows(const DispatchArgs& a, const int32_t* begins, Call call, int first, int step) {
  const Common& c = a.common;
  const Routing& r = a.routing;
  const int num_ranks = c.team.num_ranks, me = c.team.rank, topk = a.num_topk;
  const std::byte* block = c.team.base[me] + a.block;
  const int begin = static_cast<int>(min(a.round * a.block_rows, static_cast<int64_t>(begins[num_ranks])));
  const int end = static_cast<int>(min(begin + a.block_rows, static_cast<int64_t>(begins[num_ranks])));
  for (int row = begin + first; row < end; row += step) {
    int s = 0;
    while (row >= begins[s + 1]) ++s;
    int64_t token = -1;
    if (s == me) {
      token = r.own_tokens[row - begins[s]];
    } else {
      const std::byte* p = c.team.base[me] + c.arena.row_at(c.lane, call.copy, s, row - begins[s]);
      bool came = true;
      if (lane_id() == 0) came = wait_signal(c, Phase::rows, s, call.epoch, true, reinterpret_cast<const uint64_t*>(p), nullptr);
      if (!__shfl_sync(kFull, came, 0)) return;
    }
    if (a.layout == Layout::rank_major) {
      place_row(a, block, row - begin, token, row);
    } else {
      for (int k0 = 0; k0 < topk; k0 += 32) {
        const int k = k0 + lane_id();
        const int at = k < topk ? __ldcg(r.position + static_cast<int64_t>(row) * topk + k) : -1;
        for (unsigned left = __ballot_sync(kFull, at >= 0); left; left &= left - 1) {
          place_row(a, block, row - begin, token, __shfl_sync(kFull, at, __ffs(left) - 1));
        }
      }
    }
    if (a.arrived) {
      __syncwarp();
      if (lane_id() == 0) {
        __threadfence_system();
        atomicAdd_system(reinterpret_cast<unsigned long long*>(&a.arrived[s]), 1ull);
      }
    }
  }
}

/// Padding of expert_major groups is zero.
__device__ void zero_padding(const DispatchArgs& a, int local, int64_t first, int64_t step) {
  const Routing& r = a.routing;
  if (a.alignment == 1) return;
  for (int e = 0; e < local; ++e) {
    const int64_t end = __ldcg(r.expert_offsets + e + 1);
    for (int64_t i = __ldcg(r.expert_offsets + e) + __ldcg(r.expert_counts + e) + first; i < end; i += step) {
      zero_row(a.out_x + i * a.out_stride, a.x_bytes);
      if (a.scale_bytes) zero_row(a.out_scales + i * a.scale_bytes, a.scale_bytes);
      for (int s = 0; s < a.num_side; ++s) zero_row(a.side[s].out + i * a.side[s].bytes, a.side[s].bytes);
    }
  }
}

template <bool kSend, bool kReceive>
__global__ void __launch_bounds__(kThreads, 1) move_kernel(const __grid_constant__ DispatchArgs a) {
  __shared__ Offer offers[kMaxRanks];
  __shared__ int32_t begins[kMaxRanks + 1], slots[kMaxRanks];
  const Common& c = a.common;
  const Call call = call_of(c);
  const int local = a.num_local;
  for (int s = static_cast<int>(threadIdx.x); s <= c.team.num_ranks; s += kThreads) begins[s] = a.routing.recv_begin[s];
  bool good = __syncthreads_and(!is_over(c, call) && !(a.cached && is_broken(a.routing)));
  if (good) good = gather_offers(c, call, offers, false);
  const int first = static_cast<int>(blockIdx.x) * num_warps() + warp_id(), step = static_cast<int>(gridDim.x) * num_warps();
  if (kSend && good) {
    // Where this rank's rows begin in the blocks of this round.
    for (int d = static_cast<int>(threadIdx.x); d < c.team.num_ranks; d += kThreads) {
      const int64_t earlier = min(static_cast<int64_t>(a.round) * offers[d].rows, static_cast<int64_t>(INT_MAX));
      slots[d] = a.routing.send_begin[d] - static_cast<int32_t>(earlier);
    }
    __syncthreads();
    send_rows(a, offers, slots, call);
    if (a.layout == Layout::rank_major) signal_channel(c, call);
  }
  if (kReceive && good) {
    if (a.straight) {
      if (is_last_to_start(c, call)) good = wait_channels(a, offers, begins, call);
    } else {
      receive_rows(a, begins, call, first, step);
      if (a.layout == Layout::expert_major && a.round == 0) zero_padding(a, local, first, step);
    }
  }
  __syncthreads();
  if (kReceive && blockIdx.x == 0 && !a.cached && is_over(c, call)) clear_counts(a);
  if (kSend && c.last_of_send) advance_epoch(c, call.epoch);
}

CallKernels<DispatchArgs> kernels() { return {move_kernel<true, true>, move_kernel<true, false>, move_kernel<false, true>}; }

}  // namespace

cudaError_t launch_move(const DispatchArgs& a, bool send, bool receive, int blocks, cudaStream_t stream) {
  if (can_move_bulk(a)) return launch_move_bulk(a, send, receive, blocks, stream);
  return kernels().launch(a, send, receive, blocks, kThreads, stream);
}
cudaError_t prepare_move() {
  if (const cudaError_t bad = kernels().load()) return bad;
  if (const cudaError_t bad = prepare_quantize_ahead()) return bad;
  return prepare_move_bulk();
}

}  // namespace turnout::engine::cuda
