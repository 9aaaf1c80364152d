// What the usual combine sends first: the sum of the first row that a block owes. Its places are known after one trip to memory, which begins
// with the arguments: all that is needed until the row is on its way lies in two or three lines of them. Each warp sends what it has
// summed without waiting for another.
#pragma once
#include "engine/cuda/low_latency/books.cuh"
#include "engine/cuda/low_latency/slab.h"

namespace turnout::engine::cuda::low_latency {

constexpr DType kType = DType::bf16;
/// The arguments of a kernel whose partial sums come in lines, or in words.
template <bool kLines>
struct Sums : SlabSums {
  explicit Sums(const CombineArgs& a) : SlabSums(a) {}
  static constexpr bool kHasLines = kLines && kMayHaveLines;
};

constexpr int kTopk = SlabSums::num_topk, kMostUnits = 320, kMostThreads = kMostUnits + 32, kTermsBarrier = 1;

/// All that is needed until the first sum is on its way, side by side in the arguments: each line of them that a kernel touches is a trip
/// of its own.
struct SumsEarly {
  LaneControl* lane;
  const uint64_t *status, *generation;
  const int32_t *recv_begin, *record_begin, *slots, *dest, *send_index, *sent;
  int32_t rank, source, num_tokens, ll_tokens, room;  ///< source: of the first rows to send; slots: its part
  uint32_t depth, chunks, y_stride;
  PartialFormat f;
  const std::byte* y;
  std::byte* to;  ///< the staging of `source`
  uint64_t copy_bytes, row_bytes;

  explicit SumsEarly(const CombineArgs& a) {
    const Common& c = a.common;
    lane = c.lane_control;
    status = reinterpret_cast<const uint64_t*>(c.team.base[c.team.rank] + c.arena.status);
    generation = &c.control->generation;
    rank = c.team.rank;
    source = (rank + 1) % c.team.num_ranks;
    num_tokens = static_cast<int32_t>(a.num_tokens);
    ll_tokens = static_cast<int32_t>(c.arena.ll_tokens);
    room = ll_tokens * c.arena.ll_combine_copies;
    const Routing& r = a.routing;
    recv_begin = r.recv_begin, record_begin = r.record_begin, sent = r.sent;
    dest = r.dest, send_index = r.send_index;
    slots = r.slots + static_cast<int64_t>(source) * ll_tokens * kTopk;
    depth = static_cast<uint32_t>(c.arena.depth);
    f = PartialFormat::of(a.hidden, kElement<kType>, kTopk, false, c.arena.ll_combine_lines);
    chunks = static_cast<uint32_t>(a.hidden / kUnitChunk);
    y_stride = static_cast<uint32_t>(a.y_stride);
    y = a.y;
    to = c.team.base[source] + c.arena.ll_combine_at(c.lane, 0, 0, 0);
    copy_bytes = c.arena.ll_combine_at(c.lane, 1, 0, 0) - c.arena.ll_combine_at(c.lane, 0, 0, 0);
    row_bytes = c.arena.ll_combine_row;
  }
};

/// What a block has asked for before it knows anything.
struct SumsBegun {
  Asked asked;
  Parts<1> parts;  ///< of its first token
  int32_t slot;    ///< lane k: of its first row to send
  int32_t broken, begin, end, record;
};
__device__ __forceinline__ SumsBegun ask_first(const SumsEarly& e, int worker) {
  SumsBegun b;
  b.asked.before = *reinterpret_cast<const volatile uint32_t*>(&e.lane->epoch[block() % kMaxChannels]);
  b.broken = e.recv_begin[0];
  b.begin = e.recv_begin[e.source], b.end = e.recv_begin[e.source + 1];
  b.record = e.record_begin[e.source];
  const bool lists = worker >= 0 && lane_id() < kTopk;
  const int at = worker * kTopk + lane_id();
  b.slot = lists && worker < e.ll_tokens ? e.slots[at] : -1;
  b.parts = {{-1}, {-1}, 0};
  if (lists && worker < e.num_tokens) b.parts.rank[0] = e.dest[at], b.parts.at[0] = e.send_index[at];
  b.asked.failed = *reinterpret_cast<const volatile uint32_t*>(&e.lane->failed);
  b.asked.status = load_relaxed(e.status);
  b.asked.generation = *reinterpret_cast<const volatile uint64_t*>(e.generation);
  return b;
}
/// The last warp asks for rows of its own when all terms of the first row have come: memory is to give those first.
__device__ __forceinline__ void terms_are_there() { arrive_some(kTermsBarrier, num_threads()); }
__device__ __forceinline__ void wait_for_terms() { sync_some(kTermsBarrier, num_threads()); }

/// The first row to send: all its terms are asked for at once. A warp waits for its own only, so that warps, whose loads come one after the
/// other, send one after the other, too: the link, which takes longest, begins early.
struct FirstRow {
  uint32_t raw[3][kTopk][4];
  int num;

