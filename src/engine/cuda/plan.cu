// First kernel of a dispatch in throughput mode. Tokens are counted in chunks, which blocks claim; a chunk's prefix is the sum of
// the chunks before it, whose blocks have started. The block of the last chunk knows the totals: it exchanges headers with all ranks, first
// the rows, which are counted before all else because they wait for nothing but these, then the pairs of experts. Then every block sends
// ids, weights and positions of its chunks to where the rows will go.
#define TURNOUT_WAITS_CALL 1
#include <algorithm>

#include "engine/cuda/kernels.h"
#include "engine/cuda/launch.h"
#include "engine/cuda/throughput/count_pairs.cuh"
#include "engine/cuda/throughput/count_rows.cuh"
#include "engine/cuda/throughput/plan_tables.cuh"

namespace turnout::engine::cuda {
namespace {

using namespace count;

struct Tables {  // of experts: for the block that sends headers
  int32_t num_local[kMaxRanks], first[kMaxRanks];
};
/// They are here after copies_done().
__device__ __forceinline__ void ask_owners(const PlanShape& p, const Shared& s) {
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x); i < p.num_experts; i += kThreads) {
    copy_async(s.owner + i, p.owner + i);
    copy_async(s.local + i, p.local + i);
  }
}
__device__ __forceinline__ void ask_tables(const Common& c, const Shared& s, Tables* tables) {
  const ExpertTable experts = *c.experts;
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x); i < c.num_experts; i += kThreads) copy_async(s.by_rank + i, experts.by_rank + i);
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x); i < c.team.num_ranks; i += kThreads) {
    copy_async(tables->num_local + i, experts.num_local + i);
    copy_async(tables->first + i, experts.first + i);
  }
}

/// Headers out as far as rows go; `facts` lack only whether an id is out of range (`bad`).
__device__ __forceinline__ void send_rows(const Common& c, const Shared& s, bool bad, Call call, const FactWords& facts) {
  send_header(c, call, 0, HeaderInts::experts(c.team.num_ranks), [&](int, int i) -> uint32_t {
    if (i == HeaderInts::kRefused) return bad;
    return i < HeaderInts::kRows ? facts.words[i] : static_cast<uint32_t>(s.row_all[i - HeaderInts::kRows]);
  });
}
/// The rest of them.
__device__ __forceinline__ void send_pairs(const Common& c, const Shared& s, const Tables& tables, Call call) {
  const int begin = HeaderInts::later_experts(c.team.num_ranks);
  copies_done();
  __syncthreads();
  send_header(c, call, begin, begin + c.max_local, [&](int rank, int i) -> uint32_t {
    const int e = i - begin;
    return e < tables.num_local[rank] ? static_cast<uint32_t>(s.all[s.by_rank[tables.first[rank] + e]]) : 0;
  });
}

struct Places {  // where this rank's rows go
  Offer offers[kMaxRanks];
  int32_t begin[kMaxRanks];
  int32_t num_rows[kMaxRanks];  ///< whose ids there is room for
  int32_t *idx[kMaxRanks], *pair[kMaxRanks];
  float* weights[kMaxRanks];
  FirstWords told;
};

/// Ids, weights and positions of a step that is in shared memory, placed, to the blocks that its rows will go to.
__device__ void send_step(const DispatchArgs& a, const Shared& s, const Places& places, Step step) {
  const int topk = a.num_topk;
  for (int i = static_cast<int>(threadIdx.x); i < step.n; i += kThreads) {
    const int id = s.ids[i], first = i / topk * topk, pair = s.place[i];
    const int owner = id >= 0 ? s.owner[id] : -1, local = id >= 0 ? s.local[id] : -1;
    const float weight = a.has_weights && id >= 0 ? s.weight[i] : 0.0f;
    for (int j = first; j < first + topk; ++j) {
      const int d = s.first[j];
      if (d < 0) continue;
      const int64_t row = static_cast<int64_t>(places.begin[d]) + s.slot[j];
      if (row >= places.num_rows[d]) continue;
      const int64_t to = row * topk + (i - first);
      places.idx[d][to] = owner == d ? local : -1;
      places.pair[d][to] = pair;
      if (a.has_weights) places.weights[d][to] = owner == d ? weight : 0.0f;
    }
  }
}

