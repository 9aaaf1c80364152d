// The dispatch of most low_latency calls, as short as it can be: a block has one token at most, and what is rare is not inlined. A
// kernel runs once a call, so what counts is how much code and how many arguments an SM must fetch before its row is out.
#include "engine/cuda/kernels.h"
#include "engine/cuda/low_latency/counts.cuh"
#include "engine/cuda/low_latency/lay_out.cuh"
#include "engine/cuda/low_latency/publish.cuh"
#include "engine/cuda/low_latency/send.cuh"
#include "engine/cuda/low_latency/slab.h"

namespace turnout::engine::cuda::low_latency {
namespace {

constexpr int kMostThreads = 512;

/// What blocks owe that have not started. Rare, so it takes the general way, which makes the same words.
__device__ __noinline__ void send_for_rest(const DispatchArgs& a, RowFormat f, Tables t, Token* s, FactWords* facts, Call call, std::byte* row) {
  const Common& c = a.common;
  __shared__ int32_t found, unused;
  if (warp_id() == 0) {
    const int unstarted = next_unstarted(c, call.epoch, 0, true);
    if (lane_id() == 0) found = unstarted;
  }
  __syncthreads();
#pragma unroll 1
  for (int b = found; b >= 0 && b < num_blocks(); ++b) {
    if (!__syncthreads_or(thread() == 0 && !has_started(c, b, call.epoch) && take_over(c, b, call.epoch))) continue;
    if (b == 0) send_counts<false>(a, t, call, {}, false, facts);
    const int worker = worker_of(b);
    if (worker < 0 || worker >= a.num_tokens) continue;
    prepare_token<false>(a, f, t, s, worker, {}, false, row, &unused, [] {});
    send_row<false>(a, f, s, call, row);
    __syncthreads();
  }
  __syncthreads();
}

/// The row of a token from what was loaded of it: two pieces a thread.
__device__ __forceinline__ void build_row_early(const SlabArgs& a, const RowFormat& f, const Early& early, std::byte* row) {
  const int p = thread(), q = p + num_threads();
  quantize_chunk(a, f, widen(a.dtype, early.x[0]), p * kChunk, row);
  if ((q - lane_id()) * kChunk < a.hidden) quantize_chunk(a, f, widen(a.dtype, early.x[1]), q * kChunk, row);
}

/// Weights of rows that are not there.
__device__ __forceinline__ void fill_rest(const Work<SlabArgs>& w) {
  const SlabArgs& a = w.a;
#pragma unroll 1
  for (int e = w.worker * num_warps() + warp_id(); e < a.num_local; e += w.workers * num_warps()) {
    const int64_t end = (e + 1) * a.capacity;
#pragma unroll 1
    for (int64_t i = e * a.capacity + w.t.admitted[e] + lane_id(); i < end; i += 32) a.routing.row_weights[i] = 0.0f;
  }
}

/// A call that failed says that it brought nothing.
__device__ __noinline__ void clear_counts(const DispatchArgs& a) {
#pragma unroll 1
  for (int e = thread(); e <= a.num_local; e += num_threads()) {
    if (e < a.num_local) a.routing.expert_counts[e] = 0;
    a.routing.expert_offsets[e] = 0;
  }
  if (thread() == 0) *a.routing.num_rows = *a.routing.num_dropped = 0, break_routing(a.routing);
}

/// Block 0 alone tells what this rank does and writes down what it hears.
__device__ __noinline__ void tell_counts(const SlabArgs& a, Tables t, Call call, FactWords* facts) {
  send_counts<true>(a, t, call, {}, false, facts);
}
__device__ __noinline__ bool write_down(const SlabArgs& a, Tables t, Call call, const Admission& m, const FactWords& facts) {
  return publish(a, call, t, m, &facts);
}

__global__ void __launch_bounds__(kMostThreads, 1)
    slab_kernel(const __grid_constant__ SlabArgs a, const __grid_constant__ SharedPlan plan, const __grid_constant__ RowFormat f) {
  extern __shared__ __align__(128) std::byte memory[];
  __shared__ Token token;
  __shared__ Admission admission;
  __shared__ FactWords facts;
  __shared__ int32_t own_place;
  const Common& c = a.common;
  const int workers = num_workers(), worker = worker_of(block());
  const bool some = worker >= 0 && worker < a.num_tokens;

  // Everything that depends on nothing is asked for first, what is needed first first.
  Early early{};
  early.is_there = some;
  early.mine = ask_entries(a, worker, some);
  early.other = ask_entries(a, thread(), some && thread() < worker);
  const int first_owner = thread() < c.num_experts ? __ldg(c.owner + thread()) : 0,
            first_local = thread() < c.num_experts ? __ldg(c.local + thread()) : 0;
  const auto* x = reinterpret_cast<const uint4*>(a.x + worker * a.x_stride);
  const auto num = static_cast<int>(a.hidden / kChunk);
#pragma unroll
  for (int j = 0; j < 2; ++j) early.x[j] = load_stream_if(some && thread() + j * num_threads() < num, x + thread() + j * num_threads());
  if (some) early.weight = weight_of(a, static_cast<int64_t>(worker) * a.num_topk + min(lane_id(), a.num_topk - 1));
  const Asked asked = ask_start(c);

  const Tables t = tables_at(a, plan, memory);
  const Meta meta = meta_of(a, f, memory);
  clear_places(a, &token, meta, &own_place);
#pragma unroll 1
  for (int e = thread(); e < c.num_experts; e += num_threads()) {
    const bool first = e == thread();
    t.owner[e] = static_cast<uint8_t>(first ? first_owner : __ldg(c.owner + e));
    t.local[e] = static_cast<uint16_t>(first ? first_local : __ldg(c.local + e));
  }
  const Start start = start_of(c, asked);
  const Call call = start.call;
  if (__syncthreads_or(start.over)) {
    if (block() == 0) clear_counts(a);
    __syncthreads();
    tell_expired(c, call.epoch);
    advance_epoch(c, call.epoch);
    return;
  }

  if (block() == 0) tell_counts(a, t, call, &facts);
  if (some) find_places_plain(a, t, &token, worker, early, true, meta);
  const bool all_have_started = have_started(c, call.epoch);
  if (some) {
    build_row_early(a, f, early, memory);
    bulk_can_read();
    __syncthreads();
    send_row<true>(a, f, &token, call, memory);
    const int k = thread();
    if (k < a.num_topk && token.key[k] == c.team.rank) own_place = token.row[k];
    write_routing(a, t, &token, meta.pair, worker);
  }
  const HeaderItems items(a);
  const uint4 seen = items.peek(c, call, thread());
  const Work<SlabArgs> w{a, call, f, plan, t, &token, &admission, memory, nullptr, worker, workers};
  if (__syncthreads_or(!all_have_started)) send_for_rest(a, f, t, &token, &facts, call, w.received_row(0));

  bool good = gather_counts(a, call, t, &admission, items, seen) && admit(a, call, f, t, &admission);
  if (good && worker >= 0) {
    const int me = c.team.rank;
    if (some && own_place >= 0 && own_place < admission.begins[me + 1] - admission.begins[me])
      lay_out<true>(w, memory, me, admission.begins[me] + own_place);
    fill_rest(w);
    good = receive_rows<true>(w);
  }
  if (block() == 0) good = write_down(a, t, call, admission, facts) && good && !is_over(c, call);
  if (!good) clear_counts(a);
  bulk_finish();
  __syncthreads();
  tell_expired(c, call.epoch);
  advance_epoch(c, call.epoch);
}

}  // namespace

bool can_dispatch_slab(const DispatchArgs& a, int blocks, int threads) {
  const bool is_slab = a.layout == SlabArgs::layout && !a.cached && !a.arrived && a.num_side == 0 && a.common.last_of_send;
  const bool is_usual = a.num_topk == SlabArgs::num_topk && a.dtype == SlabArgs::dtype && a.quantize == SlabArgs::quantize && a.has_weights &&
                        !a.weights_are_bf16 && reinterpret_cast<uintptr_t>(a.topk_idx) % 16 == 0;
  return is_slab && is_usual && a.num_tokens < blocks && a.num_tokens <= threads && a.hidden % kChunk == 0 && a.hidden <= 2 * threads * kChunk;
}

cudaError_t launch_dispatch_slab(const DispatchArgs& a, int blocks, int threads, cudaStream_t stream) {
  const SharedPlan plan = SharedPlan::of(a, blocks - 1);
  slab_kernel<<<blocks, threads, static_cast<size_t>(plan.num_bytes), stream>>>(SlabArgs(a), plan, RowFormat::of(a));
  return cudaGetLastError();
}

cudaError_t prepare_dispatch_slab() { return cudaFuncSetAttribute(slab_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, SharedPlan::kMost); }

}  // namespace turnout::engine::cuda::low_latency
