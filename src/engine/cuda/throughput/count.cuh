// How a block counts a chunk of tokens and finds the place of each of its pairs: a chunk goes through shared memory in steps, a step
// is cut into groups of a warp, whose lanes look at each other; sums over groups, steps and chunks give the rest.
#pragma once
#include "engine/cuda/device/header.cuh"
#include "engine/cuda/device/rows.cuh"

namespace turnout::engine::cuda::count {

inline constexpr int kThreads = 640;  ///< more would have too few registers
inline constexpr int kPairs = 2048;   ///< pairs of a step, in shared memory
inline constexpr int kGroup = 32;     ///< pairs that find their place by looking at each other: a warp

struct Shared {
  int32_t* running;  ///< [R + P] counts so far: token rows per rank, pairs per expert
  int32_t* total;    ///< [R + P] counts of a step
  int32_t* all;      ///< [R + P] counts of all tokens: the block of the last chunk
  int32_t* before;   ///< [groups][R + P] counts of a step's earlier groups
  int32_t* ids;      ///< [kPairs] expert or -1
  int32_t* first;    ///< [kPairs] destination rank at its first k, else -1
  int32_t* slot;     ///< [kPairs] rank of the expert or -1; once placed: position in the list of the destination
  int32_t* place;    ///< [kPairs] equal ones earlier in the group (experts, ranks << 16); once placed: equal experts before
  int32_t* owner;    ///< [P] copy of the expert table

