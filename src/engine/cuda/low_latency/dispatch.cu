// A dispatch in low_latency mode: one kernel. Rows go out at once, in flagged words, to staging of the receiver; it learns from
// the headers where they belong, and lays each out as its words arrive. Positions are counted twice or more often rather than
// waited for: by every block for its own tokens, and by every block for the tables of the receiving side.
#include "engine/cuda/kernels.h"
#include "engine/cuda/low_latency/publish.cuh"
#include "engine/cuda/low_latency/send.cuh"

namespace turnout::engine::cuda {
namespace low_latency {
namespace {

constexpr int kMostThreads = 512;

/// What a block holds while it works.
struct Work {
  const DispatchArgs& a;
  Call call;
  RowFormat f;
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
    for (int i = thread(); i < n / 16; i += num_threads()) store_stream(reinterpret_cast<uint4*>(to) + i, reinterpret_cast<const uint4*>(from)[i]);
  } else if (bits % 4 == 0) {
    for (int i = thread(); i < n / 4; i += num_threads()) reinterpret_cast<uint32_t*>(to)[i] = reinterpret_cast<const uint32_t*>(from)[i];
  } else {
    for (int i = thread(); i < n; i += num_threads()) to[i] = from[i];
  }
}

/// Parts of a row: x, scales, side arrays. `visit(to, stride, offset in the row, bytes)`.
template <class Visit>
__device__ __forceinline__ void for_each_part(const DispatchArgs& a, const RowFormat& f, Visit visit) {
  visit(a.out_x, a.out_stride, 0, a.x_bytes);
  if (a.scale_bytes) visit(a.out_scales, a.scale_bytes, f.scales, a.scale_bytes);
  int at = f.side;
  for (int s = 0; s < a.num_side; ++s) {
    visit(a.side[s].out, static_cast<int64_t>(a.side[s].bytes), at, static_cast<int64_t>(a.side[s].bytes));
    at += static_cast<int>(core::align_up(a.side[s].bytes, 16));
  }
}

/// Where entry k of received row `n` of source `s` goes in the result: its row, or -1. Writes the routing.
__device__ __forceinline__ int place(const Work& w, const std::byte* row, int s, int n, int k) {
  const DispatchArgs& a = w.a;
  const Routing& r = a.routing;
  const bool by_rank = a.layout == Layout::rank_major;
  const int64_t i = static_cast<int64_t>(n) * a.num_topk + k;
  if (a.cached) return by_rank ? (k == 0 ? n : -1) : r.position[i];
  const Meta m = meta_of(a, w.f, const_cast<std::byte*>(row));
  const int id = m.id[k];
  const bool here = id >= 0 && id < a.common.num_experts && w.t.owner[id] == a.common.team.rank;
  const int e = here ? w.t.local[id] : -1;
  r.recv_idx[i] = e;
  if (a.has_weights) r.recv_weights[i] = here ? m.weight[k] : 0.0f;
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
  if (by_rank) {
    if (at >= 0) r.sorted_rows[at] = n;
    return k == 0 ? n : -1;
  }
  r.position[i] = at;
  if (at >= 0 && a.has_weights) r.row_weights[at] = m.weight[k];
  return at;
}

/// Copies a row in shared memory to its places. The whole block calls it; bulk copies are still reading when it returns.
__device__ __forceinline__ void lay_out(const Work& w, const std::byte* row, int s, int n) {
  const DispatchArgs& a = w.a;
  __shared__ int32_t where[kMaxTopk];
  if (a.arrived && thread() == 0) ++w.laid[s];
  const int k = thread();
  bool all_bulk = true;
  for_each_part(a, w.f, [&](std::byte* to, int64_t stride, int, int64_t bytes) { all_bulk = all_bulk && fits_bulk(to, stride, bytes); });
  if (k < a.num_topk) {
    const int at = place(w, row, s, n, k);
    if (at >= 0) {
      for_each_part(a, w.f, [&](std::byte* to, int64_t stride, int from, int64_t bytes) {
        if (fits_bulk(to, stride, bytes)) bulk_put(to + at * stride, row + from, static_cast<uint32_t>(bytes));
      });
    }
    bulk_close();
    if (!all_bulk) where[k] = at;
  }
  if (all_bulk) return;
  __syncthreads();
  for (int j = 0; j < a.num_topk; ++j) {
    const int at = where[j];
    if (at < 0) continue;
    for_each_part(a, w.f, [&](std::byte* to, int64_t stride, int from, int64_t bytes) {
      if (!fits_bulk(to, stride, bytes)) copy_out(to + at * stride, row + from, bytes);
    });
  }
  __syncthreads();
}

/// The tokens of worker `worker` to the other ranks. Rows stay in shared memory, the last num_own of them.
template <int kIds>
__device__ __forceinline__ void send_tokens(const Work& w, int worker, const Early<kIds>* early, int32_t* own_place, bool mine) {
  int j = 0;
  for (int64_t token = worker; token < w.a.num_tokens; token += w.workers, ++j) {
    const int buffer = j % w.plan.num_own;
    std::byte* row = mine ? w.own_row(buffer) : w.received_row(0);
    prepare_token<kIds>(w.a, w.f, w.t, w.token, token, j == 0 && mine ? early : nullptr, row,
                        mine ? &own_place[buffer] : &own_place[SharedPlan::kMostOwn]);
    send_row(w.a, w.f, w.token, w.call, row);
    if (mine) write_routing(w.a, w.t, w.token, token);
    __syncthreads();
  }
}

/// The rows that stay on this rank.
template <int kIds>
__device__ __forceinline__ void lay_out_own(const Work& w, int32_t* own_place) {
  const int me = w.a.common.team.rank;
  const int room = w.m->begins[me + 1] - w.m->begins[me];
  const int num = w.a.num_tokens > w.worker ? static_cast<int>((w.a.num_tokens - w.worker + w.workers - 1) / w.workers) : 0;
  for (int j = num - 1; j >= 0; --j) {
    const int buffer = j % w.plan.num_own;
    if (j < num - w.plan.num_own) {  // its buffer went to a later token
      bulk_have_read<0>();
      __syncthreads();
      prepare_token<kIds>(w.a, w.f, w.t, w.token, w.worker + static_cast<int64_t>(j) * w.workers, nullptr, w.own_row(buffer), &own_place[buffer]);
    }
    const int i = own_place[buffer];
    if (i >= 0 && i < room) lay_out(w, w.own_row(buffer), me, w.m->begins[me] + i);
  }
}

/// Until all words of a staged row show the epoch; their payload goes to shared memory. A thread polls two at a time.
__device__ __forceinline__ bool receive_row(const Work& w, int s, int i, std::byte* row) {
  const Common& c = w.a.common;
  const auto* from = reinterpret_cast<const uint4*>(c.team.base[c.team.rank] + c.arena.ll_dispatch_at(c.lane, w.call.copy, s, i));
  auto* to = reinterpret_cast<uint32_t*>(row);
  bool good = true;
  for (int x = thread(); good && x < w.f.num_words; x += 2 * num_threads()) {
    const int y = x + num_threads() < w.f.num_words ? x + num_threads() : x;
    uint4 p{}, q{};
    good = wait_for(
        c, Phase::low_latency_rows, s, w.call.epoch, true,
        [&] {
          p = load_word(from + x);
          q = load_word(from + y);
          return p.w == w.call.epoch && q.w == w.call.epoch;
        },
        [&] { return p.w != w.call.epoch ? p.w : q.w; });
    to[3 * x] = p.x, to[3 * x + 1] = p.y, to[3 * x + 2] = p.z;
    to[3 * y] = q.x, to[3 * y + 1] = q.y, to[3 * y + 2] = q.z;
  }
  bulk_can_read();
  return __syncthreads_and(good);
}

/// The rows of all other ranks, as they arrive. False: given up.
__device__ __forceinline__ bool receive_rows(const Work& w) {
  const int ranks = w.a.common.team.num_ranks, me = w.a.common.team.rank;
  int j = 0, first = 0;  // rows of the sources before s
  int s = (me + 1) % ranks;
  for (int n = w.worker; s != me;) {
    const int rows = w.m->begins[s + 1] - w.m->begins[s];
    if (n - first >= rows) {
      first += rows;
      s = (s + 1) % ranks;
      continue;
    }
    if (j >= 2) {  // the row before the last was copied from this buffer
      bulk_have_read<1>();
      __syncthreads();
    }
    if (!receive_row(w, s, n - first, w.received_row(j))) return false;
    lay_out(w, w.received_row(j), s, w.m->begins[s] + n - first);
    n += w.workers;
    ++j;
  }
  return true;
}

/// Weights and ids of rows that are not there; padding of groups.
__device__ __forceinline__ void fill_rest(const Work& w) {
  const DispatchArgs& a = w.a;
  const Routing& r = a.routing;
  const int local = a.num_local;
  const int64_t first = static_cast<int64_t>(w.worker) * num_threads() + thread(), step = static_cast<int64_t>(w.workers) * num_threads();
  const int first_warp = w.worker * num_warps() + warp_id(), all_warps = w.workers * num_warps();
  if (a.layout == Layout::rank_major) {
    if (a.cached) return;
    for (int64_t i = static_cast<int64_t>(w.m->begins[a.common.team.num_ranks]) * a.num_topk + first; i < a.result_rows * a.num_topk; i += step) {
      r.recv_idx[i] = -1;
      if (a.has_weights) r.recv_weights[i] = 0.0f;
    }
    return;
  }
  if (a.has_weights && !a.cached) {
    for (int e = first_warp; e < local; e += all_warps) {
      const int64_t end = a.layout == Layout::expert_slab ? (e + 1) * a.capacity : w.t.offset[e + 1];
      for (int64_t i = w.t.offset[e] + w.t.admitted[e] + lane_id(); i < end; i += 32) r.row_weights[i] = 0.0f;
    }
    for (int64_t i = w.t.offset[local] + first; i < a.result_rows; i += step) r.row_weights[i] = 0.0f;
  }
  if (a.layout != Layout::expert_major || a.alignment == 1) return;
  for (int e = 0; e < local; ++e) {
    for (int64_t i = w.t.offset[e] + w.t.admitted[e] + first_warp; i < w.t.offset[e + 1]; i += all_warps) {
      for_each_part(a, w.f, [&](std::byte* to, int64_t stride, int, int64_t bytes) { zero_row(to + i * stride, bytes); });
    }
  }
}

/// The tables of a known routing.
__device__ __forceinline__ bool load_known(const Work& w) {
  const DispatchArgs& a = w.a;
  for (int s = thread(); s <= a.common.team.num_ranks; s += num_threads()) w.m->begins[s] = a.routing.recv_begin[s];
  for (int e = thread(); e <= a.num_local; e += num_threads()) {
    if (e < a.num_local) w.t.admitted[e] = a.routing.expert_counts[e];
    w.t.offset[e] = static_cast<int32_t>(a.routing.expert_offsets[e]);
  }
  return __syncthreads_and(all_agree(a.common, w.call));
}

/// Tells the counters of a resident receive. After the copies have ended.
__device__ __forceinline__ void count_arrivals(const Work& w) {
  bulk_finish();
  __threadfence();
  __syncthreads();
  for (int s = thread(); s < w.a.common.team.num_ranks; s += num_threads()) {
    if (w.laid[s]) atomicAdd(reinterpret_cast<unsigned long long*>(w.a.arrived + s), static_cast<unsigned long long>(w.laid[s]));
  }
}

/// A call that failed says that it brought nothing.
__device__ void clear_counts(const DispatchArgs& a) {
  for (int e = thread(); e <= a.num_local; e += num_threads()) {
    if (e < a.num_local) a.routing.expert_counts[e] = 0;
    a.routing.expert_offsets[e] = 0;
  }
  if (thread() == 0) *a.routing.num_rows = *a.routing.num_dropped = 0;
}

template <int kIds>
__global__ void __launch_bounds__(kMostThreads, 1) dispatch_kernel(const __grid_constant__ DispatchArgs a) {
  extern __shared__ __align__(128) std::byte memory[];
  __shared__ Token token;
  __shared__ Admission admission;
  __shared__ FactWords facts;
  __shared__ int32_t own_place[SharedPlan::kMostOwn + 1], laid[kMaxRanks];
  const Common& c = a.common;
  const int workers = num_workers(), worker = worker_of(block());
  const RowFormat f = RowFormat::of(a);
  const SharedPlan plan = SharedPlan::of(a, workers);

  // Everything that depends on nothing is asked for first, what is needed first last.
  Early<kIds> early;
  const bool some = worker >= 0 && worker < a.num_tokens;
  if (some && loads_pieces(a)) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int64_t at = static_cast<int64_t>(thread() + j * num_threads()) * 16;
      early.x[j] = at < source_bytes(a) ? load_piece(a.x + worker * a.x_stride, at, source_bytes(a)) : uint4{};
    }
  }
  const Tables t = tables_at(a, plan, memory);
  const int first_owner = thread() < c.num_experts ? __ldg(c.owner + thread()) : 0,
            first_local = thread() < c.num_experts ? __ldg(c.local + thread()) : 0;
  const Start start = start_of(c);
  const Call call = start.call;
  if (some && !a.cached) {
    load_ids<1>(a, static_cast<int64_t>(worker) * a.num_topk + min(thread(), a.num_topk - 1), 1, &early.id);
    early.weight = weight_of(a, static_cast<int64_t>(worker) * a.num_topk + min(thread(), a.num_topk - 1));
    if (kIds > 1 && thread() < worker) load_ids<kIds>(a, static_cast<int64_t>(thread()) * a.num_topk, a.num_topk, early.ids);
  }
  for (int e = thread(); e < c.num_experts; e += num_threads()) {
    const bool first = e == thread();
    t.owner[e] = static_cast<uint8_t>(first ? first_owner : __ldg(c.owner + e));
    t.local[e] = static_cast<uint16_t>(first ? first_local : __ldg(c.local + e));
  }
  for (int s = thread(); s < c.team.num_ranks; s += num_threads()) laid[s] = 0;
  const Work w{a, call, f, plan, t, &token, &admission, memory, laid, worker, workers};

