// How a block counts a chunk of tokens and finds the place of each of its pairs: a chunk goes through shared memory in steps, a step
// is cut into groups of a warp, whose lanes look at each other; sums over groups, steps and chunks give the rest. What other blocks
// wait for comes first: the counts of a chunk are told before the block looks at its groups.
#pragma once
#include "engine/cuda/device/header.cuh"
#include "engine/cuda/device/rows.cuh"

namespace turnout::engine::cuda::count {

inline constexpr int kThreads = 512;  ///< more would have too few registers
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
  float* weight;     ///< [kPairs]
  int32_t* owner;    ///< [P] copy of the expert table: rank,
  int32_t* local;    ///< [P] number there,
  int32_t* by_rank;  ///< [P] ids by rank and number: the block that sends headers

  __device__ Shared(int32_t* memory, int columns, int num_experts, int num_groups)
      : running(memory),
        total(running + columns),
        all(total + columns),
        before(all + columns),
        ids(before + num_groups * columns),
        first(ids + num_groups * kGroup),
        slot(first + num_groups * kGroup),
        place(slot + num_groups * kGroup),
        weight(reinterpret_cast<float*>(place + num_groups * kGroup)),
        owner(place + 2 * num_groups * kGroup),
        local(owner + num_experts),
        by_rank(local + num_experts) {}
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

/// Ids and weights of a step on their way into registers: each load takes as long as all of them.
struct Asked {
  static constexpr int kEach = (kPairs + kThreads - 1) / kThreads;
  int64_t id[kEach];
  uint32_t weight[kEach];

  __device__ __forceinline__ void ask(const DispatchArgs& a, Step step) {
    const auto each = [&](auto take) {
#pragma unroll
      for (int j = 0; j < kEach; ++j) {
        const int i = static_cast<int>(threadIdx.x) + j * kThreads;
        take(j, step.begin + i, i < step.n);
      }
    };
    const auto* ids64 = static_cast<const int64_t*>(a.topk_idx);
    const auto* ids32 = static_cast<const int32_t*>(a.topk_idx);
    if (a.ids_are_64) each([&](int j, int64_t i, bool is_there) { id[j] = is_there ? ids64[i] : -1; });
    else each([&](int j, int64_t i, bool is_there) { id[j] = is_there ? ids32[i] : -1; });
    const auto* bf16 = static_cast<const uint16_t*>(a.topk_weights);
    const auto* floats = static_cast<const uint32_t*>(a.topk_weights);
    if (!a.has_weights) each([&](int j, int64_t, bool) { weight[j] = 0; });
    else if (a.weights_are_bf16) each([&](int j, int64_t i, bool is_there) { weight[j] = is_there ? static_cast<uint32_t>(bf16[i]) << 16 : 0; });
    else each([&](int j, int64_t i, bool is_there) { weight[j] = is_there ? floats[i] : 0; });
  }
};

__device__ __forceinline__ int bits_of(int most) {
  int bits = 0;
  while (most >> bits) ++bits;
  return bits;
}
/// The lanes that have the same value of so many bits. The whole warp calls it.
__device__ __forceinline__ unsigned lanes_with(int value, int bits) {
  unsigned same = kFull;
  for (int b = 0; b < bits; ++b) {
    const bool one = value >> b & 1;
    const unsigned ones = __ballot_sync(kFull, one);
    same &= one ? ones : ~ones;
  }
  return same;
}

/// What the lanes of a group find before them: of pair `i`, whose expert is `id` and whose rank is that of the expert, or -1. Returns
/// the rank if no earlier pair of the token has it, else -1.
__device__ __forceinline__ int look_at_group(const DispatchArgs& a, const Shared& s, int i, int id, int rank, int id_bits, int rank_bits) {
  const int num_ranks = a.common.team.num_ranks, topk = a.num_topk, lane = lane_id();
  const unsigned below = (1u << lane) - 1, same_id = lanes_with(id + 1, id_bits), same_rank = lanes_with(rank + 1, rank_bits);
  if (kGroup % topk == 0) {
    // Entries of the token that come earlier.
    const unsigned earlier = below & ~((1u << lane / topk * topk) - 1);
    if (same_rank & earlier) rank = -1;
  } else {
    for (int j = i / topk * topk; j < i && rank >= 0; ++j) {
      if (s.slot[j] == rank) rank = -1;
    }
  }
  const unsigned same_first = same_rank & __ballot_sync(kFull, rank >= 0);
  int32_t* counts = s.before + i / kGroup * (num_ranks + a.common.num_experts);
  if (id >= 0 && !(same_id & below)) {
    counts[num_ranks + id] = __popc(same_id);
    atomicAdd(&s.total[num_ranks + id], __popc(same_id));
  }
  if (rank >= 0 && !(same_first & below)) {
    counts[rank] = __popc(same_first);
    atomicAdd(&s.total[rank], __popc(same_first));
  }
  s.place[i] = __popc(same_id & below) | __popc(same_first & below) << 16;
  return rank;
}

/// A step to shared memory: ids, what each pair finds before it in its group, the counts of each group and of all. Returns whether an id
/// is out of range.
__device__ __forceinline__ bool load_step(const DispatchArgs& a, const Shared& s, Step step, const Asked& asked, uint32_t epoch) {
  const int num_ranks = a.common.team.num_ranks, columns = num_ranks + a.common.num_experts;
  const int num_groups = (step.n + kGroup - 1) / kGroup;
  const int id_bits = bits_of(a.common.num_experts), rank_bits = bits_of(num_ranks);
  for (int i = static_cast<int>(threadIdx.x); i < num_groups * columns; i += kThreads) s.before[i] = 0;
  for (int i = static_cast<int>(threadIdx.x); i < columns; i += kThreads) s.total[i] = 0;
  __syncthreads();
  const auto id_of = [&](int64_t id) { return id >= 0 && id < a.common.num_experts ? static_cast<int>(id) : -1; };
  bool bad = false;
#pragma unroll
  for (int j = 0; j < Asked::kEach; ++j) {
    const int i = static_cast<int>(threadIdx.x) + j * kThreads;
    if (i >= step.n) break;
    bad |= asked.id[j] < -1 || asked.id[j] >= a.common.num_experts;  // it counts as none; the call is refused for it
    const int id = id_of(asked.id[j]);
    s.ids[i] = id;
    s.slot[i] = id >= 0 ? s.owner[id] : -1;
    s.weight[i] = __uint_as_float(asked.weight[j]);
  }
  if (kGroup % a.num_topk != 0) __syncthreads();
#pragma unroll
  for (int j = 0; j < Asked::kEach; ++j) {
    const int i = static_cast<int>(threadIdx.x) + j * kThreads;
    if (i / kGroup >= num_groups) break;  // a warp goes on or it does not
    const int id = i < step.n ? id_of(asked.id[j]) : -1;
    s.first[i] = look_at_group(a, s, i, id, id >= 0 ? s.owner[id] : -1, id_bits, rank_bits);
  }
  if (bad) tell_bad_ids(a, step, epoch);
  return __syncthreads_or(bad);
}

/// The counts of groups become those of the groups before.
__device__ inline void sum_groups(const DispatchArgs& a, const Shared& s, Step step) {
  constexpr int kAtOnce = 8;
  const int columns = a.common.team.num_ranks + a.common.num_experts, num_groups = (step.n + kGroup - 1) / kGroup;
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
  }
}

