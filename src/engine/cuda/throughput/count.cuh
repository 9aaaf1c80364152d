// How a block counts a chunk of tokens and finds the place of each of its pairs: a chunk goes through shared memory in steps, a step
// is cut into groups of a warp, whose lanes look at each other; sums over groups, steps and chunks give the rest.
#pragma once
#include "engine/cuda/device/header.cuh"
#include "engine/cuda/device/rows.cuh"

namespace turnout::engine::cuda::count {

inline constexpr int kThreads = 512;
inline constexpr int kPairs = 1024;  ///< pairs of a step, in shared memory
inline constexpr int kGroup = 32;    ///< pairs that find their place by looking at each other: a warp

struct Shared {
  int32_t* running;  ///< [R + P] counts so far: token rows per rank, pairs per expert
  int32_t* total;    ///< [R + P] counts of a step
  int32_t* before;   ///< [groups][R + P] counts of a step's earlier groups
  int32_t* ids;      ///< [kPairs] expert or -1
  int32_t* first;    ///< [kPairs] destination rank at its first k, else -1
  int32_t* slot;     ///< [kPairs] rank of the expert or -1; once placed: position in the list of the destination
  int32_t* place;    ///< [kPairs] equal ones earlier in the group (experts, ranks << 16); once placed: equal experts before

  __device__ Shared(int32_t* memory, int columns, int num_groups)
      : running(memory),
        total(running + columns),
        before(total + columns),
        ids(before + num_groups * columns),
        first(ids + kPairs),
        slot(first + kPairs),
        place(slot + kPairs) {}
};

__device__ __forceinline__ int64_t id_at(const DispatchArgs& a, int64_t i) {
  return a.ids_are_64 ? static_cast<const int64_t*>(a.topk_idx)[i] : static_cast<const int32_t*>(a.topk_idx)[i];
}
/// An id that is no expert counts as none; the call is refused for it.
__device__ __forceinline__ int checked_id(const DispatchArgs& a, int64_t i, bool* bad) {
  const int64_t id = id_at(a, i);
  if (id >= -1 && id < a.common.experts->num_experts) return static_cast<int>(id);
  *bad = true;
  return -1;
}
struct Step {
  int64_t begin;
  int n;
};
/// The `i`-th step of a chunk: whole tokens, as many pairs as fit.
__device__ __forceinline__ Step step_of(const DispatchArgs& a, int chunk, int i, int num_groups) {
  const int64_t size = chunk_tokens(a.num_tokens) * a.num_topk;
  const int64_t end = min(a.num_tokens * a.num_topk, (chunk + 1) * size);
  const int most = num_groups * kGroup / a.num_topk * a.num_topk;
  const int64_t begin = chunk * size + static_cast<int64_t>(i) * most;
  return {begin, static_cast<int>(max(static_cast<int64_t>(0), min(static_cast<int64_t>(most), end - begin)))};
}

__device__ inline void tell_bad_id(const DispatchArgs& a, int64_t i, uint32_t epoch) {
  DeviceRecord r{};
  r.state = 4;
  r.peer = a.common.team.rank;
  r.epoch = epoch;
  r.expected = i / a.num_topk;
  r.k = static_cast<int32_t>(i % a.num_topk);
  r.value = id_at(a, i);
  write_record(a.common, r);
  *reinterpret_cast<volatile uint32_t*>(&a.common.lane_control->bad_ids) = epoch;
  __threadfence();
}

/// Ids of a step to shared memory; what each pair finds before it in its group; counts of the groups before each group.
__device__ inline void load_step(const DispatchArgs& a, const Shared& s, Step step, int num_groups, uint32_t epoch) {
  const int num_ranks = a.common.team.num_ranks, columns = num_ranks + a.common.experts->num_experts, topk = a.num_topk;
  const int32_t* owner = a.common.experts->owner;
  for (int i = static_cast<int>(threadIdx.x); i < num_groups * columns; i += kThreads) s.before[i] = 0;
  for (int i = static_cast<int>(threadIdx.x); i < step.n; i += kThreads) {
    bool bad = false;
    const int id = checked_id(a, step.begin + i, &bad);
    if (bad) tell_bad_id(a, step.begin + i, epoch);
    s.ids[i] = id;
    s.slot[i] = id >= 0 ? __ldg(owner + id) : -1;
  }
  __syncthreads();
  const unsigned below = (1u << lane_id()) - 1;
  for (int i = static_cast<int>(threadIdx.x); i < (step.n + 31) / 32 * 32; i += kThreads) {
    const int id = i < step.n ? s.ids[i] : -1;
    int rank = i < step.n ? s.slot[i] : -1;
    for (int j = i / topk * topk; j < i && rank >= 0; ++j) {
      if (s.slot[j] == rank) rank = -1;
    }
    int32_t* counts = s.before + i / kGroup * columns;
    const unsigned same_id = __match_any_sync(kFull, id), same_rank = __match_any_sync(kFull, rank);
    if (id >= 0 && !(same_id & below)) counts[num_ranks + id] = __popc(same_id);
    if (rank >= 0 && !(same_rank & below)) counts[rank] = __popc(same_rank);
    if (i >= step.n) continue;
    s.first[i] = rank;
    s.place[i] = __popc(same_id & below) | __popc(same_rank & below) << 16;
  }
  __syncthreads();
  for (int i = static_cast<int>(threadIdx.x); i < columns; i += kThreads) {
    int run = 0;
    for (int g = 0; g < num_groups; ++g) {
      const int n = s.before[g * columns + i];
      s.before[g * columns + i] = run;
      run += n;
    }
    s.total[i] = run;
  }
  __syncthreads();
}

/// Counts of a chunk go to global memory for the blocks of later chunks. Leaves the chunk's last step loaded.
__device__ inline void count_chunk(const DispatchArgs& a, const Shared& s, int chunk, int num_groups, uint32_t epoch) {
  const int columns = a.common.team.num_ranks + a.common.experts->num_experts;
  int32_t* counts = a.chunk_counts + static_cast<int64_t>(chunk) * columns;
  for (int n = 0;; ++n) {
    const Step step = step_of(a, chunk, n, num_groups);
    if (n > 0 && step.n == 0) break;
    load_step(a, s, step, num_groups, epoch);
    // Each thread comes back to its own columns.
    for (int i = static_cast<int>(threadIdx.x); i < columns; i += kThreads) counts[i] = (n > 0 ? counts[i] : 0) + s.total[i];
    if (step_of(a, chunk, n + 1, num_groups).n == 0) break;
    __syncthreads();
  }
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) store_release_gpu(&a.flags[chunk], epoch);
}