  if (!__syncthreads_or(start.over)) {
    const HeaderItems items(a);
    uint4 seen{};
    send_for_all(
        c, call.epoch,
        [&](int b) {
          if (b == 0) send_counts(a, t, call, &facts);
          if (worker_of(b) >= 0) send_tokens<kIds>(w, worker_of(b), &early, own_place, b == block());
        },
        [&] {
          if (!a.cached) seen = items.peek(c, call, thread());
        });
    bool good = a.cached ? load_known(w) : gather_counts(a, call, t, &admission, items, seen) && admit(a, call, f, t, &admission);
    if (good && worker >= 0) {
      lay_out_own<kIds>(w, own_place);
      good = receive_rows(w);
      if (good) fill_rest(w);
    }
    // Last, since rows are waited for by others of this block.
    if (block() == 0) good = publish(a, call, t, admission, &facts) && good && !is_over(c, call);
    if (!good && !a.cached) clear_counts(a);
    bulk_finish();
    if (good && a.arrived) count_arrivals(w);
  } else if (block() == 0 && !a.cached) {
    clear_counts(a);
  }
  __syncthreads();
  tell_expired(c, call.epoch);
  if (c.last_of_send) advance_epoch(c, call.epoch);
}

int threads_for(const DispatchArgs& a) {
  const int64_t bytes = a.quantize == Quantize::none ? a.x_bytes : a.hidden * static_cast<int64_t>(size_of(a.dtype));
  const int64_t wanted = core::align_up(core::ceil_div(core::ceil_div(bytes, 16), 2), 32);
  return static_cast<int>(wanted < 128 ? 128 : wanted > kMostThreads ? kMostThreads : wanted);
}

}  // namespace
}  // namespace low_latency

