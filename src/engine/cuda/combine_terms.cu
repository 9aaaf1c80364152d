// Combine with wire = rows: every expert's row crosses as it is, and the source adds the rows of a token in k order, with one rounding.
// A block does one (token, source) after the other, then tokens of its own. Its last warp, the clerk, looks up which rows these are and
// where, a turn ahead, and keeps the books (masks, scalars, signals, num_lost); all others move or add a part of every row, so that few
// tokens keep a GPU as busy as many do.
#include "engine/cuda/device/combine.cuh"
#include "engine/cuda/device/tickets.cuh"
#include "engine/cuda/kernels.h"
#include "engine/cuda/launch.h"

namespace turnout::engine::cuda {
namespace {

constexpr int kMovers = 480, kThreads = kMovers + 32, kMostTerms = 64;
/// Loads of 16 bytes that a thread has under way.
constexpr int kBatch = 8;

/// The rows of a record or of a token, in k order.
struct Terms {
  const std::byte* row[kMostTerms];
  std::byte* to[kMostTerms];  ///< of a record
  float weight[kMostTerms];   ///< of a token
  int num;                    ///< -1: there are no more; -2: given up
};
constexpr int kNoMore = -1, kGivenUp = -2;

__device__ __forceinline__ bool is_clerk() { return warp_id() == kMovers / 32; }
/// Bits of the k's before that of this lane: k = h * 32 + lane.
__device__ __forceinline__ int num_before(uint64_t mask, int h) {
  return __popcll(static_cast<long long>(mask & ((1ull << (h * 32 + lane_id())) - 1)));
}
__device__ __forceinline__ bool has(uint64_t mask, int h) { return mask >> (h * 32 + lane_id()) & 1; }

/// What the expert side owes, by ticket, all sources in turn: a block waits for rows only when blocks that have started have taken all.
class Sender {
 public:
  __device__ Sender(const CombineArgs& a, const Offer* offers, const int32_t* begins, Call call)
      : a_(a), offers_(offers), begins_(begins), call_(call) {
    if (!is_clerk()) return;
    const Common& c = a.common;
    for (int s = 0; s < c.team.num_ranks; ++s) most_ = s == c.team.rank ? most_ : max(most_, begins[s + 1] - begins[s]);
    const int others = c.team.num_ranks - 1;
    tickets_ = Tickets(&c.lane_control->tickets[call.copy][kPushTicket], most_ * others, static_cast<int>(gridDim.x), 8);
  }

  /// The whole block calls it.
  __device__ void run(Terms (&turns)[2]) {
    for (int turn = 0;; turn ^= 1) {
      Terms& t = turns[turn];
      uint64_t* said = signal_;
      const uint64_t value = value_;
      if (is_clerk()) look_up(&t);
      __syncthreads();  // what was moved before is there, and what is next is known
      if (is_clerk() && lane_id() == 0 && said) {
        fence_system();
        store_release(said, value);
      }
      if (t.num == kNoMore) break;
      if (!is_clerk()) move(t);
    }
  }

