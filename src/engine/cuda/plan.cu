// First kernel of a dispatch in throughput mode. Tokens are counted in chunks, which blocks take by ticket; a chunk's prefix is
// the sum of the chunks before it, whose blocks have started. The block of the last chunk knows the totals: it exchanges
// headers with all ranks. Then every block sends ids, weights and positions of its chunks to where the rows will go.
#include <algorithm>

#include "engine/cuda/device/header.cuh"
#include "engine/cuda/device/rows.cuh"
#include "engine/cuda/kernels.h"

namespace turnout::engine::cuda {
namespace {

constexpr int kThreads = 512;
constexpr int kPairs = 1024;  ///< pairs of a step, in shared memory
constexpr int kGroup = 128;   ///< pairs that find their place by looking at each other

struct Shared {
  int32_t* running;  ///< [R + P] counts so far: token rows per rank, pairs per expert
  int32_t* before;   ///< [groups][R + P] counts of a step's groups
  int32_t* ids;      ///< [kPairs] expert or -1
  int32_t* first;    ///< [kPairs] destination rank at its first k, else -1
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
/// Destination of pair `i` if it is the first of its token that goes there.
__device__ __forceinline__ int first_destination(const DispatchArgs& a, int64_t i, int id) {
  if (id < 0) return -1;
  const int32_t* owner = a.common.experts->owner;
  const int rank = owner[id];
  for (int64_t j = i / a.num_topk * a.num_topk; j < i; ++j) {
    const int64_t other = id_at(a, j);
    if (other >= 0 && other < a.common.experts->num_experts && owner[other] == rank) return -1;
  }
  return rank;
}

/// Counts of a chunk go to global memory for the blocks of later chunks.
__device__ void count_chunk(const DispatchArgs& a, const Shared& s, int chunk, uint32_t epoch) {
  const int columns = a.common.team.num_ranks + a.common.experts->num_experts;
  for (int i = static_cast<int>(threadIdx.x); i < columns; i += kThreads) s.running[i] = 0;
  __syncthreads();
  const int64_t size = chunk_tokens(a.num_tokens);
  const int64_t begin = chunk * size * a.num_topk;
  const int64_t end = min(a.num_tokens, (chunk + 1) * size) * a.num_topk;
  bool bad = false;
  for (int64_t i = begin + threadIdx.x; i < end; i += kThreads) {
    const int id = checked_id(a, i, &bad);
    if (bad) {
      bad = false;
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
    if (id < 0) continue;
    atomicAdd(&s.running[a.common.team.num_ranks + id], 1);
    const int rank = first_destination(a, i, id);
    if (rank >= 0) atomicAdd(&s.running[rank], 1);
  }
  __syncthreads();
  for (int i = static_cast<int>(threadIdx.x); i < columns; i += kThreads) a.chunk_counts[static_cast<int64_t>(chunk) * columns + i] = s.running[i];
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    store_release_gpu(&a.flags[chunk], epoch);
  }
}

/// Position of each pair among the equal ones before it. A step of kPairs is cut into groups: counts of earlier groups, then a
/// look at the pairs of the own group.
__device__ void place_chunk(const DispatchArgs& a, const Shared& s, int chunk, int num_groups) {
  const int num_ranks = a.common.team.num_ranks, columns = num_ranks + a.common.experts->num_experts, topk = a.num_topk;
  const int64_t size = chunk_tokens(a.num_tokens);
  const int64_t end = min(a.num_tokens, (chunk + 1) * size) * topk;
  const int step = num_groups * kGroup / topk * topk;  // whole tokens
  for (int64_t begin = chunk * size * topk; begin < end; begin += step) {
    const int n = static_cast<int>(min(static_cast<int64_t>(step), end - begin));
    for (int i = static_cast<int>(threadIdx.x); i < num_groups * columns; i += kThreads) s.before[i] = 0;
    __syncthreads();
    bool bad = false;
    for (int i = static_cast<int>(threadIdx.x); i < n; i += kThreads) {
      const int id = checked_id(a, begin + i, &bad);
      const int rank = first_destination(a, begin + i, id);
      s.ids[i] = id;
      s.first[i] = rank;
      a.routing.topk_idx[begin + i] = id;
      a.routing.dest[begin + i] = id >= 0 ? a.common.experts->owner[id] : -1;
      if (id >= 0) atomicAdd(&s.before[i / kGroup * columns + num_ranks + id], 1);
      if (rank >= 0) atomicAdd(&s.before[i / kGroup * columns + rank], 1);
      if (a.has_weights) {
        a.routing.topk_weights[begin + i] =
            a.weights_are_bf16 ? __uint_as_float(static_cast<uint32_t>(static_cast<const uint16_t*>(a.topk_weights)[begin + i]) << 16)
                               : static_cast<const float*>(a.topk_weights)[begin + i];
      }
    }
    __syncthreads();
    for (int i = static_cast<int>(threadIdx.x); i < n; i += kThreads) {
      const int id = s.ids[i], rank = s.first[i];
      int pair = 0, row = 0;
      for (int j = i / kGroup * kGroup; j < i; ++j) {
        pair += s.ids[j] == id;
        row += s.first[j] == rank;
      }
      for (int g = 0; g < i / kGroup; ++g) {
        if (id >= 0) pair += s.before[g * columns + num_ranks + id];
        if (rank >= 0) row += s.before[g * columns + rank];
      }
      a.routing.pair_index[begin + i] = id >= 0 ? pair + s.running[num_ranks + id] : -1;
      a.routing.send_index[begin + i] = rank >= 0 ? row + s.running[rank] : -1;
      if (rank == a.common.team.rank) a.routing.own_tokens[row + s.running[rank]] = static_cast<int32_t>((begin + i) / topk);
    }
    __syncthreads();
    for (int i = static_cast<int>(threadIdx.x); i < columns; i += kThreads) {
      for (int g = 0; g < num_groups; ++g) s.running[i] += s.before[g * columns + i];
    }
    __syncthreads();
  }
}

/// s.running becomes the sum of the chunks before `chunk`. False: given up.
__device__ bool sum_earlier(const DispatchArgs& a, const Shared& s, int chunk, uint32_t epoch) {
  const int columns = a.common.team.num_ranks + a.common.experts->num_experts;
  bool good = true;
  for (int c = static_cast<int>(threadIdx.x); good && c < chunk; c += kThreads) good = wait_local(a.common, epoch, &a.flags[c]);
  if (!__syncthreads_and(good)) return false;
  for (int i = static_cast<int>(threadIdx.x); i < columns; i += kThreads) {
    int sum = 0;
    for (int c = 0; c < chunk; ++c) sum += __ldcg(&a.chunk_counts[static_cast<int64_t>(c) * columns + i]);
    s.running[i] = sum;
  }
  __syncthreads();
  return true;
}

/// Headers out and in; what follows from the table of rows alone. s.running holds the totals. False: given up.
__device__ bool exchange(const DispatchArgs& a, const Shared& s, Call call) {
  __shared__ FactWords facts;
  const Common& c = a.common;
  const ExpertTable& experts = *c.experts;
  const int num_ranks = c.team.num_ranks, me = c.team.rank;
  if (threadIdx.x == 0)
    fill_facts(c, call.epoch, *reinterpret_cast<const volatile uint32_t*>(&c.lane_control->bad_ids) == call.epoch, a.num_tokens, &facts);
  __syncthreads();
  send_header(c, call, HeaderInts::experts(num_ranks) + experts.max_local, [&](int rank, int i) -> uint32_t {
    if (i < HeaderInts::kRows) return facts.words[i];
    if (i < HeaderInts::experts(num_ranks)) return static_cast<uint32_t>(s.running[i - HeaderInts::kRows]);
    const int e = i - HeaderInts::experts(num_ranks);
    return e < experts.num_local[rank] ? static_cast<uint32_t>(s.running[num_ranks + experts.by_rank[experts.first[rank] + e]]) : 0;
  });
  const int local = experts.num_local[me];
  const bool good = receive_headers(c, call, HeaderInts::experts(num_ranks) + experts.max_local, &facts, [&](int source, int i, uint32_t value) {
    if (i == HeaderInts::kTokens) a.routing.source_tokens[source] = static_cast<int32_t>(value);
    if (i < HeaderInts::kRows) return;
    if (i < HeaderInts::experts(num_ranks)) a.routing.rows[source * num_ranks + i - HeaderInts::kRows] = static_cast<int32_t>(value);
    else if (i - HeaderInts::experts(num_ranks) < local)
      a.routing.expert_base[source * local + i - HeaderInts::experts(num_ranks)] = static_cast<int32_t>(value);
  });
  return __syncthreads_and(good);
}

/// Tables that follow from the rows that ranks send each other, once the room of a block is known. One block calls it.
__device__ void derive_tables(const DispatchArgs& a) {
  const Routing& r = a.routing;
  const int num_ranks = a.common.team.num_ranks, me = a.common.team.rank;
  const auto rows = [&](int s, int d) { return static_cast<int64_t>(r.rows[s * num_ranks + d]); };
  const int64_t room = a.capacity >= 0 ? a.block_rows : static_cast<int64_t>(INT32_MAX);
  const auto admitted = [&](int64_t begin, int64_t n) { return begin + n <= room ? n : begin < room ? room - begin : 0; };
  for (int d = static_cast<int>(threadIdx.x); d < num_ranks; d += kThreads) {
    int64_t begin = 0;
    for (int s = 0; s < me; ++s) begin += rows(s, d);
    r.send_begin[d] = static_cast<int32_t>(begin);
    r.sent[d] = static_cast<int32_t>(admitted(begin, rows(me, d)));
  }
  // Where this rank's records begin in the combine block of source s: behind those of the ranks before this one.
  for (int s = static_cast<int>(threadIdx.x); s < num_ranks; s += kThreads) {
    int64_t at = 0;
    for (int d = 0; d < me; ++d) {
      int64_t begin = 0;
      for (int other = 0; other < s; ++other) begin += rows(other, d);
      at += admitted(begin, rows(s, d));
    }
    r.record_begin[s] = static_cast<int32_t>(at);
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    int64_t at = 0;
    for (int d = 0; d < num_ranks; ++d) {
      r.send_offset[d] = static_cast<int32_t>(at);
      at += r.sent[d];
    }
    r.send_offset[num_ranks] = static_cast<int32_t>(at);
    int64_t begin = 0, kept = 0;
    for (int s = 0; s < num_ranks; ++s) {
      r.recv_begin[s] = static_cast<int32_t>(kept);
      kept += admitted(begin, rows(s, me));
      begin += rows(s, me);
    }
    r.recv_begin[num_ranks] = static_cast<int32_t>(kept);
  }
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

/// Ids, weights and positions of a chunk's tokens to the blocks that their rows will go to.
__device__ void send_meta(const DispatchArgs& a, const Offer* offers, int chunk, Call call) {
  const Common& c = a.common;
  const int topk = a.num_topk, me = c.team.rank;
  const int64_t size = chunk_tokens(a.num_tokens), begin = chunk * size * topk, end = min(a.num_tokens, (chunk + 1) * size) * topk;
  for (int64_t i = begin + threadIdx.x; i < end; i += kThreads) {
    const int id = a.routing.topk_idx[i];
    const int owner = a.routing.dest[i];
    const int64_t token = i / topk, first = token * topk;
    for (int64_t j = first; j < first + topk; ++j) {
      const int at = a.routing.send_index[j];
      if (at < 0) continue;
      const int d = a.routing.dest[j];
      const int64_t row = static_cast<int64_t>(a.routing.send_begin[d]) + at - a.first_row;
      if (row < 0 || row >= offers[d].rows) continue;
      std::byte* block = offered_block(c, d, offers[d]);
      const BlockOffsets offsets = block_offsets(a, offers[d].rows);
      const int64_t slot = row * topk + (i - first);
      reinterpret_cast<int32_t*>(block + offsets.idx)[slot] = owner == d ? c.experts->local[id] : -1;
      reinterpret_cast<int32_t*>(block + offsets.pair)[slot] = a.routing.pair_index[i];
      if (a.has_weights) reinterpret_cast<float*>(block + offsets.weights)[slot] = owner == d ? a.routing.topk_weights[i] : 0.0f;
    }
  }
  __syncthreads();
  if (threadIdx.x == 0) fence_system();
  __syncthreads();
  for (int d = static_cast<int>(threadIdx.x); d < c.team.num_ranks; d += kThreads) {
    store_release(reinterpret_cast<uint64_t*>(c.team.base[d] + c.arena.channel_at(c.lane, call.copy, me, chunk)), signal_of(call.epoch, 0));
  }
}

__device__ bool gather_offers(const DispatchArgs& a, Call call, Offer* offers) {
  bool good = true;
  for (int d = static_cast<int>(threadIdx.x); good && d < a.common.team.num_ranks; d += kThreads) good = wait_offer(a.common, call, d, &offers[d]);
  return __syncthreads_and(good);
}

__global__ void __launch_bounds__(kThreads, 1) plan_kernel(const __grid_constant__ DispatchArgs a, int num_groups) {
  extern __shared__ int32_t memory[];
  __shared__ Offer offers[kMaxRanks];
  __shared__ int mine[kMaxChunks], num_mine, ticket;
  const Common& c = a.common;
  const Call call = call_of(c);
  clear_next_tickets(c, call);
  if (is_over(c, call)) return;
  const int columns = c.team.num_ranks + c.experts->num_experts;
  const Shared s{memory, memory + columns, memory + columns + num_groups * columns, memory + columns + num_groups * columns + kPairs};
  const int chunks = num_chunks(a.num_tokens);
  if (threadIdx.x == 0) num_mine = 0;
  for (;;) {
    __syncthreads();
    if (threadIdx.x == 0) {
      ticket = static_cast<int>(atomicAdd(&c.lane_control->tickets[call.copy][kChunkTicket], 1u));
      if (ticket < chunks) mine[num_mine++] = ticket;
    }
    __syncthreads();
    if (ticket >= chunks) break;
    count_chunk(a, s, ticket, call.epoch);
  }
  const int n = num_mine;
  for (int i = 0; i < n; ++i) {
    if (!sum_earlier(a, s, mine[i], call.epoch)) return;
    place_chunk(a, s, mine[i], num_groups);
    if (mine[i] != chunks - 1) continue;
    if (a.capacity >= 0) {
      for (int d = static_cast<int>(threadIdx.x); d < c.team.num_ranks; d += kThreads)
        send_offer(c, call, d, a.block, a.block_rows, static_cast<uint32_t>(a.move_blocks));
    }
    if (!exchange(a, s, call)) return;
    if (a.counts_for_host) tell_host(a, call.epoch);
    if (a.capacity < 0) return;  // exact: the host comes first
    derive_tables(a);
    if (threadIdx.x == 0) {
      __threadfence();
      store_release_gpu(&a.flags[kPlanReady], call.epoch);
    }
  }
  if (n == 0 || a.capacity < 0) return;
  const bool ready = threadIdx.x == 0 ? wait_local(c, call.epoch, &a.flags[kPlanReady]) : true;
  if (!__syncthreads_and(ready) || !gather_offers(a, call, offers)) return;
  for (int i = 0; i < n; ++i) send_meta(a, offers, mine[i], call);
}

/// Exact size, once the host has found memory: offers, tables and meta data.
__global__ void __launch_bounds__(kThreads, 1) meta_kernel(const __grid_constant__ DispatchArgs a) {
  __shared__ Offer offers[kMaxRanks];
  const Common& c = a.common;
  const Call call = call_of(c);
  if (is_over(c, call)) return;
  if (take_role(c, call, kChunkTicket + 8) == 0) {
    for (int d = static_cast<int>(threadIdx.x); d < c.team.num_ranks; d += kThreads) {
      send_offer(c, call, d, a.block, a.block_rows, static_cast<uint32_t>(a.move_blocks));
    }
    derive_tables(a);
    if (threadIdx.x == 0) {
      __threadfence();
      store_release_gpu(&a.flags[kPlanReady], call.epoch);
    }
  }
  const bool ready = threadIdx.x == 0 ? wait_local(c, call.epoch, &a.flags[kPlanReady]) : true;
  if (!__syncthreads_and(ready) || !gather_offers(a, call, offers)) return;
  for (int chunk = static_cast<int>(blockIdx.x); chunk < num_chunks(a.num_tokens); chunk += static_cast<int>(gridDim.x)) {
    send_meta(a, offers, chunk, call);
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
  // Shared memory: the counts of a step's groups beside the running ones.
  const int columns = num_ranks + num_experts;
  const int room = (200 * 1024 - 2 * kPairs * 4) / (columns * 4) - 1;
  return room < 1 ? 0 : room < kPairs / kGroup ? room : kPairs / kGroup;
}

cudaError_t launch_plan(const DispatchArgs& a, int num_ranks, int num_experts, int blocks, cudaStream_t stream) {
  const int groups = plan_groups(num_ranks, num_experts);
  const size_t bytes = static_cast<size_t>((num_ranks + num_experts) * (groups + 1) + 2 * kPairs) * 4;
  const int chunks = num_chunks(a.num_tokens), grid = std::min(blocks, chunks);
  plan_kernel<<<grid, kThreads, bytes, stream>>>(a, groups);
  return cudaGetLastError();
}
cudaError_t launch_meta(const DispatchArgs& a, int blocks, cudaStream_t stream) {
  const int chunks = num_chunks(a.num_tokens), grid = std::min(blocks, chunks);
  meta_kernel<<<grid, kThreads, 0, stream>>>(a);
  return cudaGetLastError();
}
cudaError_t launch_hello(const Common& c, size_t block, int64_t block_rows, int channels, bool refused, cudaStream_t stream) {
  hello_kernel<<<1, 128, 0, stream>>>(c, block, block_rows, static_cast<uint32_t>(channels), refused);
  return cudaGetLastError();
}
cudaError_t prepare_plan() {
  const cudaError_t e = cudaFuncSetAttribute(plan_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, 200 * 1024);
  cudaFuncAttributes unused;
  if (e != cudaSuccess) return e;
  // Loading a kernel later, while a peer waits, could stop everything.
  for (const void* kernel : {reinterpret_cast<const void*>(meta_kernel), reinterpret_cast<const void*>(hello_kernel)}) {
    if (const cudaError_t bad = cudaFuncGetAttributes(&unused, kernel)) return bad;
  }
  return cudaSuccess;
}

}  // namespace turnout::engine::cuda
