// Second kernel of a dispatch: which pairs are admitted, where their rows go in the result, and what the result says about
// itself (counts, offsets, sorted rows). One block makes the tables; then all blocks go over the received ids.
#define TURNOUT_WAITS_CALL 1
#include "engine/cuda/device/dispatch.cuh"
#include "engine/cuda/device/header.cuh"
#include "engine/cuda/device/rows.cuh"
#include "engine/cuda/kernels.h"
#include "engine/cuda/launch.h"

namespace turnout::engine::cuda {
namespace {

constexpr int kThreads = 512;

__device__ __forceinline__ int64_t padded(int64_t n, int64_t alignment) { return (n + alignment - 1) / alignment * alignment; }

/// Sum over the block; every thread gets it.
__device__ int64_t block_sum(int64_t v) {
  __shared__ int64_t partial[kThreads / 32];
  for (int d = 16; d > 0; d /= 2) v += __shfl_xor_sync(kFull, v, d);
  __syncthreads();
  if (lane_id() == 0) partial[warp_id()] = v;
  __syncthreads();
  int64_t sum = 0;
  for (int w = 0; w < kThreads / 32; ++w) sum += partial[w];
  return sum;
}

struct Received {  // ids, positions and weights as the sources put them into this rank's block
  const int32_t* idx;
  const int32_t* pair;
  const float* weights;
};
__device__ __forceinline__ Received received(const DispatchArgs& a) {
  const std::byte* block = a.common.team.base[a.common.team.rank] + a.block;
  const BlockOffsets offsets = block_offsets(a, a.block_rows, a.total_rows);
  return {reinterpret_cast<const int32_t*>(block + offsets.idx), reinterpret_cast<const int32_t*>(block + offsets.pair),
          reinterpret_cast<const float*>(block + offsets.weights)};
}

__device__ bool wait_meta(const DispatchArgs& a, Call call) {
  const Common& c = a.common;
  bool good = true;
  for (int i = static_cast<int>(threadIdx.x); good && i < c.team.num_ranks * kMaxChunks; i += kThreads) {
    const int s = i / kMaxChunks, chunk = i % kMaxChunks;
    if (chunk >= num_chunks(a.routing.source_tokens[s])) continue;
    const std::byte* p = c.team.base[c.team.rank] + c.arena.channel_at(c.lane, call.copy, s, chunk);
    good = wait_signal(c, Phase::meta, s, call.epoch, true, reinterpret_cast<const uint64_t*>(p), nullptr);
  }
  return __syncthreads_and(good);
}

/// Adds the pairs of rows [begin, end) to counts[e]. The block calls it.
__device__ void count_pairs(const DispatchArgs& a, int64_t begin, int64_t end, int32_t* counts) {
  const Received in = received(a);
  for (int64_t i = begin * a.num_topk + threadIdx.x; i < end * a.num_topk; i += kThreads) {
    const int e = __ldcg(in.idx + i);
    if (e >= 0) atomicAdd(&counts[e], 1);
  }
  __syncthreads();
}

/// Rows of the result if the first sources (`base` their pairs) and rows [begin, end) of the next are admitted.
__device__ int64_t padded_rows(const DispatchArgs& a, const int32_t* base, int64_t begin, int64_t end, int local) {
  int32_t* counts = a.routing.expert_counts;
  __syncthreads();
  for (int e = static_cast<int>(threadIdx.x); e < local; e += kThreads) counts[e] = base[e];
  __syncthreads();
  count_pairs(a, begin, end, counts);
  int64_t sum = 0;
  for (int e = static_cast<int>(threadIdx.x); e < local; e += kThreads) sum += padded(__ldcg(counts + e), a.alignment);
  return block_sum(sum);
}

/// expert_major that does not fit: finds the first pair, in (source, token, k) order, that does not. Leaves expert_counts of what
/// is admitted. Row and k of that pair go to routing.cut.
__device__ void find_cut(const DispatchArgs& a, int local) {
  const Routing& r = a.routing;
  const int num_ranks = a.common.team.num_ranks;
  int s = 0;
  for (; s + 1 < num_ranks; ++s) {  // the source in which it lies: the next source's base is all of this one
    int64_t sum = 0;
    for (int e = static_cast<int>(threadIdx.x); e < local; e += kThreads) sum += padded(r.expert_base[(s + 1) * local + e], a.alignment);
    if (block_sum(sum) > a.capacity) break;
  }
  const int32_t* base = r.expert_base + s * local;
  int64_t low = r.recv_begin[s], high = r.recv_begin[s + 1];  // rows before `low` fit; with row `high` they do not
  const int64_t begin = low, end = high;
  while (low < high) {
    const int64_t middle = (low + high + 1) / 2;
    if (padded_rows(a, base, begin, middle, local) <= a.capacity) low = middle;
    else high = middle - 1;
  }
  const int64_t rows = padded_rows(a, base, begin, low, local);
  if (threadIdx.x == 0) {
    int k = 0;
    int64_t used = rows;
    if (low < end) {
      const Received in = received(a);
      for (; k < a.num_topk; ++k) {
        const int e = __ldcg(in.idx + low * a.num_topk + k);
        if (e < 0) continue;
        const int64_t cost = __ldcg(r.expert_counts + e) % a.alignment == 0 ? a.alignment : 0;
        if (used + cost > a.capacity) break;
        used += cost;
        ++r.expert_counts[e];
      }
    }
    r.cut[0] = static_cast<int32_t>(low);
    r.cut[1] = k;
  }
  __syncthreads();
}

/// Counts of each expert become offsets; returns the total. One warp.
__device__ int64_t prefix_offsets(const DispatchArgs& a, int local, const volatile int32_t* counts) {
  const Routing& r = a.routing;
  int64_t begin = 0;
  for (int at = 0; at < local; at += 32) {
    const int e = at + lane_id();
    const int64_t n = e < local ? padded(counts[e], a.layout == Layout::expert_major ? a.alignment : 1) : 0;
    int64_t run = n;
    for (int d = 1; d < 32; d *= 2) {
      const int64_t v = __shfl_up_sync(kFull, run, d);
      if (lane_id() >= d) run += v;
    }
    if (e < local) r.expert_offsets[e] = a.layout == Layout::expert_slab ? e * a.capacity : begin + run - n;
    begin += __shfl_sync(kFull, run, 31);
  }
  if (lane_id() == 0) r.expert_offsets[local] = a.layout == Layout::expert_slab ? local * a.capacity : begin;
  return begin;
}

/// What the result says about itself, from the counts of what is admitted, which may lie in shared memory. The block calls it.
__device__ void finish_tables(const DispatchArgs& a, int local, const volatile int32_t* counts, int64_t all_pairs, int64_t asked) {
  const Routing& r = a.routing;
  int64_t admitted = 0;
  for (int e = static_cast<int>(threadIdx.x); e < local; e += kThreads) admitted += counts[e];
  admitted = block_sum(admitted);
  if (warp_id() == 0) {
    const int64_t rows = prefix_offsets(a, local, counts), token_rows = r.recv_begin[a.common.team.num_ranks];
    if (lane_id() == 0) {
      *r.num_rows = a.layout == Layout::rank_major ? token_rows : a.layout == Layout::expert_major ? rows : admitted;
      *r.num_dropped = a.layout == Layout::rank_major ? asked - token_rows : all_pairs - admitted;
    }
  }
  __syncthreads();
}

struct Totals {
  int64_t pairs, asked;
  bool fits;  ///< else it takes a look at the ids of received rows to know what is admitted
};

/// Tables from the counts alone, as they are if everything is admitted.
__device__ Totals make_tables(const DispatchArgs& a, int local) {
  constexpr int kAtOnce = 8, kMostShared = 1024;
  __shared__ int32_t shared_counts[kMostShared];
  const Routing& r = a.routing;
  const int num_ranks = a.common.team.num_ranks, me = a.common.team.rank;
  // Nothing waits for each load of its own.
  const int64_t token_rows = __ldcg(r.recv_begin + num_ranks);
  int64_t asked = 0;
#pragma unroll 4
  for (int s = 0; s < num_ranks; ++s) asked += __ldcg(r.rows + s * num_ranks + me);
  int64_t pairs = 0, full = 0;
  for (int e = static_cast<int>(threadIdx.x); e < local; e += kThreads) {
    int run = 0;
    for (int s0 = 0; s0 < num_ranks; s0 += kAtOnce) {
      int n[kAtOnce];
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) n[j] = s0 + j < num_ranks ? __ldcg(r.expert_base + (s0 + j) * local + e) : 0;
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        if (s0 + j < num_ranks) r.expert_base[(s0 + j) * local + e] = run;
        run += n[j];
      }
    }
    const int count = a.layout == Layout::expert_slab && run > a.capacity ? static_cast<int32_t>(a.capacity) : run;
    r.expert_counts[e] = count;
    if (local <= kMostShared) shared_counts[e] = count;
    pairs += run;
    full += padded(run, a.alignment);
  }
  const int64_t all_pairs = block_sum(pairs), all_rows = block_sum(full);
  if (threadIdx.x == 0) r.cut[0] = static_cast<int32_t>(token_rows), r.cut[1] = 0;
  __syncthreads();
  const bool fits =
      a.capacity < 0 || a.layout == Layout::expert_slab || (a.layout == Layout::expert_major ? all_rows <= a.capacity : asked <= token_rows);
  if (fits) finish_tables(a, local, local <= kMostShared ? shared_counts : r.expert_counts, all_pairs, asked);
  return {all_pairs, asked, fits};
}

