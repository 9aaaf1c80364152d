// A combine in low_latency mode: one kernel. A block takes a row that another rank sent, adds its experts' rows in k order, rounds,
// and writes the partial sum in flagged words to staging of the source; then it takes tokens of its own and adds what comes back,
// ranks ascending. A thread owns a unit of 24 channels from the first load to the last store; nothing goes through shared memory.
// A warp finds the terms of its row itself. The last warp has no units: it keeps the books (masks, scalars, num_lost).
#include <algorithm>
#include <atomic>
#include <climits>

#include "engine/cuda/kernels.h"
#include "engine/cuda/launch.h"
#include "engine/cuda/low_latency/books.cuh"
#include "engine/cuda/low_latency/format.h"
#include "engine/cuda/low_latency/slab.h"

namespace turnout::engine::cuda {
namespace low_latency {
namespace {

/// 299 units of a row of 7168, and the clerk. Rows without alignment have more to do with fewer threads; those of fp32 need the
/// registers.
template <DType kType, bool kFast>
inline constexpr int kThreads = kFast&& kType != DType::fp32 ? 320 + 32 : 256;
/// Shared memory that is not rows of y, at most.
inline constexpr int kStaticBytes = 2048;

/// The first token of a block, asked for before anything else.
template <int kHalves>
struct First {
  Parts<kHalves> parts;
  int own_row;
  Terms<kHalves> own;
};
template <int kHalves>
__device__ __forceinline__ First<kHalves> first_of(const auto& w, const Parts<kHalves>& asked) {
  First<kHalves> f;
  f.parts = parts_of(w, asked);
  f.own_row = own_row_of(w, f.parts);
  f.own = ask_terms<kHalves>(w.a, f.own_row);
  return f;
}

/// What a warp of units does: partial sums for others, then its own tokens. One loop, so that the code of adding is there once.
template <DType kType, bool kFast, int kHalves>
__device__ __forceinline__ bool work_on_units(const auto& w, int worker, const Parts<kHalves>& parts, const Fetched& room) {
  const auto& a = w.a;
  const int fetching = min(num_warps() - 1, Fetched::kMost);
  Owed owed(w, worker);
  int64_t token = worker;
  int n = 0;
  uint4* to = nullptr;
  bool sends = a.sends && owed.next(w, &n, &to);
  Terms<kHalves> asked = ask_terms<kHalves>(a, sends ? n : -1);
  First<kHalves> now = first_of(w, parts);
  Terms<kHalves> t = terms_of(a, n, asked);
  constexpr bool kFetch = kFetches<kType, kFast> && kHasBulk;
  const bool first_is_fetched = kFetch && sends && fetch(w, t, room, fetching);
  // Now, behind those to send: once all blocks have begun to send, loads take as long as the link is busy.
  const bool own_is_fetched = kFetch && a.receives && token < a.num_tokens && fetch(w, terms_of(a, now.own_row, now.own), room.second(), fetching);
#pragma unroll 1
  for (bool first = true;; first = false) {
    if (!first) {
      sends = sends && owed.next(w, &n, &to);
      t = terms_of(a, sends ? n : now.own_row, sends ? ask_terms<kHalves>(a, n) : now.own);
    }
    if (!sends && (!a.receives || token >= a.num_tokens)) return true;
    if (!sends && first) t = terms_of(a, now.own_row, now.own);
    const bool is_fetched = sends ? first && first_is_fetched : token == worker && own_is_fetched;
    if (sends && t.mask == 0) continue;  // all of it was dropped: the mask says so
#pragma unroll 1
    for (int base = warp_id() * 32; base < w.f.units; base += num_unit_threads()) {
      const int unit = base + lane_id();
      const Place place = place_of<kType>(a, unit, w.f.units, unit < w.f.units);
      uint32_t p[kPayload<kType>];
      if (t.mask) sum_terms<kType, kFast>(w, t, is_fetched, sends ? room : room.second(), place, p);
      if (sends) send_unit<kType>(w, to, unit, p);
      else if (!add_unit<kType, kFast>(w, token, now.parts, t.mask, place, unit, p)) return false;
    }
    if (sends) continue;
    token += num_workers();
    now = first_of(w, ask_parts<kHalves>(a, token));
  }
}

/// What the clerk does: facts, the books of what is sent, the work of blocks that have not started, the books of tokens.
template <DType kType, bool kFast, int kHalves>
__device__ __forceinline__ bool work_on_books(const auto& w, int worker, const Parts<kHalves>& parts, FactWords* facts) {
  const auto& a = w.a;
  const Common& c = a.common;
  if (a.sends && block() == 0) send_facts(c, w.call, false, facts);
  if (a.sends && worker >= 0) {
    int n = 0;
    uint4* to = nullptr;
#pragma unroll 1
    for (Owed owed(w, worker); owed.next(w, &n, &to);) send_books(w, terms_of(a, n, ask_terms<kHalves>(a, n)), n, to);
  }
  if (!a.receives) return true;
  if (a.sends) send_for_rest<kType, kFast>(w.general(), facts);
  if (!all_agree(c, w.call)) return false;
#pragma unroll 1
  for (int64_t t = worker; worker >= 0 && t < a.num_tokens; t += num_workers()) {
    const First<kHalves> now = first_of(w, t == worker ? parts : ask_parts<kHalves>(a, t));
    if (!keep_books(w, t, now.parts, now.own_row, now.own)) return false;
  }
  return true;
}

template <DType kType, bool kFast, class Args>
__global__ void __launch_bounds__(kThreads<kType, kFast>, 1) combine_kernel(const __grid_constant__ Args a, int num_fetched) {
  extern __shared__ __align__(128) std::byte memory[];
  __shared__ uint64_t barriers[2 * Fetched::kMost];
  __shared__ int32_t begins[kMaxRanks + 1], records[kMaxRanks], sent[kMaxRanks], send_offset[kMaxRanks + 1];
  __shared__ FactWords facts;
  constexpr int kHalves = kHalvesOf<kFast>;
  const Common& c = a.common;
  const int ranks = c.team.num_ranks, worker = worker_of(block());
  const bool clerk = is_clerk();
  // Everything that depends on nothing is asked for first.
  const Asked asked = ask_start(c);
  const Parts<kHalves> parts = ask_parts<kHalves>(a, worker >= 0 ? worker : a.num_tokens);
  for (int s = thread(); s <= ranks; s += num_threads()) {
    begins[s] = a.routing.recv_begin[s];
    send_offset[s] = a.routing.send_offset[s];
    if (s < ranks) records[s] = a.routing.record_begin[s], sent[s] = a.routing.sent[s];
  }
  const Start start = a.sends ? start_of(c, asked) : start_of_receive(c);
  if (thread() < 2 * Fetched::kMost) {
    fetch_init(barriers + thread());
    bulk_can_read();
  }
  const Call call = start.call;
  const bool over = __syncthreads_or(start.over);
  // A routing whose dispatch failed is refused.
  bool good = !over && begins[0] >= 0;
  if (good) {
    const Work<Args> w{
        a, call, PartialFormat::of(a.hidden, kElement<kType>, a.num_topk, a.has_side, c.arena.ll_combine_lines), begins, records, sent, send_offset};
    if (clerk) {
      good = work_on_books<kType, kFast>(w, worker, parts, &facts);
    } else if (worker >= 0) {
      const int32_t bytes = static_cast<int32_t>(a.hidden) * kElement<kType>;
      good = work_on_units<kType, kFast>(w, worker, parts, Fetched{memory, barriers, bytes, num_fetched});
    }
  } else if (a.sends && !over && clerk && block() == 0) {
    send_facts(c, call, true, &facts);
  }
  good = __syncthreads_and(good);
  if (a.receives && !over && block() == 0) {
    if (!a.sends) read_facts(c, call, &facts);
    const bool heard = hear_all(c, call, &facts);
    good = __syncthreads_and(heard) && good;
  }
  if (!good && a.receives && worker >= 0) poison(a, worker);
  __syncthreads();
  end_kernel(c, call.epoch);
}

/// Dynamic shared memory that a block may have, on every device of this process that has been prepared.
std::atomic<int> g_shared_bytes{INT_MAX};

template <DType kType>
cudaError_t launch(const CombineArgs& a, int blocks, cudaStream_t stream) {
  const auto bits = reinterpret_cast<uintptr_t>(a.y) | reinterpret_cast<uintptr_t>(a.out) | static_cast<uintptr_t>(a.y_stride) |
                    static_cast<uintptr_t>(a.out_stride);
  const int units = PartialFormat::of(a.hidden, kElement<kType>, a.num_topk, false, a.common.arena.ll_combine_lines).units;
  const int wanted = static_cast<int>(core::align_up(units, 32)) + 32;
  const auto threads = [&](int most) { return wanted < 128 ? 128 : wanted > most ? most : wanted; };
  const int64_t row = a.hidden * kElement<kType>, room = g_shared_bytes.load(std::memory_order_relaxed) / (2 * row);
  const int rows = kFetches<kType, true> ? static_cast<int>(std::min<int64_t>({room, a.num_topk, Fetched::kMost})) : 0;
  const auto shared = static_cast<size_t>(2 * rows * row);
  const bool fast = bits % 16 == 0 && a.hidden % kUnitChunk == 0 && a.num_topk <= 32;
  const bool whole = a.sends && a.receives;
  if (fast && whole && can_sum_slab(a)) return launch_slab_sums(a, blocks, g_shared_bytes.load(std::memory_order_relaxed), stream);
  const auto start = [&]<class Args>(const Args& args) {
    if (fast) return launch_kernel(combine_kernel<kType, true, Args>, blocks, threads(kThreads<kType, true>), shared, stream, false, args, rows);
    return launch_kernel(combine_kernel<kType, false, Args>, blocks, threads(kThreads<kType, false>), 0, stream, false, args, 0);
  };
  return whole ? start(WholeCombine(a)) : start(a);
}
template <DType kType>
cudaError_t load() {
  const auto take = [](auto* kernel, int bytes) { return load_kernel(reinterpret_cast<const void*>(kernel), bytes); };
  const int bytes = g_shared_bytes.load(std::memory_order_relaxed);
  if (kType == DType::bf16) {
    if (const cudaError_t bad = prepare_slab_sums(bytes)) return bad;
  }
  for (const cudaError_t bad : {take(combine_kernel<kType, true, WholeCombine>, bytes), take(combine_kernel<kType, true, CombineArgs>, bytes),
                                take(combine_kernel<kType, false, WholeCombine>, 0), take(combine_kernel<kType, false, CombineArgs>, 0)}) {
    if (bad) return bad;
  }
  return cudaSuccess;
}
cudaError_t find_shared_bytes() {
  int device = 0, most = 0;
  if (const cudaError_t bad = cudaGetDevice(&device)) return bad;
  if (const cudaError_t bad = cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device)) return bad;
  int least = g_shared_bytes.load(std::memory_order_relaxed);
  while (most - kStaticBytes < least && !g_shared_bytes.compare_exchange_weak(least, most - kStaticBytes)) {
  }
  return cudaSuccess;
}

}  // namespace
}  // namespace low_latency

