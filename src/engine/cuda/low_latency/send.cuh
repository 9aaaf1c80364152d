// The sending side of a low-latency dispatch: counts, and rows. A block that sends a token finds its places itself, by counting
// all tokens before it.
#pragma once
#include "engine/cuda/device/chunk.cuh"
#include "engine/cuda/low_latency/tables.cuh"

namespace turnout::engine::cuda::low_latency {

/// The token that is being sent.
struct Token {
  int32_t id[kMaxTopk];    ///< -1: none
  int32_t key[kMaxTopk];   ///< destination at its first k, else -2
  int32_t pair[kMaxTopk];  ///< earlier pairs of the same expert
  int32_t row[kMaxTopk];   ///< place in the list of that destination
  float weight[kMaxTopk];
};
struct Meta {  // of a row, where RowFormat::meta says
  int32_t* id;
  int32_t* pair;
  float* weight;
};
__device__ __forceinline__ Meta meta_of(const DispatchArgs& a, const RowFormat& f, std::byte* row) {
  auto* p = reinterpret_cast<int32_t*>(row + f.meta);
  return {p, p + a.num_topk, reinterpret_cast<float*>(p + 2 * a.num_topk)};
}

/// What is loaded before anything else is known: of the first token of a block. `is_there` is the same in all threads.
struct Early {
  static constexpr int kIds = 3;
  uint4 x[2];
  int32_t ids[kIds];  ///< of earlier tokens, as count_earlier_plain goes through them
  int32_t id;         ///< of the entry whose number is this thread's
  float weight;
  bool is_there;
};

__device__ __forceinline__ float weight_of(const DispatchArgs& a, int64_t i) {
  if (!a.has_weights) return 0.0f;
  return a.weights_are_bf16 ? __uint_as_float(static_cast<uint32_t>(static_cast<const uint16_t*>(a.topk_weights)[i]) << 16)
                            : static_cast<const float*>(a.topk_weights)[i];
}

/// Rows of x in pieces of 16 bytes where they can be.
__device__ __forceinline__ bool loads_pieces(const DispatchArgs& a) {
  return (a.quantize == Quantize::none || size_of(a.dtype) == 2) && (reinterpret_cast<uintptr_t>(a.x) | static_cast<uintptr_t>(a.x_stride)) % 16 == 0;
}
__device__ __forceinline__ int64_t source_bytes(const DispatchArgs& a) {
  return a.quantize == Quantize::none ? a.x_bytes : a.hidden * static_cast<int64_t>(size_of(a.dtype));
}
/// Bytes [at, at + 16) of a row, as far as it goes; the rest is 0.
__device__ __forceinline__ uint4 load_piece(const std::byte* row, int64_t at, int64_t end) {
  if (at + 16 <= end) return load_stream(reinterpret_cast<const uint4*>(row + at));
  uint4 v{};
  auto* to = reinterpret_cast<uint32_t*>(&v);
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    if (at + i < end) to[i / 4] |= static_cast<uint32_t>(row[at + i]) << (i % 4 * 8);
  }
  return v;
}

__device__ __forceinline__ Chunk<float> widen(DType dtype, uint4 v) {
  const uint32_t words[4] = {v.x, v.y, v.z, v.w};
  Chunk<float> c;
#pragma unroll
  for (int i = 0; i < kChunk; ++i) {
    const uint32_t bits = words[i / 2] >> (i % 2 * 16) & 0xffff;
    c.v[i] = dtype == DType::bf16 ? __uint_as_float(bits << 16) : from_fp16(bits);
  }
  return c;
}

