// What block 0 of a low-latency dispatch writes down for the handle, once it has heard all ranks.
#pragma once
#include "engine/cuda/low_latency/tables.cuh"

namespace turnout::engine::cuda::low_latency {

/// Block 0: the tables that the handle keeps, from the rows that each rank sends to each ([s][d] in t.scratch).
__device__ __forceinline__ void keep_tables(const AnyDispatch auto& a, const Tables& t, const Admission& m) {
  const Common& c = a.common;
  const Routing& r = a.routing;
  const int ranks = c.team.num_ranks, me = c.team.rank, local = a.num_local;
  int32_t* rows = t.scratch;
  const int64_t room = a.block_rows;
  const auto admitted = [&](int64_t begin, int64_t n) { return static_cast<int32_t>(begin + n <= room ? n : begin < room ? room - begin : 0); };
#pragma unroll 1
  for (int d = thread(); d < ranks; d += num_threads()) {
    int64_t begin = 0;
#pragma unroll 1
    for (int s = 0; s < ranks; ++s) {
      const int64_t n = rows[s * ranks + d];
      if (s == me) r.send_begin[d] = static_cast<int32_t>(begin);
      rows[s * ranks + d] = admitted(begin, n);
      begin += n;
    }
    r.sent[d] = rows[me * ranks + d];
  }
  __syncthreads();
#pragma unroll 1
  for (int s = thread(); s < ranks; s += num_threads()) {
    int32_t at = 0;
#pragma unroll 1
    for (int d = 0; d < me; ++d) at += rows[s * ranks + d];
    r.record_begin[s] = at;
  }
#pragma unroll 1
  for (int d = thread(); d <= ranks; d += num_threads()) {
    int32_t at = 0;
#pragma unroll 1
    for (int x = 0; x < d; ++x) at += rows[me * ranks + x];
    r.send_offset[d] = at;
    r.recv_begin[d] = m.begins[d];
  }
  int pairs = 0, kept = 0;
#pragma unroll 1
  for (int e = thread(); e < local; e += num_threads()) {
#pragma unroll 1
    for (int s = 0; s < ranks; ++s) r.expert_base[s * local + e] = t.before[s * c.max_local + e];
    r.expert_counts[e] = t.admitted[e];
    pairs += t.total[e];
    kept += t.admitted[e];
  }
#pragma unroll 1
  for (int e = thread(); e <= local; e += num_threads()) r.expert_offsets[e] = a.layout == Layout::expert_slab ? e * a.capacity : t.offset[e];
  __shared__ int32_t sums[2];
  if (thread() < 2) sums[thread()] = 0;
  __syncthreads();
  pairs = static_cast<int>(__reduce_add_sync(kFull, static_cast<unsigned>(pairs)));
  kept = static_cast<int>(__reduce_add_sync(kFull, static_cast<unsigned>(kept)));
  if (lane_id() == 0 && pairs) atomicAdd(&sums[0], pairs), atomicAdd(&sums[1], kept);
  __syncthreads();
  if (thread() == 0) {
    pairs = sums[0], kept = sums[1];
    const int token_rows = m.begins[ranks];
    r.cut[0] = m.cut_row;
    r.cut[1] = m.cut_k;
    *r.num_rows = a.layout == Layout::rank_major ? token_rows : a.layout == Layout::expert_major ? t.offset[local] : kept;
    *r.num_dropped = a.layout == Layout::rank_major ? m.asked - token_rows : pairs - kept;
  }
}

/// Block 0: rows and tokens that the headers of all ranks tell, as gather_counts() does what concerns this rank. False: given up.
__device__ __forceinline__ bool hear_rows(const AnyDispatch auto& a, Call call, const Tables& t) {
  const Common& c = a.common;
  const int ranks = c.team.num_ranks, num = ranks + 1;
  bool good = true;
#pragma unroll 1
  for (int i = thread(); good && i < ranks * num; i += num_threads()) {
    const int s = i / num, d = i % num, at = d < ranks ? HeaderInts::kRows + d : HeaderInts::kTokens;
    uint4 word;
    good = wait_for_header(c, call, s, at / kWordPayload, &word);
    const auto value = static_cast<int32_t>(at % kWordPayload == 0 ? word.x : at % kWordPayload == 1 ? word.y : word.z);
    if (d < ranks) a.routing.rows[s * ranks + d] = t.scratch[s * ranks + d] = value;
    else a.routing.source_tokens[s] = value;
  }
  return good;
}

/// Block 0: what the headers of all ranks say, checked, and the tables that the handle keeps. False: given up.
__device__ inline bool publish(const AnyDispatch auto& a, Call call, const Tables& t, const Admission& m, const FactWords* facts) {
  const Common& c = a.common;
  const Routing& r = a.routing;
  const int ranks = c.team.num_ranks;
  int32_t* rows = t.scratch;  // [s][d]
  const bool good = receive_headers(c, call, a.cached ? HeaderInts::kRows : HeaderInts::experts(ranks), facts, [&](int s, int i, uint32_t value) {
    if (a.cached) return;
    if (i == HeaderInts::kTokens) r.source_tokens[s] = static_cast<int32_t>(value);
    if (i >= HeaderInts::kRows) r.rows[s * ranks + i - HeaderInts::kRows] = rows[s * ranks + i - HeaderInts::kRows] = static_cast<int32_t>(value);
  });
  if (!__syncthreads_and(good)) return false;
  if (!a.cached) keep_tables(a, t, m);
  return true;
}

}  // namespace turnout::engine::cuda::low_latency