/// The same where not everything fits.
__device__ void cut_tables(const DispatchArgs& a, int local, const Totals& totals) {
  const Routing& r = a.routing;
  if (a.layout == Layout::expert_major) {
    find_cut(a, local);
  } else {
    for (int e = static_cast<int>(threadIdx.x); e < local; e += kThreads) r.expert_counts[e] = 0;
    __syncthreads();
    count_pairs(a, 0, r.recv_begin[a.common.team.num_ranks], r.expert_counts);
  }
  finish_tables(a, local, a.routing.expert_counts, totals.pairs, totals.asked);
}

/// For the blocks of this and of the next kernel.
__device__ void tell(const DispatchArgs& a, int flag, uint32_t epoch) {
  __syncthreads();
  if (threadIdx.x == 0) store_release_gpu(&a.flags[flag], epoch);
}

__device__ __forceinline__ int source_of(const int32_t* begins, int num_ranks, int64_t row) {
  int s = 0;
  while (s + 1 < num_ranks && row >= begins[s + 1]) ++s;
  return s;
}

/// Where each received pair goes. A thread does a few at a time, so that their loads overlap.
__device__ void place_pairs(const DispatchArgs& a, const int32_t* begins, int local, int64_t first, int64_t step) {
  constexpr int kEach = 4;
  const Routing& r = a.routing;
  const Received in = received(a);
  const int num_ranks = a.common.team.num_ranks, topk = a.num_topk;
  const int64_t rows = begins[num_ranks], cut_row = __ldcg(r.cut), cut_k = __ldcg(r.cut + 1);
  for (int64_t i0 = first; i0 < rows * topk; i0 += kEach * step) {
    int expert[kEach], pair[kEach], base[kEach];
    float weight[kEach];
    int64_t offset[kEach];
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
      const int64_t i = i0 + j * step;
      const bool in_range = i < rows * topk;
      expert[j] = in_range ? __ldcg(in.idx + i) : -1;
      pair[j] = in_range ? __ldcg(in.pair + i) : 0;
      weight[j] = in_range && a.has_weights ? __ldcg(in.weights + i) : 0.0f;
    }
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
      const int e = expert[j];
      base[j] = e >= 0 ? __ldcg(r.expert_base + source_of(begins, num_ranks, (i0 + j * step) / topk) * local + e) : 0;
      offset[j] = e >= 0 ? __ldcg(r.expert_offsets + e) : 0;
    }
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
      const int64_t i = i0 + j * step, row = i / topk, k = i % topk;
      if (i >= rows * topk) break;
      const int e = expert[j];
      r.recv_idx[i] = e;
      if (a.has_weights) r.recv_weights[i] = weight[j];
      if (e < 0) {
        if (a.layout != Layout::rank_major) r.position[i] = -1;
        continue;
      }
      const int64_t nth = static_cast<int64_t>(base[j]) + pair[j], at = offset[j] + nth;
      if (a.layout == Layout::rank_major) {
        r.sorted_rows[at] = static_cast<int32_t>(row);
        continue;
      }
      const bool fits = is_admitted(a, nth, row, k, cut_row, cut_k);
      r.position[i] = fits ? static_cast<int32_t>(at) : -1;
      if (fits && a.has_weights) r.row_weights[at] = weight[j];
    }
  }
}

