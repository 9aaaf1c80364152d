// What follows from the headers of all ranks: tables of the routing, and what the host wants to know.
#pragma once
#include "engine/cuda/device/tell_host.cuh"
#include "engine/cuda/throughput/count.cuh"

namespace turnout::engine::cuda {

/// Exclusive prefix sums of in[0, n) and the total at out[n]. One warp.
__device__ inline void prefix_sum(const int32_t* in, int n, int32_t* out) {
  int32_t begin = 0;
#pragma unroll 1
  for (int at = 0; at < n; at += 32) {
    const int i = at + lane_id();
    const int32_t value = i < n ? in[i] : 0;
    int32_t run = value;
#pragma unroll 1
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
__device__ inline void derive_tables(const DispatchArgs& a, const int32_t* table, uint32_t epoch) {
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
#pragma unroll 1
    for (int s = 0; s < me; ++s) send_begin += rows(s, i);
#pragma unroll 1
    for (int s = 0; s < i; ++s) recv_begin += rows(s, me);
    // What rows wait for comes first.
    tell_begins(i, send_begin, recv_begin);
    if (i == num_ranks - 1) tell_begins(num_ranks, 0, recv_begin + rows(i, me));
      // Where this rank's records begin in the combine block of source i: behind those of the ranks before this one.
#pragma unroll 1
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
__device__ __noinline__ inline void tell_host(const DispatchArgs& a, Call call) {
  const int num_ranks = a.common.team.num_ranks, local = a.num_local;
  tell_rooms(a.common, call, a.counts_for_host);
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x); i < num_ranks * num_ranks; i += count::kThreads)
    a.counts_for_host[CountWords::rows(num_ranks) + i] = a.routing.rows[i];
#pragma unroll 1
  for (int e = static_cast<int>(threadIdx.x); e < local; e += count::kThreads) {
    int64_t sum = 0;
#pragma unroll 1
    for (int s = 0; s < num_ranks; ++s) sum += a.routing.expert_base[s * local + e];
    a.counts_for_host[CountWords::pairs(num_ranks) + e] = sum;
  }
  publish_counts(a.counts_for_host, call.epoch);
}

/// Headers in as far as rows go, which go to `rows` too. False: given up.
__device__ inline bool receive_rows(const DispatchArgs& a, Call call, const FactWords* facts, int32_t* rows) {
  const Common& c = a.common;
  const int num_ranks = c.team.num_ranks;
  const bool good = receive_headers(c, call, 0, HeaderInts::experts(num_ranks), facts, [&](int source, int i, uint32_t value) {
    if (i == HeaderInts::kTokens) a.routing.source_tokens[source] = static_cast<int32_t>(value);
    if (i >= HeaderInts::kRows)
      a.routing.rows[source * num_ranks + i - HeaderInts::kRows] = rows[source * num_ranks + i - HeaderInts::kRows] = static_cast<int32_t>(value);
  });
  return __syncthreads_and(good);
}
/// The rest of them, from ranks that agree.
__device__ inline bool receive_pairs(const DispatchArgs& a, Call call, const FactWords* facts) {
  const int begin = HeaderInts::later_experts(a.common.team.num_ranks), local = a.num_local;
  const bool good = receive_headers(a.common, call, begin, begin + a.common.max_local, facts, [&](int source, int i, uint32_t value) {
    if (i - begin < local && !move_places(a)) a.routing.expert_base[source * local + i - begin] = static_cast<int32_t>(value);
  });
  return __syncthreads_and(good);
}

/// The headers of all ranks and what follows from them. False: given up.
__device__ __forceinline__ bool receive_first(const DispatchArgs& a, Call call, const FactWords& facts, int32_t* rows) {
  if (!receive_rows(a, call, &facts, rows)) return false;
  if (a.capacity >= 0) derive_tables(a, rows, call.epoch);
  return true;
}
__device__ __forceinline__ bool receive_rest(const DispatchArgs& a, Call call, const FactWords& facts) {
  if (!receive_pairs(a, call, &facts)) return false;
  if (a.counts_for_host) tell_host(a, call);
  if (a.capacity >= 0 && threadIdx.x == 0) store_release_gpu(&a.flags[kPlanReady], call.epoch);
  return true;
}

}  // namespace turnout::engine::cuda