/// Leaves the counts of a chunk in s.running, and the chunk's last step loaded. `asked`: its first. Returns whether an id is out of range.
__device__ inline bool count_chunk(const DispatchArgs& a, const Shared& s, int chunk, int num_groups, Asked* asked, uint32_t epoch) {
  const int columns = a.common.team.num_ranks + a.common.num_experts;
  bool bad = false;
  for (int n = 0;; ++n) {
    bad |= load_step(a, s, step_of(a, chunk, n, num_groups), *asked, epoch);
    // Each thread comes back to its own columns.
    for (int i = static_cast<int>(threadIdx.x); i < columns; i += kThreads) s.running[i] = (n > 0 ? s.running[i] : 0) + s.total[i];
    const Step next = step_of(a, chunk, n + 1, num_groups);
    if (next.n == 0) return bad;
    asked->ask(a, next);
  }
}

/// They go to global memory for the blocks of later chunks. A count and its epoch are one word: no fence, no flag.
__device__ __forceinline__ void tell_counts(const DispatchArgs& a, const Shared& s, int chunk, bool bad, uint32_t epoch) {
  const int columns = a.common.team.num_ranks + a.common.num_experts;
  uint64_t* counts = a.chunk_counts + static_cast<int64_t>(chunk) * columns;
  for (int i = static_cast<int>(threadIdx.x); i < columns; i += kThreads) {
    store_relaxed(counts + i, static_cast<uint64_t>(epoch) << 32 | static_cast<uint32_t>(s.running[i]) | (bad ? kBadChunk : 0));
  }
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
    if (a.has_weights) r.topk_weights[step.begin + i] = s.weight[i];
    s.slot[i] = at;  // of this pair alone: nobody else looks at it any more
  }
  __syncthreads();
  for (int i = static_cast<int>(threadIdx.x); i < columns; i += kThreads) s.running[i] += s.total[i];
  __syncthreads();
}

/// `loaded`: the chunk is one step, and that has been loaded and its groups summed.
__device__ inline void place_chunk(const DispatchArgs& a, const Shared& s, int chunk, int num_groups, bool loaded, uint32_t epoch) {
  for (int n = 0;; ++n) {
    const Step step = step_of(a, chunk, n, num_groups);
    if (step.n == 0) break;
    if (!loaded) {
      Asked asked;
      asked.ask(a, step);
      load_step(a, s, step, asked, epoch);
      sum_groups(a, s, step);
      __syncthreads();
    }
    place_step(a, s, step);
  }
  __syncthreads();
  if (threadIdx.x == 0) store_release_gpu(&a.flags[kPlaced + chunk], epoch);
}

/// s.running becomes the sum of the chunks before `chunk`. `total`: s.all becomes the sum with that chunk, which this block has counted
/// (`own`: s.running has still its counts), and *bad tells whether one of the others had an id out of range. False: given up.
__device__ inline bool sum_earlier(const DispatchArgs& a, const Shared& s, int chunk, bool own, bool total, bool* bad, uint32_t epoch) {
  constexpr int kAtOnce = 8;
  const int columns = a.common.team.num_ranks + a.common.num_experts;
  const int parts = max(1, kThreads / columns);  // threads that share a column
  for (int i = static_cast<int>(threadIdx.x); i < columns; i += kThreads) {
    if (total) {
      s.all[i] = own ? s.running[i] : static_cast<int32_t>(static_cast<uint32_t>(load_relaxed(a.chunk_counts + chunk * columns + i)) & ~kBadChunk);
    }
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
  if (total) *bad |= __syncthreads_or(flags != 0) != 0;
  if (!__syncthreads_and(good)) return false;
  for (int i = static_cast<int>(threadIdx.x); total && i < columns; i += kThreads) s.all[i] += s.running[i];
  return true;
}

}  // namespace turnout::engine::cuda::count
