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

/// What a thread asks for before it knows anything, what is needed first first. Builders hold pieces of x where others have entries.
struct Loaded {
  Entries one, two;
  float weight;
  Asked asked;
  int owner, local;
  int64_t hash;
};
__device__ __forceinline__ Loaded ask_all(const SlabArgs& a, int counter, bool some, int worker) {
  const Common& c = a.common;
  Loaded l{};
  if (block() == 0) {
    const bool there = thread() < a.num_tokens;
    l.one = ask_entries(a, thread(), there);
    if (a.ids_are_64) l.two = ask_entries<true>(a, thread(), there);
    l.hash = c.experts ? c.experts->hash : 0;
  } else if (counter >= 0) {
    if (some) l.one = ask_entries(a, worker, true), l.two = ask_entries(a, counter, counter < worker);
    if (some) l.weight = weight_of(a, static_cast<int64_t>(worker) * kTopk + min(lane_id(), kTopk - 1));
  } else {
    const auto* x = reinterpret_cast<const uint4*>(a.x + worker * a.x_stride);
#pragma unroll
    for (int j = 0; j < kPieces; ++j) {
      const int p = (warp_id() * kPieces + j) * 32 + lane_id();
      const uint4 v = load_stream_if(some && p * kChunk < a.hidden, x + p);
      uint32_t* to = (j < 2 ? l.one : l.two).words + j % 2 * 4;
      to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
    }
  }
  l.asked = ask_start(c);
  l.owner = thread() < c.num_experts ? __ldg(c.owner + thread()) : 0;
  l.local = thread() < c.num_experts ? __ldg(c.local + thread()) : 0;
  return l;
}
__device__ __forceinline__ void fill_tables(const Common& c, const Tables& t, const Loaded& l) {
#pragma unroll 1
  for (int e = thread(); e < c.num_experts; e += num_threads()) {
    const bool first = e == thread();
    t.owner[e] = static_cast<uint8_t>(first ? l.owner : __ldg(c.owner + e));
    t.local[e] = static_cast<uint16_t>(first ? l.local : __ldg(c.local + e));
  }
}

/// Of a counter: id and rank of the entry of the block's token whose number is the lane's, and how often the token has the id before it.
struct Counted {
  int id, dest, same;
};
/// Where the token goes: its ranks, and how many of the tokens that this warp looks at go there, too. No table is waited for.
__device__ __forceinline__ Counted find_ranks(const SlabArgs& a, const Entries& mine, const Entries& other, bool there, int warp, Found* found) {
  const int32_t* owner = a.common.owner;
  Counted n{-1, -1, 0};
  int ids[kTopk], others[kTopk], dest[kTopk], owners[kTopk];
#pragma unroll
  for (int k = 0; k < kTopk; ++k) {
    ids[k] = entry_of(a, mine, k);
    others[k] = there ? entry_of(a, other, k) : -1;
    dest[k] = __ldg(owner + max(ids[k], 0));
    owners[k] = __ldg(owner + max(others[k], 0));
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
__device__ __forceinline__ void send_words(const SlabArgs& a, const auto& f, const Found& found, Call call, const std::byte* row, int first, int end,
                                           int warps) {
  const Common& c = a.common;
#pragma unroll 1
  for (uint32_t left = found.remote; left; left &= left - 1) {
    const int k = __ffs(static_cast<int>(left)) - 1;
    auto* to = reinterpret_cast<uint4*>(c.team.base[found.key[k]] + c.arena.ll_dispatch_at(c.lane, call.copy, c.team.rank, row_of(found, k, warps)));
    store_words(f, to, row, first, end, 32, call.epoch);
  }
}
/// Words that hold nothing but x.
__device__ __forceinline__ int words_of_x(const SlabArgs& a, bool lines) {
  const auto hidden = static_cast<int>(a.hidden);
  return lines ? hidden / kLinePayload * kLineWords : hidden / (kWordPayload * 4);
}

/// A warp of builders: its part of the row.
__device__ __forceinline__ void build_part(const SlabArgs& a, const RowFormat& f, const Loaded& l, std::byte* row) {
#pragma unroll
  for (int j = 0; j < kPieces; ++j) {
    const int p = (warp_id() * kPieces + j) * 32;
    const uint32_t* v = (j < 2 ? l.one : l.two).words + j % 2 * 4;
    if (p * kChunk < a.hidden) quantize_chunk(a, f, widen(a.dtype, uint4{v[0], v[1], v[2], v[3]}), (p + lane_id()) * kChunk, row);
  }
}

/// The first warp of counters, once the row is there and all pairs are counted: the end of the row, and what the source keeps of its routing.
__device__ __forceinline__ void finish_token(const SlabArgs& a, const auto& f, const Tables& t, const Counted& n, int warps, float weight, int token,
                                             Call call, std::byte* row, const Found& found, int32_t* own_place) {
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
  send_words(a, f, found, call, row, words_of_x(a, f.lines), f.num_words, warps);
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

/// Block 0: a thread counts the pairs of one token in t.before and the rows to each rank in t.scratch, which are 0. Returns where an id
/// is no expert, -1: nowhere.
__device__ __forceinline__ int count_token(const SlabArgs& a, const Tables& t, const Entries& ids, const Entries& upper) {
  const Common& c = a.common;
  if (warp_id() * 32 >= a.num_tokens) return -1;
  const int u = thread();
  const bool there = u < a.num_tokens;
  int bad = -1;
  uint32_t ranks = 0;
#pragma unroll
  for (int k = 0; k < kTopk; ++k) {
    int id = there ? entry_of(a, ids, k) : -1;
    if (a.ids_are_64 && there && id != -2 && static_cast<int>(upper.words[k]) != id >> 31) id = -2;
    if (id == -2) bad = u * kMaxTopk + k;
    if (id < 0) continue;
    const int owner = t.owner[id];
    atomicAdd(&t.before[owner * c.max_local + t.local[id]], 1);
    ranks |= 1u << owner;
  }
#pragma unroll 1
  for (int r = 0; r < c.team.num_ranks; ++r) {
    const int n = __popc(__ballot_sync(kFull, ranks >> r & 1));
    if (lane_id() == 0 && n) atomicAdd(&t.scratch[r], n);
  }
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
