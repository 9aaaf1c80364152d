// Combine, the general form: every dtype, layout and weight, and every wire but rows (combine_terms.cu). The expert side sums the rows of a (token,
// source) in k order and writes one record to the source's block; the source adds the records of a token, ranks ascending within a node, nodes
// ascending. What is on the own rank is summed where it is added, rounded as if it had crossed. A warp does a row.
#include "engine/cuda/device/combine.cuh"
#include "engine/cuda/device/tickets.cuh"
#include "engine/cuda/kernels.h"
#include "engine/cuda/launch.h"
#include "engine/cuda/throughput/bulk.h"

namespace turnout::engine::cuda {
namespace {

constexpr int kThreads = 256;

/// Partial sum of received row `n` over this rank's experts, elements [begin, begin + 8), before its rounding. The whole warp calls it.
template <class T>
__device__ __forceinline__ Chunk<T> partial_chunk(const CombineArgs& a, int64_t n, uint64_t mask, int64_t begin) {
  if (a.layout == Layout::rank_major) {
    Chunk<T> c = load_chunk<T>(a.dtype, a.y + n * a.y_stride, begin, a.hidden);
    if (a.apply == CombineWeights::rows) {
      const auto w = static_cast<T>(weight_at(a, n));
#pragma unroll
      for (int i = 0; i < kChunk; ++i) c.v[i] *= w;
    }
    return c;
  }
  Chunk<T> sum{};
  bool started = false;
  for (uint64_t left = mask; left; left &= left - 1) {
    Term t;
    term_of(a, n, __ffsll(static_cast<long long>(left)) - 1, &t);
    Chunk<T> c = load_chunk<T>(a.dtype, a.y + t.row * a.y_stride, begin, a.hidden);
    const auto w = static_cast<T>(t.weight);
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
      if (a.apply != CombineWeights::none) c.v[i] *= w;
      sum.v[i] = started ? sum.v[i] + c.v[i] : c.v[i];
    }
    started = true;
  }
  return sum;
}

/// The record of received row `n` for its source; returns its mask.
template <class T>
__device__ uint64_t write_record(const CombineArgs& a, core::WireForm form, int64_t n, std::byte* record) {
  const uint64_t mask = mask_of(a, n);
  for (int64_t base = 0; mask && base < a.hidden; base += kWarpChunk) {
    const int64_t begin = base + lane_id() * kChunk;
    store_wire(form, record, begin, a.hidden, partial_chunk<T>(a, n, mask, begin));
  }
  for (int k = lane_id(); a.has_side && k < a.num_topk; k += 32) {
    if (!(mask >> k & 1)) continue;
    auto* scalars = reinterpret_cast<float*>(record + a.side_offset);
    Term t{};
    if (a.layout != Layout::rank_major) term_of(a, n, k, &t);
    scalars[k] = a.layout == Layout::rank_major ? a.side[n * a.num_topk + k] : a.side[t.row];
  }
  if (lane_id() == 0) *reinterpret_cast<uint64_t*>(record + a.mask_offset) = mask;
  return mask;
}

/// By ticket, all sources in turn: a block waits for partial sums only when blocks that have started have taken all of this rank's.
template <class T>
__device__ void send_partials(const CombineArgs& a, core::WireForm form, const Offer* offers, const int32_t* begins, Call call) {
  const Common& c = a.common;
  const int num_ranks = c.team.num_ranks, me = c.team.rank, others = num_ranks - 1;
  int most = 0;
  for (int s = 0; s < num_ranks; ++s) most = s == me ? most : max(most, begins[s + 1] - begins[s]);
  Tickets tickets(&c.lane_control->tickets[call.copy][kPushTicket], most * others, static_cast<int>(gridDim.x) * num_warps(), 8);
  for (int item = tickets.take(); item >= 0; item = tickets.take()) {
    const int s = (me + 1 + item % others) % num_ranks;
    const int64_t i = item / others;
    if (i >= begins[s + 1] - begins[s]) continue;
    std::byte* record = offered_block(c, s, offers[s]) + (a.routing.record_begin[s] + i) * a.record_bytes;
    const uint64_t mask = write_record<T>(a, form, begins[s] + i, record);
    __syncwarp();
    if (lane_id() == 0) {
      fence_system();
      store_release(reinterpret_cast<uint64_t*>(c.team.base[s] + c.arena.row_at(c.lane, call.copy, me, i)),
                    signal_of(call.epoch, static_cast<uint32_t>(mask)));
    }
  }
}

/// One rank's part of a token: its record, or on this rank the received row itself.
struct Part {
  int rank;
  int64_t row;              ///< position in the list of the rank
  const std::byte* record;  ///< null: own rank
  uint64_t mask;
};

template <class T>
class TokenSum {
 public:
  __device__ TokenSum(const CombineArgs& a, core::WireForm form, int64_t token, const int32_t* begins, Call call)
      : a_(a), form_(form), token_(token), begins_(begins), call_(call) {}