/// Rows that are not there: no ids, no weights.
__device__ void fill_rest(const DispatchArgs& a, const int32_t* begins, int local, int64_t first, int64_t step) {
  const Routing& r = a.routing;
  const int64_t rows = begins[a.common.team.num_ranks];
  if (a.layout == Layout::rank_major) {
    for (int64_t i = rows * a.num_topk + first; i < a.result_rows * a.num_topk; i += step) {
      r.recv_idx[i] = -1;
      if (a.has_weights) r.recv_weights[i] = 0.0f;
    }
    return;
  }
  if (!a.has_weights) return;
  // Behind the pairs of each expert; a few warps share one where there are more of them than experts.
  const int warps = static_cast<int>(step / 32), parts = max(1, warps / max(local, 1));
  for (int u = static_cast<int>(first / 32); u < local * parts; u += warps) {
    const int e = u / parts;
    const int64_t end = __ldcg(r.expert_offsets + e + 1);
    for (int64_t i = __ldcg(r.expert_offsets + e) + __ldcg(r.expert_counts + e) + u % parts * 32 + lane_id(); i < end; i += parts * 32)
      r.row_weights[i] = 0.0f;
  }
  for (int64_t i = __ldcg(r.expert_offsets + local) + first; i < a.result_rows; i += step) r.row_weights[i] = 0.0f;
}

