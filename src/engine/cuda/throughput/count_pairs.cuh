// The second look at a chunk: how many of its pairs go to each expert, and the place of each pair among those of its expert.
#pragma once
#include "engine/cuda/throughput/count.cuh"

namespace turnout::engine::cuda::count {

/// Weights of a step, as Ids.
struct Weights {
  uint32_t bits[kEach];

  __device__ __forceinline__ void ask(const DispatchArgs& a, Step step) {
    const auto* bf16 = static_cast<const uint16_t*>(a.topk_weights);
    const auto* floats = static_cast<const uint32_t*>(a.topk_weights);
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
      const int i = static_cast<int>(threadIdx.x) + j * kThreads;
      bits[j] = 0;
      if (i >= step.n || !a.has_weights) continue;
      bits[j] = a.weights_are_bf16 ? static_cast<uint32_t>(bf16[step.begin + i]) << 16 : floats[step.begin + i];
    }
  }
};

/// The ids of a step, which are in shared memory (`here`) or come there, what each pair finds before it in its group, the counts of each
/// group and of all.
__device__ __forceinline__ void load_pairs(const DispatchArgs& a, const PlanShape& p, const Shared& s, Step step, bool here) {
  const int thread = static_cast<int>(threadIdx.x), lane = lane_id(), num_groups = step.num_groups();
  Weights weights;
  weights.ask(a, step);
  if (!here) {
    Ids ids;
    ids.ask(p, step);
    bool unused = false;
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
      if ((thread + j * kThreads) / kGroup < num_groups) s.ids[thread + j * kThreads] = ids.get(j, p.num_experts, &unused);
    }
  }
  clear_words(s.before, num_groups * p.num_experts);
#pragma unroll 1
  for (int i = thread; i < p.num_experts; i += kThreads) s.total[i] = 0;
  __syncthreads();
#pragma unroll 1
  for (int i = thread; i / kGroup < num_groups; i += kThreads) {
    const int id = s.ids[i];
    const unsigned below = (1u << lane) - 1, same = lanes_with(id + 1, p.id_bits);
    if (id >= 0 && !(same & below)) {
      s.before[i / kGroup * p.num_experts + id] = __popc(same);
      atomicAdd(&s.total[id], __popc(same));
    }
    s.place[i] = __popc(same & below);
  }
#pragma unroll
  for (int j = 0; j < kEach; ++j) {
    if ((thread + j * kThreads) / kGroup < num_groups) s.weight[thread + j * kThreads] = __uint_as_float(weights.bits[j]);
  }
  __syncthreads();
}