 private:
  /// The rows of the next record and where they go; its books are written at once.
  __device__ void look_up(Terms* t) {
    const Common& c = a_.common;
    const int others = c.team.num_ranks - 1;
    int item = -1, s = 0, i = 0;
    do {
      item = tickets_.take();
      s = item < 0 ? 0 : (c.team.rank + 1 + item % others) % c.team.num_ranks;
      i = item < 0 ? 0 : item / others;
    } while (item >= 0 && i >= begins_[s + 1] - begins_[s]);
    signal_ = nullptr;
    if (item < 0) {
      t->num = kNoMore;
      return;
    }
    std::byte* record = offered_block(c, s, offers_[s]) + (a_.routing.record_begin[s] + i) * a_.record_bytes;
    const int64_t n = begins_[s] + i;
    Term terms[2];
    uint64_t mask = 0;
    for (int h = 0; h < 2; ++h) {
      const int k = h * 32 + lane_id();
      const bool in = k < a_.num_topk && term_of(a_, n, k, &terms[h]);
      mask |= static_cast<uint64_t>(__ballot_sync(kFull, in)) << (h * 32);
    }
    auto* scalars = reinterpret_cast<float*>(record + a_.side_offset);
    for (int h = 0; h < 2; ++h) {
      if (!has(mask, h)) continue;
      const int k = h * 32 + lane_id(), at = num_before(mask, h);
      t->row[at] = a_.y + terms[h].row * a_.y_stride;
      t->to[at] = record + k * a_.wire_row_stride;
      if (a_.has_side) scalars[k] = a_.side[terms[h].row];
      // The weights of the expert's side travel beside the rows; the others the source has itself.
      if (a_.apply == CombineWeights::rows) scalars[a_.num_topk + k] = terms[h].weight;
    }
    if (lane_id() == 0) *reinterpret_cast<uint64_t*>(record + a_.mask_offset) = mask;
    __syncwarp();
    t->num = __popcll(static_cast<long long>(mask));
    signal_ = reinterpret_cast<uint64_t*>(c.team.base[s] + c.arena.row_at(c.lane, call_.copy, c.team.rank, i));
    value_ = signal_of(call_.epoch, static_cast<uint32_t>(mask));
  }

  __device__ void move(const Terms& t) const {
    const int64_t bytes = a_.hidden * static_cast<int64_t>(size_of(a_.dtype));
    const int me = static_cast<int>(threadIdx.x);
    if ((reinterpret_cast<uintptr_t>(a_.y) | static_cast<uintptr_t>(a_.y_stride | bytes)) % 16 != 0) {
      for (int j = 0; j < t.num; ++j) {
        for (int64_t i = me; i < bytes; i += kMovers) t.to[j][i] = *reinterpret_cast<const volatile std::byte*>(t.row[j] + i);
      }
      return;
    }
    const int words = static_cast<int>(bytes / 16), total = t.num * words;
#pragma unroll 1
    for (int first = me; first < total; first += kMovers * kBatch) {
      uint4 v[kBatch];
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        const int i = first + b * kMovers;
        if (i < total) v[b] = load_stream(reinterpret_cast<const uint4*>(t.row[i / words]) + i % words);
      }
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        const int i = first + b * kMovers;
        if (i < total) store_stream(reinterpret_cast<uint4*>(t.to[i / words]) + i % words, v[b]);
      }
    }
  }

  const CombineArgs& a_;
  const Offer* offers_;
  const int32_t* begins_;
  Call call_;
  Tickets tickets_;
  int most_ = 0;
  uint64_t* signal_ = nullptr;  ///< of the record before, with its value
  uint64_t value_ = 0;
};

/// The tokens of this rank, of which each block has its share.
template <class T>
class Adder {
 public:
  __device__ Adder(const CombineArgs& a, const int32_t* begins, Call call) : a_(a), begins_(begins), call_(call) {
    const bool half = a.dtype == DType::bf16 || a.dtype == DType::fp16;
    const auto bits = reinterpret_cast<uintptr_t>(a.y) | reinterpret_cast<uintptr_t>(a.out) | static_cast<uintptr_t>(a.y_stride | a.out_stride);
    fast_ = half && bits % 16 == 0 && a.hidden % kChunk == 0;
  }

  /// False: given up. The whole block calls it.
  __device__ bool run(Terms (&turns)[2]) const {
    int turn = 0;
    for (int64_t token = blockIdx.x; token < a_.num_tokens; token += gridDim.x, turn ^= 1) {
      Terms& t = turns[turn];
      if (is_clerk() && !collect(token, &t)) t.num = kGivenUp;
      __syncthreads();
      if (t.num == kGivenUp) return false;
      if (!is_clerk()) add(token, t);
    }
    return true;
  }

 private:
  /// One rank's part of a token.
  struct Part {
    int rank = -1;
    int64_t at = -1;  ///< position in the list of the rank
  };

  __device__ const std::byte* record(const Part& p) const {
    return a_.common.team.base[a_.common.team.rank] + block_of(a_, call_) + (a_.routing.send_offset[p.rank] + p.at) * a_.record_bytes;
  }