/// Eight elements, quantised, into the row; the lane with the first of a block writes its scale. The whole warp calls it.
__device__ __forceinline__ void quantize_chunk(const DispatchArgs& a, const RowFormat& f, const Chunk<float>& c, int64_t begin, std::byte* row) {
  float scale = block_scale(c);
  uint8_t exponent = 0;
  if (a.quantize == Quantize::fp8_e4m3_ue8m0) {
    exponent = core::float_to_ue8m0_up(scale);
    scale = core::ue8m0_to_float(exponent);
  }
  const float inverse = 1.0f / scale;
  if (begin >= a.hidden) return;
  uint2 q;
  q.x = to_e4m3(c.v[0] * inverse, c.v[1] * inverse) | to_e4m3(c.v[2] * inverse, c.v[3] * inverse) << 16;
  q.y = to_e4m3(c.v[4] * inverse, c.v[5] * inverse) | to_e4m3(c.v[6] * inverse, c.v[7] * inverse) << 16;
  *reinterpret_cast<uint2*>(row + begin) = q;  // what lies behind the last element is padding
  if (begin % core::kScaleBlock != 0) return;
  const int64_t at = begin / core::kScaleBlock;
  if (a.quantize == Quantize::fp8_e4m3) reinterpret_cast<float*>(row + f.scales)[at] = scale;
  else row[f.scales + at] = static_cast<std::byte>(exponent);
}

/// The row of a plain token: two pieces at a time, both asked for before the first is looked at.
__device__ __forceinline__ void build_row_plain(const DispatchArgs& a, const RowFormat& f, int64_t token, const Early& early, bool use_early,
                                                std::byte* row) {
  const std::byte* x = a.x + token * a.x_stride;
  const bool quantise = a.quantize != Quantize::none;
  const auto num = static_cast<int>(source_bytes(a) / 16);
#pragma unroll 1
  for (int base = warp_id() * 32; base < num; base += 2 * num_threads()) {
    const int p = base + lane_id(), q = p + num_threads();
    const bool first = use_early && base < num_threads();
    uint4 v[2] = {early.x[0], early.x[1]};
    if (!first) v[0] = load_stream_if(p < num, reinterpret_cast<const uint4*>(x) + p);
    if (!first) v[1] = load_stream_if(q < num, reinterpret_cast<const uint4*>(x) + q);
    if (!quantise) {
      if (p < num) reinterpret_cast<uint4*>(row)[p] = v[0];
      if (q < num) reinterpret_cast<uint4*>(row)[q] = v[1];
      continue;
    }
    quantize_chunk(a, f, widen(a.dtype, v[0]), p * kChunk, row);
    if (base + num_threads() < num) quantize_chunk(a, f, widen(a.dtype, v[1]), q * kChunk, row);
  }
}

/// x, scales and side arrays of a token into shared memory, whatever they are like.
__device__ __noinline__ void build_row(const DispatchArgs& a, RowFormat f, int64_t token, std::byte* row) {
  const std::byte* x = a.x + token * a.x_stride;
  const bool pieces = loads_pieces(a), quantise = a.quantize != Quantize::none;
  const int64_t bytes = source_bytes(a);
  const int num = static_cast<int>(quantise ? core::ceil_div(a.hidden, kChunk) : core::ceil_div(bytes, 16));
#pragma unroll 1
  for (int base = warp_id() * 32; base < num; base += num_threads()) {
    const int p = base + lane_id();
    uint4 v{};
    if (pieces && p < num) v = load_piece(x, p * 16, bytes);
    if (!quantise) {
      if (!pieces && p < num) {
        auto* to = reinterpret_cast<uint32_t*>(&v);
#pragma unroll 1
        for (int i = 0; i < 16 && p * 16 + i < bytes; ++i) to[i / 4] |= static_cast<uint32_t>(x[p * 16 + i]) << (i % 4 * 8);
      }
      if (p < num) reinterpret_cast<uint4*>(row)[p] = v;
      continue;
    }
    const Chunk<float> c = pieces ? widen(a.dtype, v) : load_chunk<float>(a.dtype, x, p * kChunk, a.hidden);
    quantize_chunk(a, f, c, p * kChunk, row);
  }
  int at = f.side;
#pragma unroll 1
  for (int s = 0; s < a.num_side; ++s) {
    const std::byte* src = a.side[s].src + token * a.side[s].src_stride;
#pragma unroll 1
    for (int i = thread(); i < a.side[s].bytes; i += num_threads()) row[at + i] = src[i];
    at += static_cast<int>(core::align_up(a.side[s].bytes, 16));
  }
}

