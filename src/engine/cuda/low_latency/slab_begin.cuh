// How a block of the short dispatch kernel begins: what its warps load before anything is known, where its token goes, its row, and what
// block 0 tells. Nobody waits who can go on: a warp sends its part of the row as soon as it has quantised it.
#pragma once
#include "engine/cuda/low_latency/counts.cuh"
#include "engine/cuda/low_latency/send.cuh"
#include "engine/cuda/low_latency/slab.h"

namespace turnout::engine::cuda::low_latency {

/// Builders quantise, some pieces of 16 bytes each; each counter looks at one token before the block's.
constexpr int kPieces = 3, kMostBuilders = 384, kMostCounters = 128, kMostThreads = kMostBuilders + kMostCounters, kTopk = SlabArgs::num_topk;

/// The pieces of a warp of builders lie side by side and are whole words of the row. They begin and end inside of lines: these borders are
/// sent when the block has met.
constexpr int kWarpBytes = 32 * kPieces * kChunk;
static_assert(kWarpBytes % (kWordPayload * 4) == 0 && 32 * kChunk % core::kScaleBlock == 0, "a warp needs no other for its words");

/// Words of a row: those that a warp of builders sends, [first, end); from `end` to `border`: what it has in common with the next.
struct Part {
  int first, end, border;
};
template <bool kLines>
__device__ __forceinline__ Part part_of(int hidden, int warp) {
  const int begin = warp * kWarpBytes, end = min(begin + kWarpBytes, hidden);
  if (!kLines) return {begin / (kWordPayload * 4), end / (kWordPayload * 4), 0};
  const auto up = [](int at) { return (at + kLinePayload - 1) / kLinePayload * kLineWords; };
  const int down = end / kLinePayload * kLineWords;
  return {up(begin), down, end < hidden ? min(up(end), hidden / kLinePayload * kLineWords) : down};
}

/// Barriers beside that of the block: of the counters; of each warp of builders, for which the counters arrive.
constexpr int kCountersBarrier = 1, kBuildersBarrier = 2;
static_assert(kBuildersBarrier + kMostBuilders / 32 <= 16, "a block has so many");

/// What the warps that count have found, each in its 32 tokens: rows to the rank of entry k. And of the token of the block: the rank at
/// the first k that goes there (else -2), the k's of other ranks.
struct Found {
  int32_t rows[kMostCounters / 32][kTopk];
  int32_t key[kTopk];
  uint32_t remote;
};

/// All that a block asks for first, side by side in the arguments of the kernel: each line of them that it touches is a trip of its own.
struct SlabEarly {
  LaneControl* lane;
  const uint64_t *status, *generation;
  const std::byte* x;
  const void* topk_idx;
  const float* topk_weights;
  const int32_t *owner, *local;
  int64_t x_stride;
  uint64_t to, copy_bytes;  ///< where rows of this rank are staged, in any arena
  int32_t num_tokens, num_experts, hidden, builders;
  uint32_t depth, row_bytes;
  bool ids_are_64;