  /// False: given up.
  __device__ bool run() {
    if (!collect()) return false;
    for (int64_t base = 0; base < a_.hidden; base += kWarpChunk) {
      const int64_t begin = base + lane_id() * kChunk;
      store_chunk(a_.dtype, a_.out + token_ * a_.out_stride, begin, a_.hidden, sum_parts(begin));
    }
    write_scalars();
    return true;
  }

 private:
  /// Waits for the records of the token. Lane l holds rank, position and mask of entry k = l (and l + 32) where it is the first of
  /// its rank.
  __device__ bool collect() {
    const Common& c = a_.common;
    const int topk = a_.num_topk, me = c.team.rank;
    bool good = true;
    present_ = 0;
    for (int h = 0; h < 2; ++h) {
      const int k = h * 32 + lane_id();
      rank_[h] = -1;
      mask_[h] = 0;
      at_[h] = -1;
      id_[h] = k < topk ? a_.routing.topk_idx[token_ * topk + k] : -1;
      const int at = k < topk ? a_.routing.send_index[token_ * topk + k] : -1;
      if (at < 0) continue;
      const int d = a_.routing.dest[token_ * topk + k];
      if (at >= a_.routing.sent[d]) continue;
      rank_[h] = d;
      at_[h] = at;
      if (d == me) continue;
      const std::byte* p = c.team.base[me] + c.arena.row_at(c.lane, call_.copy, d, at);
      if (good) good = wait_signal(c, Phase::partials, d, call_.epoch, true, reinterpret_cast<const uint64_t*>(p), nullptr);
      if (good) mask_[h] = *reinterpret_cast<const volatile uint64_t*>(record(d, at) + a_.mask_offset);
    }
    if (!__all_sync(kFull, good)) return false;
    // Masks of the own rank need the whole warp.
    for (int h = 0; h < 2; ++h) {
      for (unsigned own = __ballot_sync(kFull, rank_[h] == me); own; own &= own - 1) {
        const int from = __ffs(own) - 1;
        const uint64_t mask = mask_of(a_, begins_[me] + __shfl_sync(kFull, at_[h], from));
        if (lane_id() == from) mask_[h] = mask;
      }
    }
    for (int h = 0; h < 2; ++h) {
      for (int l = 0; l < 32; ++l) present_ |= __shfl_sync(kFull, mask_[h], l);
    }
    return true;
  }

  __device__ const std::byte* record(int d, int64_t at) const {
    return a_.common.team.base[a_.common.team.rank] + a_.block + (a_.routing.send_offset[d] + at) * a_.record_bytes;
  }
  __device__ int node_of(int rank) const { return a_.node_of_rank ? a_.node_of_rank[rank] : 0; }

  /// The part whose (node, rank) is the smallest above `after`; false: no more. The whole warp calls it.
  __device__ bool next_part(int64_t after, int64_t* key, Part* part) const {
    int64_t best = INT64_MAX;
    for (int h = 0; h < 2; ++h) {
      if (rank_[h] < 0 || mask_[h] == 0) continue;
      const int64_t mine = static_cast<int64_t>(node_of(rank_[h])) << 32 | rank_[h];
      if (mine > after && mine < best) best = mine;
    }
    for (int d = 16; d > 0; d /= 2) {
      const int64_t other = __shfl_xor_sync(kFull, best, d);
      best = other < best ? other : best;
    }
    if (best == INT64_MAX) return false;
    *key = best;
    const int rank = static_cast<int>(best & 0xffffffff);
    for (int h = 0; h < 2; ++h) {
      const unsigned holder = __ballot_sync(kFull, rank_[h] == rank && mask_[h] != 0);
      if (!holder) continue;
      const int from = __ffs(holder) - 1;
      part->rank = rank;
      part->row = __shfl_sync(kFull, at_[h], from);
      part->mask = __shfl_sync(kFull, mask_[h], from);
      part->record = rank == a_.common.team.rank ? nullptr : record(rank, part->row);
    }
    return true;
  }

  __device__ Chunk<T> sum_parts(int64_t begin) const {
    Chunk<T> node{}, total{};
    bool node_started = false, total_started = false;
    int64_t key = -1;
    int last_node = -1;
    Part part{};
    while (next_part(key, &key, &part)) {
      const int n = static_cast<int>(key >> 32);
      if (node_started && n != last_node) {  // a node is complete
        close_node(node, total, total_started);
        node_started = false;
      }
      last_node = n;
      Chunk<T> c;
      if (part.record) {
        c = load_wire<T>(form_, part.record, begin, a_.hidden);
      } else {
        c = partial_chunk<T>(a_, begins_[part.rank] + part.row, part.mask, begin);
        round_to_wire(form_, c);
      }
#pragma unroll
      for (int i = 0; i < kChunk; ++i) node.v[i] = node_started ? node.v[i] + c.v[i] : c.v[i];
      node_started = true;
    }
    if (!a_.node_of_rank || !node_started) return node;
    close_node(node, total, total_started);
    return total;
  }
  __device__ void close_node(Chunk<T>& node, Chunk<T>& total, bool& total_started) const {
    round_to_wire(form_, node);
#pragma unroll
    for (int i = 0; i < kChunk; ++i) total.v[i] = total_started ? total.v[i] + node.v[i] : node.v[i];
    total_started = true;
  }

