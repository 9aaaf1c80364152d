// A combine in low_latency mode: one kernel. A block takes a row that another rank sent, adds its experts' rows in k order, rounds,
// and writes the partial sum in flagged words to staging of the source; then it takes tokens of its own and adds what comes back,
// ranks ascending. A thread owns a unit of 24 channels from the first load to the last store; nothing goes through shared memory.
// A warp finds the terms of its row itself. The last warp has no units: it keeps the books (masks, scalars, num_lost).
#include "engine/cuda/device/chunk.cuh"
#include "engine/cuda/kernels.h"
#include "engine/cuda/low_latency/format.h"
#include "engine/cuda/low_latency/terms.cuh"

namespace turnout::engine::cuda {
namespace low_latency {
namespace {

/// 299 units of a row of 7168, and the clerk. Rows without alignment have more to do with fewer threads.
template <bool kFast>
inline constexpr int kThreads = kFast ? 320 + 32 : 256;

__device__ __forceinline__ int num_unit_threads() { return num_threads() - 32; }
__device__ __forceinline__ bool is_clerk() { return warp_id() == num_warps() - 1; }

/// The scalar of entry `k` of received row `n`, where there is one.
__device__ __forceinline__ float scalar_of(const CombineArgs& a, const Terms& t, int n, int h) {
  const int k = h * 32 + lane_id();
  if (k >= a.num_topk || t.row[h] < 0) return 0.0f;
  return a.layout == Layout::rank_major ? a.side[static_cast<int64_t>(n) * a.num_topk + k] : a.side[t.row[h]];
}

/// The mask of a partial sum, and its scalars. One warp.
__device__ __forceinline__ void send_books(const Work& w, const Terms& t, int n, uint4* to) {
  const CombineArgs& a = w.a;
  if (lane_id() == 0) store_word(to + w.f.mask, uint4{static_cast<uint32_t>(t.mask), static_cast<uint32_t>(t.mask >> 32), 0, w.call.epoch});
  if (!a.has_side) return;
  const float low = scalar_of(a, t, n, 0), high = scalar_of(a, t, n, 1);
  for (int first = 0; first < a.num_topk; first += kWordPayload) {
    uint32_t p[kWordPayload];
    for (int x = 0; x < kWordPayload; ++x) {
      const int k = first + x;
      p[x] = __float_as_uint(__shfl_sync(kFull, k < 32 ? low : high, k % 32));
    }
    if (lane_id() == 0) store_word(to + w.f.mask + 1 + first / kWordPayload, uint4{p[0], p[1], p[2], w.call.epoch});
  }
}

/// Which part of a partial sum a warp sends.
struct Share {
  int first, step;  ///< units
  bool units, books;
};

/// The partial sum of received row `i` of `source` to it.
template <DType kType, bool kFast>
__device__ __forceinline__ void send_partial(const Work& w, Share share, int source, int i) {
  const CombineArgs& a = w.a;
  const Common& c = a.common;
  const int n = w.begins[source] + i;
  const Terms t = terms_of(a, n, ask_terms(a, n));
  auto* to = reinterpret_cast<uint4*>(c.team.base[source] + c.arena.ll_combine_at(c.lane, w.call.copy, 0, w.records[source] + i));
  if (share.books) send_books(w, t, n, to);
  if (!share.units || t.mask == 0) return;  // all of it was dropped: the mask says so
  for (int base = share.first; base < w.f.units; base += share.step) {
    const int unit = base + lane_id();
    uint32_t p[kPayload<kType>];
    sum_terms<kType, kFast>(w, t, place_of<kType>(a, unit, w.f.units, unit < w.f.units), p);
    if (unit >= w.f.units) continue;
#pragma unroll
    for (int j = 0; j < kWords<kType>; ++j) store_word(to + j * w.f.units + unit, uint4{p[3 * j], p[3 * j + 1], p[3 * j + 2], w.call.epoch});
  }
}

/// What worker `worker` owes to other ranks.
template <DType kType, bool kFast>
__device__ __forceinline__ void send_partials(const Work& w, Share share, int worker) {
  const int ranks = w.a.common.team.num_ranks, me = w.a.common.team.rank;
  int first = 0;
  for (int s = (me + 1) % ranks, n = worker; s != me;) {
    const int rows = w.begins[s + 1] - w.begins[s];
    if (n - first >= rows) {
      first += rows;
      s = (s + 1) % ranks;
      continue;
    }
    send_partial<kType, kFast>(w, share, s, n - first);
    n += num_workers();
  }
}

/// Where the parts of a token are: lane l holds rank and place of entries l and l + 32, if they are the first of their rank.
struct Parts {
  int32_t rank[2], at[2], asked;
};
/// Asked for first and looked at later.
__device__ __forceinline__ Parts ask_parts(const CombineArgs& a, int64_t token) {
  Parts p{{-1, -1}, {-1, -1}, 0};
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int k = h * 32 + lane_id();
    if (k >= a.num_topk || token >= a.num_tokens) continue;
    p.rank[h] = a.routing.dest[token * a.num_topk + k];
    p.at[h] = a.routing.send_index[token * a.num_topk + k];
  }
  return p;
}
__device__ __forceinline__ Parts parts_of(const Work& w, Parts p) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    if (p.rank[h] >= 0) p.asked |= 1 << h;
    if (p.at[h] < 0 || p.at[h] >= w.sent[p.rank[h]]) p.rank[h] = -1;
  }
  return p;
}
/// The part of the lowest rank above `after`; -1: no more.
__device__ __forceinline__ int next_part(const Parts& p, int after, int* at) {
  unsigned best = kFull;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    if (p.rank[h] > after && static_cast<unsigned>(p.rank[h]) < best) best = static_cast<unsigned>(p.rank[h]);
  }
  best = __reduce_min_sync(kFull, best);
  if (best == kFull) return -1;
  const auto rank = static_cast<int>(best);
  const unsigned low = __ballot_sync(kFull, p.rank[0] == rank), high = __ballot_sync(kFull, p.rank[1] == rank);
  *at = low ? __shfl_sync(kFull, p.at[0], __ffs(low) - 1) : __shfl_sync(kFull, p.at[1], __ffs(high) - 1);
  return rank;
}

