// The combine of most low_latency calls: plain sums of eight rows of a slab. What a block sends depends on one trip to memory: the
// dispatch has left the places of every row where its number alone says (Routing::slots), and they are asked for together with the
// epoch. The rows to send go to registers, because their sum waits for nothing else. Rows of the block's own token are asked for by
// the last warp, right behind them and into shared memory: once all blocks have begun to send, a load takes as long as the link is busy.
#include <algorithm>

#include "engine/cuda/kernels.h"
#include "engine/cuda/launch.h"
#include "engine/cuda/low_latency/first_row.cuh"
#include "engine/cuda/low_latency/slab.h"

namespace turnout::engine::cuda::low_latency {
namespace {

/// Where the chunks of a unit are in a row, in bytes; of one that is not in the row, its beginning.
struct Chunks {
  int32_t at[3];

  __device__ Chunks(const SlabSums& a, int unit, int units) {
    const int num = static_cast<int>(a.hidden / kUnitChunk);
#pragma unroll
    for (int j = 0; j < 3; ++j) at[j] = (unit + j * units < num ? unit + j * units : 0) * kUnitChunk * kElement<kType>;
  }
};

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
__device__ __forceinline__ bool work_on_units(const auto& w, int worker, int unit, const Chunks& chunks, const SumsBegun& begun, bool sent,
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
__device__ __forceinline__ bool work_on_books(const auto& w, int worker, const SumsBegun& begun, int own_row, int own_slot, bool sent,
                                              FactWords* facts) {
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
  send_for_rest<kType, true>(w.general(), facts);
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
  end_kernel(a.common, call.epoch);
}

template <bool kLines>
__global__ void __launch_bounds__(kMostThreads, 1)
    slab_sums_kernel(const __grid_constant__ SumsEarly e, const __grid_constant__ Sums<kLines> a, int room) {
  extern __shared__ __align__(128) std::byte memory[];
  __shared__ uint64_t barrier;
  __shared__ int32_t begins[kMaxRanks + 1], records[kMaxRanks], sent[kMaxRanks], send_offset[kMaxRanks + 1];
  __shared__ uint32_t fetched;
  __shared__ FactWords facts;
  wait_for_previous();
  const Common& c = a.common;
  const int worker = worker_of(block()), unit = thread();
  const bool clerk = is_clerk();
  const SumsBegun begun = ask_first(e, worker);
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
  end_kernel(c, call.epoch);
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
    return launch_kernel(slab_sums_kernel<true>, blocks, threads, shared, stream, a.chained, SumsEarly(a), Sums<true>(a), room);
  return launch_kernel(slab_sums_kernel<false>, blocks, threads, shared, stream, a.chained, SumsEarly(a), Sums<false>(a), room);
}

cudaError_t prepare_slab_sums(int shared_bytes) {
  if (const cudaError_t bad = load_kernel(reinterpret_cast<const void*>(slab_sums_kernel<true>), shared_bytes)) return bad;
  return load_kernel(reinterpret_cast<const void*>(slab_sums_kernel<false>), shared_bytes);
}

}  // namespace turnout::engine::cuda::low_latency
