// How a block counts a chunk of tokens and finds the place of each of its rows and pairs: a chunk goes through shared memory in steps, a
// step is cut into groups of a warp, whose lanes look at each other; sums over groups, steps and chunks give the rest. First come the rows
// (count_rows.cuh): they leave once ranks have told each other how many there are. Pairs with experts (count_pairs.cuh) are counted while
// rows travel.
//
// Code that runs once is as long in the fetching as in the running: loops here stay loops, and what is rare is called.
#pragma once
#include "engine/cuda/device/header.cuh"
#include "engine/cuda/device/rows.cuh"

namespace turnout::engine::cuda::count {

inline constexpr int kThreads = 512;  ///< more would have too few registers
inline constexpr int kPairs = 2048;   ///< pairs of a step, in shared memory
inline constexpr int kGroup = 32;     ///< pairs that find their place by looking at each other: a warp
inline constexpr int kEach = kPairs / kThreads;

/// What the host works out for the plan kernel, and what that needs first, side by side: the first looks at parameters are slow.
struct PlanShape {
  const void* ids = nullptr;
  const int32_t *owner = nullptr, *local = nullptr;
  int64_t num_pairs = 0;
  int chunk_pairs = 0, step_pairs = 0;    ///< pairs of a chunk and of a step: whole tokens
  int chunk_tokens = 0, step_tokens = 0;  ///< the same in tokens
  int num_chunks = 1, num_groups = 0;     ///< groups of a step
  int num_ranks = 1, num_experts = 0, num_topk = 1;
  int rank_bits = 1, id_bits = 1;              ///< of a number of ranks or experts and one more
  bool ids_are_64 = false, are_whole = false;  ///< tokens do not reach across groups
};

struct Shared {
  int32_t* before;      ///< [groups][P] counts of a step's earlier groups: pairs per expert
  int32_t* row_before;  ///< [groups][row_stride] the same: rows per rank
  int32_t* running;     ///< [P] counts so far
  int32_t* total;       ///< [P] counts of a step
  int32_t* all;         ///< [P] counts of all tokens: the block of the last chunk
  int32_t* row_base;    ///< [R] rows before a step,
  int32_t* row_total;   ///< [R] in the step,
  int32_t* row_count;   ///< [R] in the chunk so far,
  int32_t* row_all;     ///< [R] of all tokens: the block of the last chunk
  int32_t* ids;         ///< [kPairs] expert or -1
  int32_t* first;       ///< [kPairs] destination rank at its first k, else -1
  int32_t* slot;        ///< [kPairs] rank of the expert or -1; once placed: position in the list of the destination
  int32_t* place;       ///< [kPairs] equal ranks, then equal experts earlier in the group; once placed: equal experts before
  float* weight;        ///< [kPairs]
  int32_t* owner;       ///< [P] copy of the expert table: rank,
  int32_t* local;       ///< [P] number there,
  int32_t* by_rank;     ///< [P] ids by rank and number: the block that sends headers
  int row_stride;       ///< odd: a column is in many banks

  static __host__ __device__ constexpr int padded(int n) { return (n + 3) / 4 * 4; }
  static __host__ __device__ constexpr int stride_of(int num_ranks) { return num_ranks | 1; }
  static __host__ __device__ constexpr int num_words(int num_ranks, int num_experts, int groups) {
    return padded(groups * num_experts) + padded(groups * stride_of(num_ranks)) + 6 * num_experts + 4 * num_ranks + 5 * groups * kGroup;
  }
  __device__ Shared(int32_t* memory, const PlanShape& p)
      : before(memory),
        row_before(before + padded(p.num_groups * p.num_experts)),
        running(row_before + padded(p.num_groups * stride_of(p.num_ranks))),
        total(running + p.num_experts),
        all(total + p.num_experts),
        row_base(all + p.num_experts),
        row_total(row_base + p.num_ranks),
        row_count(row_total + p.num_ranks),
        row_all(row_count + p.num_ranks),
        ids(row_all + p.num_ranks),
        first(ids + p.num_groups * kGroup),
        slot(first + p.num_groups * kGroup),
        place(slot + p.num_groups * kGroup),
        weight(reinterpret_cast<float*>(place + p.num_groups * kGroup)),
        owner(place + 2 * p.num_groups * kGroup),
        local(owner + p.num_experts),
        by_rank(local + p.num_experts),
        row_stride(stride_of(p.num_ranks)) {}
};

/// `n` words, as many as fill 16 bytes at least.
__device__ __forceinline__ void clear_words(int32_t* words, int n) {
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x); i * 4 < n; i += kThreads) reinterpret_cast<uint4*>(words)[i] = uint4{};
}

struct Step {
  int64_t begin;
  int n;
  __device__ int num_groups() const { return (n + kGroup - 1) / kGroup; }
};
/// The `i`-th step of a chunk: whole tokens, as many pairs as fit.
__device__ __forceinline__ Step step_of(const PlanShape& p, int chunk, int i) {
  const int done = i * p.step_pairs;
  const int64_t begin = static_cast<int64_t>(chunk) * p.chunk_pairs + done, left = p.num_pairs - begin;
  const int most = min(p.step_pairs, p.chunk_pairs - done);
  return {begin, left < most ? max(static_cast<int>(left), 0) : max(most, 0)};
}
__device__ __forceinline__ bool is_one_step(const PlanShape& p, int chunk) { return step_of(p, chunk, 1).n == 0; }

/// Ids of a step on their way into registers: each load takes as long as all of them.
struct Ids {
  uint32_t low[kEach], high[kEach];
  bool are_64;

  __device__ __forceinline__ void ask(const PlanShape& p, Step step) {
    are_64 = p.ids_are_64;
    const int thread = static_cast<int>(threadIdx.x);
    if (are_64) {
      const auto* from = static_cast<const uint2*>(p.ids) + step.begin;
#pragma unroll
      for (int j = 0; j < kEach; ++j) {
        const bool is_there = thread + j * kThreads < step.n;
        const uint2 v = is_there ? from[thread + j * kThreads] : uint2{~0u, ~0u};
        low[j] = v.x;
        high[j] = v.y;
      }
    } else {
      const auto* from = static_cast<const uint32_t*>(p.ids) + step.begin;
#pragma unroll
      for (int j = 0; j < kEach; ++j) low[j] = thread + j * kThreads < step.n ? from[thread + j * kThreads] : ~0u;
    }
  }
  /// One that is out of range counts as none; the call is refused for it.
  __device__ __forceinline__ int get(int j, int num_experts, bool* bad) const {
    const bool is_none = low[j] == ~0u && (!are_64 || high[j] == ~0u),
               is_good = low[j] < static_cast<uint32_t>(num_experts) && (!are_64 || high[j] == 0);
    *bad |= !is_good && !is_none;
    return is_good ? static_cast<int>(low[j]) : -1;
  }
};

/// The lanes that have the same value of so many bits. The whole warp calls it.
__device__ __forceinline__ unsigned lanes_with(int value, int bits) {
  unsigned same = kFull;
#pragma unroll 1
  for (int b = 0; b < bits; ++b) {
    const bool one = value >> b & 1;
    const unsigned ones = __ballot_sync(kFull, one);
    same &= one ? ones : ~ones;
  }
  return same;
}

}  // namespace turnout::engine::cuda::count