/// Waits for a unit of a partial sum and for its mask. Where the mask is 0 nothing else comes.
template <DType kType>
__device__ __forceinline__ bool receive_unit(const Work& w, int rank, const uint4* from, int unit, bool active, uint64_t* mask, uint32_t* out) {
  const uint32_t epoch = w.call.epoch;
  uint4 words[kWords<kType>], m{};
  const int mine = active ? unit : 0;
  const bool good = wait_for(
      w.a.common, Phase::low_latency_partials, rank, epoch, true,
      [&] {
        m = load_word(from + w.f.mask);
        bool all = true;
#pragma unroll
        for (int j = 0; j < kWords<kType>; ++j) words[j] = load_word(from + j * w.f.units + mine);
#pragma unroll
        for (int j = 0; j < kWords<kType>; ++j) all = all && words[j].w == epoch;
        return m.w == epoch && (all || (m.x | m.y) == 0);
      },
      [&] { return m.w != epoch ? m.w : words[0].w; });
  *mask = m.x | static_cast<uint64_t>(m.y) << 32;
#pragma unroll
  for (int j = 0; j < kWords<kType>; ++j) out[3 * j] = words[j].x, out[3 * j + 1] = words[j].y, out[3 * j + 2] = words[j].z;
  return good;
}

/// Scalars of a part for the lanes that hold their k. The whole warp calls it.
__device__ __forceinline__ bool receive_scalars(const Work& w, int rank, const uint4* from, uint64_t mask, float* scalar) {
  bool good = true;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int k = h * 32 + lane_id();
    if (k >= w.a.num_topk || !(mask >> k & 1)) continue;
    uint4 word;
    good = good && wait_for_word(w.a.common, Phase::low_latency_partials, rank, w.call.epoch, true, from + w.f.mask + 1 + k / kWordPayload, &word);
    scalar[h] = __uint_as_float(k % kWordPayload == 0 ? word.x : k % kWordPayload == 1 ? word.y : word.z);
  }
  return good;
}

/// Place of a token's row that stays on this rank, -1: none. The whole warp calls it.
__device__ __forceinline__ int own_place(const Work& w, const Parts& parts) {
  int at = -1;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const unsigned holder = __ballot_sync(kFull, parts.rank[h] == w.a.common.team.rank);
    if (holder) at = __shfl_sync(kFull, parts.at[h], __ffs(holder) - 1);
  }
  return at < 0 ? -1 : w.begins[w.a.common.team.rank] + at;
}
__device__ __forceinline__ const uint4* staged(const Work& w, int rank, int at) {
  const Common& c = w.a.common;
  return reinterpret_cast<const uint4*>(c.team.base[c.team.rank] + c.arena.ll_combine_at(c.lane, w.call.copy, 0, w.send_offset[rank] + at));
}

