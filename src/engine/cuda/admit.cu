// Second kernel of a dispatch: which pairs are admitted, where their rows go in the result, and what the result says about
// itself (counts, offsets, sorted rows). One block makes the tables; then all blocks go over the received ids, unless the move kernel does.
#define TURNOUT_WAITS_CALL 1
#include "engine/cuda/device/admit_tables.cuh"
#include "engine/cuda/kernels.h"
#include "engine/cuda/launch.h"

namespace turnout::engine::cuda {
namespace {

using namespace tables;

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

/// Rows that are not there: no ids, no weights. `begins`: rank_major.
__device__ void fill_rest(const DispatchArgs& a, const int32_t* begins, int local, int64_t first, int64_t step) {
  const Routing& r = a.routing;
  if (a.layout == Layout::rank_major) {
    const int64_t rows = begins[a.common.team.num_ranks];
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
    if (!wait_meta(a, call, a.routing.source_tokens)) return;
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

/// What the first words of a source's header, and its rows for this rank, say.
struct Sources {
  uint32_t first[kMaxRanks][kWordPayload];
  int32_t tokens[kMaxRanks], rows[kMaxRanks];
};

/// Every rank's. False: given up, or they do not agree: the block that receives the headers makes the record.
__device__ bool read_sources(const Common& c, Call call, Sources* sources) {
  const int thread = static_cast<int>(threadIdx.x), s = thread / 3, part = thread % 3, row = HeaderInts::kRows + c.team.rank;
  static_assert(3 * kMaxRanks <= kThreads && HeaderInts::kTokens / kWordPayload == 1 && HeaderInts::kTokens % kWordPayload == 0);
  bool good = true;
  if (s < c.team.num_ranks) {
    uint4 w{};
    const int word = part == 0 ? 0 : part == 1 ? 1 : row / kWordPayload;
    good = wait_word(c, Phase::local_blocks, c.team.rank, call.epoch, false, header_from(c, call, s) + word, &w);
    const int at = row % kWordPayload;
    if (part == 0) sources->first[s][0] = w.x, sources->first[s][1] = w.y, sources->first[s][2] = w.z;
    if (part == 1) sources->tokens[s] = static_cast<int32_t>(w.x);
    if (part == 2) sources->rows[s] = static_cast<int32_t>(at == 0 ? w.x : at == 1 ? w.y : w.z);
  }
  if (!__syncthreads_and(good)) return false;
  const auto *mine = sources->first[c.team.rank], *theirs = sources->first[min(thread, c.team.num_ranks - 1)];
  return __syncthreads_and(theirs[0] == mine[0] && theirs[1] == mine[1] && theirs[2] == 0);
}

/// Counts of experts from the headers themselves: three experts a thread, the words of several sources at once. False: given up.
__device__ bool read_counts(const DispatchArgs& a, Call call, int local, int32_t* shared_counts, int64_t* pairs) {
  constexpr int kAtOnce = 4;
  const Common& c = a.common;
  const Routing& r = a.routing;
  const int num_ranks = c.team.num_ranks, first = HeaderInts::later_experts(num_ranks), begin = first / kWordPayload;
  const int end = local > 0 ? (first + local - 1) / kWordPayload + 1 : begin;
  for (int at = begin + static_cast<int>(threadIdx.x); at < end; at += kThreads) {
    const int e0 = at * kWordPayload - first;
    int run[kWordPayload] = {};
    for (int s0 = 0; s0 < num_ranks; s0 += kAtOnce) {
      uint4 w[kAtOnce];
      const bool came = wait_until(
          c, Phase::local_blocks, c.team.rank, call.epoch, false,
          [&] {
            bool all = true;
#pragma unroll
            for (int j = 0; j < kAtOnce; ++j) w[j] = load_word(header_from(c, call, min(s0 + j, num_ranks - 1)) + at);
#pragma unroll
            for (int j = 0; j < kAtOnce; ++j) all &= w[j].w == call.epoch;
            return all;
          },
          [&] { return w[0].w; });
      if (!came) return false;
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        if (s0 + j >= num_ranks) break;
        const uint32_t n[kWordPayload] = {w[j].x, w[j].y, w[j].z};
#pragma unroll
        for (int i = 0; i < kWordPayload; ++i) {
          if (e0 + i >= 0 && e0 + i < local) r.expert_base[(s0 + j) * local + e0 + i] = run[i];
          run[i] += static_cast<int>(n[i]);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kWordPayload; ++i) {
      const int e = e0 + i;
      if (e < 0 || e >= local) continue;
      const int count = a.layout == Layout::expert_slab && run[i] > a.capacity ? static_cast<int32_t>(a.capacity) : run[i];
      r.expert_counts[e] = count;
      if (local <= kMostShared) shared_counts[e] = count;
      *pairs += run[i];
    }
  }
  return true;
}

/// Offsets of experts from their counts, an alignment of 2^shift (else -1) without a division, and the number of rows. One warp, each lane of
/// it a few experts that follow each other: rows can be laid out only after this. Nothing is written unless everything fits.
__device__ __forceinline__ bool fast_offsets(const DispatchArgs& a, int local, int shift, const int32_t* counts) {
  const Routing& r = a.routing;
  const int each = (local + 31) / 32, begin = lane_id() * each, end = min(local, begin + each);
  const bool slab = a.layout == Layout::expert_slab;
  const auto room = [&](int e) -> int64_t {
    if (slab) return a.capacity;
    const int64_t n = counts[e];
    return shift >= 0 ? (n + a.alignment - 1) >> shift << shift : padded(n, a.alignment);
  };
  int64_t mine = 0, rows = 0;
#pragma unroll 1
  for (int e = begin; e < end; ++e) mine += room(e);
  int64_t run = mine;
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    const int64_t v = __shfl_up_sync(kFull, run, d);
    if (lane_id() >= d) run += v;
  }
  rows = __shfl_sync(kFull, run, 31);
  if (!slab && rows > a.capacity) return false;
  run -= mine;
#pragma unroll 1
  for (int e = begin; e < end; ++e) {
    r.expert_offsets[e] = run;
    run += room(e);
  }
  if (lane_id() == 0) r.expert_offsets[local] = rows;
  if (lane_id() == 0 && !slab) *r.num_rows = rows, *r.num_dropped = 0;
  return true;
}

/// Where the move kernel finds the places: one block makes the tables, from the headers alone if everything is admitted, and tells when
/// the ids of all received rows are here.
__device__ void admit_counts(const DispatchArgs& a, Call call) {
  __shared__ Sources sources;
  __shared__ int32_t shared_counts[kMostShared];
  const Common& c = a.common;
  const Routing& r = a.routing;
  const int local = a.num_local, shift = (a.alignment & (a.alignment - 1)) == 0 ? __ffsll(a.alignment) - 1 : -1;
  if (!read_sources(c, call, &sources)) return;
  let_next_start();
  int64_t pairs = 0, asked = 0;
  const bool good = read_counts(a, call, local, shared_counts, &pairs);
  for (int s = 0; s < c.team.num_ranks; ++s) asked += sources.rows[s];
  if (threadIdx.x == 0) r.cut[0] = static_cast<int32_t>(min(asked, a.block_rows)), r.cut[1] = 0;
  if (!__syncthreads_and(good)) return;
  const int32_t* counts = local <= kMostShared ? shared_counts : r.expert_counts;
  const bool fits = __syncthreads_and(warp_id() != 0 || fast_offsets(a, local, shift, counts));
  if (fits && threadIdx.x == 0) store_release_gpu(&a.flags[kCounted], call.epoch);
  const Totals totals{block_sum(pairs), asked, fits};
  if (fits && a.layout == Layout::expert_slab) finish_tables(a, local, counts, totals.pairs, asked);
  if (!wait_meta(a, call, sources.tokens)) return;
  if (!totals.fits) {
    // It looks at tables of the plan kernel.
    const bool planned = threadIdx.x == 0 ? wait_local(c, call.epoch, &a.flags[kPlanReady], false) : true;
    if (!__syncthreads_and(planned)) return;
    cut_tables(a, local, totals);
    tell(a, kCounted, call.epoch);
  }
  tell(a, kAdmitted, call.epoch);
  fill_rest(a, nullptr, local, threadIdx.x, kThreads);
}

__global__ void __launch_bounds__(kThreads, 1) admit_kernel(const __grid_constant__ DispatchArgs a) {
  __shared__ int32_t begins[kMaxRanks + 1];
  const Call call = call_of(a.common);
  if (a.move_blocks <= DispatchArgs::kFewBlocks) let_next_start();
  const bool over = is_over(a.common, call);
  if (move_places(a)) {
    if (!over && blockIdx.x == 0) admit_counts(a, call);
  } else if (!over) {
    admit(a, call, begins);
  }
  wait_for_previous();  // whoever waits for this kernel has waited for the one before it too
}

}  // namespace

cudaError_t launch_admit(const DispatchArgs& a, int blocks, cudaStream_t stream) {
  return launch_kernel(admit_kernel, move_places(a) ? 1 : blocks, kThreads, 0, stream, a.chained, a);
}
cudaError_t prepare_admit() {
  cudaFuncAttributes unused;
  return cudaFuncGetAttributes(&unused, admit_kernel);
}

}  // namespace turnout::engine::cuda
