// A dispatch in low_latency mode: one kernel. Rows go out at once, in flagged words, to staging of the receiver; it learns from
// the headers where they belong, and lays each out as its words arrive. Positions are counted twice or more often rather than
// waited for: by every block for its own tokens, and by every block for the tables of the receiving side.
#include "engine/cuda/kernels.h"
#include "engine/cuda/launch.h"
#include "engine/cuda/low_latency/counts.cuh"
#include "engine/cuda/low_latency/lay_out.cuh"
#include "engine/cuda/low_latency/publish.cuh"
#include "engine/cuda/low_latency/send.cuh"
#include "engine/cuda/low_latency/slab.h"
#include "engine/cuda/throughput/bulk.h"

namespace turnout::engine::cuda {
namespace low_latency {
namespace {

constexpr int kMostThreads = 512;

/// The tokens of worker `worker` to the other ranks. Rows stay in shared memory, the last num_own of them. Returns have_started().
template <bool kPlain>
__device__ __forceinline__ bool send_tokens(const auto& w, int worker, const Early& early, int32_t* own_place, bool mine) {
  int j = 0;
  bool all = false;
#pragma unroll 1
  for (int64_t token = worker; token < w.a.num_tokens; token += w.workers, ++j) {
    const int buffer = j % w.plan.num_own;
    std::byte* row = mine ? w.own_row(buffer) : w.received_row(0);
    prepare_token<kPlain>(w.a, w.f, w.t, w.token, token, early, j == 0 && mine && early.is_there, row,
                          &own_place[mine ? buffer : SharedPlan::kMostOwn], [&] { all = have_started(w.a.common, w.call.epoch); });
    send_row<kPlain>(w.a, w.f, w.token, w.call, row);
    if (mine) write_routing(w.a, w.t, w.token, kPlain && !w.a.cached ? meta_of(w.a, w.f, row).pair : w.token->pair, token);
    __syncthreads();
  }
  return j > 0 ? all : have_started(w.a.common, w.call.epoch);
}

/// The rows that stay on this rank.
template <bool kPlain>
__device__ __forceinline__ void lay_out_own(const auto& w, const Early& early, int32_t* own_place) {
  const int me = w.a.common.team.rank;
  const int room = w.m->begins[me + 1] - w.m->begins[me];
  const int num = w.a.num_tokens > w.worker ? static_cast<int>((w.a.num_tokens - w.worker + w.workers - 1) / w.workers) : 0;
#pragma unroll 1
  for (int j = num - 1; j >= 0; --j) {
    const int buffer = j % w.plan.num_own;
    if (j < num - w.plan.num_own) {  // its buffer went to a later token
      bulk_have_read<0>();
      __syncthreads();
      prepare_token<kPlain>(w.a, w.f, w.t, w.token, w.worker + static_cast<int64_t>(j) * w.workers, early, false, w.own_row(buffer),
                            &own_place[buffer], [] {});
      __syncthreads();
    }
    const int i = own_place[buffer];
    if (i >= 0 && i < room) lay_out<kPlain>(w, w.own_row(buffer), me, w.m->begins[me] + i);
  }
}

__device__ __noinline__ void zero_padding(const DispatchArgs& a, RowFormat f, const int32_t* offset, const int32_t* admitted, int first, int step) {
#pragma unroll 1
  for (int e = 0; e < a.num_local; ++e) {
#pragma unroll 1
    for (int64_t i = offset[e] + admitted[e] + first; i < offset[e + 1]; i += step) {
      for_each_part(a, f, [&](std::byte* to, int64_t stride, int, int64_t bytes) { zero_row(to + i * stride, bytes); });
    }
  }
}

/// Weights and ids of rows that are not there; padding of groups.
__device__ __forceinline__ void fill_rest(const auto& w) {
  const auto& a = w.a;
  const Routing& r = a.routing;
  const int local = a.num_local;
  const int64_t first = static_cast<int64_t>(w.worker) * num_threads() + thread(), step = static_cast<int64_t>(w.workers) * num_threads();
  const int first_warp = w.worker * num_warps() + warp_id(), all_warps = w.workers * num_warps();
  if (a.layout == Layout::rank_major) {
    if (a.cached) return;
#pragma unroll 1
    for (int64_t i = static_cast<int64_t>(w.m->begins[a.common.team.num_ranks]) * a.num_topk + first; i < a.result_rows * a.num_topk; i += step) {
      r.recv_idx[i] = -1;
      if (a.has_weights) r.recv_weights[i] = 0.0f;
    }
    return;
  }
  if (a.has_weights && !a.cached) {
#pragma unroll 1
    for (int e = first_warp; e < local; e += all_warps) {
      const int64_t end = a.layout == Layout::expert_slab ? (e + 1) * a.capacity : w.t.offset[e + 1];
#pragma unroll 1
      for (int64_t i = w.t.offset[e] + w.t.admitted[e] + lane_id(); i < end; i += 32) r.row_weights[i] = 0.0f;
    }
#pragma unroll 1
    for (int64_t i = w.t.offset[local] + first; i < a.result_rows; i += step) r.row_weights[i] = 0.0f;
  }
  if (a.layout == Layout::expert_major && a.alignment > 1) zero_padding(a, w.f, w.t.offset, w.t.admitted, first_warp, all_warps);
}

/// The tables of a known routing.
__device__ __forceinline__ bool load_known(const auto& w) {
  const auto& a = w.a;
#pragma unroll 1
  for (int s = thread(); s <= a.common.team.num_ranks; s += num_threads()) w.m->begins[s] = a.routing.recv_begin[s];
#pragma unroll 1
  for (int e = thread(); e <= a.num_local; e += num_threads()) {
    if (e < a.num_local) w.t.admitted[e] = a.routing.expert_counts[e];
    w.t.offset[e] = static_cast<int32_t>(a.routing.expert_offsets[e]);
  }
  return __syncthreads_and(all_agree(a.common, w.call));
}

/// Tells the counters of a resident receive. After the copies have ended.
__device__ __forceinline__ void count_arrivals(const auto& w) {
  bulk_finish();
  __threadfence();
  __syncthreads();
#pragma unroll 1
  for (int s = thread(); s < w.a.common.team.num_ranks; s += num_threads()) {
    if (w.laid[s]) atomicAdd(reinterpret_cast<unsigned long long*>(w.a.arrived + s), static_cast<unsigned long long>(w.laid[s]));
  }
}

/// A call that failed says that it brought nothing.
__device__ void clear_counts(const DispatchArgs& a) {
#pragma unroll 1
  for (int e = thread(); e <= a.num_local; e += num_threads()) {
    if (e < a.num_local) a.routing.expert_counts[e] = 0;
    a.routing.expert_offsets[e] = 0;
  }
  if (thread() == 0) *a.routing.num_rows = *a.routing.num_dropped = 0, break_routing(a.routing);
}

template <bool kPlain, class Args>
__global__ void __launch_bounds__(kMostThreads, 1)
    dispatch_kernel(const __grid_constant__ Args a, const __grid_constant__ SharedPlan plan, const __grid_constant__ RowFormat f) {
  extern __shared__ __align__(128) std::byte memory[];
  __shared__ Token token;
  __shared__ Admission admission;
  __shared__ FactWords facts;
  __shared__ int32_t own_place[SharedPlan::kMostOwn + 1], laid[kMaxRanks];
  const Common& c = a.common;
  const int workers = num_workers(), worker = worker_of(block());

  // Everything that depends on nothing is asked for first, what is needed first first.
  const Tables t = tables_at(a, plan, memory);
  const Asked asked = ask_start(c);
  const int first_owner = thread() < c.num_experts ? __ldg(c.owner + thread()) : 0,
            first_local = thread() < c.num_experts ? __ldg(c.local + thread()) : 0;
  Early early{};
  const bool some = a.sends && worker >= 0 && worker < a.num_tokens;
  early.is_there = kPlain && some;
  if constexpr (kPlain) {
    if (!a.cached && a.sends) {
      early.mine = ask_entries(a, worker, some);
      early.other = ask_entries(a, thread(), thread() < (block() == 0 ? static_cast<int>(a.num_tokens) : some ? worker : 0));
      if (some) early.weight = weight_of(a, static_cast<int64_t>(worker) * a.num_topk + min(lane_id(), a.num_topk - 1));
    }
    const auto* x = reinterpret_cast<const uint4*>(a.x + worker * a.x_stride);
    const auto num = static_cast<int>(source_bytes(a) / 16);
#pragma unroll
    for (int j = 0; j < 2; ++j) early.x[j] = load_stream_if(early.is_there && thread() + j * num_threads() < num, x + thread() + j * num_threads());
    if (some && !a.cached) clear_places(a, &token, meta_of(a, f, memory), &own_place[0]);
    if (block() == 0 && !a.cached && a.sends) clear_counters(a, t);
  }
  const Start start = a.sends ? start_of(c, asked) : start_of_receive(c);
  const Call call = start.call;
#pragma unroll 1
  for (int e = thread(); e < c.num_experts; e += num_threads()) {
    const bool first = e == thread();
    t.owner[e] = static_cast<uint8_t>(first ? first_owner : __ldg(c.owner + e));
    t.local[e] = static_cast<uint16_t>(first ? first_local : __ldg(c.local + e));
  }
#pragma unroll 1
  for (int s = thread(); s < c.team.num_ranks; s += num_threads()) laid[s] = 0;
  const Work<Args> w{a, call, f, plan, t, &token, &admission, memory, laid, worker, workers};

  if (!__syncthreads_or(start.over || (a.cached && is_broken(a.routing)))) {
    const HeaderItems items(a);
    uint4 seen{};
    if (a.sends)
      send_for_all(
          c, call.epoch,
          [&](int b) {
            if (b == 0) send_counts<kPlain>(a, t, call, early, kPlain && b == block() && !a.cached, &facts);
            return worker_of(b) >= 0 ? send_tokens<kPlain>(w, worker_of(b), early, own_place, b == block()) : have_started(c, call.epoch);
          },
          [&] {
            if (!a.cached && a.receives) seen = items.peek(c, call, thread());
          },
          a.receives);
    bool good = true;
    if (a.receives) good = a.cached ? load_known(w) : gather_counts(a, call, t, &admission, items, seen) && admit(a, call, f, t, &admission);
    if (a.receives && good && worker >= 0) {
      if (a.sends) lay_out_own<kPlain>(w, early, own_place);
      good = receive_rows<kPlain>(w);
      if (good) fill_rest(w);
    }
    // Last, since rows are waited for by others of this block.
    if (block() == 0 && !a.sends) read_facts(c, call, &facts);
    if (block() == 0 && a.receives) good = publish(a, call, t, admission, &facts) && good && !is_over(c, call);
    if (!good && !a.cached) clear_counts(a);
    bulk_finish();
    if (good && a.arrived) count_arrivals(w);
  } else if (block() == 0 && !a.cached) {
    clear_counts(a);
  }
  __syncthreads();
  end_kernel(c, call.epoch);
}

template <class Args>
cudaError_t launch(const Args& a, bool plain, int blocks, int threads, cudaStream_t stream) {
  const SharedPlan plan = SharedPlan::of(a, blocks > 1 ? blocks - 1 : 1);
  const RowFormat f = RowFormat::of(a);
  const auto bytes = static_cast<size_t>(plan.num_bytes);
  const auto kernel = plain ? dispatch_kernel<true, Args> : dispatch_kernel<false, Args>;
  return launch_kernel(kernel, blocks, threads, bytes, stream, false, a, plan, f);
}
template <class Args>
cudaError_t load() {
  for (const auto kernel : {dispatch_kernel<true, Args>, dispatch_kernel<false, Args>}) {
    if (const cudaError_t bad = load_kernel(reinterpret_cast<const void*>(kernel), SharedPlan::kMost)) return bad;
  }
  return cudaSuccess;
}

int threads_for(const DispatchArgs& a) {
  const int64_t bytes = a.quantize == Quantize::none ? a.x_bytes : a.hidden * static_cast<int64_t>(size_of(a.dtype));
  const int64_t wanted = core::align_up(core::ceil_div(core::ceil_div(bytes, 16), 2), 32);
  return static_cast<int>(wanted < 128 ? 128 : wanted > kMostThreads ? kMostThreads : wanted);
}

/// What the fast kernel takes: pieces of 16 bytes in and out, a few experts and ranks. A choice of this rank alone.
bool is_plain(const DispatchArgs& a) {
  const int64_t bytes = a.quantize == Quantize::none ? a.x_bytes : a.hidden * static_cast<int64_t>(size_of(a.dtype));
  uint64_t bits = static_cast<uint64_t>(a.x_stride | bytes | a.out_stride | a.x_bytes);
  for (const std::byte* p : {a.x, static_cast<const std::byte*>(a.out_x)}) bits |= reinterpret_cast<uintptr_t>(p);
  if (!a.columns.at_once) bits |= static_cast<uint64_t>(a.scale_bytes) | reinterpret_cast<uintptr_t>(a.out_scales);
  return bits % 16 == 0 && a.num_side == 0 && a.num_topk <= 8 && a.common.team.num_ranks <= 32 &&
         (a.quantize == Quantize::none || size_of(a.dtype) == 2);
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

bool ll_lays_columns(const DispatchArgs& a) {
  DispatchArgs asked = a;
  asked.columns.at_once = true;
  return has_bulk() && a.layout == Layout::expert_slab && low_latency::is_plain(asked);
}

int ll_dispatch_blocks(const DispatchArgs& a, int num_sms) {
  const int64_t most = a.common.arena.ll_tokens + 1;  // other ranks may have more tokens than this one
  return static_cast<int>(most < num_sms ? most : num_sms);
}

cudaError_t launch_ll_dispatch(const DispatchArgs& a, int blocks, cudaStream_t stream) {
  const int threads = low_latency::threads_for(a);
  const bool plain = low_latency::is_plain(a);
  if (plain && low_latency::can_dispatch_slab(a, blocks)) return low_latency::launch_dispatch_slab(a, blocks, stream);
  if (!a.sends || !a.receives) return low_latency::launch(a, plain, blocks, threads, stream);
  return low_latency::launch(WholeDispatch(a), plain, blocks, threads, stream);
}

cudaError_t prepare_ll_dispatch() {
  for (const cudaError_t bad : {low_latency::load<WholeDispatch>(), low_latency::load<DispatchArgs>(), low_latency::prepare_dispatch_slab()}) {
    if (bad) return bad;
  }
  return cudaSuccess;
}

}  // namespace turnout::engine::cuda