__device__ void admit(const DispatchArgs& a, Call call, int32_t* begins) {
  const Common& c = a.common;
  const int local = a.num_local, role = take_role(c, call, kRoleTicket);
  if (a.chained) {
    // Once all ranks have told their counts the rows may start; the tables that follow from the counts take a little longer.
    bool told = true;
    for (int s = static_cast<int>(threadIdx.x); told && s < c.team.num_ranks; s += kThreads) {
      uint4 word;
      const uint4* from = c.through_host ? reinterpret_cast<const uint4*>(a.begins) + s : header_from(c, call, s);
      told = wait_word(c, Phase::local_blocks, c.team.rank, call.epoch, false, from, &word);
    }
    if (!__syncthreads_and(told)) return;
    let_next_start();
    const bool planned = threadIdx.x == 0 ? wait_local(c, call.epoch, &a.flags[kPlanReady], false) : true;
    if (!__syncthreads_and(planned)) return;
  }
  // One block waits for what peers send, and for all: many polling threads would slow down what they wait for.
  if (role == 0) {
    const Totals totals = make_tables(a, local);
    if (totals.fits) tell(a, kCounted, call.epoch);
    if (!wait_meta(a, call)) return;
    if (!totals.fits) {
      cut_tables(a, local, totals);
      tell(a, kCounted, call.epoch);
    }
    tell(a, kAdmitted, call.epoch);
  }
  const bool ready = threadIdx.x == 0 ? wait_local(c, call.epoch, &a.flags[kAdmitted]) : true;
  if (!__syncthreads_and(ready)) return;
  for (int s = static_cast<int>(threadIdx.x); s <= c.team.num_ranks; s += kThreads) begins[s] = __ldcg(&a.routing.recv_begin[s]);
  __syncthreads();
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x, step = static_cast<int64_t>(gridDim.x) * kThreads;
  place_pairs(a, begins, local, first, step);
  fill_rest(a, begins, local, first, step);
}

__global__ void __launch_bounds__(kThreads, 1) admit_kernel(const __grid_constant__ DispatchArgs a) {
  __shared__ int32_t begins[kMaxRanks + 1];
  const Call call = call_of(a.common);
  if (a.move_blocks <= DispatchArgs::kFewBlocks) let_next_start();
  if (!is_over(a.common, call)) admit(a, call, begins);
  wait_for_previous();  // whoever waits for this kernel has waited for the one before it too
}

}  // namespace

cudaError_t launch_admit(const DispatchArgs& a, int blocks, cudaStream_t stream) {
  return launch_kernel(admit_kernel, blocks, kThreads, 0, stream, a.chained, a);
}
cudaError_t prepare_admit() {
  cudaFuncAttributes unused;
  return cudaFuncGetAttributes(&unused, admit_kernel);
}

}  // namespace turnout::engine::cuda
