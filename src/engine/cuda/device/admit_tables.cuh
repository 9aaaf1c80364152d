// What the result of a dispatch says about itself: counts and offsets of experts, and where admission ends if not everything fits.
// One block of the admit kernel makes it.
#pragma once
#include "engine/cuda/device/dispatch.cuh"
#include "engine/cuda/device/header.cuh"
#include "engine/cuda/device/rows.cuh"

namespace turnout::engine::cuda::tables {

inline constexpr int kThreads = 512;
inline constexpr int kMostShared = 1024;  ///< experts whose counts lie in shared memory

__device__ __forceinline__ int64_t padded(int64_t n, int64_t alignment) { return (n + alignment - 1) / alignment * alignment; }

/// Sum over the block; every thread gets it.
__device__ inline int64_t block_sum(int64_t v) {
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

/// `tokens` of each source.
__device__ inline bool wait_meta(const DispatchArgs& a, Call call, const int32_t* tokens) {
  const Common& c = a.common;
  bool good = true;
  for (int i = static_cast<int>(threadIdx.x); good && i < c.team.num_ranks * kMaxChunks; i += kThreads) {
    const int s = i / kMaxChunks, chunk = i % kMaxChunks;
    if (chunk >= num_chunks(tokens[s])) continue;
    const std::byte* p = c.team.base[c.team.rank] + c.arena.channel_at(c.lane, call.copy, s, chunk);
    good = wait_signal(c, Phase::meta, s, call.epoch, true, reinterpret_cast<const uint64_t*>(p), nullptr);
  }
  return __syncthreads_and(good);
}

/// Adds the pairs of rows [begin, end) to counts[e]. The block calls it.
__device__ inline void count_pairs(const DispatchArgs& a, int64_t begin, int64_t end, int32_t* counts) {
  const Received in = received(a);
  for (int64_t i = begin * a.num_topk + threadIdx.x; i < end * a.num_topk; i += kThreads) {
    const int e = __ldcg(in.idx + i);
    if (e >= 0) atomicAdd(&counts[e], 1);
  }
  __syncthreads();
}

/// Rows of the result if the first sources (`base` their pairs) and rows [begin, end) of the next are admitted.
__device__ inline int64_t padded_rows(const DispatchArgs& a, const int32_t* base, int64_t begin, int64_t end, int local) {
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
__device__ inline void find_cut(const DispatchArgs& a, int local) {
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
__device__ inline int64_t prefix_offsets(const DispatchArgs& a, int local, const volatile int32_t* counts) {
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
__device__ inline void finish_tables(const DispatchArgs& a, int local, const volatile int32_t* counts, int64_t all_pairs, int64_t asked) {
  const Routing& r = a.routing;
  int64_t admitted = 0;
  for (int e = static_cast<int>(threadIdx.x); e < local; e += kThreads) admitted += counts[e];
  admitted = block_sum(admitted);
  if (warp_id() == 0) {
    const int64_t rows = prefix_offsets(a, local, counts);
    if (lane_id() == 0) {
      const int64_t token_rows = a.layout == Layout::rank_major ? r.recv_begin[a.common.team.num_ranks] : 0;
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
__device__ inline Totals make_tables(const DispatchArgs& a, int local) {
  constexpr int kAtOnce = 8;
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
__device__ inline void cut_tables(const DispatchArgs& a, int local, const Totals& totals) {
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
__device__ inline void tell(const DispatchArgs& a, int flag, uint32_t epoch) {
  __syncthreads();
  if (threadIdx.x == 0) store_release_gpu(&a.flags[flag], epoch);
}

}  // namespace turnout::engine::cuda::tables
