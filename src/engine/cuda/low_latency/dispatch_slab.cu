// The dispatch of most low_latency calls. Nothing that must leave waits for what can come later: a block has one token at most; most
// of its warps quantise it, each sends its part at once, while the others find where it goes and which pairs came earlier. Block 0 tells
// the counts as soon as it has the ids, and writes down what the handle keeps. The words are those of the general kernel. Loads queue
// behind the stores of the row, so as little as can be is asked for after them. What is rare is not inlined: a kernel runs once a
// call, so it counts how much code an SM must fetch before its row is out.
#include "engine/cuda/kernels.h"
#include "engine/cuda/launch.h"
#include "engine/cuda/low_latency/lay_out.cuh"
#include "engine/cuda/low_latency/publish.cuh"
#include "engine/cuda/low_latency/slab_begin.cuh"

namespace turnout::engine::cuda::low_latency {
namespace {

/// What blocks owe that have not started. Rare, so it takes the general way, which makes the same words.
__device__ __noinline__ void send_for_rest(const WholeDispatch& a, RowFormat f, Tables t, FactWords* facts, Call call, std::byte* row) {
  const Common& c = a.common;
  __shared__ Token token;
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
    prepare_token<false>(a, f, t, &token, worker, {}, false, row, &unused, [] {});
    send_row<false>(a, f, &token, call, row);
    __syncthreads();
  }
  __syncthreads();
}

__device__ __noinline__ void tell_of_bad_id(const SlabArgs& a, Call call, int bad) { write_reason(a.common, bad_id(a, call, bad)); }

/// Weights of rows that are not there.
__device__ __forceinline__ void fill_rest(const auto& w) {
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

/// Block 0 writes down what it hears. Where all agree that is little; the general way finds out who does not.
__device__ __forceinline__ bool write_down(const SlabArgs& a, const Tables& t, Call call, const Admission& m) {
  const bool heard = hear_rows(a, call, t);
  if (!__syncthreads_and(heard)) return false;
  keep_tables(a, t, m);
  return true;
}
__device__ __noinline__ bool find_difference(const SlabArgs& a, Tables t, Call call, const Admission& m, const FactWords& facts) {
  return publish(a, call, t, m, &facts);
}

/// What a block knows once its row is on its way, or the counts of this rank are.
struct Begun {
  Call call;
  bool over;              ///< the call is, already
  uint32_t seen_started;  ///< of the block whose number is this thread's, asked for before the row was sent
  Counted counted;
  float weight;
};
template <bool kLines>
__device__ __forceinline__ Begun begin(const SlabArgs& a, const SlabEarly& e, const Tables& t, const FormatOf<kLines>& f, bool some, int worker,
                                       std::byte* row, Found* found, FactWords* facts) {
  const Common& c = a.common;
  const int builders = e.builders, counter = thread() - builders, counters = num_threads() - builders;
  const bool tells = block() == 0, counts = some && counter >= 0;
  alignas(16) __shared__ int32_t ids[kMostCounters * kTopk];
  const Loaded l = ask_all(e, c, counter, counters, some, worker);
  asm volatile("" ::"l"(c.team.base[(c.team.rank + 1) % c.team.num_ranks]));  // that line of the arguments is there when it is needed
  if (tells) {
    clear_counters(a, t);
    if (thread() == 0) found->remote = 0;
  } else if (counts) {
#pragma unroll 1
    for (int i = counter; i < e.num_experts; i += counters) pairs_before(t)[i] = 0;
  }
  if (tells) {
    keep_ids(e, e.num_tokens, thread(), num_threads(), l, ids);
    fill_owners(e, t, l, thread(), num_threads());
    fill_locals(e, t, l);
  } else if (counter >= 0) {
    if (some) keep_ids(e, worker + 1, counter, counters, l, ids);
    fill_owners(e, t, l, counter, counters);
  }
  const Start start = start_of(c, e.lane, e.depth, l.asked);
  Begun b{};
  b.call = start.call;
  int bad = -1;
  Telling told{};
  if (tells) {
    const int num = num_tellings(c) * c.team.num_ranks;
    told = telling_of(c, t, b.call, facts, &found->remote, thread() < num ? thread() : 0);
    __syncthreads();
    bad = count_all(a, t, ids);
    if (thread() == num_threads() - 1) fill_facts(c, b.call.epoch, false, a.num_tokens, facts, 0, l.hash);
  } else if (counts) {
    sync_some(kCountersBarrier, counters);
    b.weight = l.weight;
    const Entries other = kept_ids(ids, min(counter, worker));
    b.counted = find_ranks(a, t, kept_ids(ids, worker), other, counter < worker, counter / 32, found);
#pragma unroll 1
    for (int i = 0; i < builders / 32; ++i) arrive_some(kBuildersBarrier + i, 32 + counters);
    count_pairs(a, t, other, counter < worker);
  } else if (some) {
    build_part(e, f, l, row);
    if (thread() < num_blocks()) b.seen_started = *reinterpret_cast<const volatile uint32_t*>(&e.lane->started[thread()]);
    __syncwarp();
    sync_some(kBuildersBarrier + warp_id(), 32 + counters);
    const Part part = part_of<kLines>(e.hidden, warp_id());
    if (!__any_sync(kFull, start.over)) send_words(a, e, f, *found, b.call, row, part.first, part.end, counters / 32);
    bulk_can_read();
  }
  if (!tells) fill_locals(e, t, l);
  if (__syncthreads_or(start.over || bad >= 0)) {
    b.over = __syncthreads_or(start.over);
    if (b.over) return b;
    if (bad >= 0) tell_of_bad_id(a, b.call, bad), facts->words[HeaderInts::kRefused] = 1;
    __syncthreads();
  }
  if (tells) {
    const int num = num_tellings(c) * c.team.num_ranks;
    if (thread() < num) tell(told, b.call.epoch);
#pragma unroll 1
    for (int i = thread() + num_threads(); i < num; i += num_threads()) tell(telling_of(c, t, b.call, facts, &found->remote, i), b.call.epoch);
  }
  return b;
}

template <bool kLines>
__global__ void __launch_bounds__(kMostThreads, 1) slab_kernel(const __grid_constant__ SlabEarly e, const __grid_constant__ FormatOf<kLines> f,
                                                               const __grid_constant__ SharedPlan plan, const __grid_constant__ SlabArgs a) {
  extern __shared__ __align__(128) std::byte memory[];
  __shared__ Found found;
  __shared__ Admission admission;
  __shared__ FactWords facts;
  __shared__ int32_t own_place;
  const Common& c = a.common;
  const int workers = num_workers(), worker = worker_of(block());
  const int builders = e.builders;
  const bool some = worker >= 0 && worker < e.num_tokens;
  const Tables t = tables_at(a, plan, memory);
  wait_for_previous();
  const Begun begun = begin(a, e, t, f, some, worker, memory, &found, &facts);
  const Call call = begun.call;
  if (begun.over) {
    if (block() == 0) clear_counts(a);
    __syncthreads();
    tell_expired(c, call.epoch);
    advance_epoch(c, call.epoch);
    return;
  }
  const HeaderItems items(a);
  const Work<SlabArgs, FormatOf<kLines>> w{a, call, f, plan, t, nullptr, &admission, memory, nullptr, worker, workers};
  const uint4 seen = items.peek(c, call, thread());
  RowWords first_words;
  if (kLines && some && thread() < builders) {
    const Part part = part_of<kLines>(e.hidden, warp_id());
    send_words(a, e, f, found, call, memory, part.end, part.border, (num_threads() - builders) / 32);
  }
  if (some && thread() / 32 == builders / 32)
    finish_token(a, e, f, t, begun.counted, (num_threads() - builders) / 32, begun.weight, worker, call, memory, found, &own_place);
  if (__syncthreads_or(!have_started_soon(c, call.epoch, begun.seen_started))) send_for_rest(a, f, t, &facts, call, w.received_row(0));

  bool good = gather_counts(a, call, t, &admission, items, seen) && admit(a, call, f, t, &admission);
  let_next_start();
  first_words = ask_first_row(w);  // most of it is there by now; what comes meanwhile takes as long as a look
  if (good && worker >= 0) {
    const int me = c.team.rank;
    if (some && own_place >= 0 && own_place < admission.begins[me + 1] - admission.begins[me])
      lay_out<true>(w, memory, me, admission.begins[me] + own_place);
    fill_rest(w);
    good = receive_rows<true>(w, first_words);
  }
  if (block() == 0) good = (good ? write_down(a, t, call, admission) : find_difference(a, t, call, admission, facts) && good) && !is_over(c, call);
  if (!good) clear_counts(a);
  bulk_have_read<0>();  // the end of the kernel waits for the rest
  __syncthreads();
  tell_expired(c, call.epoch);
  advance_epoch(c, call.epoch);
}

int builders_for(const DispatchArgs& a) { return static_cast<int>(core::align_up(core::ceil_div(a.hidden, kPieces * kChunk), 32)); }
int counters_for(const DispatchArgs& a) { return static_cast<int>(a.num_tokens <= 32 ? 32 : core::align_up(a.num_tokens, 32)); }

}  // namespace

bool can_dispatch_slab(const DispatchArgs& a, int blocks) {
  const bool is_slab = a.sends && a.receives && a.layout == SlabArgs::layout && !a.cached && !a.arrived && a.num_side == 0 && a.common.last_of_send;
  const bool is_usual = a.num_topk == SlabArgs::num_topk && a.dtype == SlabArgs::dtype && a.quantize == SlabArgs::quantize && a.has_weights &&
                        !a.weights_are_bf16 && reinterpret_cast<uintptr_t>(a.topk_idx) % 16 == 0;
  return is_slab && is_usual && a.num_tokens < blocks && a.num_tokens <= kMostCounters && builders_for(a) <= kMostBuilders && a.hidden % kChunk == 0;
}

cudaError_t launch_dispatch_slab(const DispatchArgs& a, int blocks, cudaStream_t stream) {
  const SharedPlan plan = SharedPlan::of(a, blocks > 1 ? blocks - 1 : 1);
  const int builders = builders_for(a), threads = builders + counters_for(a);
  const RowFormat f = RowFormat::of(a);
  const auto bytes = static_cast<size_t>(plan.num_bytes);
  if (f.lines)
    return launch_kernel(slab_kernel<true>, blocks, threads, bytes, stream, a.chained, SlabEarly(a, builders), FormatOf<true>(f), plan, SlabArgs(a));
  return launch_kernel(slab_kernel<false>, blocks, threads, bytes, stream, a.chained, SlabEarly(a, builders), FormatOf<false>(f), plan, SlabArgs(a));
}

cudaError_t prepare_dispatch_slab() {
  const cudaError_t bad = load_kernel(reinterpret_cast<const void*>(slab_kernel<true>), SharedPlan::kMost);
  return bad ? bad : load_kernel(reinterpret_cast<const void*>(slab_kernel<false>), SharedPlan::kMost);
}

}  // namespace turnout::engine::cuda::low_latency