  __device__ __forceinline__ void load(const SumsEarly& e, int unit, int slot, uint32_t terms) {
    num = __popc(terms);
    const std::byte* from[kTopk];
#pragma unroll
    for (int i = 0; i < kTopk; ++i) {
      const auto row = static_cast<uint32_t>(__shfl_sync(kFull, slot, __ffs(static_cast<int>(terms)) - 1));
      terms &= terms - 1;
      from[i] = e.y + static_cast<uint64_t>(row) * e.y_stride;
    }
#pragma unroll
    for (uint32_t j = 0; j < 3; ++j) {
      const uint32_t chunk = static_cast<uint32_t>(unit) + j * static_cast<uint32_t>(e.f.units), at = chunk < e.chunks ? chunk * 16 : 0;
#pragma unroll
      for (int i = 0; i < kTopk; ++i) {
        if (i >= num) continue;
        const uint4 v = load_stream(reinterpret_cast<const uint4*>(from[i] + at));
        raw[j][i][0] = v.x, raw[j][i][1] = v.y, raw[j][i][2] = v.z, raw[j][i][3] = v.w;
      }
    }
  }
  /// Four words of chunk `j`.
  __device__ __forceinline__ void sum(int j, uint32_t* out) const {
    float sum[kUnitChunk];
#pragma unroll
    for (float& v : sum) v = -0.0f;
#pragma unroll
    for (int n = 0; n < kTopk; ++n) {
      if (n >= num) continue;
#pragma unroll
      for (int i = 0; i < kUnitChunk; ++i) sum[i] += value_of<kType>(raw[j][n], i);
    }
    round_values<kType, kUnitChunk>(sum, out);
  }
  __device__ __forceinline__ void send(const SumsEarly& e, int unit, uint4* to, uint32_t epoch) const {
    const auto mine = static_cast<uint32_t>(unit), units = static_cast<uint32_t>(e.f.units);
    const bool sends = mine < units, third = mine / PartialFormat::kLineUnits * PartialFormat::kLineUnits + 2 * units < e.chunks;
    uint32_t taken[3];
#pragma unroll
    for (int j = 0; j < 3; ++j) {
      uint32_t p[4];
      sum(j, p);
      taken[j] = p[3];
      __syncwarp();  // the threads of a line store together
      if (sends && (j < 2 || third))
        store_word(to + (static_cast<uint32_t>(e.f.lines) + mine + j * units), uint4{p[0], p[1], p[2], ends_line() ? epoch : p[3]});
      if (j == 0) terms_are_there();
    }
    __syncwarp();
    if (sends && ends_line())
      store_word(to + (static_cast<uint32_t>(e.f.rest) + mine / PartialFormat::kLineUnits), uint4{taken[0], taken[1], taken[2], epoch});
  }
};
static_assert(kUnitRest<kType> == 1 && kUnitWords<kType> == 3, "a chunk is a word of a line");
/// A warp's part of the first row.
__device__ __forceinline__ uint4* first_place(const SumsEarly& e, Call call, int record) {
  return reinterpret_cast<uint4*>(e.to + static_cast<uint32_t>(call.copy) * e.copy_bytes + static_cast<uint32_t>(record) * e.row_bytes);
}
template <bool kLines>
__device__ __forceinline__ void send_first(const FirstRow& row, const SumsEarly& e, Call call, uint4* to, int unit) {
  if constexpr (Sums<kLines>::kHasLines) {
    row.send(e, unit, to, call.epoch);
  } else {
    uint32_t p[kPayload<kType>];
#pragma unroll
    for (int j = 0; j < 3; ++j) row.sum(j, p + 4 * j);
#pragma unroll
    for (int j = 0; j < kWords<kType>; ++j) {
      if (unit < e.f.units) store_word(to + (j * e.f.units + unit), uint4{p[3 * j], p[3 * j + 1], p[3 * j + 2], call.epoch});
    }
    __syncwarp();
    terms_are_there();
  }
}

}  // namespace turnout::engine::cuda::low_latency