  /// The part that holds entry k. The whole warp calls it.
  __device__ bool part_of(int k, Part* part) const {
    for (int h = 0; h < 2; ++h) {
      const unsigned holder = __ballot_sync(kFull, mask_[h] >> k & 1);
      if (!holder) continue;
      const int from = __ffs(holder) - 1;
      part->rank = __shfl_sync(kFull, rank_[h], from);
      part->row = __shfl_sync(kFull, at_[h], from);
      part->mask = __shfl_sync(kFull, mask_[h], from);
      part->record = part->rank == a_.common.team.rank ? nullptr : record(part->rank, part->row);
      return true;
    }
    return false;
  }

  __device__ void write_scalars() const {
    int lost = 0;
    for (int h = 0; h < 2; ++h) {
      const int k = h * 32 + lane_id();
      const bool asked = k < a_.num_topk && id_[h] >= 0;
      lost += __popc(__ballot_sync(kFull, asked && !(present_ >> k & 1)));
    }
    if (lane_id() == 0) a_.num_lost[token_] = lost;
    if (!a_.out_side) return;
    for (int k = 0; k < a_.num_topk; ++k) {
      Part part{};
      float value = 0;
      if (part_of(k, &part)) {
        if (part.record) {
          value = reinterpret_cast<const volatile float*>(part.record + a_.side_offset)[k];
        } else {
          const int64_t n = begins_[part.rank] + part.row;
          Term t{};
          if (a_.layout != Layout::rank_major) term_of(a_, n, k, &t);
          value = a_.layout == Layout::rank_major ? a_.side[n * a_.num_topk + k] : a_.side[t.row];
        }
      }
      if (lane_id() == 0) a_.out_side[token_ * a_.num_topk + k] = value;
    }
  }

  const CombineArgs& a_;
  core::WireForm form_;
  int64_t token_;
  const int32_t* begins_;
  Call call_;
  int rank_[2], id_[2];
  int64_t at_[2];
  uint64_t mask_[2], present_ = 0;
};

template <class T, bool kSend, bool kReceive>
__global__ void __launch_bounds__(kThreads, 1) combine_kernel(const __grid_constant__ CombineArgs a) {
  __shared__ Offer offers[kMaxRanks];
  __shared__ int32_t begins[kMaxRanks + 1];
  __shared__ FactWords facts;
  const Common& c = a.common;
  const Call call = call_of(c);
  const core::WireForm form = core::wire_form(a.wire, a.dtype);
  for (int s = static_cast<int>(threadIdx.x); s <= c.team.num_ranks; s += kThreads) begins[s] = a.routing.recv_begin[s];
  const int64_t first = static_cast<int64_t>(blockIdx.x) * num_warps() + warp_id(), step = static_cast<int64_t>(gridDim.x) * num_warps();
  bool good = !is_over(c, call);
  good = __syncthreads_and(good);
  if (kSend) {
    if (good) good = start_call(a, call, take_role(c, call, kRoleTicket), offers, &facts);
    if (good) send_partials<T>(a, form, offers, begins, call);
  }
  if (kReceive) {
    for (int64_t t = first; good && t < a.num_tokens; t += step) good = TokenSum<T>(a, form, t, begins, call).run();
    good = __syncthreads_and(good && !is_over(c, call));
    if (!good) poison(a, first, step);
  }
  __syncthreads();
  if (kSend && c.last_of_send) advance_epoch(c, call.epoch);
}

template <class T>
CallKernels<CombineArgs> kernels() {
  return {combine_kernel<T, true, true>, combine_kernel<T, true, false>, combine_kernel<T, false, true>};
}

}  // namespace

cudaError_t launch_combine(const CombineArgs& a, bool send, bool receive, int blocks, cudaStream_t stream) {
  if (a.wire == Wire::rows) return launch_combine_terms(a, send, receive, blocks, stream);
  if (send && receive && can_combine_bulk(a)) return launch_combine_bulk(a, blocks, stream);
  return (core::sums_in_double(a.dtype) ? kernels<double>() : kernels<float>()).launch(a, send, receive, blocks, kThreads, stream);
}
cudaError_t prepare_combine() {
  if (const cudaError_t bad = kernels<float>().load()) return bad;
  if (const cudaError_t bad = kernels<double>().load()) return bad;
  if (const cudaError_t bad = prepare_combine_terms()) return bad;
  return prepare_combine_bulk();
}

}  // namespace turnout::engine::cuda