bool can_ll_dispatch(const DispatchArgs& a) {
  const Arena& arena = a.common.arena;
  DispatchArgs least = a;  // of a rank without tokens: as much as all ranks need
  least.num_tokens = 0;
  return arena.ll_tokens > 0 && a.capacity >= 0 && a.num_topk <= kMaxTopk && a.common.num_experts <= 32768 &&
         static_cast<size_t>(RowFormat::of(a).num_words) * 16 <= arena.ll_dispatch_row &&
         low_latency::SharedPlan::of(least, 1).num_bytes <= low_latency::SharedPlan::kMost;
}

int ll_dispatch_blocks(const DispatchArgs& a, int num_sms) {
  const int64_t most = a.common.arena.ll_tokens + 1;  // other ranks may have more tokens than this one
  return static_cast<int>(most < num_sms ? most : num_sms);
}

cudaError_t launch_ll_dispatch(const DispatchArgs& a, int blocks, cudaStream_t stream) {
  const low_latency::SharedPlan plan = low_latency::SharedPlan::of(a, blocks > 1 ? blocks - 1 : 1);
  const int threads = low_latency::threads_for(a);
  if (a.num_topk <= 8) low_latency::dispatch_kernel<8><<<blocks, threads, static_cast<size_t>(plan.num_bytes), stream>>>(a);
  else low_latency::dispatch_kernel<1><<<blocks, threads, static_cast<size_t>(plan.num_bytes), stream>>>(a);
  return cudaGetLastError();
}

cudaError_t prepare_ll_dispatch() {
  for (const void* kernel :
       {reinterpret_cast<const void*>(low_latency::dispatch_kernel<8>), reinterpret_cast<const void*>(low_latency::dispatch_kernel<1>)}) {
    if (const cudaError_t bad = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, low_latency::SharedPlan::kMost)) return bad;
  }
  return cudaSuccess;
}

}  // namespace turnout::engine::cuda