/// `loaded`: the chunk is one step, which has been placed and is still in shared memory.
__device__ void send_meta(const DispatchArgs& a, const PlanShape& p, const Shared& s, const Places& places, int chunk, bool loaded, Call call) {
  const Common& c = a.common;
  const Routing& r = a.routing;
#pragma unroll 1
  for (int n = 0;; ++n) {
    const Step step = step_of(p, chunk, n);
    if (step.n == 0) break;
#pragma unroll 1
    for (int i = static_cast<int>(threadIdx.x); !loaded && i < step.n; i += kThreads) {
      s.ids[i] = r.topk_idx[step.begin + i];
      s.slot[i] = r.send_index[step.begin + i];
      s.place[i] = r.pair_index[step.begin + i];
      s.first[i] = s.slot[i] >= 0 ? r.dest[step.begin + i] : -1;
      s.weight[i] = a.has_weights ? r.topk_weights[step.begin + i] : 0.0f;
    }
    __syncthreads();
    send_step(a, s, places, step);
    __syncthreads();
  }
  // The last step has ended with all threads at one place.
  if (threadIdx.x != 0) return;
  fence_system();
#pragma unroll 1
  for (int d = 0; d < c.team.num_ranks; ++d) {
    store_relaxed(reinterpret_cast<uint64_t*>(c.team.base[d] + c.arena.channel_at(c.lane, call.copy, c.team.rank, chunk)), signal_of(call.epoch, 0));
  }
}

/// Once all ranks have told their counts. kExact: ids of the rows that come in later rounds go with the others. False: given up.
/// `first`: the block that looks for what others offer (wait_offer).
template <bool kExact>
__device__ bool gather_places(const DispatchArgs& a, Call call, Places* places, bool first) {
  const Common& c = a.common;
  bool good = true;
  if (kExact || c.through_host) {
#pragma unroll 1
    for (int d = static_cast<int>(threadIdx.x); good && d < c.team.num_ranks; d += kThreads) {
      uint4 begins;
      good = wait_word(c, Phase::local_blocks, c.team.rank, call.epoch, false, reinterpret_cast<const uint4*>(a.begins) + d, &begins);
      places->begin[d] = static_cast<int32_t>(begins.x);
    }
    // Ends with all threads at one place.
    if (!__syncthreads_and(good) || !gather_offers(c, call, places->offers, first)) return false;
  } else {
    // Headers and offers at the same time.
    constexpr int kReaders = kThreads - kMaxRanks;
    const int thread = static_cast<int>(threadIdx.x);
    if (thread < c.team.num_ranks) places->begin[thread] = 0;
    __syncthreads();
    if (thread < kReaders) good = read_begins(c, call, thread, kReaders, places->begin, places->num_rows, &places->told);
    else if (thread - kReaders < c.team.num_ranks) good = wait_offer(c, call, thread - kReaders, &places->offers[thread - kReaders]);
    if (!__syncthreads_and(good) || !all_agree(c, places->told)) return false;
  }
#pragma unroll 1
  for (int d = static_cast<int>(threadIdx.x); d < c.team.num_ranks; d += kThreads) {
    std::byte* block = offered_block(c, d, places->offers[d]);
    int32_t all = 0;
#pragma unroll 1
    for (int s = 0; kExact && s < c.team.num_ranks; ++s) all += __ldcg(&a.routing.rows[s * c.team.num_ranks + d]);
    places->num_rows[d] = kExact ? all : static_cast<int32_t>(places->offers[d].rows);
    const BlockOffsets offsets = block_offsets(a, places->offers[d].rows, places->num_rows[d]);
    places->idx[d] = reinterpret_cast<int32_t*>(block + offsets.idx);
    places->pair[d] = reinterpret_cast<int32_t*>(block + offsets.pair);
    places->weights[d] = reinterpret_cast<float*>(block + offsets.weights);
  }
  __syncthreads();
  return true;
}

