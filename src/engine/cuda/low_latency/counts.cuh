// What a low-latency dispatch tells all ranks before rows: facts, and how many rows and pairs come.
#pragma once
#include "engine/cuda/low_latency/send.cuh"

namespace turnout::engine::cuda::low_latency {

/// id_of(), all bits of it.
__device__ __forceinline__ int wide_id_of(const AnyDispatch auto& a, int64_t i) {
  const int id = id_of(a, i);
  const bool fits = !a.ids_are_64 || __ldg(static_cast<const int32_t*>(a.topk_idx) + 2 * i + 1) == id >> 31;
  return fits ? id : -2;
}

/// Adds the tokens of a warp to the rows of the ranks that each goes to. The whole warp calls it.
__device__ __forceinline__ void add_to_ranks(int32_t* rows, int num_ranks, uint32_t ranks) {
#pragma unroll 1
  for (int r = 0; r < num_ranks; ++r) {
    const int n = __popc(__ballot_sync(kFull, ranks >> r & 1));
    if (lane_id() == 0 && n) atomicAdd(&rows[r], n);
  }
}

/// Counts the pairs of each expert in t.before and the rows to each rank in t.scratch. Returns where an id is no expert, -1: nowhere.
__device__ inline int count_all(const AnyDispatch auto& a, const Tables& t) {
  const Common& c = a.common;
  const int ranks = c.team.num_ranks, topk = a.num_topk, tokens = static_cast<int>(a.num_tokens);
  int32_t* rows = t.scratch;
  int bad = -1;  // where an id is no expert
#pragma unroll 1
  for (int base = warp_id() * 32; base < tokens; base += num_threads()) {
    const int u = base + lane_id();
    uint64_t low = 0, high = 0;  // ranks that the token goes to
#pragma unroll 4
    for (int j = 0; j < topk; ++j) {
      const int id = u < tokens ? wide_id_of(a, static_cast<int64_t>(u) * topk + j) : -1;
      if (id == -2) bad = u * kMaxTopk + j;
      if (id < 0) continue;
      const int owner = t.owner[id];
      atomicAdd(&t.before[owner * c.max_local + t.local[id]], 1);
      (owner < 64 ? low : high) |= 1ull << owner % 64;
    }
    if (ranks <= 8) {
      add_to_ranks(rows, ranks, static_cast<uint32_t>(low));
    } else {
#pragma unroll 1
      for (; low; low &= low - 1) atomicAdd(&rows[__ffsll(static_cast<long long>(low)) - 1], 1);
#pragma unroll 1
      for (; high; high &= high - 1) atomicAdd(&rows[63 + __ffsll(static_cast<long long>(high))], 1);
    }
  }
  return bad;
}
/// The same of plain tokens: a thread looks at one of them, at the first before it knows anything else.
__device__ __forceinline__ int count_all_plain(const AnyDispatch auto& a, const Tables& t, const Early& early, bool use_early) {
  const Common& c = a.common;
  int bad = -1;
#pragma unroll 1
  for (int64_t u = thread(); u - lane_id() < a.num_tokens; u += num_threads()) {
    const Entries e = use_early && u == thread() ? early.other : ask_entries(a, u, u < a.num_tokens);
    const Entries upper = a.ids_are_64 ? ask_entries<true>(a, u, u < a.num_tokens) : Entries{};
    uint32_t ranks = 0;
#pragma unroll
    for (int k = 0; k < Entries::kMost; ++k) {
      int id = u < a.num_tokens ? entry_of(a, e, k) : -1;
      if (id != -2 && a.ids_are_64 && u < a.num_tokens && k < a.num_topk && static_cast<int>(upper.words[k]) != id >> 31) id = -2;
      if (id == -2) bad = static_cast<int>(u) * kMaxTopk + k;
      if (id < 0) continue;
      const int owner = t.owner[id];
      atomicAdd(&t.before[owner * c.max_local + t.local[id]], 1);
      ranks |= 1u << owner;
    }
    add_to_ranks(t.scratch, c.team.num_ranks, ranks);
  }
  return bad;
}
/// Before counting, and a barrier.
__device__ __forceinline__ void clear_counters(const AnyDispatch auto& a, const Tables& t) {
  const int ranks = a.common.team.num_ranks;
#pragma unroll 1
  for (int i = thread(); i < ranks; i += num_threads()) t.scratch[i] = 0;
#pragma unroll 1
  for (int i = thread(); i < ranks * a.common.max_local; i += num_threads()) t.before[i] = 0;
}

/// Why a rank refuses a call: entry `bad` (see count_all) is no expert.
__device__ __forceinline__ DeviceRecord bad_id(const AnyDispatch auto& a, Call call, int bad) {
  const int64_t i = static_cast<int64_t>(bad / kMaxTopk) * a.num_topk + bad % kMaxTopk;
  DeviceRecord r{};
  r.state = 4;
  r.peer = a.common.team.rank;
  r.epoch = call.epoch;
  r.expected = bad / kMaxTopk;
  r.k = bad % kMaxTopk;
  r.value = a.ids_are_64 ? static_cast<const int64_t*>(a.topk_idx)[i] : static_cast<const int32_t*>(a.topk_idx)[i];
  return r;
}
/// Facts, and what has been counted, to all ranks, this one included.
__device__ __forceinline__ void tell_counts(const AnyDispatch auto& a, const Tables& t, Call call, bool refused, const FactWords* facts) {
  const Common& c = a.common;
  const int ranks = c.team.num_ranks;
  send_header(c, call, HeaderInts::experts(ranks) + c.max_local, [&](int rank, int i) -> uint32_t {
    if (i == HeaderInts::kRefused) return refused;
    if (i < HeaderInts::kRows) return facts->words[i];
    if (i < HeaderInts::experts(ranks)) return static_cast<uint32_t>(t.scratch[i - HeaderInts::kRows]);
    return static_cast<uint32_t>(t.before[rank * c.max_local + i - HeaderInts::experts(ranks)]);
  });
}

/// Counts the tokens and tells all ranks.
template <bool kPlain>
__device__ __forceinline__ void send_counts(const AnyDispatch auto& a, const Tables& t, Call call, const Early& early, bool use_early,
                                            FactWords* facts) {
  const Common& c = a.common;
  if (thread() == num_threads() - 1) fill_facts(c, call.epoch, false, a.num_tokens, facts);
  if (a.cached) {
    __syncthreads();
    send_header(c, call, HeaderInts::kRows, [&](int, int i) { return facts->words[i]; });
    return;
  }
  if (!use_early) {
    clear_counters(a, t);
    __syncthreads();
  }
  int bad;
  if constexpr (kPlain) bad = count_all_plain(a, t, early, use_early);
  else bad = count_all(a, t);
  if (bad >= 0) write_reason(c, bad_id(a, call, bad));
  tell_counts(a, t, call, __syncthreads_or(bad >= 0), facts);
  __syncthreads();
}

}  // namespace turnout::engine::cuda::low_latency
