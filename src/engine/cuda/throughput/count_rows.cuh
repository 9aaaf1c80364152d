// The first look at a chunk: how many token rows go to each rank, and the place of each row in the list of its destination. All ranks wait for
// these few sums, so nothing else comes before them.
#pragma once
#include "engine/cuda/throughput/count.cuh"

namespace turnout::engine::cuda::count {

/// By each thread for those of a step that it has looked at.
__device__ __noinline__ void tell_bad_ids(const DispatchArgs& a, Step step, uint32_t epoch) {
  for (int j = static_cast<int>(threadIdx.x); j < step.n; j += kThreads) {
    const int64_t i = step.begin + j;
    const int64_t id = a.ids_are_64 ? static_cast<const int64_t*>(a.topk_idx)[i] : static_cast<const int32_t*>(a.topk_idx)[i];
    if (id >= -1 && id < a.common.num_experts) continue;
    DeviceRecord r{};
    r.state = 4;
    r.peer = a.common.team.rank;
    r.epoch = epoch;
    r.expected = i / a.num_topk;
    r.k = static_cast<int32_t>(i % a.num_topk);
    r.value = id;
    write_reason(a.common, r);
  }
}

/// A step to shared memory: ids, their ranks, for each rank at its first k what it finds before it in its group, the counts of each group.
/// Returns whether an id is out of range.
__device__ __forceinline__ bool load_rows(const PlanShape& p, const Shared& s, Step step, const Ids& ids) {
  const int thread = static_cast<int>(threadIdx.x), lane = lane_id(), topk = p.num_topk;
  const int num_groups = step.num_groups();
  const unsigned below = (1u << lane) - 1;
  const bool is_whole = p.are_whole;
  const unsigned earlier = is_whole ? below & ~((1u << lane / topk * topk) - 1) : 0u;  // entries of the token that come first
  clear_words(s.row_before, p.num_groups * s.row_stride);
  copies_done();  // the expert table
  __syncthreads();
  bool bad = false;
#pragma unroll
  for (int j = 0; j < kEach; ++j) {
    const int i = thread + j * kThreads;
    if (i / kGroup >= num_groups) break;  // a warp goes on or it does not
    const int id = ids.get(j, p.num_experts, &bad);
    s.ids[i] = id;
    s.slot[i] = id >= 0 ? s.owner[id] : -1;
  }
  if (!is_whole) __syncthreads();
#pragma unroll 1
  for (int i = thread; i / kGroup < num_groups; i += kThreads) {
    const int owner = s.slot[i];
    const unsigned same = lanes_with(owner + 1, p.rank_bits);
    bool is_first = owner >= 0 && !(same & earlier);
    if (!is_whole) {
#pragma unroll 1
      for (int k = i / topk * topk; k < i; ++k) is_first = is_first && s.slot[k] != owner;
    }
    const unsigned same_first = same & __ballot_sync(kFull, is_first);
    if (is_first && !(same_first & below)) s.row_before[i / kGroup * s.row_stride + owner] = __popc(same_first);
    s.first[i] = is_first ? owner : -1;
    s.place[i] = __popc(same_first & below);
  }
  return __syncthreads_or(bad);
}

/// The counts of groups become those of the groups before: a warp for each rank; `take(rank, total)` by one lane.
template <class Take>
__device__ __forceinline__ void sum_row_groups(const PlanShape& p, const Shared& s, Take take) {
  static_assert(kPairs / kGroup <= 64);
  const int lane = lane_id(), g = 2 * lane;
#pragma unroll 1
  for (int r = warp_id(); r < p.num_ranks; r += kThreads / 32) {
    int32_t* at = s.row_before + g * s.row_stride + r;
    const int n0 = g < p.num_groups ? at[0] : 0, n1 = g + 1 < p.num_groups ? at[s.row_stride] : 0;
    int run = n0 + n1;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
      const int v = __shfl_up_sync(kFull, run, d);
      if (lane >= d) run += v;
    }
    if (lane == 31) take(r, run);
    if (g < p.num_groups) at[0] = run - n0 - n1;
    if (g + 1 < p.num_groups) at[s.row_stride] = run - n1;
  }
}

/// Tells the other blocks the rows of a chunk, and leaves its last step loaded. A count and its epoch are one word: no fence, no flag.
/// `ids`: of its first step. Returns whether an id is out of range.
__device__ __forceinline__ bool count_rows(const DispatchArgs& a, const PlanShape& p, const Shared& s, int chunk, Ids* ids, uint32_t epoch) {
  bool bad = false;
#pragma unroll 1
  for (int n = 0;; ++n) {
    const Step step = step_of(p, chunk, n), next = step_of(p, chunk, n + 1);
    if (load_rows(p, s, step, *ids)) {
      tell_bad_ids(a, step, epoch);
      __syncthreads();  // the reason is there before others hear of it
      bad = true;
    }
    uint64_t* counts = a.chunk_counts + static_cast<int64_t>(chunk) * (p.num_ranks + p.num_experts);
    sum_row_groups(p, s, [&](int r, int total) {
      const int count = (n > 0 ? s.row_count[r] : 0) + total;
      if (next.n == 0) store_relaxed(counts + r, static_cast<uint64_t>(epoch) << 32 | static_cast<uint32_t>(count) | (bad ? kBadChunk : 0));
      s.row_count[r] = count;
      s.row_total[r] = total;
    });
    if (next.n == 0) return bad;
    ids->ask(p, next);
    __syncthreads();
  }
}