/// Adds up a token: what the unit warps do. False for a thread that gave up.
template <DType kType, bool kFast>
__device__ __forceinline__ bool add_token(const Work& w, int64_t token, const Parts& parts, int own_row, const Terms& asked) {
  const CombineArgs& a = w.a;
  const int me = a.common.team.rank;
  const Terms own = terms_of(a, own_row, asked);
  for (int base = warp_id() * 32; base < w.f.units; base += num_unit_threads()) {
    const int unit = base + lane_id();
    const bool active = unit < w.f.units;
    const Place place = place_of<kType>(a, unit, w.f.units, active);
    uint32_t mine[kPayload<kType>], part[kPayload<kType>];
    if (own.mask) sum_terms<kType, kFast>(w, own, place, mine);
    float sum[kUnit];
#pragma unroll
    for (int i = 0; i < kUnit; ++i) sum[i] = -0.0f;
    bool some = false;
    for (int rank = -1, at = 0; (rank = next_part(parts, rank, &at)) >= 0;) {
      uint64_t mask = own.mask;
      if (rank != me && !__all_sync(kFull, receive_unit<kType>(w, rank, staged(w, rank, at), unit, active, &mask, part))) return false;
      if (!mask) continue;
      some = true;
#pragma unroll
      for (int i = 0; i < kUnit; ++i) sum[i] += value_of<kType>(rank == me ? mine : part, i);
    }
    if (!some) {
#pragma unroll
      for (int i = 0; i < kUnit; ++i) sum[i] = 0.0f;
    }
    round_unit<kType>(sum, part);
    store_unit<kType, kFast>(a.out + token * a.out_stride, place, part);
  }
  return true;
}

/// The books of a token: what was lost of it, and its scalars. What the clerk does. False for a thread that gave up.
__device__ __forceinline__ bool keep_books(const Work& w, int64_t token, const Parts& parts, int own_row, const Terms& asked) {
  const CombineArgs& a = w.a;
  const int me = a.common.team.rank;
  const Terms own = terms_of(a, own_row, asked);
  uint64_t present = own.mask;
  float scalar[2] = {0.0f, 0.0f};
  if (a.has_side && own_row >= 0) scalar[0] = scalar_of(a, own, own_row, 0), scalar[1] = scalar_of(a, own, own_row, 1);
  for (int rank = -1, at = 0; (rank = next_part(parts, rank, &at)) >= 0;) {
    if (rank == me) continue;
    const uint4* from = staged(w, rank, at);
    uint4 word;
    bool good = wait_for_word(a.common, Phase::low_latency_partials, rank, w.call.epoch, true, from + w.f.mask, &word);
    const uint64_t mask = word.x | static_cast<uint64_t>(word.y) << 32;
    if (good && a.has_side) good = receive_scalars(w, rank, from, mask, scalar);
    if (!__all_sync(kFull, good)) return false;
    present |= mask;
  }
  int lost = 0;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int k = h * 32 + lane_id();
    lost += __popc(__ballot_sync(kFull, (parts.asked >> h & 1) && !(present >> k & 1)));
    if (a.out_side && k < a.num_topk) a.out_side[token * a.num_topk + k] = scalar[h];
  }
  if (lane_id() == 0) a.num_lost[token] = lost;
  return true;
}

/// What a failed call leaves: NaN, or 0 for scalars.
__device__ void poison(const CombineArgs& a, int worker) {
  for (int64_t t = worker; t < a.num_tokens; t += num_workers()) {
    for (int64_t i = thread(); i < a.hidden; i += num_threads()) store_value(a.dtype, a.out + t * a.out_stride, i, NAN);
    if (thread() == 0) a.num_lost[t] = 0;
    for (int k = thread(); a.out_side && k < a.num_topk; k += num_threads()) a.out_side[t * a.num_topk + k] = 0.0f;
  }
}

