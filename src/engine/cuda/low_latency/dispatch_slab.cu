// The dispatch of most low_latency calls. Nothing that must leave waits for what can come later: a block has one token at most; most
// of its warps quantise it while the others find where it goes; x and scales leave then, and what says which pairs came earlier leaves
// behind them. Block 0 tells the counts as soon as it has the ids, and writes down what the handle keeps. The words are those of the
// general kernel. What is rare is not inlined: a kernel runs once a call, so it counts how much code an SM must fetch before its row is out.
#include "engine/cuda/kernels.h"
#include "engine/cuda/launch.h"
#include "engine/cuda/low_latency/counts.cuh"
#include "engine/cuda/low_latency/lay_out.cuh"
#include "engine/cuda/low_latency/publish.cuh"
#include "engine/cuda/low_latency/send.cuh"
#include "engine/cuda/low_latency/slab.h"

namespace turnout::engine::cuda::low_latency {
namespace {

/// Builders quantise, some pieces of 16 bytes each; each counter looks at one token before the block's.
constexpr int kPieces = 3, kMostBuilders = 384, kMostCounters = 128, kMostThreads = kMostBuilders + kMostCounters, kTopk = SlabArgs::num_topk;

/// What the warps that count have found, each in its 32 tokens: rows to the rank of entry k, pairs with its expert. And of the token
/// of the block: the rank at the first k that goes there (else -2), the k's of other ranks.
struct Found {
  int32_t rows[kMostCounters / 32][kTopk], pairs[kMostCounters / 32][kTopk];
  int32_t key[kTopk];
  uint32_t remote;
};

/// What blocks owe that have not started. Rare, so it takes the general way, which makes the same words.
__device__ __noinline__ void send_for_rest(const DispatchArgs& a, RowFormat f, Tables t, FactWords* facts, Call call, std::byte* row) {
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

/// Of a counter: entries of the block's token and of the one that it looks at, as 16 bits each (can_ll_dispatch), and id and rank of the
/// entry whose number is the lane's.
struct Counted {
  uint32_t mine[kTopk / 2], other[kTopk / 2];
  int id, dest;
};
__device__ __forceinline__ int unpacked(const uint32_t (&ids)[kTopk / 2], int k) { return static_cast<int>(ids[k / 2] << (k % 2 ? 0 : 16)) >> 16; }
/// Where the token goes: its ranks, and how many of the tokens that this warp looks at go there, too. No table is waited for.
__device__ __forceinline__ Counted find_ranks(const SlabArgs& a, const Entries& mine, const Entries& other, bool there, int warp, Found* found) {
  const int32_t* owner = a.common.owner;
  Counted n;
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
  n.id = n.dest = -1;
#pragma unroll
  for (int k = 0; k < kTopk; ++k) {
    const int all = __popc(__ballot_sync(kFull, dest[k] >= 0 && (ranks >> dest[k] & 1)));
    if (lane_id() == k) rows = all, n.id = ids[k], n.dest = dest[k];
  }
#pragma unroll
  for (int k = 0; k < kTopk; ++k) {
    if (k < lane_id() && dest[k] == n.dest) first = false;
    const int low = k % 2 ? ids[k - 1] : 0, low_other = k % 2 ? others[k - 1] : 0;
    if (k % 2) n.mine[k / 2] = (static_cast<uint32_t>(low) & 0xffff) | static_cast<uint32_t>(ids[k]) << 16;
    if (k % 2) n.other[k / 2] = (static_cast<uint32_t>(low_other) & 0xffff) | static_cast<uint32_t>(others[k]) << 16;
  }
  if (lane_id() < kTopk) found->rows[warp][lane_id()] = rows;
  if (warp != 0) return n;
  const bool goes = lane_id() < kTopk && n.dest >= 0 && first;
  const uint32_t remote = __ballot_sync(kFull, goes && n.dest != a.common.team.rank);
  if (lane_id() == 0) found->remote = remote;
  if (lane_id() < kTopk) found->key[lane_id()] = goes ? n.dest : -2;
  return n;
}
/// Place of the token in the list of the rank of entry k.
__device__ __forceinline__ int row_of(const Found& found, int k, int warps) {
  int row = 0;
#pragma unroll 1
  for (int w = 0; w < warps; ++w) row += found.rows[w][k];
  return row;
}

/// Words [begin, end) of the row to all other ranks that get it, by `threads` threads.
__device__ __forceinline__ void send_words(const SlabArgs& a, const Found& found, Call call, const std::byte* row, int first, int end, int step,
                                           int warps) {
  const Common& c = a.common;
#pragma unroll 1
  for (uint32_t left = found.remote; left; left &= left - 1) {
    const int k = __ffs(static_cast<int>(left)) - 1;
    auto* to = reinterpret_cast<uint4*>(c.team.base[found.key[k]] + c.arena.ll_dispatch_at(c.lane, call.copy, c.team.rank, row_of(found, k, warps)));
#pragma unroll 1
    for (int w = first; w < end; w += step) {
      const uint32_t* p = reinterpret_cast<const uint32_t*>(row) + kWordPayload * w;
      store_word(to + w, uint4{p[0], p[1], p[2], call.epoch});
    }
  }
}

/// The counters: earlier pairs of the token's experts, and with them the end of its row and what the source keeps of its routing.
__device__ __forceinline__ void finish_token(const SlabArgs& a, const RowFormat& f, const Counted& n, int warp, int warps, float weight, int token,
                                             Call call, std::byte* row, Found* found, int32_t* own_place) {
  const int id = n.id, dest = n.dest;
  int sum = 0;
#pragma unroll
  for (int k = 0; k < kTopk; ++k) {
    int pairs = 0;
#pragma unroll
    for (int j = 0; j < kTopk; ++j) pairs += unpacked(n.other, j) == unpacked(n.mine, k) ? 1 : 0;
    const auto all = static_cast<int>(__reduce_add_sync(kFull, static_cast<unsigned>(pairs)));
    if (lane_id() == k) sum = all;
  }
#pragma unroll
  for (int k = 0; k < kTopk; ++k) sum += warp == 0 && k < lane_id() && unpacked(n.mine, k) == id ? 1 : 0;
  if (lane_id() < kTopk) found->pairs[warp][lane_id()] = sum;
  if (warps > 1) sync_some(1, warps * 32);
  else __syncwarp();
  if (warp != 0) return;
  const int k = lane_id();
  if (k == 0) *own_place = -1;
  __syncwarp();
  if (k < kTopk) {
    int pair = 0;
#pragma unroll 1
    for (int w = 0; w < warps; ++w) pair += found->pairs[w][k];
    if (id < 0) pair = 0;
    const Meta m = meta_of(a, f, row);
    m.id[k] = id < 0 ? -1 : id;
    m.pair[k] = pair;
    m.weight[k] = weight;
    const bool goes = found->key[k] >= 0;
    const int at = row_of(*found, k, warps);
    const int64_t i = static_cast<int64_t>(token) * kTopk + k;
    const Routing& r = a.routing;
    r.topk_idx[i] = id < 0 ? -1 : id;
    r.dest[i] = dest;
    r.topk_weights[i] = weight;
    r.send_index[i] = goes ? at : -1;
    r.pair_index[i] = id >= 0 ? pair : -1;
    if (goes && dest == a.common.team.rank) r.own_tokens[at] = token, *own_place = at;
  }
  __syncwarp();
  send_words(a, *found, call, row, f.meta / (kWordPayload * 4) + lane_id(), f.num_words, 32, warps);
}

/// The row of a token from what was loaded of it.
__device__ __forceinline__ void build_row_early(const SlabArgs& a, const RowFormat& f, const uint4 (&x)[kPieces], int builders, std::byte* row) {
#pragma unroll
  for (int j = 0; j < kPieces; ++j) {
    const int p = thread() + j * builders;
    if ((p - lane_id()) * kChunk < a.hidden) quantize_chunk(a, f, widen(a.dtype, x[j]), p * kChunk, row);
  }
}

/// Block 0: a thread counts the pairs of one token in t.before and the rows to each rank in t.scratch, which are 0. Returns where an id
/// is no expert, -1: nowhere.
__device__ __forceinline__ int count_token(const SlabArgs& a, const Tables& t, const Entries& ids, const Entries& upper) {
  const Common& c = a.common;
  const int u = thread();
  const bool there = u < a.num_tokens;
  int id[kTopk], owner[kTopk], local[kTopk], bad = -1;
#pragma unroll
  for (int k = 0; k < kTopk; ++k) {
    id[k] = there ? entry_of(a, ids, k) : -1;
    if (a.ids_are_64 && there && id[k] != -2 && static_cast<int>(upper.words[k]) != id[k] >> 31) id[k] = -2;
    owner[k] = __ldg(c.owner + max(id[k], 0)), local[k] = __ldg(c.local + max(id[k], 0));
  }
  uint32_t ranks = 0;
#pragma unroll
  for (int k = 0; k < kTopk; ++k) {
    if (id[k] == -2) bad = u * kMaxTopk + k;
    if (id[k] < 0) continue;
    atomicAdd(&t.before[owner[k] * c.max_local + local[k]], 1);
    ranks |= 1u << owner[k];
  }
  if (warp_id() * 32 >= a.num_tokens) return bad;
#pragma unroll 1
  for (int r = 0; r < c.team.num_ranks; ++r) {
    const int n = __popc(__ballot_sync(kFull, ranks >> r & 1));
    if (lane_id() == 0 && n) atomicAdd(&t.scratch[r], n);
  }
  return bad;
}
__device__ __noinline__ void tell_of_bad_id(const SlabArgs& a, Call call, int bad) { write_reason(a.common, bad_id(a, call, bad)); }

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

/// Until the token's x and scales are on their way, and the counts of this rank. False: the call is over already.
struct Begun {
  Call call;
  bool over;
  Counted counted;
  float weight;
};
__device__ __forceinline__ Begun begin(const SlabArgs& a, const Tables& t, const RowFormat& f, int builders, bool some, int worker, std::byte* row,
                                       Found* found, FactWords* facts) {
  const Common& c = a.common;
  const int num = static_cast<int>(a.hidden / kChunk), counter = thread() - builders, warp = counter / 32, warps = (num_threads() - builders) / 32;
  const bool tells = block() == 0;
  // Everything that depends on nothing is asked for before anything is looked at, what is needed first first.
  Begun b{};
  Asked asked;
  int first_owner, first_local, bad = -1;
  const auto ask_rest = [&] {
    asked = ask_start(c);
    first_owner = thread() < c.num_experts ? __ldg(c.owner + thread()) : 0;
    first_local = thread() < c.num_experts ? __ldg(c.local + thread()) : 0;
  };
  if (tells) {
    const bool there = thread() < a.num_tokens;
    const Entries ids = ask_entries(a, thread(), there), upper = a.ids_are_64 ? ask_entries<true>(a, thread(), there) : Entries{};
    ask_rest();
    const int64_t hash = c.experts ? c.experts->hash : 0;
    clear_counters(a, t);
    __syncthreads();
    bad = count_token(a, t, ids, upper);
    if (thread() == num_threads() - 1) fill_facts(c, asked.before + 1, false, a.num_tokens, facts, 0, hash);
  } else if (some && counter >= 0) {
    const bool there = counter < worker;
    const Entries mine = ask_entries(a, worker, true), other = ask_entries(a, counter, there);
    ask_rest();
    b.weight = weight_of(a, static_cast<int64_t>(worker) * kTopk + min(lane_id(), kTopk - 1));
    b.counted = find_ranks(a, mine, other, there, warp, found);
  } else {
    uint4 x[kPieces];
#pragma unroll
    for (int j = 0; j < kPieces; ++j) {
      const int p = thread() + j * builders;
      x[j] = load_stream_if(some && p < num, reinterpret_cast<const uint4*>(a.x + worker * a.x_stride) + p);
    }
    ask_rest();
    if (some) build_row_early(a, f, x, builders, row);
    bulk_can_read();
  }
#pragma unroll 1
  for (int e = thread(); e < c.num_experts; e += num_threads()) {
    const bool first = e == thread();
    t.owner[e] = static_cast<uint8_t>(first ? first_owner : __ldg(c.owner + e));
    t.local[e] = static_cast<uint16_t>(first ? first_local : __ldg(c.local + e));
  }
  const Start start = start_of(c, asked);
  b.call = start.call;
  b.over = __syncthreads_or(start.over);
  if (b.over) return b;
  if (tells) {
    if (bad >= 0) tell_of_bad_id(a, b.call, bad);
    tell_counts(a, t, b.call, __syncthreads_or(bad >= 0), facts);
  } else if (some && counter < 0) {
    send_words(a, *found, b.call, row, thread(), f.meta / (kWordPayload * 4), builders, warps);
  }
  return b;
}

__global__ void __launch_bounds__(kMostThreads, 1)
    slab_kernel(const __grid_constant__ SlabArgs a, const __grid_constant__ SharedPlan plan, const __grid_constant__ RowFormat f, int builders) {
  extern __shared__ __align__(128) std::byte memory[];
  __shared__ Found found;
  __shared__ Admission admission;
  __shared__ FactWords facts;
  __shared__ int32_t own_place;
  const Common& c = a.common;
  const int workers = num_workers(), worker = worker_of(block());
  const bool some = worker >= 0 && worker < a.num_tokens;
  const Tables t = tables_at(a, plan, memory);
  const Begun begun = begin(a, t, f, builders, some, worker, memory, &found, &facts);
  const Call call = begun.call;
  if (begun.over) {
    if (block() == 0) clear_counts(a);
    __syncthreads();
    tell_expired(c, call.epoch);
    advance_epoch(c, call.epoch);
    return;
  }
  if (some && thread() >= builders) {
    const int counter = thread() - builders;
    finish_token(a, f, begun.counted, counter / 32, (num_threads() - builders) / 32, begun.weight, worker, call, memory, &found, &own_place);
  }
  const bool all_have_started = have_started(c, call.epoch);
  const HeaderItems items(a);
  const uint4 seen = items.peek(c, call, thread());
  const Work<SlabArgs> w{a, call, f, plan, t, nullptr, &admission, memory, nullptr, worker, workers};
  if (__syncthreads_or(!all_have_started)) send_for_rest(a, f, t, &facts, call, w.received_row(0));

  bool good = gather_counts(a, call, t, &admission, items, seen) && admit(a, call, f, t, &admission);
  if (good && worker >= 0) {
    const int me = c.team.rank;
    if (some && own_place >= 0 && own_place < admission.begins[me + 1] - admission.begins[me])
      lay_out<true>(w, memory, me, admission.begins[me] + own_place);
    fill_rest(w);
    good = receive_rows<true>(w);
  }
  if (block() == 0) good = (good ? write_down(a, t, call, admission) : find_difference(a, t, call, admission, facts) && good) && !is_over(c, call);
  if (!good) clear_counts(a);
  bulk_finish();
  __syncthreads();
  tell_expired(c, call.epoch);
  advance_epoch(c, call.epoch);
}

int builders_for(const DispatchArgs& a) { return static_cast<int>(core::align_up(core::ceil_div(a.hidden, kPieces * kChunk), 32)); }
int counters_for(const DispatchArgs& a) { return static_cast<int>(a.num_tokens <= 32 ? 32 : core::align_up(a.num_tokens, 32)); }

}  // namespace

bool can_dispatch_slab(const DispatchArgs& a, int blocks) {
  const bool is_slab = a.layout == SlabArgs::layout && !a.cached && !a.arrived && a.num_side == 0 && a.common.last_of_send;
  const bool is_usual = a.num_topk == SlabArgs::num_topk && a.dtype == SlabArgs::dtype && a.quantize == SlabArgs::quantize && a.has_weights &&
                        !a.weights_are_bf16 && reinterpret_cast<uintptr_t>(a.topk_idx) % 16 == 0;
  return is_slab && is_usual && a.num_tokens < blocks && a.num_tokens <= kMostCounters && builders_for(a) <= kMostBuilders && a.hidden % kChunk == 0;
}

cudaError_t launch_dispatch_slab(const DispatchArgs& a, int blocks, cudaStream_t stream) {
  const SharedPlan plan = SharedPlan::of(a, blocks > 1 ? blocks - 1 : 1);
  const int builders = builders_for(a), threads = builders + counters_for(a);
  slab_kernel<<<blocks, threads, static_cast<size_t>(plan.num_bytes), stream>>>(SlabArgs(a), plan, RowFormat::of(a), builders);
  return cudaGetLastError();
}

cudaError_t prepare_dispatch_slab() { return load_kernel(reinterpret_cast<const void*>(slab_kernel), SharedPlan::kMost); }

}  // namespace turnout::engine::cuda::low_latency
