// First kernel of a dispatch in throughput mode. Tokens are counted in chunks, which blocks take by ticket; a chunk's prefix is
// the sum of the chunks before it, whose blocks have started. The block of the last chunk knows the totals: it exchanges
// headers with all ranks. Then every block sends ids, weights and positions of its chunks to where the rows will go.
#include <algorithm>

#include "engine/cuda/device/header.cuh"
#include "engine/cuda/device/rows.cuh"
#include "engine/cuda/kernels.h"
#include "engine/cuda/launch.h"

namespace turnout::engine::cuda {
namespace {

constexpr int kThreads = 512;
constexpr int kPairs = 1024;  ///< pairs of a step, in shared memory
constexpr int kGroup = 32;    ///< pairs that find their place by looking at each other: a warp

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

__device__ void tell_bad_id(const DispatchArgs& a, int64_t i, uint32_t epoch) {
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
__device__ void load_step(const DispatchArgs& a, const Shared& s, Step step, int num_groups, uint32_t epoch) {
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
__device__ void count_chunk(const DispatchArgs& a, const Shared& s, int chunk, int num_groups, uint32_t epoch) {
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
__device__ void place_step(const DispatchArgs& a, const Shared& s, Step step) {
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
__device__ void place_chunk(const DispatchArgs& a, const Shared& s, int chunk, int num_groups, bool loaded, uint32_t epoch) {
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
__device__ bool sum_earlier(const DispatchArgs& a, const Shared& s, int chunk, uint32_t epoch) {
  const int columns = a.common.team.num_ranks + a.common.experts->num_experts;
  bool good = true;
  for (int c = static_cast<int>(threadIdx.x); good && c < chunk; c += kThreads) good = wait_local(a.common, epoch, &a.flags[c]);
  if (!__syncthreads_and(good)) return false;
  for (int i = static_cast<int>(threadIdx.x); i < columns; i += kThreads) {
    int sum = 0;
#pragma unroll 8
    for (int c = 0; c < chunk; ++c) sum += __ldcg(&a.chunk_counts[static_cast<int64_t>(c) * columns + i]);
    s.running[i] = sum;
  }
  __syncthreads();
  return true;
}

/// Headers out. s.running holds the counts before the last chunk.
__device__ void send_totals(const DispatchArgs& a, const Shared& s, Call call, FactWords* facts) {
  const Common& c = a.common;
  const ExpertTable& experts = *c.experts;
  const int num_ranks = c.team.num_ranks;
  const int32_t* last = a.chunk_counts + static_cast<int64_t>(num_chunks(a.num_tokens) - 1) * (num_ranks + experts.num_experts);
  const auto total = [&](int column) { return static_cast<uint32_t>(s.running[column] + __ldcg(last + column)); };
  if (threadIdx.x == 0)
    fill_facts(c, call.epoch, *reinterpret_cast<const volatile uint32_t*>(&c.lane_control->bad_ids) == call.epoch, a.num_tokens, facts);
  __syncthreads();
  send_header(c, call, HeaderInts::experts(num_ranks) + experts.max_local, [&](int rank, int i) -> uint32_t {
    if (i < HeaderInts::kRows) return facts->words[i];
    if (i < HeaderInts::experts(num_ranks)) return total(i - HeaderInts::kRows);
    const int e = i - HeaderInts::experts(num_ranks);
    return e < experts.num_local[rank] ? total(num_ranks + experts.by_rank[experts.first[rank] + e]) : 0;
  });
}

/// Headers in; the rows of the table go to `rows` too. False: given up.
__device__ bool receive_totals(const DispatchArgs& a, Call call, const FactWords* facts, int32_t* rows) {
  const Common& c = a.common;
  const int num_ranks = c.team.num_ranks, local = a.num_local, most = c.experts->max_local;
  const bool good = receive_headers(c, call, HeaderInts::experts(num_ranks) + most, facts, [&](int source, int i, uint32_t value) {
    if (i == HeaderInts::kTokens) a.routing.source_tokens[source] = static_cast<int32_t>(value);
    if (i < HeaderInts::kRows) return;
    if (i < HeaderInts::experts(num_ranks)) {
      a.routing.rows[source * num_ranks + i - HeaderInts::kRows] = rows[source * num_ranks + i - HeaderInts::kRows] = static_cast<int32_t>(value);
    } else if (i - HeaderInts::experts(num_ranks) < local) {
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
__device__ void derive_tables(const DispatchArgs& a, const int32_t* table) {
  __shared__ int32_t sent[kMaxRanks], kept[kMaxRanks];
  const Routing& r = a.routing;
  const int num_ranks = a.common.team.num_ranks, me = a.common.team.rank;
  const auto rows = [&](int s, int d) { return static_cast<int64_t>(table[s * num_ranks + d]); };
  const int64_t room = a.capacity >= 0 ? a.block_rows : static_cast<int64_t>(INT32_MAX);
  const auto admitted = [&](int64_t begin, int64_t n) { return begin + n <= room ? n : begin < room ? room - begin : 0; };
  // Thread i speaks for rank i as destination (what this rank sends there) and as source (what it sends here).
  if (const int i = static_cast<int>(threadIdx.x); i < num_ranks) {
    int64_t send_begin = 0, recv_begin = 0, record = 0;
    for (int s = 0; s < me; ++s) send_begin += rows(s, i);
    for (int s = 0; s < i; ++s) recv_begin += rows(s, me);
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
  __threadfence();
  __syncthreads();
}

/// Counts for the host (exact): [R * R] rows, [Le] pairs of each local expert, then the epoch.
__device__ void tell_host(const DispatchArgs& a, uint32_t epoch) {
  const int num_ranks = a.common.team.num_ranks, local = a.common.experts->num_local[a.common.team.rank];
  for (int i = static_cast<int>(threadIdx.x); i < num_ranks * num_ranks; i += kThreads) a.counts_for_host[i] = a.routing.rows[i];
  for (int e = static_cast<int>(threadIdx.x); e < local; e += kThreads) {
    int64_t sum = 0;
    for (int s = 0; s < num_ranks; ++s) sum += a.routing.expert_base[s * local + e];
    a.counts_for_host[num_ranks * num_ranks + e] = sum;
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    fence_system();
    store_release(reinterpret_cast<uint64_t*>(&a.counts_for_host[num_ranks * num_ranks + a.common.experts->max_local]), epoch);
  }
}

struct Places {  // where this rank's rows go
  Offer offers[kMaxRanks];
  int32_t begin[kMaxRanks];
  int32_t *idx[kMaxRanks], *pair[kMaxRanks];
  float* weights[kMaxRanks];
};

/// Ids, weights and positions of a step that is in shared memory, placed, to the blocks that its rows will go to.
__device__ void send_step(const DispatchArgs& a, const Shared& s, const Places& places, Step step) {
  const Common& c = a.common;
  const int topk = a.num_topk;
  for (int i = static_cast<int>(threadIdx.x); i < step.n; i += kThreads) {
    const int id = s.ids[i], first = i / topk * topk, pair = s.place[i];
    const int owner = id >= 0 ? __ldg(c.experts->owner + id) : -1, local = id >= 0 ? __ldg(c.experts->local + id) : -1;
    const float weight = a.has_weights && id >= 0 ? a.routing.topk_weights[step.begin + i] : 0.0f;
    for (int j = first; j < first + topk; ++j) {
      const int d = s.first[j];
      if (d < 0) continue;
      const int64_t row = static_cast<int64_t>(places.begin[d]) + s.slot[j] - a.first_row;
      if (row < 0 || row >= places.offers[d].rows) continue;
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
    }
    __syncthreads();
    send_step(a, s, places, step);
    __syncthreads();
  }
  if (threadIdx.x == 0) fence_system();
  __syncthreads();
  for (int d = static_cast<int>(threadIdx.x); d < c.team.num_ranks; d += kThreads) {
    store_release(reinterpret_cast<uint64_t*>(c.team.base[d] + c.arena.channel_at(c.lane, call.copy, c.team.rank, chunk)), signal_of(call.epoch, 0));
  }
}

/// Once the tables are there. False: given up.
__device__ bool gather_places(const DispatchArgs& a, Call call, Places* places) {
  const Common& c = a.common;
  const bool ready = threadIdx.x == 0 ? wait_local(c, call.epoch, &a.flags[kPlanReady]) : true;
  if (!__syncthreads_and(ready)) return false;
  if (!gather_offers(c, call, places->offers)) return false;
  for (int d = static_cast<int>(threadIdx.x); d < c.team.num_ranks; d += kThreads) {
    places->begin[d] = __ldcg(&a.routing.send_begin[d]);
    std::byte* block = offered_block(c, d, places->offers[d]);
    const BlockOffsets offsets = block_offsets(a, places->offers[d].rows);
    places->idx[d] = reinterpret_cast<int32_t*>(block + offsets.idx);
    places->pair[d] = reinterpret_cast<int32_t*>(block + offsets.pair);
    places->weights[d] = reinterpret_cast<float*>(block + offsets.weights);
  }
  __syncthreads();
  return true;
}

__device__ void send_offers(const DispatchArgs& a, Call call) {
  for (int d = static_cast<int>(threadIdx.x); d < a.common.team.num_ranks; d += kThreads) {
    send_offer(a.common, call, d, a.block, a.block_rows, static_cast<uint32_t>(a.move_blocks));
  }
}

struct Chunks {  // those of a block, ascending
  int list[kMaxChunks], num, ticket;
};

/// Takes and counts chunks until there are no more.
__device__ void take_chunks(const DispatchArgs& a, const Shared& s, Chunks* chunks, int num_groups, Call call) {
  const int all = num_chunks(a.num_tokens);
  if (threadIdx.x == 0) chunks->num = 0;
  for (;;) {
    __syncthreads();
    if (threadIdx.x == 0) {
      chunks->ticket = static_cast<int>(atomicAdd(&a.common.lane_control->tickets[call.copy][kChunkTicket], 1u));
      if (chunks->ticket < all) chunks->list[chunks->num++] = chunks->ticket;
    }
    __syncthreads();
    if (chunks->ticket >= all) break;
    count_chunk(a, s, chunks->ticket, num_groups, call.epoch);
  }
}

__global__ void __launch_bounds__(kThreads, 1) plan_kernel(const __grid_constant__ DispatchArgs a, int num_groups) {
  extern __shared__ int32_t memory[];
  __shared__ Places places;
  __shared__ FactWords facts;
  __shared__ Chunks chunks;
  __shared__ int32_t rows[kMaxRanks * kMaxRanks];
  const Common& c = a.common;
  const Call call = call_of(c);
  let_next_start();
  clear_next_tickets(c, call);
  if (is_over(c, call)) return;
  const Shared s(memory, c.team.num_ranks + c.experts->num_experts, num_groups);
  take_chunks(a, s, &chunks, num_groups, call);
  const int n = chunks.num, last = num_chunks(a.num_tokens) - 1;
  if (n == 0) return;
  const bool loaded = n == 1 && step_of(a, chunks.list[0], 1, num_groups).n == 0;
  // The last chunk first: all ranks wait for its headers, which travel while the other chunks find their places.
  const bool totals = chunks.list[n - 1] == last;
  for (int i = n - 1; i >= 0; --i) {
    if (!sum_earlier(a, s, chunks.list[i], call.epoch)) return;
    if (totals && i == n - 1) {
      if (a.capacity >= 0) send_offers(a, call);
      send_totals(a, s, call, &facts);
      __syncthreads();
    }
    place_chunk(a, s, chunks.list[i], num_groups, loaded, call.epoch);
  }
  if (totals) {
    if (!receive_totals(a, call, &facts, rows)) return;
    if (a.counts_for_host) tell_host(a, call.epoch);
    if (a.capacity >= 0) derive_tables(a, rows);
    if (a.capacity >= 0 && threadIdx.x == 0) store_release_gpu(&a.flags[kPlanReady], call.epoch);
  }
  // Exact: the host comes first.
  if (a.capacity < 0 || !gather_places(a, call, &places)) return;
  for (int i = 0; i < n; ++i) send_meta(a, s, places, chunks.list[i], num_groups, loaded, call);
}

/// Exact size, once the host has found memory: offers, tables and meta data.
__global__ void __launch_bounds__(kThreads, 1) meta_kernel(const __grid_constant__ DispatchArgs a, int num_groups) {
  extern __shared__ int32_t memory[];
  __shared__ Places places;
  const Common& c = a.common;
  const Call call = call_of(c);
  if (is_over(c, call)) return;
  const Shared s(memory, c.team.num_ranks + c.experts->num_experts, num_groups);
  if (take_role(c, call, kMetaRoleTicket) == 0) {
    send_offers(a, call);
    derive_tables(a, a.routing.rows);
    if (threadIdx.x == 0) store_release_gpu(&a.flags[kPlanReady], call.epoch);
  }
  if (!gather_places(a, call, &places)) return;
  for (int chunk = static_cast<int>(blockIdx.x); chunk < num_chunks(a.num_tokens); chunk += static_cast<int>(gridDim.x)) {
    send_meta(a, s, places, chunk, num_groups, false, call);
  }
}

/// Start of a call whose routing is known: facts and offers only. One block. Also how a refused call is told (no offers then).
__global__ void __launch_bounds__(128, 1)
    hello_kernel(const __grid_constant__ Common c, size_t block, int64_t block_rows, uint32_t channels, bool refused) {
  __shared__ FactWords facts;
  const Call call = call_of(c);
  clear_next_tickets(c, call);
  if (is_over(c, call)) {
    if (c.last_of_send) advance_epoch(c, call.epoch);
    return;
  }
  if (threadIdx.x == 0) fill_facts(c, call.epoch, refused, 0, &facts);
  __syncthreads();
  send_header(c, call, HeaderInts::kRows, [&](int, int i) { return facts.words[i]; });
  if (refused) {
    // A peer that has had a header of this call already (exact size) sees it in the offer.
    for (int d = static_cast<int>(threadIdx.x); d < c.team.num_ranks; d += static_cast<int>(blockDim.x)) send_offer(c, call, d, 0, kRefusedOffer, 0);
  } else {
    for (int d = static_cast<int>(threadIdx.x); d < c.team.num_ranks; d += static_cast<int>(blockDim.x))
      send_offer(c, call, d, block, block_rows, channels);
    receive_headers(c, call, HeaderInts::kRows, &facts, [](int, int, uint32_t) {});
  }
  __syncthreads();
  if (c.last_of_send) advance_epoch(c, call.epoch);
}

}  // namespace

int plan_groups(int num_ranks, int num_experts) {
  // Shared memory: the counts of a step's groups beside the running ones. A token (64 entries) needs two groups.
  const int columns = num_ranks + num_experts;
  const int room = (200 * 1024 - 4 * kPairs * 4) / (columns * 4) - 2;
  return room < 2 ? 0 : room < kPairs / kGroup ? room : kPairs / kGroup;
}

static size_t plan_shared_bytes(int num_ranks, int num_experts) {
  return static_cast<size_t>((num_ranks + num_experts) * (plan_groups(num_ranks, num_experts) + 2) + 4 * kPairs) * 4;
}

cudaError_t launch_plan(const DispatchArgs& a, int num_ranks, int num_experts, int blocks, cudaStream_t stream) {
  const int grid = std::min(blocks, num_chunks(a.num_tokens));
  return launch_kernel(plan_kernel, grid, kThreads, plan_shared_bytes(num_ranks, num_experts), stream, false, a, plan_groups(num_ranks, num_experts));
}
cudaError_t launch_meta(const DispatchArgs& a, int num_ranks, int num_experts, int blocks, cudaStream_t stream) {
  const int grid = std::min(blocks, num_chunks(a.num_tokens));
  return launch_kernel(meta_kernel, grid, kThreads, plan_shared_bytes(num_ranks, num_experts), stream, false, a, plan_groups(num_ranks, num_experts));
}
cudaError_t launch_hello(const Common& c, size_t block, int64_t block_rows, int channels, bool refused, cudaStream_t stream) {
  hello_kernel<<<1, 128, 0, stream>>>(c, block, block_rows, static_cast<uint32_t>(channels), refused);
  return cudaGetLastError();
}
cudaError_t prepare_plan() {
  // Loading a kernel later, while a peer waits, could stop everything.
  for (const void* kernel : {reinterpret_cast<const void*>(plan_kernel), reinterpret_cast<const void*>(meta_kernel)}) {
    if (const cudaError_t bad = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, 200 * 1024)) return bad;
  }
  cudaFuncAttributes unused;
  return cudaFuncGetAttributes(&unused, hello_kernel);
}

}  // namespace turnout::engine::cuda
