// The receiving side of a low-latency dispatch: rows as they arrive, and where they go in the result.
#pragma once
#include "engine/cuda/low_latency/send.cuh"

namespace turnout::engine::cuda::low_latency {

/// What a block holds while it works.
template <class Args, class Format = RowFormat>
struct Work {
  const Args& a;
  Call call;
  Format f;
  SharedPlan plan;
  Tables t;
  Token* token;
  Admission* m;
  std::byte* memory;
  int32_t* laid;  ///< [R] rows of each source that this block has laid out, where they are counted
  int worker, workers;

  __device__ std::byte* own_row(int i) const { return memory + i * plan.row_stride; }
  __device__ std::byte* received_row(int i) const { return memory + plan.received + (i & 1) * plan.row_stride; }
};

__device__ __forceinline__ bool fits_bulk(const void* p, int64_t stride, int64_t bytes) {
  return kHasBulk && (reinterpret_cast<uintptr_t>(p) | static_cast<uintptr_t>(stride) | static_cast<uintptr_t>(bytes)) % 16 == 0;
}

/// From shared memory to global memory, by the threads of a block.
__device__ __forceinline__ void copy_out(std::byte* to, const std::byte* from, int64_t n) {
  const auto bits = reinterpret_cast<uintptr_t>(to) | static_cast<uintptr_t>(n);
  if (bits % 16 == 0) {
#pragma unroll 1
    for (int i = thread(); i < n / 16; i += num_threads()) store_stream(reinterpret_cast<uint4*>(to) + i, reinterpret_cast<const uint4*>(from)[i]);
  } else if (bits % 4 == 0) {
#pragma unroll 1
    for (int i = thread(); i < n / 4; i += num_threads()) reinterpret_cast<uint32_t*>(to)[i] = reinterpret_cast<const uint32_t*>(from)[i];
  } else {
#pragma unroll 1
    for (int i = thread(); i < n; i += num_threads()) to[i] = from[i];
  }
}

/// Parts of a row: x, scales, side arrays. `visit(to, stride, offset in the row, bytes)`.
template <class Visit>
__device__ __forceinline__ void for_each_part(const AnyDispatch auto& a, const RowFormat& f, Visit visit) {
  visit(a.out_x, a.out_stride, 0, a.x_bytes);
  if (a.scale_bytes) visit(a.out_scales, a.scale_bytes, f.scales, a.scale_bytes);
  int at = f.side;
#pragma unroll 1
  for (int s = 0; s < a.num_side; ++s) {
    visit(a.side[s].out, static_cast<int64_t>(a.side[s].bytes), at, static_cast<int64_t>(a.side[s].bytes));
    at += static_cast<int>(core::align_up(a.side[s].bytes, 16));
  }
}

/// Where entry k of received row `n` of source `s` goes in the result: its row, or -1. `put(row)` comes first, then the routing is written.
template <class Put>
__device__ __forceinline__ int place(const auto& w, const std::byte* row, int s, int n, int k, Put put) {
  const auto& a = w.a;
  const Routing& r = a.routing;
  const bool by_rank = a.layout == Layout::rank_major;
  const int64_t i = static_cast<int64_t>(n) * a.num_topk + k;
  if (a.cached) {
    const int at = by_rank ? (k == 0 ? n : -1) : r.position[i];
    if (at >= 0) put(at);
    return at;
  }
  const Meta m = meta_of(a, w.f, const_cast<std::byte*>(row));
  const int id = m.id[k];
  const bool here = id >= 0 && id < a.common.num_experts && w.t.owner[id] == a.common.team.rank;
  const int e = here ? w.t.local[id] : -1;
  int at = -1;
  if (here) {
    const int nth = w.t.before[s * a.common.max_local + e] + m.pair[k];
    at = w.t.offset[e] + nth;
    const bool fits = a.layout == Layout::expert_slab    ? nth >= 0 && nth < a.capacity
                      : a.layout == Layout::expert_major ? n < w.m->cut_row || (n == w.m->cut_row && k < w.m->cut_k)
                                                         : true;
    // What a peer that disagrees says must not lead out of our memory.
    const int64_t room = by_rank ? a.result_rows * a.num_topk : a.result_rows;
    if (!fits || at < 0 || at >= room) at = -1;
  }
  const int to = by_rank ? (k == 0 ? n : -1) : at;
  if (to >= 0) put(to);
  r.recv_idx[i] = e;
  if (a.has_weights) r.recv_weights[i] = here ? m.weight[k] : 0.0f;
  if (by_rank) {
    if (at >= 0) r.sorted_rows[at] = n;
    return to;
  }
  r.position[i] = at;
  if (r.slots) r.slots[(s * a.common.arena.ll_tokens + n - w.m->begins[s]) * a.num_topk + k] = at;
  if (at >= 0 && a.has_weights) r.row_weights[at] = m.weight[k];
  return to;
}

/// The scales of a row in shared memory, whose copy reaches to a multiple of 16 bytes, to their columns. The whole warp calls it.
__device__ __forceinline__ void put_columns(const DispatchArgs::ScaleColumns& to, int64_t scale_bytes, const std::byte* scales, int at) {
  if (at < 0) return;
  const int group = at / to.group_rows;
  uint32_t* first = to.to + static_cast<int64_t>(group) * to.words * to.length + (at - group * to.group_rows);
#pragma unroll 1
  for (int word = lane_id(); word < to.words; word += 32) {
    const auto beyond = static_cast<int>(4 * (word + 1) - scale_bytes);  // bytes of the last word that are of no scale
    const uint32_t bits = reinterpret_cast<const uint32_t*>(scales)[word];
    first[static_cast<int64_t>(word) * to.length] = beyond > 0 ? bits & (~0u >> 8 * beyond) : bits;
  }
}

/// Copies a row in shared memory to its places. The whole block calls it; bulk copies are still reading when it returns.
template <bool kPlain>
__device__ __forceinline__ void lay_out(const auto& w, const std::byte* row, int s, int n) {
  const auto& a = w.a;
  __shared__ int32_t where[kMaxTopk];
  if (a.arrived && thread() == 0) ++w.laid[s];
  const int k = thread();
  if constexpr (kPlain && kHasBulk) {
    // A thread takes long to ask for a copy, and those of a warp do so one after the other: one of each warp.
    const bool by_column = a.columns.at_once;
    if (lane_id() != 0 && !by_column) return;
#pragma unroll 1
    for (int j = warp_id(); j < a.num_topk; j += num_warps()) {
      int to = -1;
      if (lane_id() == 0) {
        place(w, row, s, n, j, [&](int at) {
          to = at;
          bulk_put(a.out_x + at * a.out_stride, row, static_cast<uint32_t>(a.x_bytes));
          if (a.scale_bytes && !by_column) bulk_put(a.out_scales + at * a.scale_bytes, row + w.f.scales, static_cast<uint32_t>(a.scale_bytes));
        });
      }
      if (by_column) put_columns(a.columns, a.scale_bytes, row + w.f.scales, __shfl_sync(kFull, to, 0));
    }
    if (lane_id() == 0) bulk_close();
    return;
  }
  bool all_bulk = true;
  for_each_part(a, w.f, [&](std::byte* to, int64_t stride, int, int64_t bytes) { all_bulk = all_bulk && fits_bulk(to, stride, bytes); });
  if (k < a.num_topk) {
    const int at = place(w, row, s, n, k, [&](int row_at) {
      for_each_part(a, w.f, [&](std::byte* to, int64_t stride, int from, int64_t bytes) {
        if (fits_bulk(to, stride, bytes)) bulk_put(to + row_at * stride, row + from, static_cast<uint32_t>(bytes));
      });
    });
    bulk_close();
    if (!all_bulk) where[k] = at;
  }
  if (all_bulk) return;
  __syncthreads();
#pragma unroll 1
  for (int j = 0; j < a.num_topk; ++j) {
    const int at = where[j];
    if (at < 0) continue;
    for_each_part(a, w.f, [&](std::byte* to, int64_t stride, int from, int64_t bytes) {
      if (!fits_bulk(to, stride, bytes)) copy_out(to + at * stride, row + from, bytes);
    });
  }
  __syncthreads();
}

__device__ __forceinline__ const uint4* staged_row(const auto& w, int s, int i) {
  const Common& c = w.a.common;
  return reinterpret_cast<const uint4*>(c.team.base[c.team.rank] + c.arena.ll_dispatch_at(c.lane, w.call.copy, s, i));
}
/// The words of a staged row that a thread looks at first. Those of the first row that a block may receive can be asked for before it
/// is known whether there is one: loads queue behind the stores of the rows that the block has sent, so a trip there is long.
struct RowWords {
  uint4 p{}, q{};
};
/// The same of lines: which words the lanes of a warp look at whose first is `base`. Beyond the end of the row there is the last line again,
/// so that all lanes of a warp do the same.
struct LinePlaces {
  int p, q;
  bool two;
  __device__ LinePlaces(const auto& w, int base) : p(0), q(0), two(base + num_threads() < w.f.num_words) {
    const int last = w.f.num_words - kLineWords + line_lane();
    p = min(base + lane_id(), last);
    q = two ? min(p + num_threads(), last) : p;
  }
  __device__ __forceinline__ void load(const uint4* row, RowWords* seen) const {
    seen->p = load_word(row + p);
    if (two) seen->q = load_word(row + q);
  }
  __device__ __forceinline__ bool miss_nothing(const RowWords& seen, uint32_t epoch) const {
    return is_no_obstacle(seen.p, epoch) && (!two || is_no_obstacle(seen.q, epoch));
  }
};
__device__ __forceinline__ RowWords ask_first_row(const auto& w) {
  const int ranks = w.a.common.team.num_ranks;
  if (ranks == 1 || w.worker < 0 || w.worker >= w.a.common.arena.ll_tokens) return {};
  const uint4* row = staged_row(w, (w.a.common.team.rank + 1) % ranks, w.worker);
  if (w.f.lines) {
    const LinePlaces at(w, warp_id() * 32);
    if (warp_id() * 32 >= w.f.num_words) return {};
    RowWords seen;
    at.load(row, &seen);
    return seen;
  }
  if (thread() >= w.f.num_words) return {};
  const uint4* from = row + thread();
  return {load_word(from), load_word(from + (thread() + num_threads() < w.f.num_words ? num_threads() : 0))};
}

/// Until all lines of a staged row show the epoch; their payload goes to shared memory.
__device__ __forceinline__ bool receive_lines(const auto& w, int s, int i, std::byte* row, RowWords seen) {
  const Common& c = w.a.common;
  const uint4* from = staged_row(w, s, i);
  const uint32_t epoch = w.call.epoch;
  bool good = true;
#pragma unroll 1
  for (int base = warp_id() * 32; good && base < w.f.num_words; base += 2 * num_threads()) {
    const LinePlaces at(w, base);
    if (base >= num_threads() || !__all_sync(kFull, at.miss_nothing(seen, epoch))) {
      good = wait_for_lines(
          c, s, epoch,
          [&] {
            at.load(from, &seen);
            return at.miss_nothing(seen, epoch);
          },
          [&] { return seen.p.w != epoch ? seen.p.w : seen.q.w; });
    }
    keep_line_word(row, at.p, seen.p);
    if (at.two) keep_line_word(row, at.q, seen.q);
  }
  bulk_can_read();
  return __syncthreads_and(good);
}

/// Until all words of a staged row show the epoch; their payload goes to shared memory. A thread polls two at a time.
__device__ __forceinline__ bool receive_row(const auto& w, int s, int i, std::byte* row, RowWords seen) {
  if (w.f.lines) return receive_lines(w, s, i, row, seen);
  const Common& c = w.a.common;
  const uint4* from = staged_row(w, s, i);
  auto* to = reinterpret_cast<uint32_t*>(row);
  bool good = true;
#pragma unroll 1
  for (int x = thread(); good && x < w.f.num_words; x += 2 * num_threads()) {
    const int y = x + num_threads() < w.f.num_words ? x + num_threads() : x;
    uint4 p = seen.p, q = seen.q;
    const auto are_there = [&] { return p.w == w.call.epoch && q.w == w.call.epoch; };
    if (x != thread() || !are_there()) {
      good = wait_for(
          c, Phase::low_latency_rows, s, w.call.epoch, true,
          [&] {
            p = load_word(from + x);
            q = load_word(from + y);
            return are_there();
          },
          [&] { return p.w != w.call.epoch ? p.w : q.w; });
    }
    to[3 * x] = p.x, to[3 * x + 1] = p.y, to[3 * x + 2] = p.z;
    to[3 * y] = q.x, to[3 * y + 1] = q.y, to[3 * y + 2] = q.z;
  }
  bulk_can_read();
  return __syncthreads_and(good);
}

/// The rows of all other ranks, and own ones that wait in staging, as they arrive; `seen`: of ask_first_row(). False: given up.
template <bool kPlain>
__device__ __forceinline__ bool receive_rows(const auto& w, RowWords seen = {}) {
  const int ranks = w.a.common.team.num_ranks, me = w.a.common.team.rank;
  int j = 0, first = 0;  // rows of the sources before s
  int s = (me + 1) % ranks;
#pragma unroll 1
  for (int n = w.worker; s != me || !w.a.sends;) {
    const int rows = w.m->begins[s + 1] - w.m->begins[s];
    if (n - first >= rows) {
      first += rows;
      if (s == me) break;
      s = (s + 1) % ranks;
      seen = {};
      continue;
    }
    if (j >= 2) {  // the row before the last was copied from this buffer
      bulk_have_read<1>();
      __syncthreads();
    }
    if (!receive_row(w, s, n - first, w.received_row(j), seen)) return false;
    seen = {};
    lay_out<kPlain>(w, w.received_row(j), s, w.m->begins[s] + n - first);
    n += w.workers;
    ++j;
  }
  return true;
}

}  // namespace turnout::engine::cuda::low_latency