template <DType kType, bool kFast>
__global__ void __launch_bounds__(kThreads<kFast>, 1) combine_kernel(const __grid_constant__ CombineArgs a) {
  __shared__ int32_t begins[kMaxRanks + 1], records[kMaxRanks], sent[kMaxRanks], send_offset[kMaxRanks + 1];
  __shared__ FactWords facts;
  const Common& c = a.common;
  const int ranks = c.team.num_ranks, worker = worker_of(block());
  const bool clerk = is_clerk();
  // Everything that depends on nothing is asked for first.
  const Start start = start_of(c);
  Parts parts = ask_parts(a, worker >= 0 ? worker : a.num_tokens);
  for (int s = thread(); s <= ranks; s += num_threads()) {
    begins[s] = a.routing.recv_begin[s];
    send_offset[s] = a.routing.send_offset[s];
    if (s < ranks) records[s] = a.routing.record_begin[s], sent[s] = a.routing.sent[s];
  }
  const Call call = start.call;
  bool good = !__syncthreads_or(start.over);
  if (good) {
    const Work w{a, call, PartialFormat::of(a.hidden, kElement<kType>, a.num_topk, a.has_side), begins, records, sent, send_offset};
    parts = parts_of(w, parts);
    int own_row = own_place(w, parts);
    Terms own = ask_terms(a, own_row);
    for (int b = block(), next = 0;;) {
      const bool mine = b == block();
      if (clerk && b == 0) send_facts(c, call, &facts);
      const Share share{mine ? warp_id() * 32 : 0, mine ? num_unit_threads() : 32, !clerk || !mine, clerk};
      if (worker_of(b) >= 0) send_partials<kType, kFast>(w, share, worker_of(b));
      if (!clerk) break;
      b = next_unstarted(c, call.epoch, next, mine);  // the clerk does the work of others alone: slow, but it never happens
      if (b < 0) break;
      next = b + 1;
    }
    if (clerk) good = all_agree(c, call);
    for (int64_t t = worker; worker >= 0 && good && t < a.num_tokens;) {
      good = clerk ? keep_books(w, t, parts, own_row, own) : add_token<kType, kFast>(w, t, parts, own_row, own);
      t += num_workers();
      parts = parts_of(w, ask_parts(a, t));
      own_row = own_place(w, parts);
      own = ask_terms(a, own_row);
    }
    good = __syncthreads_and(good);
    if (block() == 0) {
      const bool heard = receive_headers(c, call, HeaderInts::kRows, &facts, [](int, int, uint32_t) {});
      good = __syncthreads_and(heard) && good;
    }
  }
  if (!good && worker >= 0) poison(a, worker);
  __syncthreads();
  tell_expired(c, call.epoch);
  if (c.last_of_send) advance_epoch(c, call.epoch);
}

template <DType kType>
cudaError_t launch(const CombineArgs& a, int blocks, cudaStream_t stream) {
  const auto bits = reinterpret_cast<uintptr_t>(a.y) | reinterpret_cast<uintptr_t>(a.out) | static_cast<uintptr_t>(a.y_stride) |
                    static_cast<uintptr_t>(a.out_stride);
  const int units = PartialFormat::of(a.hidden, kElement<kType>, a.num_topk, false).units;
  const int wanted = static_cast<int>(core::align_up(units, 32)) + 32;
  const auto threads = [&](int most) { return wanted < 128 ? 128 : wanted > most ? most : wanted; };
  if (bits % 16 == 0 && a.hidden % kUnitChunk == 0) combine_kernel<kType, true><<<blocks, threads(kThreads<true>), 0, stream>>>(a);
  else combine_kernel<kType, false><<<blocks, threads(kThreads<false>), 0, stream>>>(a);
  return cudaGetLastError();
}
template <DType kType>
cudaError_t load() {
  cudaFuncAttributes unused;
  const cudaError_t bad = cudaFuncGetAttributes(&unused, combine_kernel<kType, true>);
  return bad ? bad : cudaFuncGetAttributes(&unused, combine_kernel<kType, false>);
}

}  // namespace
}  // namespace low_latency

bool can_ll_combine(const CombineArgs& a) {
  const Arena& arena = a.common.arena;
  const bool type = a.dtype == DType::bf16 || a.dtype == DType::fp16 || a.dtype == DType::fp32;
  if (!type || a.wire != Wire::payload || a.node_of_rank || arena.ll_tokens == 0) return false;
  const PartialFormat f = PartialFormat::of(a.hidden, static_cast<int>(size_of(a.dtype)), a.num_topk, a.has_side);
  const int parts = a.num_topk < a.common.team.num_ranks ? a.num_topk : a.common.team.num_ranks;
  return static_cast<size_t>(f.num_words) * 16 <= arena.ll_combine_row && parts <= arena.ll_combine_copies;
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
  for (const cudaError_t bad : {low_latency::load<DType::bf16>(), low_latency::load<DType::fp16>(), low_latency::load<DType::fp32>()}) {
    if (bad) return bad;
  }
  return cudaSuccess;
}

}  // namespace turnout::engine::cuda