/// Entry `i` of all tokens, eight a token, of which num_topk are there; -1: none.
__device__ __forceinline__ int entry_of(const DispatchArgs& a, int i, int end) {
  return i < end && i % 8 < a.num_topk ? id_of(a, i / 8 * a.num_topk + i % 8) : -1;
}
/// Tokens before `token` that go where it goes, and their pairs with its experts. Eight lanes look at an earlier token, each at one
/// entry.
__device__ __forceinline__ void count_earlier_plain(const DispatchArgs& a, const Tables& t, Token* s, int token, const Early& early, bool use_early) {
  const int topk = a.num_topk, end = token * 8;
  int id[8];
#pragma unroll
  for (int k = 0; k < 8; ++k) id[k] = k < topk && s->id[k] >= 0 ? s->id[k] : -3;
#pragma unroll 1
  for (int base = warp_id() * 32, round = 0; base < end; base += num_threads(), ++round) {
    const int known = round == 0 ? early.ids[0] : round == 1 ? early.ids[1] : early.ids[2];
    const int other = use_early && round < Early::kIds ? known : entry_of(a, base + lane_id(), end);
    uint32_t same = 0, ranks = other >= 0 ? 1u << t.owner[other] : 0;
#pragma unroll
    for (int k = 0; k < 8; ++k) same |= (other == id[k] ? 1u : 0u) << k;
#pragma unroll 1
    for (; same; same &= same - 1) atomicAdd(&s->pair[__ffs(same) - 1], 1);
#pragma unroll
    for (int d = 1; d < 8; d *= 2) ranks |= __shfl_xor_sync(kFull, ranks, d);
#pragma unroll 1
    for (int k = 0; k < topk; ++k) {
      const int key = s->key[k];
      if (key < 0) continue;
      const int n = __popc(__ballot_sync(kFull, ranks >> key & 1)) / 8;
      if (lane_id() == 0 && n) atomicAdd(&s->row[k], n);
    }
  }
}
/// The same for any number of experts and ranks: a warp looks at one earlier token, a lane at one of its entries (and the 32nd after it).
__device__ __forceinline__ void count_earlier(const DispatchArgs& a, const Tables& t, Token* s, int token) {
  const int topk = a.num_topk;
#pragma unroll 1
  for (int u = warp_id(); u < token; u += num_warps()) {
    int other[2], owner[2];
#pragma unroll 1
    for (int h = 0; h < 2; ++h) {
      const int j = h * 32 + lane_id();
      other[h] = j < topk ? id_of(a, static_cast<int64_t>(u) * topk + j) : -1;
      owner[h] = other[h] >= 0 ? t.owner[other[h]] : -1;
    }
#pragma unroll 1
    for (int k = 0; k < topk; ++k) {
      const int key = s->key[k], id = s->id[k];
      const int n = id < 0 ? 0 : __popc(__ballot_sync(kFull, other[0] == id)) + __popc(__ballot_sync(kFull, other[1] == id));
      const bool hit = __any_sync(kFull, key >= 0 && (owner[0] == key || owner[1] == key));
      if (lane_id() != 0) continue;
      if (n) atomicAdd(&s->pair[k], n);
      if (hit) atomicAdd(&s->row[k], 1);
    }
  }
}