/// The counts of groups become those of the groups before.
__device__ inline void sum_groups(const PlanShape& p, const Shared& s, Step step) {
  constexpr int kAtOnce = 8;
  const int columns = p.num_experts, num_groups = step.num_groups();
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x); i < columns; i += kThreads) {
    int run = 0;
#pragma unroll 1
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

/// Tells the other blocks the pairs of a chunk, leaves them in s.running, and its last step loaded. `here`: the chunk is one step, whose ids
/// are in shared memory.
__device__ __forceinline__ void count_pairs(const DispatchArgs& a, const PlanShape& p, const Shared& s, int chunk, bool here, uint32_t epoch) {
  uint64_t* counts = a.chunk_counts + static_cast<int64_t>(chunk) * (p.num_ranks + p.num_experts) + p.num_ranks;
  for (int n = 0;; ++n) {
    load_pairs(a, p, s, step_of(p, chunk, n), here);
    const bool ends = step_of(p, chunk, n + 1).n == 0;
    // Each thread comes back to its own columns.
#pragma unroll 1
    for (int i = static_cast<int>(threadIdx.x); i < p.num_experts; i += kThreads) {
      const int32_t count = (n > 0 ? s.running[i] : 0) + s.total[i];
      if (ends) store_relaxed(counts + i, static_cast<uint64_t>(epoch) << 32 | static_cast<uint32_t>(count));
      s.running[i] = count;
    }
    if (ends) return;
    __syncthreads();
  }
}

/// s.running becomes the sum of the chunks before `chunk`. `total`: s.all becomes the sum with that chunk, whose counts are in s.running
/// still (`own`) or have been told. False: given up.
__device__ inline bool sum_pairs(const DispatchArgs& a, const PlanShape& p, const Shared& s, int chunk, bool own, bool total, uint32_t epoch) {
  constexpr int kAtOnce = 8;
  const int columns = p.num_experts, stride = p.num_ranks + p.num_experts;
  const int parts = max(1, kThreads / columns);  // threads that share a column
  const uint64_t* counts = a.chunk_counts + p.num_ranks;
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x); i < columns; i += kThreads) {
    if (total)
      s.all[i] = own ? s.running[i] : static_cast<int32_t>(static_cast<uint32_t>(load_relaxed(counts + static_cast<int64_t>(chunk) * stride + i)));
    s.running[i] = 0;
  }
  __syncthreads();
  bool good = true;
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x); good && i < columns * parts; i += kThreads) {
    const int column = i % columns;
    uint32_t sum = 0;
#pragma unroll 1
    for (int c = i / columns; good && c < chunk; c += kAtOnce * parts) {
      uint64_t v[kAtOnce];
      good = wait_until(
          a.common, Phase::local_blocks, a.common.team.rank, epoch, true,
          [&] {
            bool all = true;
#pragma unroll
            for (int j = 0; j < kAtOnce; ++j) {
              const int from = c + j * parts;
              v[j] = from < chunk ? load_relaxed(counts + static_cast<int64_t>(from) * stride + column) : static_cast<uint64_t>(epoch) << 32;
            }
#pragma unroll
            for (int j = 0; j < kAtOnce; ++j) all &= static_cast<uint32_t>(v[j] >> 32) == epoch;
            return all;
          },
          [&] { return v[0] >> 32; });
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) sum += static_cast<uint32_t>(v[j]);
    }
    atomicAdd(&s.running[column], static_cast<int32_t>(sum));
  }
  if (!__syncthreads_and(good)) return false;
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x); total && i < columns; i += kThreads) s.all[i] += s.running[i];
  return true;
}

/// Position of each pair of a loaded step among the equal ones before it.
__device__ __forceinline__ void place_step(const DispatchArgs& a, const PlanShape& p, const Shared& s, Step step) {
  const Routing& r = a.routing;
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x); i < step.n; i += kThreads) {
    const int id = s.ids[i];
    const int pair = id >= 0 ? s.place[i] + s.before[i / kGroup * p.num_experts + id] + s.running[id] : -1;
    r.topk_idx[step.begin + i] = id;
    r.pair_index[step.begin + i] = pair;
    s.place[i] = pair;
    if (a.has_weights) r.topk_weights[step.begin + i] = s.weight[i];
  }
}

/// The same of a chunk that is not loaded, all its steps. `memory`: all of Shared.
__device__ __noinline__ inline void reload_pairs(const DispatchArgs& a, const PlanShape& p, int32_t* memory, int chunk) {
  const Shared s(memory, p);
#pragma unroll 1
  for (int n = 0; step_of(p, chunk, n).n > 0; ++n) {
    const Step step = step_of(p, chunk, n);
    load_pairs(a, p, s, step, false);
    sum_groups(p, s, step);
    __syncthreads();
    place_step(a, p, s, step);
    __syncthreads();
#pragma unroll 1
    for (int i = static_cast<int>(threadIdx.x); i < p.num_experts; i += kThreads) s.running[i] += s.total[i];
  }
}

/// `loaded`: the chunk is one step, and that has been loaded and its groups summed.
__device__ __forceinline__ void place_chunk(const DispatchArgs& a, const PlanShape& p, const Shared& s, int chunk, bool loaded, uint32_t epoch) {
  if (loaded) place_step(a, p, s, step_of(p, chunk, 0));
  else reload_pairs(a, p, s.before, chunk);
  __syncthreads();
  if (threadIdx.x == 0) store_release_gpu(&a.flags[kPlaced + chunk], epoch);
}

}  // namespace turnout::engine::cuda::count