  /// Waits for the rows of a token, and keeps its books. False: given up.
  __device__ bool collect(int64_t token, Terms* t) const {
    const int me = a_.common.team.rank;
    Part first[2], of[2];  // of an entry that is the first of its rank; of any
    uint64_t mask[2] = {0, 0}, present = 0;
    bool good = true;
    for (int h = 0; h < 2; ++h) {
      first[h] = first_part(token, h * 32 + lane_id());
      if (first[h].rank < 0 || first[h].rank == me) continue;
      const Common& c = a_.common;
      const std::byte* p = c.team.base[me] + c.arena.row_at(c.lane, call_.copy, first[h].rank, first[h].at);
      if (good) good = wait_signal(c, Phase::partials, first[h].rank, call_.epoch, true, reinterpret_cast<const uint64_t*>(p), nullptr);
      if (good) mask[h] = *reinterpret_cast<const volatile uint64_t*>(record(first[h]) + a_.mask_offset);
    }
    if (!__all_sync(kFull, good)) return false;
    for (int h = 0; h < 2; ++h) {
      for (unsigned holders = __ballot_sync(kFull, first[h].rank >= 0); holders; holders &= holders - 1) {
        const int from = __ffs(static_cast<int>(holders)) - 1;
        const Part part{__shfl_sync(kFull, first[h].rank, from), __shfl_sync(kFull, first[h].at, from)};
        const uint64_t has_come = part.rank == me ? mask_of(a_, begins_[me] + part.at) : __shfl_sync(kFull, mask[h], from);
        present |= has_come;
        for (int g = 0; g < 2; ++g) {
          if (has(has_come, g)) of[g] = part;
        }
      }
    }
    int lost = 0;
    for (int h = 0; h < 2; ++h) {
      const int k = h * 32 + lane_id();
      const bool asked = k < a_.num_topk && a_.routing.topk_idx[token * a_.num_topk + k] >= 0;
      lost += __popc(__ballot_sync(kFull, asked && !has(present, h)));
      const float scalar = has(present, h) ? take(token, k, of[h], num_before(present, h), t) : 0.0f;
      if (a_.out_side && k < a_.num_topk) a_.out_side[token * a_.num_topk + k] = scalar;
    }
    if (lane_id() == 0) a_.num_lost[token] = lost;
    __syncwarp();
    t->num = __popcll(static_cast<long long>(present));
    return true;
  }

  __device__ Part first_part(int64_t token, int k) const {
    const int at = k < a_.num_topk ? a_.routing.send_index[token * a_.num_topk + k] : -1;
    if (at < 0) return {};
    const int rank = a_.routing.dest[token * a_.num_topk + k];
    return at < a_.routing.sent[rank] ? Part{rank, at} : Part{};
  }

  /// Notes entry k of a token as term `at`; returns its scalar.
  __device__ float take(int64_t token, int k, const Part& part, int at, Terms* t) const {
    float weight = 1.0f, scalar = 0.0f;
    if (a_.apply == CombineWeights::source) weight = a_.routing.topk_weights[token * a_.num_topk + k];
    if (a_.apply == CombineWeights::tokens) weight = weight_at(a_, token * a_.num_topk + k);
    if (part.rank == a_.common.team.rank) {
      Term own{};
      term_of(a_, begins_[part.rank] + part.at, k, &own);
      t->row[at] = a_.y + own.row * a_.y_stride;
      if (a_.apply == CombineWeights::rows) weight = own.weight;
      if (a_.has_side) scalar = a_.side[own.row];
    } else {
      const std::byte* from = record(part);
      const auto* scalars = reinterpret_cast<const volatile float*>(from + a_.side_offset);
      t->row[at] = from + k * a_.wire_row_stride;
      if (a_.apply == CombineWeights::rows) weight = scalars[a_.num_topk + k];
      if (a_.has_side) scalar = scalars[k];
    }
    t->weight[at] = weight;
    return scalar;
  }

