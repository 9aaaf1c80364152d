// First kernel of a dispatch in throughput mode. Tokens are counted in chunks, which blocks claim; a chunk's prefix is the sum of
// the chunks before it, whose blocks have started. The block of the last chunk knows the totals: it exchanges
// headers with all ranks. Then every block sends ids, weights and positions of its chunks to where the rows will go.
#include <algorithm>

#include "engine/cuda/device/tell_host.cuh"
#include "engine/cuda/kernels.h"
#include "engine/cuda/launch.h"
#include "engine/cuda/throughput/count.cuh"

namespace turnout::engine::cuda {
namespace {

using namespace count;

struct Tables {  // of experts: for the block that sends headers
  int32_t num_local[kMaxRanks], first[kMaxRanks];
};
__device__ __forceinline__ void load_owners(const Common& c, const Shared& s) {
  for (int i = static_cast<int>(threadIdx.x); i < c.num_experts; i += kThreads) {
    const int32_t owner = __ldg(c.owner + i), local = __ldg(c.local + i);
    s.owner[i] = owner;
    s.local[i] = local;
  }
}
/// They are here after copies_done().
__device__ __forceinline__ void ask_tables(const Common& c, const Shared& s, const ExpertTable& experts, Tables* tables) {
  for (int i = static_cast<int>(threadIdx.x); i < c.num_experts; i += kThreads) copy_async(s.by_rank + i, experts.by_rank + i);
  for (int i = static_cast<int>(threadIdx.x); i < c.team.num_ranks; i += kThreads) {
    copy_async(tables->num_local + i, experts.num_local + i);
    copy_async(tables->first + i, experts.first + i);
  }
}

/// Headers out; `facts` lack only whether an id is out of range (`bad`).
__device__ void send_totals(const DispatchArgs& a, const Shared& s, const Tables& tables, bool bad, Call call, FactWords* facts) {
  const Common& c = a.common;
  const int num_ranks = c.team.num_ranks;
  if (threadIdx.x == 0) facts->words[HeaderInts::kRefused] = bad;
  copies_done();
  __syncthreads();
  send_header(c, call, HeaderInts::experts(num_ranks) + c.max_local, [&](int rank, int i) -> uint32_t {
    if (i < HeaderInts::kRows) return facts->words[i];
    if (i < HeaderInts::experts(num_ranks)) return static_cast<uint32_t>(s.all[i - HeaderInts::kRows]);
    const int e = i - HeaderInts::experts(num_ranks);
    return e < tables.num_local[rank] ? static_cast<uint32_t>(s.all[num_ranks + s.by_rank[tables.first[rank] + e]]) : 0;
  });
}

/// Headers in; the rows of the table go to `rows` too. False: given up.
__device__ bool receive_totals(const DispatchArgs& a, Call call, const FactWords* facts, int32_t* rows) {
  const Common& c = a.common;
  const int num_ranks = c.team.num_ranks, local = a.num_local, most = c.max_local;
  const bool good = receive_headers(c, call, HeaderInts::experts(num_ranks) + most, facts, [&](int source, int i, uint32_t value) {
    if (i == HeaderInts::kTokens) a.routing.source_tokens[source] = static_cast<int32_t>(value);
    if (i < HeaderInts::kRows) return;
    if (i < HeaderInts::experts(num_ranks)) {
      a.routing.rows[source * num_ranks + i - HeaderInts::kRows] = rows[source * num_ranks + i - HeaderInts::kRows] = static_cast<int32_t>(value);
    } else if (i - HeaderInts::experts(num_ranks) < local && !move_places(a)) {  // else the admit kernel reads them itself
      a.routing.expert_base[source * local + i - HeaderInts::experts(num_ranks)] = static_cast<int32_t>(value);
    }
  });
  return __syncthreads_and(good);
}

/// Exclusive prefix sums of in[0, n) and the total at out[n]. One warp.
__device__ void prefix_sum(const int32_t* in, int n, int32_t* out) {
  int32_t begin = 0;
  for (int at = 0; at < n; at += 32) {
    const int i = at + lane_id();
    const int32_t value = i < n ? in[i] : 0;
    int32_t run = value;
    for (int d = 1; d < 32; d *= 2) {
      const int32_t v = __shfl_up_sync(kFull, run, d);
      if (lane_id() >= d) run += v;
    }
    if (i < n) out[i] = begin + run - value;
    begin += __shfl_sync(kFull, run, 31);
  }
  if (lane_id() == 0) out[n] = begin;
}

/// Tables that follow from the rows that ranks send each other, once the room of a block is known. One block calls it.
__device__ void derive_tables(const DispatchArgs& a, const int32_t* table, uint32_t epoch) {
  __shared__ int32_t sent[kMaxRanks], kept[kMaxRanks];
  const Routing& r = a.routing;
  const int num_ranks = a.common.team.num_ranks, me = a.common.team.rank;
  const auto rows = [&](int s, int d) { return static_cast<int64_t>(table[s * num_ranks + d]); };
  const int64_t room = a.capacity >= 0 ? a.block_rows : static_cast<int64_t>(INT32_MAX);
  const auto admitted = [&](int64_t begin, int64_t n) { return begin + n <= room ? n : begin < room ? room - begin : 0; };
  const auto tell_begins = [&](int i, int64_t send, int64_t receive) {
    store_word(reinterpret_cast<uint4*>(a.begins) + i, uint4{static_cast<uint32_t>(send), static_cast<uint32_t>(min(receive, room)), 0, epoch});
  };
  // Thread i speaks for rank i as destination (what this rank sends there) and as source (what it sends here).
  if (const int i = static_cast<int>(threadIdx.x); i < num_ranks) {
    int64_t send_begin = 0, recv_begin = 0, record = 0;
    for (int s = 0; s < me; ++s) send_begin += rows(s, i);
    for (int s = 0; s < i; ++s) recv_begin += rows(s, me);
    // What rows wait for comes first.
    tell_begins(i, send_begin, recv_begin);
    if (i == num_ranks - 1) tell_begins(num_ranks, 0, recv_begin + rows(i, me));
    // Where this rank's records begin in the combine block of source i: behind those of the ranks before this one.
    for (int d = 0; d < me; ++d) {
      int64_t begin = 0;
      for (int other = 0; other < i; ++other) begin += rows(other, d);
      record += admitted(begin, rows(i, d));
    }
    r.send_begin[i] = static_cast<int32_t>(send_begin);
    r.record_begin[i] = static_cast<int32_t>(record);
    r.sent[i] = sent[i] = static_cast<int32_t>(admitted(send_begin, rows(me, i)));
    kept[i] = static_cast<int32_t>(admitted(recv_begin, rows(i, me)));
  }
  __syncthreads();
  if (warp_id() == 0) prefix_sum(sent, num_ranks, r.send_offset);
  if (warp_id() == 1) prefix_sum(kept, num_ranks, r.recv_begin);
  __syncthreads();
}

/// Rooms and counts for the host (exact).
__device__ __noinline__ void tell_host(const DispatchArgs& a, Call call) {
  const int num_ranks = a.common.team.num_ranks, local = a.num_local;
  tell_rooms(a.common, call, a.counts_for_host);
  for (int i = static_cast<int>(threadIdx.x); i < num_ranks * num_ranks; i += kThreads)
    a.counts_for_host[CountWords::rows(num_ranks) + i] = a.routing.rows[i];
  for (int e = static_cast<int>(threadIdx.x); e < local; e += kThreads) {
    int64_t sum = 0;
    for (int s = 0; s < num_ranks; ++s) sum += a.routing.expert_base[s * local + e];
    a.counts_for_host[CountWords::pairs(num_ranks) + e] = sum;
  }
  publish_counts(a.counts_for_host, call.epoch);
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
__device__ void send_meta(const DispatchArgs& a, const Shared& s, const Places& places, int chunk, int num_groups, bool loaded, Call call) {
  const Common& c = a.common;
  const Routing& r = a.routing;
  for (int n = 0;; ++n) {
    const Step step = step_of(a, chunk, n, num_groups);
    if (step.n == 0) break;
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
    for (int d = static_cast<int>(threadIdx.x); good && d < c.team.num_ranks; d += kThreads) {
      uint4 begins;
      good = wait_word(c, Phase::local_blocks, c.team.rank, call.epoch, false, reinterpret_cast<const uint4*>(a.begins) + d, &begins);
      places->begin[d] = static_cast<int32_t>(begins.x);
    }
  } else {
    for (int d = static_cast<int>(threadIdx.x); d < c.team.num_ranks; d += kThreads) places->begin[d] = 0;
    __syncthreads();
    const bool told = read_begins(c, call, static_cast<int>(threadIdx.x), kThreads, places->begin, places->num_rows, &places->told);
    good = __syncthreads_and(told) && all_agree(c, places->told);
  }
  // Ends with all threads at one place.
  if (!__syncthreads_and(good) || !gather_offers(c, call, places->offers, first)) return false;
  for (int d = static_cast<int>(threadIdx.x); d < c.team.num_ranks; d += kThreads) {
    std::byte* block = offered_block(c, d, places->offers[d]);
    int32_t all = 0;
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
  for (int d = static_cast<int>(threadIdx.x); d < a.common.team.num_ranks; d += kThreads) {
    send_offer(a.common, call, d, a.block, a.block_rows, offered_channels(a));
  }
}

struct Chunks {  // those that a block has claimed
  int list[kMaxChunks], num, next;
  int loaded;  ///< whose counts are in s.running, the last that was counted
};

/// Claims and counts chunks until all have been claimed, and not just one: where few SMs are free the other blocks may not have started,
/// and this one will wait for what the last chunk brings. `asked`: the first step of the block's first. Returns whether one of its chunks
/// had an id out of range.
__device__ bool take_chunks(const DispatchArgs& a, const Shared& s, Chunks* chunks, Asked* asked, int num_groups, Call call) {
  const int all = num_chunks(a.num_tokens), blocks = static_cast<int>(gridDim.x), thread = static_cast<int>(threadIdx.x);
  uint32_t* claims = a.common.lane_control->started;
  bool bad = false, planned = true;  // chunks that are this block's if it comes in time
  int chunk = static_cast<int>(blockIdx.x);
  if (thread == 0) chunks->num = 0;
  for (;;) {
    // The claim is on its way while the block counts.
    const uint32_t was = thread == 0 ? atomicExch(claims + chunk, call.epoch) : call.epoch;
    const bool is_bad = count_chunk(a, s, chunk, num_groups, asked, call.epoch);
    if (thread == 0) chunks->loaded = chunk;
    const bool mine = __syncthreads_or(was != call.epoch);
    if (mine) {
      bad |= is_bad;
      tell_counts(a, s, chunk, is_bad, call.epoch);
      if (thread == 0) chunks->list[chunks->num++] = chunk;
      if (chunk == 0 && a.capacity >= 0) send_offers(a, call);
    }
    planned = planned && chunk + blocks < all;
    if (planned) {
      chunk += blocks;
    } else {
      uint32_t claimed = thread < all ? *reinterpret_cast<const volatile uint32_t*>(claims + thread) : call.epoch;
      if (mine && step_of(a, chunk, 1, num_groups).n == 0) sum_groups(a, s, step_of(a, chunk, 0, num_groups));
      if (thread == 0) chunks->next = all;
      if (!__syncthreads_or(claimed != call.epoch)) return bad;
      // A block that has just started may have claimed it meanwhile.
      claimed = thread < all ? *reinterpret_cast<const volatile uint32_t*>(claims + thread) : call.epoch;
      if (claimed != call.epoch) atomicMin(&chunks->next, (thread + all - chunk) % all);
      __syncthreads();
      if (chunks->next == all) return bad;
      chunk = (chunks->next + chunk) % all;
      __syncthreads();
    }
    asked->ask(a, step_of(a, chunk, 0, num_groups));
  }
}

/// Whoever waits for this kernel has waited for the one beside it too, which quantises.
struct LastOfAll {
  __device__ ~LastOfAll() { wait_for_previous(); }
};

__global__ void __launch_bounds__(kThreads, 1) plan_kernel(const __grid_constant__ DispatchArgs a, int num_groups) {
  extern __shared__ int32_t memory[];
  __shared__ Places places;
  __shared__ FactWords facts;
  __shared__ Chunks chunks;
  __shared__ Tables tables;
  __shared__ int32_t rows[kMaxRanks * kMaxRanks];
  const Common& c = a.common;
  const LastOfAll last_of_all;
  let_next_start();
  const Shared s(memory, c.team.num_ranks + c.num_experts, c.num_experts, num_groups);
  // All that needs nothing else is asked for at once.
  Asked asked;
  asked.ask(a, step_of(a, static_cast<int>(blockIdx.x), 0, num_groups));
  const Call call = call_of(c);
  const ExpertTable experts = *c.experts;
  const bool over = is_over(c, call);
  load_owners(c, s);
  ask_tables(c, s, experts, &tables);
  clear_next_tickets(c, call);
  if (over) return copies_done();
  bool bad = take_chunks(a, s, &chunks, &asked, num_groups, call);
  const int n = chunks.num, last = num_chunks(a.num_tokens) - 1;
  if (n == 0) return copies_done();
  // One step, still in shared memory, and its groups are summed.
  const auto is_one_step = [&](int chunk) { return step_of(a, chunk, 1, num_groups).n == 0; };
  // The last chunk first: all ranks wait for its headers, which travel while the other chunks find their places.
  bool totals = false;
  for (int i = 0; i < n; ++i) totals = totals || chunks.list[i] == last;
  if (totals && threadIdx.x == kThreads - 32) fill_facts(c, call.epoch, false, a.num_tokens, &facts, a.room);
  for (int i = totals ? n : n - 1; i >= 0; --i) {
    const int chunk = i == n ? last : chunks.list[i];
    if (i < n && totals && chunk == last) continue;
    const bool here = i == (totals ? n : n - 1) && chunk == chunks.loaded;
    if (!sum_earlier(a, s, chunk, here, i == n, &bad, call.epoch)) return copies_done();
    if (i == n) send_totals(a, s, tables, bad, call, &facts);
    place_chunk(a, s, chunk, num_groups, here && is_one_step(chunk), call.epoch);
  }
  const bool loaded = n == 1 && chunks.list[0] == chunks.loaded && is_one_step(chunks.list[0]);
  if (totals) {
    if (!receive_totals(a, call, &facts, rows)) return;
    if (a.counts_for_host) tell_host(a, call);
    if (a.capacity >= 0) derive_tables(a, rows, call.epoch);
    if (a.capacity >= 0 && threadIdx.x == 0) store_release_gpu(&a.flags[kPlanReady], call.epoch);
  }
  // Exact: the host comes first.
  if (a.capacity < 0 || !gather_places<false>(a, call, &places, totals)) return;
  for (int i = 0; i < n; ++i) send_meta(a, s, places, chunks.list[i], num_groups, loaded, call);
}

/// Exact size, once the host has found memory: offers, tables and meta data.
__global__ void __launch_bounds__(kThreads, 1) meta_kernel(const __grid_constant__ DispatchArgs a, int num_groups) {
  extern __shared__ int32_t memory[];
  __shared__ Places places;
  const Common& c = a.common;
  const Call call = call_of(c);
  if (is_over(c, call)) return;
  const Shared s(memory, c.team.num_ranks + c.num_experts, c.num_experts, num_groups);
  load_owners(c, s);
  const bool first = take_role(c, call, kMetaRoleTicket) == 0;
  if (first) {
    send_offers(a, call);
    derive_tables(a, a.routing.rows, call.epoch);
    if (threadIdx.x == 0) store_release_gpu(&a.flags[kPlanReady], call.epoch);
  }
  if (!gather_places<true>(a, call, &places, first)) return;
  for (int chunk = static_cast<int>(blockIdx.x); chunk < num_chunks(a.num_tokens); chunk += static_cast<int>(gridDim.x)) {
    send_meta(a, s, places, chunk, num_groups, false, call);
  }
}

}  // namespace

int plan_groups(int num_ranks, int num_experts) {
  // Shared memory: the counts of a step's groups beside the running ones. A token (64 entries) needs two groups.
  const int columns = num_ranks + num_experts;
  const int room = (200 * 1024 / 4 - 3 * columns - 3 * num_experts) / (columns + 5 * kGroup);
  return room < 2 ? 0 : std::min(room, kPairs / kGroup);
}

static size_t plan_shared_bytes(int num_ranks, int num_experts) {
  const int columns = num_ranks + num_experts, groups = plan_groups(num_ranks, num_experts);
  return static_cast<size_t>(columns * (groups + 3) + 5 * groups * kGroup + 3 * num_experts) * 4;
}

cudaError_t launch_plan(const DispatchArgs& a, int num_ranks, int num_experts, int blocks, cudaStream_t stream) {
  const int grid = std::min(blocks, num_chunks(a.num_tokens));
  return launch_kernel(plan_kernel, grid, kThreads, plan_shared_bytes(num_ranks, num_experts), stream, a.plans_beside, a,
                       plan_groups(num_ranks, num_experts));
}
cudaError_t launch_meta(const DispatchArgs& a, int num_ranks, int num_experts, int blocks, cudaStream_t stream) {
  const int grid = std::min(blocks, num_chunks(a.num_tokens));
  return launch_kernel(meta_kernel, grid, kThreads, plan_shared_bytes(num_ranks, num_experts), stream, false, a, plan_groups(num_ranks, num_experts));
}
cudaError_t prepare_plan() {
  for (const void* kernel : {reinterpret_cast<const void*>(plan_kernel), reinterpret_cast<const void*>(meta_kernel)}) {
    if (const cudaError_t bad = load_kernel(kernel, 200 * 1024)) return bad;
  }
  return prepare_hello();
}

}  // namespace turnout::engine::cuda