/// Position of each pair of a loaded step among the equal ones before it. s.running moves on behind the step.
__device__ inline void place_step(const DispatchArgs& a, const Shared& s, Step step) {
  const Routing& r = a.routing;
  const int num_ranks = a.common.team.num_ranks, columns = num_ranks + a.common.experts->num_experts;
  for (int i = static_cast<int>(threadIdx.x); i < step.n; i += kThreads) {
    const int id = s.ids[i], rank = s.first[i], owner = s.slot[i], place = s.place[i];
    const int32_t* before = s.before + i / kGroup * columns;
    const int pair = id >= 0 ? (place & 0xffff) + before[num_ranks + id] + s.running[num_ranks + id] : -1;
    const int at = rank >= 0 ? (place >> 16) + before[rank] + s.running[rank] : -1;
    r.topk_idx[step.begin + i] = id;
    r.dest[step.begin + i] = owner;
    r.pair_index[step.begin + i] = pair;
    r.send_index[step.begin + i] = at;
    s.place[i] = pair;
    if (rank == a.common.team.rank) r.own_tokens[at] = static_cast<int32_t>((step.begin + i) / a.num_topk);
    if (a.has_weights) {
      r.topk_weights[step.begin + i] =
          a.weights_are_bf16 ? __uint_as_float(static_cast<uint32_t>(static_cast<const uint16_t*>(a.topk_weights)[step.begin + i]) << 16)
                             : static_cast<const float*>(a.topk_weights)[step.begin + i];
    }
    s.slot[i] = at;  // of this pair alone: nobody else looks at it any more
  }
  __syncthreads();
  for (int i = static_cast<int>(threadIdx.x); i < columns; i += kThreads) s.running[i] += s.total[i];
  __syncthreads();
}

/// `loaded`: the chunk is one step, and that has been loaded.
__device__ inline void place_chunk(const DispatchArgs& a, const Shared& s, int chunk, int num_groups, bool loaded, uint32_t epoch) {
  for (int n = 0;; ++n) {
    const Step step = step_of(a, chunk, n, num_groups);
    if (step.n == 0) break;
    if (!loaded) load_step(a, s, step, num_groups, epoch);
    place_step(a, s, step);
  }
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) store_release_gpu(&a.flags[kPlaced + chunk], epoch);
}

/// s.running becomes the sum of the chunks before `chunk`. False: given up.
__device__ inline bool sum_earlier(const DispatchArgs& a, const Shared& s, int chunk, uint32_t epoch) {
  const int columns = a.common.team.num_ranks + a.common.experts->num_experts;
  bool good = true;
  for (int c = static_cast<int>(threadIdx.x); good && c < chunk; c += kThreads) good = wait_local(a.common, epoch, &a.flags[c]);
  if (!__syncthreads_and(good)) return false;
  for (int i = static_cast<int>(threadIdx.x); i < columns; i += kThreads) {
    int sum = 0;
#pragma unroll 16
    for (int c = 0; c < chunk; ++c) sum += __ldcg(&a.chunk_counts[static_cast<int64_t>(c) * columns + i]);
    s.running[i] = sum;
  }
  __syncthreads();
  return true;
}

}  // namespace turnout::engine::cuda::count