/// Routing of a token into `s`: ids, places. Of a known routing it is read.
template <bool kPlain>
__device__ __forceinline__ void find_places(const DispatchArgs& a, const Tables& t, Token* s, int64_t token, const Early& early, bool use_early) {
  const int topk = a.num_topk, k = thread();
  const int64_t i = token * topk + k;
  if (a.cached) {
    if (k < topk) {
      const int at = a.routing.send_index[i], dest = a.routing.dest[i];
      const bool goes = at >= 0 && at < a.routing.sent[dest];
      s->key[k] = goes ? dest : -2;
      s->row[k] = at;
    }
    __syncthreads();
    return;
  }
  if (k < topk) {
    const int id = use_early ? early.id : id_of(a, i);
    s->id[k] = id < 0 ? -1 : id;
    s->weight[k] = use_early ? early.weight : weight_of(a, i);
  }
  __syncthreads();  // also for the tables of experts
  if (k < topk) {
    const int id = s->id[k], dest = id >= 0 ? t.owner[id] : -2;
    bool first = id >= 0;
    int same = 0;
#pragma unroll 1
    for (int j = 0; j < k; ++j) {
      const int other = s->id[j];
      if (other < 0) continue;
      same += other == id;
      if (t.owner[other] == dest) first = false;
    }
    s->key[k] = first ? dest : -2;
    s->pair[k] = same;
    s->row[k] = 0;
  }
  __syncthreads();
  if constexpr (kPlain) count_earlier_plain(a, t, s, static_cast<int>(token), early, use_early);
  else count_earlier(a, t, s, static_cast<int>(token));
}

/// What the source keeps of a token's routing.
__device__ __forceinline__ void write_routing(const DispatchArgs& a, const Tables& t, const Token* s, int64_t token) {
  const int k = thread();
  if (a.cached || k >= a.num_topk) return;
  const int64_t i = token * a.num_topk + k;
  const Routing& r = a.routing;
  const int id = s->id[k];
  r.topk_idx[i] = id;
  r.dest[i] = id >= 0 ? t.owner[id] : -1;
  if (a.has_weights) r.topk_weights[i] = s->weight[k];
  r.send_index[i] = s->key[k] >= 0 ? s->row[k] : -1;
  r.pair_index[i] = id >= 0 ? s->pair[k] : -1;
  if (s->key[k] == a.common.team.rank) r.own_tokens[s->row[k]] = static_cast<int32_t>(token);
}

/// Builds the row of `token` in shared memory; `own_row` (shared) becomes its place in this rank's own list, -1 if it does not
/// stay here. The whole block calls it, with everything else in shared memory at rest.
template <bool kPlain>
__device__ __forceinline__ void prepare_token(const DispatchArgs& a, const RowFormat& f, const Tables& t, Token* s, int64_t token, const Early& early,
                                              bool use_early, std::byte* row, int32_t* own_row) {
  if (thread() == 0) *own_row = -1;
  find_places<kPlain>(a, t, s, token, early, use_early);
  if constexpr (kPlain) build_row_plain(a, f, token, early, use_early, row);
  else build_row(a, f, token, row);
  bulk_can_read();
  __syncthreads();
  const int k = thread();
  if (k < a.num_topk) {
    if (s->key[k] == a.common.team.rank) *own_row = s->row[k];
    if (!a.cached) {
      const Meta m = meta_of(a, f, row);
      m.id[k] = s->id[k];
      m.pair[k] = s->pair[k];
      m.weight[k] = s->weight[k];
    }
  }
  __syncthreads();
}

/// To all ranks but this one.
__device__ __forceinline__ void send_row(const DispatchArgs& a, const RowFormat& f, const Token* s, Call call, const std::byte* row) {
  const Common& c = a.common;
#pragma unroll 1
  for (int k = 0; k < a.num_topk; ++k) {
    const int d = s->key[k];
    if (d < 0 || d == c.team.rank) continue;
    auto* to = reinterpret_cast<uint4*>(c.team.base[d] + c.arena.ll_dispatch_at(c.lane, call.copy, c.team.rank, s->row[k]));
#pragma unroll 1
    for (int w = thread(); w < f.num_words; w += num_threads()) {
      const uint32_t* p = reinterpret_cast<const uint32_t*>(row) + kWordPayload * w;
      store_word(to + w, uint4{p[0], p[1], p[2], call.epoch});
    }
  }
}