__device__ void send_offers(const DispatchArgs& a, Call call) {
#pragma unroll 1
  for (int d = static_cast<int>(threadIdx.x); d < a.common.team.num_ranks; d += kThreads) {
    send_offer(a.common, call, d, a.block, a.block_rows, offered_channels(a));
  }
}

struct Chunks {  // those that a block has claimed
  int list[kMaxChunks], num, next;
};

/// Claims chunks and counts their rows until all have been claimed, and not just one: where few SMs are free the other blocks may not have
/// started, and this one will wait for what the last chunk brings. `ids`: of the first step of the block's first. Returns whether one of
/// its chunks had an id out of range; *loaded is the last that was counted.
__device__ __forceinline__ bool take_chunks(const DispatchArgs& a, const PlanShape& p, const Shared& s, Chunks* chunks, Ids* ids, int* loaded,
                                            Call call) {
  const int all = p.num_chunks, blocks = static_cast<int>(gridDim.x), thread = static_cast<int>(threadIdx.x);
  uint32_t* claims = a.common.lane_control->started;
  bool bad = false, planned = true;  // chunks that are this block's if it comes in time
  int chunk = static_cast<int>(blockIdx.x);
  if (thread == 0) chunks->num = 0;
  for (;;) {
    // The claim is on its way while the block counts. What it counts of another's chunk is what the other finds.
    const uint32_t was = thread == 0 ? atomicExch(claims + chunk, call.epoch) : call.epoch;
    bad = count_rows(a, p, s, chunk, ids, call.epoch) || bad;
    *loaded = chunk;
    planned = planned && chunk + blocks < all;
    if (planned) ids->ask(p, step_of(p, chunk + blocks, 0));
    if (chunk == 0 && a.capacity >= 0) send_offers(a, call);
    uint32_t claimed = planned || thread >= all ? call.epoch : *reinterpret_cast<const volatile uint32_t*>(claims + thread);
    if (was != call.epoch) chunks->list[chunks->num++] = chunk;
    if (planned) {
      __syncthreads();
      chunk += blocks;
      continue;
    }
    if (thread == 0) chunks->next = all;
    if (!__syncthreads_or(claimed != call.epoch)) return bad;
    // A block that has just started may have claimed it meanwhile.
    claimed = thread < all ? *reinterpret_cast<const volatile uint32_t*>(claims + thread) : call.epoch;
    if (claimed != call.epoch) atomicMin(&chunks->next, (thread + all - chunk) % all);
    __syncthreads();
    if (chunks->next == all) return bad;
    chunk = (chunks->next + chunk) % all;
    __syncthreads();
    ids->ask(p, step_of(p, chunk, 0));
  }
}

/// Whoever waits for this kernel has waited for the one beside it too, which quantises.
struct LastOfAll {
  __device__ ~LastOfAll() { wait_for_previous(); }
};

/// The rows of the chunks that a block has claimed. The last chunk first: all ranks wait for its headers, which travel while rows find their
/// places. *loaded: the chunk whose ids are in shared memory. False: given up.
__device__ __forceinline__ bool plan_rows(const DispatchArgs& a, const PlanShape& p, const Shared& s, const Chunks& chunks, bool totals, int* loaded,
                                          bool bad, const FactWords& facts, Call call) {
  const int last = p.num_chunks - 1;
  const int n = chunks.num;
#pragma unroll 1
  for (int i = totals ? n : n - 1; i >= 0; --i) {
    const int chunk = i == n ? last : chunks.list[i];
    if (i < n && totals && chunk == last) continue;
    if (!sum_rows(a, p, s, chunk, i == n, &bad, call.epoch)) return false;
    if (i == n) send_rows(a.common, s, bad, call, facts);
    place_chunk_rows(a, p, s, chunk, chunk == *loaded && is_one_step(p, chunk), call.epoch);
    *loaded = chunk;
    __syncthreads();
  }
  return true;
}