  SlabEarly(const DispatchArgs& a, int num_builders) {
    const Common& c = a.common;
    lane = c.lane_control;
    depth = static_cast<uint32_t>(c.arena.depth);
    to = c.arena.ll_dispatch_at(c.lane, 0, c.team.rank, 0);
    copy_bytes = c.arena.ll_dispatch_at(c.lane, 1, c.team.rank, 0) - to;
    row_bytes = static_cast<uint32_t>(c.arena.ll_dispatch_row);
    status = reinterpret_cast<const uint64_t*>(c.team.base[c.team.rank] + c.arena.status);
    generation = &c.control->generation;
    x = a.x, topk_idx = a.topk_idx, topk_weights = static_cast<const float*>(a.topk_weights);
    owner = c.owner, local = c.local;
    x_stride = a.x_stride;
    num_tokens = static_cast<int32_t>(a.num_tokens), num_experts = c.num_experts, hidden = static_cast<int32_t>(a.hidden), builders = num_builders;
    ids_are_64 = a.ids_are_64;
  }
};

/// What a thread asks for before it knows anything, what is needed first first: builders pieces of x, the others ids.
struct Loaded {
  static constexpr int kMost = 4;
  uint4 v[kMost];
  float weight;
  Asked asked;
  uint4 owners;  ///< of four experts
  int local;
  int64_t hash;
};
/// Ids of the first `tokens` tokens, sixteen bytes each for the `i`-th of `count` threads: neighbours ask for neighbouring words. Threads that ask
/// for tokens of their own would take the SM's loads half a microsecond, if ids have 64 bits.
__device__ __forceinline__ void ask_ids(const SlabEarly& e, int tokens, int i, int count, Loaded* l) {
  const int num = tokens * (e.ids_are_64 ? 4 : 2);
#pragma unroll
  for (int j = 0; j < Loaded::kMost; ++j) l->v[j] = load_stream_if(j * count + i < num, static_cast<const uint4*>(e.topk_idx) + j * count + i);
}
/// As they come to shared memory, in 32 bits: an id that needs more is none.
__device__ __forceinline__ void keep_ids(const SlabEarly& e, int tokens, int i, int count, const Loaded& l, int32_t* ids) {
  const int num = tokens * (e.ids_are_64 ? 4 : 2);
#pragma unroll
  for (int j = 0; j < Loaded::kMost; ++j) {
    const int w = j * count + i;
    if (w >= num) continue;
    const uint4 v = l.v[j];
    const auto narrow = [](uint32_t low, uint32_t high) { return static_cast<int>(high) == static_cast<int>(low) >> 31 ? low : ~1u; };
    if (e.ids_are_64) reinterpret_cast<uint2*>(ids)[w] = uint2{narrow(v.x, v.y), narrow(v.z, v.w)};
    else reinterpret_cast<uint4*>(ids)[w] = v;
  }
}
/// Those of a token, from there.
__device__ __forceinline__ Entries kept_ids(const int32_t* ids, int token) {
  const uint4 a = reinterpret_cast<const uint4*>(ids)[2 * token], b = reinterpret_cast<const uint4*>(ids)[2 * token + 1];
  return {{a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w}};
}

__device__ __forceinline__ Loaded ask_all(const SlabEarly& e, const Common& c, int counter, int counters, bool some, int worker) {
  Loaded l{};
  const bool tells = block() == 0;
  if (tells) {
    ask_ids(e, e.num_tokens, thread(), num_threads(), &l);
  } else if (counter >= 0) {
    if (some) ask_ids(e, worker + 1, counter, counters, &l);
    if (some) l.weight = e.topk_weights[worker * kTopk + min(lane_id(), kTopk - 1)];
  } else {
    const auto* x = reinterpret_cast<const uint4*>(e.x + worker * e.x_stride);
#pragma unroll
    for (int j = 0; j < kPieces; ++j) {
      const int p = (warp_id() * kPieces + j) * 32 + lane_id();
      l.v[j] = load_stream_if(some && p * kChunk < e.hidden, x + p);
    }
  }
  l.asked.before = *reinterpret_cast<const volatile uint32_t*>(&e.lane->epoch[block() % kMaxChannels]);
  l.asked.status = load_relaxed(e.status);
  l.asked.generation = *reinterpret_cast<const volatile uint64_t*>(e.generation);
  l.asked.failed = *reinterpret_cast<const volatile uint32_t*>(&e.lane->failed);
  const int first = 4 * (tells ? thread() : counter);  // the table of local numbers follows: there is something behind the owners
  if (first >= 0 && first < e.num_experts) l.owners = __ldg(reinterpret_cast<const uint4*>(e.owner) + first / 4);
  l.local = thread() < e.num_experts ? __ldg(e.local + thread()) : 0;
  if (tells) l.hash = c.experts ? c.experts->hash : 0;
  return l;
}
/// Owners of all experts, by `count` threads, the `i`-th of which calls it.
__device__ __forceinline__ void fill_owners(const SlabEarly& e, const Tables& t, const Loaded& l, int i, int count) {
  auto* to = reinterpret_cast<uint32_t*>(t.owner);
#pragma unroll 1
  for (int w = i; 4 * w < e.num_experts; w += count) {
    const uint4 v = w == i ? l.owners : __ldg(reinterpret_cast<const uint4*>(e.owner) + w);
    to[w] = v.x | v.y << 8 | v.z << 16 | v.w << 24;
  }
}
__device__ __forceinline__ void fill_locals(const SlabEarly& e, const Tables& t, const Loaded& l) {
#pragma unroll 1
  for (int w = thread(); w < e.num_experts; w += num_threads()) t.local[w] = static_cast<uint16_t>(w == thread() ? l.local : __ldg(e.local + w));
}

/// Of a counter: id and rank of the entry of the block's token whose number is the lane's, and how often the token has the id before it.
struct Counted {
  int id, dest, same;
};
/// Where the token goes: its ranks, and how many of the tokens that this warp looks at go there, too.
__device__ __forceinline__ Counted find_ranks(const SlabArgs& a, const Tables& t, const Entries& mine, const Entries& other, bool there, int warp,
                                              Found* found) {
  Counted n{-1, -1, 0};
  int ids[kTopk], others[kTopk], dest[kTopk], owners[kTopk];
#pragma unroll
  for (int k = 0; k < kTopk; ++k) {
    ids[k] = entry_of(a, mine, k);
    others[k] = there ? entry_of(a, other, k) : -1;
    dest[k] = t.owner[max(ids[k], 0)];
    owners[k] = t.owner[max(others[k], 0)];
  }
  uint32_t ranks = 0;
#pragma unroll
  for (int k = 0; k < kTopk; ++k) {
    if (ids[k] < 0) dest[k] = -1;
    ranks |= others[k] >= 0 ? 1u << owners[k] : 0;
  }
  int rows = 0;
  bool first = true;
#pragma unroll
  for (int k = 0; k < kTopk; ++k) {
    const int all = __popc(__ballot_sync(kFull, dest[k] >= 0 && (ranks >> dest[k] & 1)));
    if (lane_id() == k) rows = all, n.id = ids[k], n.dest = dest[k];
  }
#pragma unroll
  for (int k = 0; k < kTopk; ++k) {
    if (k < lane_id() && dest[k] == n.dest) first = false;
    if (k < lane_id() && ids[k] == n.id) ++n.same;
  }
  if (lane_id() < kTopk) found->rows[warp][lane_id()] = rows;
  if (warp != 0) return n;
  const bool goes = lane_id() < kTopk && n.dest >= 0 && first;
  const uint32_t remote = __ballot_sync(kFull, goes && n.dest != a.common.team.rank);
  if (lane_id() == 0) found->remote = remote;
  if (lane_id() < kTopk) found->key[lane_id()] = goes ? n.dest : -2;
  return n;
}
/// Pairs of each expert in the tokens before the block's, by id.
__device__ __forceinline__ int32_t* pairs_before(const Tables& t) { return t.before; }
__device__ __forceinline__ void count_pairs(const SlabArgs& a, const Tables& t, const Entries& other, bool there) {
#pragma unroll
  for (int k = 0; k < kTopk; ++k) {
    const int id = there ? entry_of(a, other, k) : -1;
    if (id >= 0) atomicAdd(&pairs_before(t)[id], 1);
  }
}
/// Place of the token in the list of the rank of entry k.
__device__ __forceinline__ int row_of(const Found& found, int k, int warps) {
  int row = 0;
#pragma unroll
  for (int w = 0; w < kMostCounters / 32; ++w) row += w < warps ? found.rows[w][k] : 0;
  return row;
}

/// Words [first, end) of the row to all other ranks that get it, by a warp.
__device__ __forceinline__ void send_words(const SlabArgs& a, const SlabEarly& e, const auto& f, const Found& found, Call call, const std::byte* row,
                                           int first, int end, int warps) {
  const uint64_t at = e.to + static_cast<uint32_t>(call.copy) * e.copy_bytes;
#pragma unroll 1
  for (uint32_t left = found.remote; left; left &= left - 1) {
    const int k = __ffs(static_cast<int>(left)) - 1;
    const auto n = static_cast<uint32_t>(row_of(found, k, warps));
    auto* to = reinterpret_cast<uint4*>(a.common.team.base[found.key[k]] + (at + static_cast<uint64_t>(n) * e.row_bytes));
    store_words(f, to, row, first, end, 32, call.epoch);
  }
}
/// Words that hold nothing but x.
__device__ __forceinline__ int words_of_x(const SlabArgs& a, bool lines) {
  const auto hidden = static_cast<int>(a.hidden);
  return lines ? hidden / kLinePayload * kLineWords : hidden / (kWordPayload * 4);
}

/// Largest magnitude of eight bf16, as bits without a sign; among the finite ones only: rare.
__device__ __forceinline__ uint32_t any_amax(const uint4& v) {
  const uint32_t most = __vmaxu2(__vmaxu2(v.x & 0x7FFF7FFF, v.y & 0x7FFF7FFF), __vmaxu2(v.z & 0x7FFF7FFF, v.w & 0x7FFF7FFF));
  return max(most & 0xFFFF, most >> 16);
}
inline constexpr uint32_t kInfinityBf16 = 0x7F80;
__device__ __noinline__ inline uint32_t finite_amax(uint4 v) {
  uint32_t amax = 0;
#pragma unroll 1
  for (int i = 0; i < 8; ++i) {
    const uint32_t two = i / 2 == 0 ? v.x : i / 2 == 1 ? v.y : i / 2 == 2 ? v.z : v.w, one = two >> (i % 2 * 16) & 0x7FFF;
    if (one < kInfinityBf16) amax = max(amax, one);
  }
  return amax;
}
/// A warp of builders: its part of the row. As in device/quantize.cuh, all blocks of the warp are scaled at once: an SM has one row to
/// quantise, and it is the number of instructions that takes time.
__device__ __forceinline__ void build_part(const SlabEarly& e, const RowFormat& f, const Loaded& l, std::byte* row) {
  static_assert(kPieces == 3 && SlabArgs::dtype == DType::bf16 && SlabArgs::quantize == Quantize::fp8_e4m3);
  const int lane = lane_id(), chunks = e.hidden / kChunk, first = warp_id() * kPieces * 32;
  uint32_t amax[kPieces];
#pragma unroll
  for (int j = 0; j < kPieces; ++j) amax[j] = any_amax(l.v[j]);
  if (max(max(amax[0], amax[1]), amax[2]) >= kInfinityBf16) {
#pragma unroll
    for (int j = 0; j < kPieces; ++j) amax[j] = finite_amax(l.v[j]);
  }
  // Three blocks over the 16 lanes that hold them: at each step a lane keeps some of what it has; in the end block lane % 4, the last twice.
  const bool odd = lane & 1, third = lane & 2;
  const uint32_t p = max(odd ? amax[1] : amax[0], __shfl_xor_sync(kFull, odd ? amax[0] : amax[1], 1));
  const uint32_t q = max(amax[2], __shfl_xor_sync(kFull, amax[2], 1));
  uint32_t mine = max(third ? q : p, __shfl_xor_sync(kFull, third ? p : q, 2));
  mine = max(mine, __shfl_xor_sync(kFull, mine, 4));
  mine = max(mine, __shfl_xor_sync(kFull, mine, 8));
  const float scale = core::scale_of(__uint_as_float(mine << 16)), inverse = 1.0f / scale;
  const int block = (first + min(lane % 4, 2) * 32 + lane / 16 * 16) / 16;
  if (lane % 16 < kPieces && block * 16 < chunks) reinterpret_cast<float*>(row + f.scales)[block] = scale;
#pragma unroll
  for (int j = 0; j < kPieces; ++j) {
    const float by = __shfl_sync(kFull, inverse, lane / 16 * 16 + j);
    const auto pair = [by](uint32_t two) { return to_e4m3(__uint_as_float(two << 16) * by, __uint_as_float(two & 0xFFFF0000) * by); };
    const int at = first + j * 32 + lane;
    const uint4 v = l.v[j];
    if (at < chunks) *reinterpret_cast<uint2*>(row + at * kChunk) = uint2{pair(v.x) | pair(v.y) << 16, pair(v.z) | pair(v.w) << 16};
  }
}

/// The first warp of counters, once the row is there and all pairs are counted: the end of the row, and what the source keeps of its routing.
__device__ __forceinline__ void finish_token(const SlabArgs& a, const SlabEarly& e, const auto& f, const Tables& t, const Counted& n, int warps,
                                             float weight, int token, Call call, std::byte* row, const Found& found, int32_t* own_place) {
  const int k = lane_id();
  if (k == 0) *own_place = -1;
  __syncwarp();
  if (k < kTopk) {
    const int id = n.id < 0 ? -1 : n.id, pair = id < 0 ? 0 : pairs_before(t)[id] + n.same;
    const Meta m = meta_of(a, f, row);
    m.id[k] = id;
    m.pair[k] = pair;
    m.weight[k] = weight;
  }
  __syncwarp();
  send_words(a, e, f, found, call, row, words_of_x(a, f.lines), f.num_words, warps);
  if (k >= kTopk) return;
  const bool goes = found.key[k] >= 0;
  const int at = row_of(found, k, warps), id = n.id < 0 ? -1 : n.id;
  const int64_t i = static_cast<int64_t>(token) * kTopk + k;
  const Routing& r = a.routing;
  r.topk_idx[i] = id;
  r.dest[i] = n.dest;
  r.topk_weights[i] = weight;
  r.send_index[i] = goes ? at : -1;
  r.pair_index[i] = id >= 0 ? meta_of(a, f, row).pair[k] : -1;
  if (goes && n.dest == a.common.team.rank) r.own_tokens[at] = token, *own_place = at;
}

/// Block 0 counts all pairs in t.before and the rows to each rank in t.scratch, which are 0. Returns where an id is no expert, -1: nowhere.
__device__ __forceinline__ int count_all(const SlabArgs& a, const Tables& t, const int32_t* ids) {
  const Common& c = a.common;
  const int tokens = static_cast<int>(a.num_tokens), u = thread();
  int bad = -1;
#pragma unroll 2
  for (int i = u; i < tokens * kTopk; i += num_threads()) {
    const int id = ids[i];
    if (static_cast<uint32_t>(id) < static_cast<uint32_t>(c.num_experts)) atomicAdd(&t.before[t.owner[id] * c.max_local + t.local[id]], 1);
    else if (id != -1) bad = i / kTopk * kMaxTopk + i % kTopk;
  }
  if (warp_id() * 32 >= tokens) return bad;
  const Entries entries = kept_ids(ids, min(u, tokens - 1));
  uint32_t ranks = 0;
#pragma unroll
  for (int k = 0; k < kTopk; ++k) {
    const int id = entry_of(a, entries, k);
    const uint32_t to = 1u << t.owner[max(id, 0)];
    ranks |= id >= 0 && u < tokens ? to : 0;
  }
  add_to_ranks(t.scratch, c.team.num_ranks, ranks);
  return bad;
}

/// A word of the header: where it goes, and where in shared memory its payload will be. Found before there is any.
struct Telling {
  uint4* to;
  const uint32_t* from[kWordPayload];
};
__device__ __forceinline__ int num_tellings(const Common& c) {
  return (header_ints_of(c.team.num_ranks, c.max_local) + kWordPayload - 1) / kWordPayload;
}
__device__ __forceinline__ Telling telling_of(const Common& c, const Tables& t, Call call, const FactWords* facts, const uint32_t* zero, int i) {
  const int num = num_tellings(c), ranks = c.team.num_ranks, rank = i / num, w = i % num;
  Telling told;
  told.to = reinterpret_cast<uint4*>(c.team.base[rank] + c.arena.header_at(c.lane, call.copy, c.team.rank)) + w;
#pragma unroll
  for (int j = 0; j < kWordPayload; ++j) {
    const int at = w * kWordPayload + j, row = at - HeaderInts::kRows, e = at - HeaderInts::experts(ranks);
    told.from[j] = row < 0           ? facts->words + at
                   : e < 0           ? reinterpret_cast<const uint32_t*>(t.scratch) + row
                   : e < c.max_local ? reinterpret_cast<const uint32_t*>(t.before) + rank * c.max_local + e
                                     : zero;
  }
  return told;
}
__device__ __forceinline__ void tell(const Telling& told, uint32_t epoch) {
  store_word(told.to, uint4{*told.from[0], *told.from[1], *told.from[2], epoch});
}

}  // namespace turnout::engine::cuda::low_latency
