// What block 0 of a low-latency dispatch writes down for the handle, once it has heard all ranks.
#pragma once
#include "engine/cuda/low_latency/tables.cuh"

namespace turnout::engine::cuda::low_latency {

/// Block 0: what the headers of all ranks say, checked, and the tables that the handle keeps. False: given up.
__device__ inline bool publish(const DispatchArgs& a, Call call, const Tables& t, const Admission& m, const FactWords* facts) {
  const Common& c = a.common;
  const Routing& r = a.routing;
  const int ranks = c.team.num_ranks, me = c.team.rank, local = a.num_local;
  int32_t* rows = t.scratch;  // [s][d]
  const bool good = receive_headers(c, call, a.cached ? HeaderInts::kRows : HeaderInts::experts(ranks), facts, [&](int s, int i, uint32_t value) {
    if (a.cached) return;
    if (i == HeaderInts::kTokens) r.source_tokens[s] = static_cast<int32_t>(value);
    if (i >= HeaderInts::kRows) r.rows[s * ranks + i - HeaderInts::kRows] = rows[s * ranks + i - HeaderInts::kRows] = static_cast<int32_t>(value);
  });
  if (!__syncthreads_and(good)) return false;
  if (a.cached) return true;
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
  pairs = block_sum(pairs);
  kept = block_sum(kept);
  if (thread() == 0) {
    const int token_rows = m.begins[ranks];
    r.cut[0] = m.cut_row;
    r.cut[1] = m.cut_k;
    *r.num_rows = a.layout == Layout::rank_major ? token_rows : a.layout == Layout::expert_major ? t.offset[local] : kept;
    *r.num_dropped = a.layout == Layout::rank_major ? m.asked - token_rows : pairs - kept;
  }
  return true;
}

}  // namespace turnout::engine::cuda::low_latency