/// What follows while rows travel: pairs, tables, and what ranks tell each other about them. Where the move kernel finds places it waits for
/// the ids of all rows, and for no table of this kernel: where ids go (*gathered: it has been found) is looked for while the other blocks
/// tell their pairs, and the tables come last.
__device__ __forceinline__ bool plan_pairs(const DispatchArgs& a, const PlanShape& p, const Shared& s, const Chunks& chunks, bool totals,
                                           int in_memory, const Tables& tables, const FactWords& facts, int32_t* rows, Places* places, bool* gathered,
                                           Call call) {
  const int n = chunks.num, last = p.num_chunks - 1;
  const bool ids_first = move_places(a);
  const int gather_at = a.capacity < 0 ? n + 1 : ids_first && !totals ? 0 : n;  // exact: the host comes first
#pragma unroll 1
  for (int i = 0; i < n; ++i) {
    const int chunk = chunks.list[i];
    count_pairs(a, p, s, chunk, i == 0 && chunk == in_memory && is_one_step(p, chunk), call.epoch);
    __syncthreads();
  }
  const bool loaded = n == 1 && is_one_step(p, chunks.list[0]);
  if (loaded) sum_groups(p, s, step_of(p, chunks.list[0], 0));
#pragma unroll 1
  for (int i = totals ? -1 : 0;; ++i) {
    if (i == n && totals && !ids_first && !receive_rest(a, call, facts)) return false;
    if (i == gather_at) *gathered = gather_places<false>(a, call, places, totals);
    if (i == n) return true;
    const int chunk = i < 0 ? last : chunks.list[i];
    if (i >= 0 && totals && chunk == last) continue;
    if (!sum_pairs(a, p, s, chunk, n == 1, i < 0, call.epoch)) return false;
    if (i < 0) {
      send_pairs(a.common, s, tables, call);
      if (!ids_first && !receive_first(a, call, facts, rows)) return false;
    }
    place_chunk(a, p, s, chunk, loaded, call.epoch);
  }
}

__global__ void __launch_bounds__(kThreads, 1) plan_kernel(const __grid_constant__ PlanShape p, const __grid_constant__ DispatchArgs a) {
  extern __shared__ __align__(16) int32_t memory[];
  __shared__ Places places;
  __shared__ FactWords facts;
  __shared__ Chunks chunks;
  __shared__ Tables tables;
  __shared__ int32_t rows[kMaxRanks * kMaxRanks];
  const Common& c = a.common;
  const LastOfAll last_of_all;
  let_next_start();
  const Shared s(memory, p);
  // All that needs nothing else is asked for at once.
  Ids ids;
  ids.ask(p, step_of(p, static_cast<int>(blockIdx.x), 0));
  ask_owners(p, s);
  const uint64_t generation = *reinterpret_cast<const volatile uint64_t*>(&c.control->generation);
  const uint64_t status = c.through_host ? *reinterpret_cast<const volatile uint64_t*>(&c.control->status) : load_relaxed(status_of(c, c.team.rank));
  const uint32_t failed = *reinterpret_cast<const volatile uint32_t*>(&c.lane_control->failed);
  const uint32_t before = *reinterpret_cast<const volatile uint32_t*>(&c.lane_control->epoch[blockIdx.x % kMaxChannels]);
  const Call call{before + 1, static_cast<int>((before + 1) % static_cast<uint32_t>(c.arena.depth))};  // as call_of, once all have been asked
  clear_next_tickets(c, call);
  if ((status > generation || failed == call.epoch) && is_over(c, call)) return copies_done();
  int loaded = 0;
  const bool bad = take_chunks(a, p, s, &chunks, &ids, &loaded, call);
  const int n = chunks.num;
  if (n == 0) return;
  bool totals = false;
#pragma unroll 1
  for (int i = 0; i < n; ++i) totals = totals || chunks.list[i] == p.num_chunks - 1;
  if (totals && threadIdx.x == kThreads - 32) fill_facts(c, call.epoch, false, a.num_tokens, &facts, a.room);
  if (!plan_rows(a, p, s, chunks, totals, &loaded, bad, facts, call)) return;
  if (totals) ask_tables(c, s, &tables);
  bool gathered = false;
  if (!plan_pairs(a, p, s, chunks, totals, loaded, tables, facts, rows, &places, &gathered, call)) return copies_done();
  const bool one = n == 1 && is_one_step(p, chunks.list[0]);
#pragma unroll 1
  for (int i = 0; gathered && i < n; ++i) send_meta(a, p, s, places, chunks.list[i], one, call);
  // A block that has found that ranks do not agree leaves it to this to say so.
  if (totals && move_places(a) && receive_first(a, call, facts, rows)) receive_rest(a, call, facts);
}