  /// -0 + x is x for every x, so a sum may start there; what is not weighted is multiplied by 1, which changes nothing.
  __device__ void add(int64_t token, const Terms& t) const {
    const auto chunks = static_cast<int>((a_.hidden + kChunk - 1) / kChunk);
#pragma unroll 1
    for (int i = static_cast<int>(threadIdx.x); i < chunks; i += kMovers) {
      Chunk<T> sum;
#pragma unroll
      for (int e = 0; e < kChunk; ++e) sum.v[e] = t.num ? T{-0.0} : T{0};
      if (fast_) add_fast(t, i, &sum);
      else add_any(t, i, &sum);
      store_chunk(a_.dtype, a_.out + token * a_.out_stride, static_cast<int64_t>(i) * kChunk, a_.hidden, sum);
    }
  }
  __device__ __forceinline__ void add_fast(const Terms& t, int chunk, Chunk<T>* sum) const {
#pragma unroll 1
    for (int first = 0; first < t.num; first += kBatch) {
      uint4 raw[kBatch];
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        if (first + b < t.num) raw[b] = load_stream(reinterpret_cast<const uint4*>(t.row[first + b]) + chunk);
      }
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        if (first + b < t.num) add_one(unpack_chunk<T>(a_.dtype, raw[b]), t.weight[first + b], sum);
      }
    }
  }
  __device__ __forceinline__ void add_any(const Terms& t, int chunk, Chunk<T>* sum) const {
#pragma unroll 1
    for (int j = 0; j < t.num; ++j) add_one(load_chunk<T>(a_.dtype, t.row[j], static_cast<int64_t>(chunk) * kChunk, a_.hidden), t.weight[j], sum);
  }
  __device__ __forceinline__ static void add_one(const Chunk<T>& c, float weight, Chunk<T>* sum) {
#pragma unroll
    for (int e = 0; e < kChunk; ++e) sum->v[e] += c.v[e] * static_cast<T>(weight);
  }

  const CombineArgs& a_;
  const int32_t* begins_;
  Call call_;
  bool fast_ = false;
};

template <class T, bool kSend, bool kReceive>
__global__ void __launch_bounds__(kThreads, 1) combine_terms_kernel(const __grid_constant__ CombineArgs a) {
  __shared__ Offer offers[kMaxRanks];
  __shared__ int32_t begins[kMaxRanks + 1];
  __shared__ FactWords facts;
  __shared__ Terms turns[2];
  const Common& c = a.common;
  const Call call = call_of(c);
  for (int s = static_cast<int>(threadIdx.x); s <= c.team.num_ranks; s += kThreads) begins[s] = a.routing.recv_begin[s];
  bool good = !is_over(c, call);
  good = __syncthreads_and(good);
  if (kSend) {
    if (good) good = start_call(a, call, take_role(c, call, kRoleTicket), offers, &facts);
    if (good && c.team.num_ranks > 1) Sender(a, offers, begins, call).run(turns);
    __syncthreads();
  }
  if (kReceive) {
    if (good) good = Adder<T>(a, begins, call).run(turns);
    good = __syncthreads_and(good && !is_over(c, call));
    if (!good) poison(a, static_cast<int64_t>(blockIdx.x) * num_warps() + warp_id(), static_cast<int64_t>(gridDim.x) * num_warps());
  }
  __syncthreads();
  if (kSend && c.last_of_send) advance_epoch(c, call.epoch);
}

template <class T>
CallKernels<CombineArgs> kernels() {
  return {combine_terms_kernel<T, true, true>, combine_terms_kernel<T, true, false>, combine_terms_kernel<T, false, true>};
}

}  // namespace

cudaError_t launch_combine_terms(const CombineArgs& a, bool send, bool receive, int blocks, cudaStream_t stream) {
  return (core::sums_in_double(a.dtype) ? kernels<double>() : kernels<float>()).launch(a, send, receive, blocks, kThreads, stream);
}
cudaError_t prepare_combine_terms() {
  if (const cudaError_t bad = kernels<float>().load()) return bad;
  return kernels<double>().load();
}

}  // namespace turnout::engine::cuda