/// id_of(), all bits of it.
__device__ __forceinline__ int wide_id_of(const DispatchArgs& a, int64_t i) {
  const int id = id_of(a, i);
  const bool fits = !a.ids_are_64 || __ldg(static_cast<const int32_t*>(a.topk_idx) + 2 * i + 1) == id >> 31;
  return fits ? id : -2;
}

/// Facts and counts to all ranks, this one included.
__device__ inline void send_counts(const DispatchArgs& a, const Tables& t, Call call, FactWords* facts) {
  const Common& c = a.common;
  const int ranks = c.team.num_ranks, topk = a.num_topk, tokens = static_cast<int>(a.num_tokens);
  if (thread() == num_threads() - 1) fill_facts(c, call.epoch, false, a.num_tokens, facts);
  if (a.cached) {
    __syncthreads();
    send_header(c, call, HeaderInts::kRows, [&](int, int i) { return facts->words[i]; });
    return;
  }
  int32_t* rows = t.scratch;
#pragma unroll 1
  for (int i = thread(); i < ranks; i += num_threads()) rows[i] = 0;
#pragma unroll 1
  for (int i = thread(); i < ranks * c.max_local; i += num_threads()) t.before[i] = 0;
  __syncthreads();
  int bad = -1;  // where an id is no expert
#pragma unroll 1
  for (int base = warp_id() * 32; base < tokens; base += num_threads()) {
    const int u = base + lane_id();
    uint64_t low = 0, high = 0;  // ranks that the token goes to
#pragma unroll 4
    for (int j = 0; j < topk; ++j) {
      const int id = u < tokens ? wide_id_of(a, static_cast<int64_t>(u) * topk + j) : -1;
      if (id == -2) bad = u * kMaxTopk + j;
      if (id < 0) continue;
      const int owner = t.owner[id];
      atomicAdd(&t.before[owner * c.max_local + t.local[id]], 1);
      (owner < 64 ? low : high) |= 1ull << owner % 64;
    }
    if (ranks <= 8) {
#pragma unroll 1
      for (int r = 0; r < ranks; ++r) {
        const int n = __popc(__ballot_sync(kFull, low >> r & 1));
        if (lane_id() == 0 && n) atomicAdd(&rows[r], n);
      }
    } else {
#pragma unroll 1
      for (; low; low &= low - 1) atomicAdd(&rows[__ffsll(static_cast<long long>(low)) - 1], 1);
#pragma unroll 1
      for (; high; high &= high - 1) atomicAdd(&rows[63 + __ffsll(static_cast<long long>(high))], 1);
    }
  }
  if (bad >= 0) {
    const int64_t i = static_cast<int64_t>(bad / kMaxTopk) * topk + bad % kMaxTopk;
    decltype(HostWords::record) r{};
    r.state = 4;
    r.peer = c.team.rank;
    r.epoch = call.epoch;
    r.expected = bad / kMaxTopk;
    r.k = bad % kMaxTopk;
    r.value = a.ids_are_64 ? static_cast<const int64_t*>(a.topk_idx)[i] : static_cast<const int32_t*>(a.topk_idx)[i];
    write_record(c, r);
  }
  const bool refused = __syncthreads_or(bad >= 0);
  send_header(c, call, HeaderInts::experts(ranks) + c.max_local, [&](int rank, int i) -> uint32_t {
    if (i == HeaderInts::kRefused) return refused;
    if (i < HeaderInts::kRows) return facts->words[i];
    if (i < HeaderInts::experts(ranks)) return static_cast<uint32_t>(rows[i - HeaderInts::kRows]);
    return static_cast<uint32_t>(t.before[rank * c.max_local + i - HeaderInts::experts(ranks)]);
  });
  __syncthreads();
}

}  // namespace turnout::engine::cuda::low_latency