/// Exact size, once the host has found memory: offers, tables and meta data.
__global__ void __launch_bounds__(kThreads, 1) meta_kernel(const __grid_constant__ PlanShape p, const __grid_constant__ DispatchArgs a) {
  extern __shared__ __align__(16) int32_t memory[];
  __shared__ Places places;
  const Common& c = a.common;
  const Call call = call_of(c);
  if (is_over(c, call)) return;
  const Shared s(memory, p);
  ask_owners(p, s);
  copies_done();
  const bool first = take_role(c, call, kMetaRoleTicket) == 0;
  if (first) {
    send_offers(a, call);
    derive_tables(a, a.routing.rows, call.epoch);
    if (threadIdx.x == 0) store_release_gpu(&a.flags[kPlanReady], call.epoch);
  }
  if (!gather_places<true>(a, call, &places, first)) return;
  for (int chunk = static_cast<int>(blockIdx.x); chunk < p.num_chunks; chunk += static_cast<int>(gridDim.x)) {
    send_meta(a, p, s, places, chunk, false, call);
  }
}

PlanShape shape_of(const DispatchArgs& a, int num_ranks, int num_experts) {
  const auto bits_of = [](int most) {
    int bits = 0;
    while (most >> bits) ++bits;
    return bits;
  };
  PlanShape p;
  p.ids = a.topk_idx;
  p.owner = a.common.owner;
  p.local = a.common.local;
  p.num_pairs = a.num_tokens * a.num_topk;
  p.num_ranks = num_ranks;
  p.num_experts = num_experts;
  p.num_topk = a.num_topk;
  p.num_groups = plan_groups(num_ranks, num_experts);
  p.num_chunks = num_chunks(a.num_tokens);
  p.chunk_tokens = static_cast<int>(chunk_tokens(a.num_tokens));
  p.chunk_pairs = p.chunk_tokens * a.num_topk;
  p.step_tokens = p.num_groups * kGroup / a.num_topk;
  p.step_pairs = p.step_tokens * a.num_topk;
  p.rank_bits = bits_of(num_ranks);
  p.id_bits = bits_of(num_experts);
  p.ids_are_64 = a.ids_are_64;
  p.are_whole = kGroup % a.num_topk == 0;
  return p;
}
size_t shared_bytes(const PlanShape& p) { return static_cast<size_t>(Shared::num_words(p.num_ranks, p.num_experts, p.num_groups)) * 4; }

}  // namespace

int plan_groups(int num_ranks, int num_experts) {
  // Shared memory: the counts of a step's groups beside the running ones. A token (64 entries) needs two groups.
  const int room = (200 * 1024 / 4 - Shared::num_words(num_ranks, num_experts, 0) - 6) / (num_experts + Shared::stride_of(num_ranks) + 5 * kGroup);
  return room < 2 ? 0 : std::min(room, kPairs / kGroup);
}

cudaError_t launch_plan(const DispatchArgs& a, int num_ranks, int num_experts, int blocks, cudaStream_t stream) {
  const PlanShape p = shape_of(a, num_ranks, num_experts);
  return launch_kernel(plan_kernel, std::min(blocks, p.num_chunks), kThreads, shared_bytes(p), stream, a.plans_beside, p, a);
}
cudaError_t launch_meta(const DispatchArgs& a, int num_ranks, int num_experts, int blocks, cudaStream_t stream) {
  const PlanShape p = shape_of(a, num_ranks, num_experts);
  return launch_kernel(meta_kernel, std::min(blocks, p.num_chunks), kThreads, shared_bytes(p), stream, false, p, a);
}
cudaError_t prepare_plan() {
  for (const void* kernel : {reinterpret_cast<const void*>(plan_kernel), reinterpret_cast<const void*>(meta_kernel)}) {
    if (const cudaError_t bad = load_kernel(kernel, 200 * 1024)) return bad;
  }
  return prepare_hello();
}

}  // namespace turnout::engine::cuda