  __device__ Shared(int32_t* memory, int columns, int num_experts, int num_groups)
      : running(memory),
        total(running + columns),
        all(total + columns),
        before(all + columns),
        ids(before + num_groups * columns),
        first(ids + num_groups * kGroup),
        slot(first + num_groups * kGroup),
        place(slot + num_groups * kGroup),
        owner(place + num_groups * kGroup) {}
};

__device__ __forceinline__ int64_t id_at(const DispatchArgs& a, int64_t i) {
  return a.ids_are_64 ? static_cast<const int64_t*>(a.topk_idx)[i] : static_cast<const int32_t*>(a.topk_idx)[i];
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

/// By each thread for those of a step that it has looked at.
__device__ __noinline__ void tell_bad_ids(const DispatchArgs& a, Step step, uint32_t epoch) {
  for (int j = static_cast<int>(threadIdx.x); j < step.n; j += kThreads) {
    const int64_t i = step.begin + j, id = id_at(a, i);
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

/// Ids of a step to shared memory; what each pair finds before it in its group; counts of the groups before each group. Returns whether an
/// id is out of range.
__device__ inline bool load_step(const DispatchArgs& a, const Shared& s, Step step, uint32_t epoch) {
  constexpr int kEach = (kPairs + kThreads - 1) / kThreads, kAtOnce = 8;
  const int num_ranks = a.common.team.num_ranks, columns = num_ranks + a.common.num_experts, topk = a.num_topk;
  const int num_groups = (step.n + kGroup - 1) / kGroup;
  // All loads first: each takes as long as all of them.
  int64_t ids[kEach];
#pragma unroll
  for (int j = 0; j < kEach; ++j) {
    const int i = static_cast<int>(threadIdx.x) + j * kThreads;
    ids[j] = i < step.n ? id_at(a, step.begin + i) : -1;
  }
  for (int i = static_cast<int>(threadIdx.x); i < num_groups * columns; i += kThreads) s.before[i] = 0;
  bool bad = false;
#pragma unroll
  for (int j = 0; j < kEach; ++j) {
    const int i = static_cast<int>(threadIdx.x) + j * kThreads;
    if (i >= step.n) break;
    const bool is_id = ids[j] >= -1 && ids[j] < a.common.num_experts;  // else it counts as none; the call is refused for it
    bad |= !is_id;
    const int id = is_id ? static_cast<int>(ids[j]) : -1;
    s.ids[i] = id;
    s.slot[i] = id >= 0 ? s.owner[id] : -1;
  }
  if (bad) tell_bad_ids(a, step, epoch);
  bad = __syncthreads_or(bad);
  const unsigned below = (1u << lane_id()) - 1;
  for (int i = static_cast<int>(threadIdx.x); i < num_groups * kGroup; i += kThreads) {
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
    for (int g = 0; g < num_groups; g += kAtOnce) {
      int n[kAtOnce];
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) n[j] = g + j < num_groups ? s.before[(g + j) * columns + i] : 0;
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        if (g + j < num_groups) s.before[(g + j) * columns + i] = run;
        run += n[j];
      }
    }
    s.total[i] = run;
  }
  __syncthreads();
  return bad;
}

/// Counts of a chunk go to global memory for the blocks of later chunks, and to s.running. Leaves the chunk's last step loaded. Returns
/// whether an id is out of range.
__device__ inline bool count_chunk(const DispatchArgs& a, const Shared& s, int chunk, int num_groups, uint32_t epoch) {
  const int columns = a.common.team.num_ranks + a.common.num_experts;
  bool bad = false;
  for (int n = 0;; ++n) {
    bad |= load_step(a, s, step_of(a, chunk, n, num_groups), epoch);
    // Each thread comes back to its own columns.
    for (int i = static_cast<int>(threadIdx.x); i < columns; i += kThreads) s.running[i] = (n > 0 ? s.running[i] : 0) + s.total[i];
    if (step_of(a, chunk, n + 1, num_groups).n == 0) break;
    __syncthreads();
  }
  // A count and its epoch are one word: no fence, no flag.
  uint64_t* counts = a.chunk_counts + static_cast<int64_t>(chunk) * columns;
  for (int i = static_cast<int>(threadIdx.x); i < columns; i += kThreads) {
    store_relaxed(counts + i, static_cast<uint64_t>(epoch) << 32 | static_cast<uint32_t>(s.running[i]) | (bad ? kBadChunk : 0));
  }
  return bad;
}

/// Position of each pair of a loaded step among the equal ones before it. s.running moves on behind the step.
__device__ inline void place_step(const DispatchArgs& a, const Shared& s, Step step) {
  const Routing& r = a.routing;
  const int num_ranks = a.common.team.num_ranks, columns = num_ranks + a.common.num_experts;
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
    if (!loaded) load_step(a, s, step, epoch);
    place_step(a, s, step);
  }
  __syncthreads();
  if (threadIdx.x == 0) store_release_gpu(&a.flags[kPlaced + chunk], epoch);
}

/// s.running becomes the sum of the chunks before `chunk`. `own`: it has been that chunk's counts; s.all becomes the sum with them, and
/// *bad tells whether one of these chunks had an id out of range. False: given up.
__device__ inline bool sum_earlier(const DispatchArgs& a, const Shared& s, int chunk, bool own, bool* bad, uint32_t epoch) {
  constexpr int kAtOnce = 8;
  const int columns = a.common.team.num_ranks + a.common.num_experts;
  const int parts = max(1, kThreads / columns);  // threads that share a column
  for (int i = static_cast<int>(threadIdx.x); i < columns; i += kThreads) {
    if (own) s.all[i] = s.running[i];
    s.running[i] = 0;
  }
  __syncthreads();
  bool good = true;
  uint32_t flags = 0;
  for (int i = static_cast<int>(threadIdx.x); good && i < columns * parts; i += kThreads) {
    const int column = i % columns;
    uint32_t sum = 0;
    for (int c = i / columns; good && c < chunk; c += kAtOnce * parts) {
      uint64_t v[kAtOnce];
      good = wait_until(
          a.common, Phase::local_blocks, a.common.team.rank, epoch, true,
          [&] {
            bool all = true;
#pragma unroll
            for (int j = 0; j < kAtOnce; ++j) {
              const int from = c + j * parts;
              v[j] = from < chunk ? load_relaxed(a.chunk_counts + from * columns + column) : static_cast<uint64_t>(epoch) << 32;
            }
#pragma unroll
            for (int j = 0; j < kAtOnce; ++j) all &= static_cast<uint32_t>(v[j] >> 32) == epoch;
            return all;
          },
          [&] { return v[0] >> 32; });
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        sum += static_cast<uint32_t>(v[j]) & ~kBadChunk;
        flags |= static_cast<uint32_t>(v[j]) & kBadChunk;
      }
    }
    atomicAdd(&s.running[column], static_cast<int32_t>(sum));
  }
  if (own) *bad |= __syncthreads_or(flags != 0) != 0;
  if (!__syncthreads_and(good)) return false;
  for (int i = static_cast<int>(threadIdx.x); own && i < columns; i += kThreads) s.all[i] += s.running[i];
  return true;
}

}  // namespace turnout::engine::cuda::count