bool can_ll_combine(const CombineArgs& a) {
  const Arena& arena = a.common.arena;
  const bool type = a.dtype == DType::bf16 || a.dtype == DType::fp16 || a.dtype == DType::fp32;
  if (!type || a.wire != Wire::payload || a.node_of_rank || arena.ll_tokens == 0) return false;
  const PartialFormat f = PartialFormat::of(a.hidden, static_cast<int>(size_of(a.dtype)), a.num_topk, a.has_side, arena.ll_combine_lines);
  const int parts = a.num_topk < a.common.team.num_ranks ? a.num_topk : a.common.team.num_ranks;
  return f.fits(arena.ll_combine_row) && parts <= arena.ll_combine_copies;
}

int ll_combine_blocks(const CombineArgs& a, int num_sms) {
  const int64_t most = a.common.arena.ll_tokens + 1;
  return static_cast<int>(most < num_sms ? most : num_sms);
}

cudaError_t launch_ll_combine(const CombineArgs& a, int blocks, cudaStream_t stream) {
  if (a.dtype == DType::bf16) return low_latency::launch<DType::bf16>(a, blocks, stream);
  if (a.dtype == DType::fp16) return low_latency::launch<DType::fp16>(a, blocks, stream);
  return low_latency::launch<DType::fp32>(a, blocks, stream);
}

cudaError_t prepare_ll_combine() {
  for (const cudaError_t bad :
       {low_latency::find_shared_bytes(), low_latency::load<DType::bf16>(), low_latency::load<DType::fp16>(), low_latency::load<DType::fp32>()}) {
    if (bad) return bad;
  }
  return cudaSuccess;
}

}  // namespace turnout::engine::cuda