/// s.row_base becomes the rows of the chunks before `chunk`, a warp for each rank; `total`: s.row_all those of all, and *bad tells whether one
/// had an id out of range. False: given up.
__device__ __forceinline__ bool sum_rows(const DispatchArgs& a, const PlanShape& p, const Shared& s, int chunk, bool total, bool* bad,
                                         uint32_t epoch) {
  static_assert(kMaxChunks <= 64);
  const int lane = lane_id(), columns = p.num_ranks + p.num_experts, end = total ? chunk + 1 : chunk;
  const uint64_t none = static_cast<uint64_t>(epoch) << 32;
  bool good = true;
  uint32_t flags = 0;
#pragma unroll 1
  for (int r = warp_id(); r < p.num_ranks; r += kThreads / 32) {
    const uint64_t* from = a.chunk_counts + lane * columns + r;
    uint64_t v = none, w = none;  // of chunks `lane` and `lane` + 32
    const bool came = wait_until(
        a.common, Phase::local_blocks, a.common.team.rank, epoch, true,
        [&] {
          if (lane < end) v = load_relaxed(from);
          if (lane + 32 < end) w = load_relaxed(from + 32 * columns);
          return static_cast<uint32_t>(v >> 32) == epoch && static_cast<uint32_t>(w >> 32) == epoch;
        },
        [&] { return v >> 32; });
    good = good && came;
    flags |= (static_cast<uint32_t>(v) | static_cast<uint32_t>(w)) & kBadChunk;
    const auto near = static_cast<int>(static_cast<uint32_t>(v) & ~kBadChunk), far = static_cast<int>(static_cast<uint32_t>(w) & ~kBadChunk);
    int sum = near + far, own = (lane == chunk ? near : 0) + (lane + 32 == chunk ? far : 0);
#pragma unroll
    for (int d = 16; d > 0; d /= 2) {
      sum += __shfl_xor_sync(kFull, sum, d);
      own += __shfl_xor_sync(kFull, own, d);
    }
    if (lane == 0) {
      s.row_base[r] = sum - own;
      if (total) s.row_all[r] = sum;
    }
  }
  if (total) *bad |= __syncthreads_or(flags != 0) != 0;
  return __syncthreads_and(good);
}

/// Position of each row of a loaded step in the list of its destination: what rows need to leave.
__device__ __forceinline__ void place_rows(const DispatchArgs& a, const PlanShape& p, const Shared& s, Step step, int first_token) {
  const Routing& r = a.routing;
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x); i < step.n; i += kThreads) {
    const int rank = s.first[i];
    const int at = rank >= 0 ? s.place[i] + s.row_before[i / kGroup * s.row_stride + rank] + s.row_base[rank] : -1;
    r.send_index[step.begin + i] = at;
    r.dest[step.begin + i] = s.slot[i];
    if (rank == a.common.team.rank) r.own_tokens[at] = first_token + i / p.num_topk;
    s.slot[i] = at;  // of this pair alone: nobody else looks at it any more
  }
}

/// The same of a chunk that is not loaded, all its steps. `memory`: all of Shared.
__device__ __noinline__ inline void reload_rows(const DispatchArgs& a, const PlanShape& p, int32_t* memory, int chunk) {
  const Shared s(memory, p);
#pragma unroll 1
  for (int n = 0; step_of(p, chunk, n).n > 0; ++n) {
    const Step step = step_of(p, chunk, n);
    Ids ids;
    ids.ask(p, step);
    load_rows(p, s, step, ids);
    sum_row_groups(p, s, [&](int r, int total) { s.row_total[r] = total; });
    __syncthreads();
    place_rows(a, p, s, step, chunk * p.chunk_tokens + n * p.step_tokens);
    __syncthreads();
#pragma unroll 1
    for (int r = static_cast<int>(threadIdx.x); r < p.num_ranks; r += kThreads) s.row_base[r] += s.row_total[r];
  }
}

/// `loaded`: the chunk is one step, and that is loaded.
__device__ __forceinline__ void place_chunk_rows(const DispatchArgs& a, const PlanShape& p, const Shared& s, int chunk, bool loaded, uint32_t epoch) {
  if (loaded) place_rows(a, p, s, step_of(p, chunk, 0), chunk * p.chunk_tokens);
  else reload_rows(a, p, s.before, chunk);
  __syncthreads();
  if (threadIdx.x == 0) store_release_gpu(&a.flags[kRowsPlaced + chunk], epoch);
}

}  // namespace turnout::engine::cuda::count
