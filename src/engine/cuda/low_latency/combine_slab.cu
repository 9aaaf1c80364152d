// The combine of most low_latency calls: plain sums of eight rows of a slab. What a block sends depends on one trip to memory: the
// dispatch has left the places of every row where its number alone says (Routing::slots), and they are asked for together with the
// epoch. The rows to send go to registers, because their sum waits for nothing else. Rows of the block's own token are asked for by
// the last warp, right behind them and into shared memory: once all blocks have begun to send, a load takes as long as the link is busy.
#include <algorithm>

#include "engine/cuda/kernels.h"
#include "engine/cuda/launch.h"
#include "engine/cuda/low_latency/books.cuh"
#include "engine/cuda/low_latency/slab.h"

namespace turnout::engine::cuda::low_latency {
namespace {

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
struct Early {
  LaneControl* lane;
  const uint64_t *status, *generation;
  const int32_t *recv_begin, *record_begin, *slots, *dest, *send_index, *sent;
  int32_t rank, source, num_tokens, ll_tokens, room;  ///< source: of the first rows to send; slots: its part
  uint32_t depth, chunks, y_stride;
  PartialFormat f;
  const std::byte* y;
  std::byte* to;  ///< the staging of `source`
  uint64_t copy_bytes, row_bytes;

  explicit Early(const CombineArgs& a) {
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
struct Begun {
  Asked asked;
  Parts<1> parts;  ///< of its first token
  int32_t slot;    ///< lane k: of its first row to send
  int32_t broken, begin, end, record;
};
__device__ __forceinline__ Begun ask(const Early& e, int worker) {
  Begun b;
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

/// Where the chunks of a unit are in a row, in bytes; of one that is not in the row, its beginning.
struct Chunks {
  int32_t at[3];

  __device__ Chunks(const SlabSums& a, int unit, int units) {
    const int num = static_cast<int>(a.hidden / kUnitChunk);
#pragma unroll
    for (int j = 0; j < 3; ++j) at[j] = (unit + j * units < num ? unit + j * units : 0) * kUnitChunk * kElement<kType>;
  }
};

/// The last warp asks for rows of its own when all terms of the first row have come: memory is to give those first.
__device__ __forceinline__ void terms_are_there() { arrive_some(kTermsBarrier, num_threads()); }
__device__ __forceinline__ void wait_for_terms() { sync_some(kTermsBarrier, num_threads()); }

/// The first row to send: all its terms are asked for at once, the first chunks of all of them first; each chunk leaves as soon as its terms
/// are there. It waits for no other warp.
struct FirstRow {
  uint32_t raw[3][kTopk][4];
  int num;

  __device__ __forceinline__ void load(const Early& e, int unit, int slot, uint32_t terms) {
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
  __device__ __forceinline__ void send(const Early& e, int unit, uint4* to, uint32_t epoch) const {
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

/// Rows of y in registers, as they are in memory, kMost at a time. The whole warp calls all of it.
template <int kMost>
struct Rows {
  uint32_t raw[kMost][kPayload<kType>];

  /// The first of the terms in `left`, which it takes from there: entry k is the row that lane k says.
  __device__ __forceinline__ int load(const SlabSums& a, const Chunks& chunks, int slot, uint32_t* left) {
    const int num = min(__popc(*left), kMost);
#pragma unroll
    for (int i = 0; i < kMost; ++i) {
      if (i >= num) continue;
      const int row = __shfl_sync(kFull, slot, __ffs(static_cast<int>(*left)) - 1);
      *left &= *left - 1;
      const std::byte* y = a.y + row * a.y_stride;
#pragma unroll
      for (int j = 0; j < 3; ++j) put(i, j, load_stream(reinterpret_cast<const uint4*>(y + chunks.at[j])));
    }
    return num;
  }
  /// The same of rows in shared memory, one bit each.
  __device__ __forceinline__ int copy(const std::byte* rows, int32_t bytes, const Chunks& chunks, uint32_t* left) {
    const int num = min(__popc(*left), kMost);
    rows += (__ffs(static_cast<int>(*left)) - 1) * bytes;
#pragma unroll
    for (int i = 0; i < kMost; ++i) {
      if (i >= num) continue;
      *left &= *left - 1;
#pragma unroll
      for (int j = 0; j < 3; ++j) put(i, j, *reinterpret_cast<const uint4*>(rows + i * bytes + chunks.at[j]));
    }
    return num;
  }
  __device__ __forceinline__ void add(int num, float (&sum)[kUnit]) const {
#pragma unroll
    for (int n = 0; n < kMost; ++n) {
      if (n >= num) continue;
#pragma unroll
      for (int i = 0; i < kUnit; ++i) sum[i] += value_of<kType>(raw[n], i);
    }
  }
  __device__ __forceinline__ void put(int i, int j, uint4 v) {
    raw[i][4 * j] = v.x, raw[i][4 * j + 1] = v.y, raw[i][4 * j + 2] = v.z, raw[i][4 * j + 3] = v.w;
  }
};

/// Rows of the block's first token on their way to shared memory; the last warp asks for them and says how many: a bit each.
struct Own {
  static constexpr uint32_t kNone = ~0u;  ///< they are too many
  std::byte* rows;
  uint64_t* barrier;
  volatile uint32_t* fetched;
  int32_t bytes;
};

__device__ __forceinline__ int slot_of(const SlabSums& a, int n) {
  return n >= 0 && lane_id() < kTopk ? a.routing.position[static_cast<int64_t>(n) * kTopk + lane_id()] : -1;
}

/// Of the first row to send all terms are asked for at once, of other rows as many as there are registers for beside the rest.
inline constexpr int kInParts = 3;

__device__ __forceinline__ void clear(float (&sum)[kUnit]) {
#pragma unroll
  for (int i = 0; i < kUnit; ++i) sum[i] = -0.0f;  // -0 + x is x for every x
}

/// The terms in `left`, added to a sum.
__device__ __forceinline__ void add_rows(const SlabSums& a, const Chunks& chunks, int slot, uint32_t left, bool is_fetched, const Own& own,
                                         float (&sum)[kUnit]) {
#pragma unroll 1
  while (left) {
    Rows<kInParts> rows;
    const int num = is_fetched ? rows.copy(own.rows, own.bytes, chunks, &left) : rows.load(a, chunks, slot, &left);
    rows.add(num, sum);
  }
}

/// What a warp of units does: partial sums for others, then its own tokens. `sent`: the first row to send is on its way.
__device__ __forceinline__ bool work_on_units(const auto& w, int worker, int unit, const Chunks& chunks, const Begun& begun, bool sent,
                                              const Own& own) {
  const auto& a = w.a;
  Owed owed(w, worker);
  int n = 0;
  uint4* to = nullptr;
  if (sent) owed.next(w, &n, &to);
  bool sends = owed.next(w, &n, &to);
  int64_t token = worker;
  Parts<1> now = parts_of(w, begun.parts);
#pragma unroll 1
  while (sends || token < a.num_tokens) {
    bool is_fetched = kHasBulk && !sends && token == worker;
    uint32_t terms = 0;
    int slot = -1;
    if (is_fetched) {
      wait_for_fetched(own.barrier);
      terms = *own.fetched;
      is_fetched = terms != Own::kNone;
    }
    if (!is_fetched) {
      slot = slot_of(a, sends ? n : own_row_of(w, now));
      terms = __ballot_sync(kFull, slot >= 0);
    }
    float sum[kUnit];
    clear(sum);
    add_rows(a, chunks, slot, terms, is_fetched, own, sum);
    uint32_t p[kPayload<kType>];
    round_unit<kType>(sum, p);
    if (sends) {
      if (terms) send_unit<kType>(w, to, unit, p);  // else all of it was dropped: its mask says so
      sends = owed.next(w, &n, &to);
      continue;
    }
    if (!add_unit<kType, true>(w, token, now, terms, place_of<kType>(a, unit, w.f.units, unit < w.f.units), unit, p)) return false;
    token += num_workers();
    now = parts_of(w, ask_parts<1>(a, token));
  }
  return true;
}

__device__ __forceinline__ void fetch_own(const SlabSums& a, int slot, int room, const Own& own) {
  const uint32_t mask = __ballot_sync(kFull, slot >= 0);
  const int rows = __popc(mask), fetched = rows <= room ? rows : 0;
  if (lane_id() == 0) {
    *own.fetched = rows <= room ? (1u << rows) - 1 : Own::kNone;
    fetch_expect(own.barrier, static_cast<uint32_t>(fetched * own.bytes));
  }
  __syncwarp();
  if (slot < 0 || fetched == 0) return;
  const int nth = __popc(mask & ((1u << lane_id()) - 1));
  fetch_one(own.rows + nth * own.bytes, a.y + slot * a.y_stride, static_cast<uint32_t>(own.bytes), own.barrier);
}

/// What the last warp does: the books of what is sent (`sent`: but the first), the work of blocks that have not started, the books of tokens.
__device__ __forceinline__ bool work_on_books(const auto& w, int worker, const Begun& begun, int own_row, int own_slot, bool sent, FactWords* facts) {
  const auto& a = w.a;
  const Common& c = a.common;
  if (worker >= 0) {
    int n = 0;
    uint4* to = nullptr;
#pragma unroll 1
    for (Owed owed(w, worker); owed.next(w, &n, &to); sent = false) {
      if (!sent) send_books(w, terms_of(a, n, ask_terms<1>(a, n)), n, to);
    }
  }
  send_for_rest<kType, true>(Work<CombineArgs>{a, w.call, w.f, w.begins, w.records, w.sent, w.send_offset}, facts);
  // The masks of the first token are asked for together with what all ranks say: loads take long while the link is busy.
  const Parts<1> first = parts_of(w, begun.parts);
  const uint4 seen = ask_masks(w, first);
  if (!all_agree(c, w.call)) return false;
  let_next_start();
#pragma unroll 1
  for (int64_t t = worker; worker >= 0 && t < a.num_tokens; t += num_workers()) {
    const Parts<1> parts = t == worker ? first : parts_of(w, ask_parts<1>(a, t));
    const int row = t == worker ? own_row : own_row_of(w, parts);
    if (!keep_books(w, t, parts, row, t == worker ? Terms<1>{0, {own_slot}, {1.0f}} : ask_terms<1>(a, row), t == worker ? seen : uint4{}))
      return false;
  }
  return true;
}

/// A warp's part of the first row.
__device__ __forceinline__ uint4* first_place(const Early& e, Call call, int record) {
  return reinterpret_cast<uint4*>(e.to + static_cast<uint32_t>(call.copy) * e.copy_bytes + static_cast<uint32_t>(record) * e.row_bytes);
}
template <bool kLines>
__device__ __forceinline__ void send_first(const FirstRow& row, const Early& e, Call call, uint4* to, int unit) {
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

/// What units look up, by the last warp.
__device__ __forceinline__ void copy_tables(const SlabSums& a, int32_t* begins, int32_t* send_offset, int32_t* records, int32_t* sent) {
  const int ranks = a.common.team.num_ranks;
#pragma unroll 1
  for (int s = lane_id(); s <= ranks; s += 32) {
    copy_async(begins + s, a.routing.recv_begin + s);
    copy_async(send_offset + s, a.routing.send_offset + s);
    if (s == ranks) break;
    copy_async(records + s, a.routing.record_begin + s);
    copy_async(sent + s, a.routing.sent + s);
  }
}

/// Of a call that is over before it begins.
__device__ __noinline__ void end_early(const CombineArgs& a, Call call, int worker, bool clerk, uint64_t* fetched) {
  if (kHasBulk && clerk) wait_for_fetched(fetched);
  if (worker >= 0) poison(a, worker);
  __syncthreads();
  tell_expired(a.common, call.epoch);
  if (a.common.last_of_send) advance_epoch(a.common, call.epoch);
}

template <bool kLines>
__global__ void __launch_bounds__(kMostThreads, 1)
    slab_sums_kernel(const __grid_constant__ Early e, const __grid_constant__ Sums<kLines> a, int room) {
  extern __shared__ __align__(128) std::byte memory[];
  __shared__ uint64_t barrier;
  __shared__ int32_t begins[kMaxRanks + 1], records[kMaxRanks], sent[kMaxRanks], send_offset[kMaxRanks + 1];
  __shared__ uint32_t fetched;
  __shared__ FactWords facts;
  wait_for_previous();
  const Common& c = a.common;
  const int worker = worker_of(block()), unit = thread();
  const bool clerk = is_clerk();
  const Begun begun = ask(e, worker);
  const int32_t own_sent = clerk ? e.sent[e.rank] : 0, own_begin = clerk ? e.recv_begin[e.rank] : 0;
  const bool whole = begun.broken >= 0;
  const int rows_there = min(begun.end - begun.begin, e.room - begun.record);  // as Owed has it
  const bool loaded = whole && worker >= 0 && e.source != e.rank && worker < min(rows_there, e.ll_tokens);
  const Own own{memory, &barrier, &fetched, static_cast<int32_t>(e.chunks) * kUnitChunk * kElement<kType>};
  int own_row = -1, own_slot = -1;
  FirstRow row;
  const uint32_t terms = loaded ? __ballot_sync(kFull, begun.slot >= 0) : 0;
  if (!clerk) row.load(e, unit, begun.slot, terms);
  const Start start = start_of(c, e.lane, e.depth, begun.asked);
  const Call call = start.call;
  const bool begins_well = !__any_sync(kFull, start.over);  // the block has not met: each warp says so for itself
  uint4* const to = first_place(e, call, begun.record + worker);
  if (clerk) {
    // What other ranks wait for comes first: facts, and the mask of the first row.
    if (begins_well && block() == 0) send_facts(c, call, !whole, &facts);
    if (begins_well && loaded && lane_id() == 0) store_word(to + e.f.mask, uint4{terms, 0, 0, call.epoch});
    copy_tables(a, begins, send_offset, records, sent);
    const int at = begun.parts.at[0];
    const unsigned holder = __ballot_sync(kFull, whole && begun.parts.rank[0] == e.rank && at >= 0 && at < own_sent);
    if (holder) own_row = own_begin + __shfl_sync(kFull, at, __ffs(static_cast<int>(holder)) - 1);
    own_slot = slot_of(a, own_row);
    if (lane_id() == 0) {
      fetch_init(&barrier);
      bulk_can_read();
    }
    __syncwarp();
    wait_for_terms();
    if (kHasBulk) fetch_own(a, own_slot, room, own);
  } else if (terms != 0 && begins_well) {
    send_first<kLines>(row, e, call, to, unit);
  } else {
    terms_are_there();
  }
  copies_done();
  if (__syncthreads_or(start.over)) return end_early(a, call, worker, clerk, &barrier);
  bool good = whole;
  if (good) {
    const Work<Sums<kLines>> w{a, call, e.f, begins, records, sent, send_offset};
    if (clerk) {
      good = work_on_books(w, worker, begun, own_row, own_slot, loaded, &facts);
    } else if (worker >= 0) {
      good = work_on_units(w, worker, unit, Chunks(a, unit, e.f.units), begun, loaded, own);
    }
  }
  good = __syncthreads_and(good);
  if (block() == 0) {
    const bool heard = hear_all(c, call, &facts);
    good = __syncthreads_and(heard) && good;
  }
  if (!good) {
    if (kHasBulk && clerk) wait_for_fetched(&barrier);
    if (worker >= 0) poison(a, worker);
  }
  tell_expired(c, call.epoch);
  if (c.last_of_send) advance_epoch(c, call.epoch);
}

}  // namespace

bool can_sum_slab(const CombineArgs& a) {
  const bool is_plain = a.num_topk == SlabSums::num_topk && a.apply == SlabSums::apply && a.layout == SlabSums::layout && !a.has_side;
  const int units = PartialFormat::of(a.hidden, kElement<kType>, kTopk, false, a.common.arena.ll_combine_lines).units;
  const bool is_near = a.y_stride >= 0 && a.y_stride <= int64_t{UINT32_MAX};
  return is_plain && is_near && a.dtype == kType && a.routing.slots != nullptr && units <= kMostUnits;
}

cudaError_t launch_slab_sums(const CombineArgs& a, int blocks, int shared_bytes, cudaStream_t stream) {
  const int64_t row = a.hidden * kElement<kType>;
  const int room = kHasBulk ? static_cast<int>(std::min<int64_t>(shared_bytes / row, kTopk)) : 0;
  const int units = PartialFormat::of(a.hidden, kElement<kType>, kTopk, false, a.common.arena.ll_combine_lines).units;
  const int threads = std::max(128, static_cast<int>(core::align_up(units, 32)) + 32);
  const auto shared = static_cast<size_t>(room * row);
  if (a.common.arena.ll_combine_lines)
    return launch_kernel(slab_sums_kernel<true>, blocks, threads, shared, stream, a.chained, Early(a), Sums<true>(a), room);
  return launch_kernel(slab_sums_kernel<false>, blocks, threads, shared, stream, a.chained, Early(a), Sums<false>(a), room);
}

cudaError_t prepare_slab_sums(int shared_bytes) {
  if (const cudaError_t bad = load_kernel(reinterpret_cast<const void*>(slab_sums_kernel<true>), shared_bytes)) return bad;
  return load_kernel(reinterpret_cast<const void*>(slab_sums_kernel<false>), shared_bytes);
}

}  // namespace turnout::engine::cuda::low_latency
