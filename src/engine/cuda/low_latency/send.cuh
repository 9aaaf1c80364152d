// The rows of a low-latency dispatch on their way out. A block that sends a token finds its places itself, by counting all tokens
// before it.
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
  uint32_t remote;  ///< of a plain token: the k's with a key that it travels to
};
/// A row that stays on its rank waits in shared memory for the receiving part, or in staging if that is another kernel's.
__device__ __forceinline__ bool travels_to(const AnyDispatch auto& a, int rank) { return rank != a.common.team.rank || !a.receives; }

struct Meta {  // of a row, where RowFormat::meta says
  int32_t* id;
  int32_t* pair;
  float* weight;
};
__device__ __forceinline__ Meta meta_of(const AnyDispatch auto& a, const RowFormat& f, std::byte* row) {
  auto* p = reinterpret_cast<int32_t*>(row + f.meta);
  return {p, p + a.num_topk, reinterpret_cast<float*>(p + 2 * a.num_topk)};
}

/// The entries of a token as they are in memory, eight at most: asked for first and looked at later.
struct Entries {
  static constexpr int kMost = 8;
  uint32_t words[kMost];
};
__device__ __forceinline__ bool ids_are_aligned(const AnyDispatch auto& a) {
  if constexpr (requires { a.kAlignedIds; }) return true;
  else return a.num_topk == Entries::kMost && reinterpret_cast<uintptr_t>(a.topk_idx) % 16 == 0;
}
/// Zeros if not wanted. Of 64-bit ids the lower halves, or (kUpper) the upper ones.
template <bool kUpper = false>
__device__ __forceinline__ Entries ask_entries(const AnyDispatch auto& a, int64_t token, bool wanted) {
  constexpr int kMost = Entries::kMost;
  Entries e;
  if (ids_are_aligned(a)) {
    const auto* p = static_cast<const uint4*>(a.topk_idx) + token * (a.ids_are_64 ? 4 : 2);
    if (a.ids_are_64) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const uint4 v = load_stream_if(wanted, p + j);
        e.words[2 * j] = kUpper ? v.y : v.x, e.words[2 * j + 1] = kUpper ? v.w : v.z;
      }
    } else {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const uint4 v = load_stream_if(wanted, p + j);
        e.words[4 * j] = v.x, e.words[4 * j + 1] = v.y, e.words[4 * j + 2] = v.z, e.words[4 * j + 3] = v.w;
      }
    }
  } else {
    const int shift = a.ids_are_64 ? 1 : 0;
    const uint32_t* p = static_cast<const uint32_t*>(a.topk_idx) + (token * a.num_topk << shift) + (kUpper ? 1 : 0);
#pragma unroll
    for (int k = 0; k < kMost; ++k) e.words[k] = wanted && k < a.num_topk ? __ldg(p + (k << shift)) : 0;
  }
  return e;
}
/// Entry `k`; -1: none, -2: no expert. Block 0 alone looks at the upper halves, too.
__device__ __forceinline__ int entry_of(const AnyDispatch auto& a, const Entries& e, int k) {
  const int id = static_cast<int>(e.words[k]);
  return k >= a.num_topk ? -1 : static_cast<uint32_t>(id + 1) <= static_cast<uint32_t>(a.common.num_experts) ? id : -2;
}

/// Loaded before anything else is known: of the first token of a block, and of those before it. `is_there`: alike in all threads.
struct Early {
  uint4 x[2];
  Entries mine, other;  ///< the token's, and those of the token whose number is this thread's
  float weight;         ///< of the entry whose number is this lane's
  bool is_there;
};

__device__ __forceinline__ float weight_of(const AnyDispatch auto& a, int64_t i) {
  if (!a.has_weights) return 0.0f;
  return a.weights_are_bf16 ? __uint_as_float(static_cast<uint32_t>(static_cast<const uint16_t*>(a.topk_weights)[i]) << 16)
                            : static_cast<const float*>(a.topk_weights)[i];
}

/// Rows of x in pieces of 16 bytes where they can be.
__device__ __forceinline__ bool loads_pieces(const AnyDispatch auto& a) {
  return (a.quantize == Quantize::none || size_of(a.dtype) == 2) && (reinterpret_cast<uintptr_t>(a.x) | static_cast<uintptr_t>(a.x_stride)) % 16 == 0;
}
__device__ __forceinline__ int64_t source_bytes(const AnyDispatch auto& a) {
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
__device__ __forceinline__ void quantize_chunk(const AnyDispatch auto& a, const RowFormat& f, const Chunk<float>& c, int64_t begin, std::byte* row) {
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
__device__ __forceinline__ void build_row_plain(const AnyDispatch auto& a, const RowFormat& f, int64_t token, const Early& early, bool use_early,
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
__device__ __noinline__ inline void build_row(const DispatchArgs& a, RowFormat f, int64_t token, std::byte* row) {
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

/// Places of a token with eight entries at most, ranks in the bits of a word: each thread looks at one earlier token. Adds to `pair` and
/// `s->row`, which are 0. The last warp writes the rest of `s`, and ids and weights to `m`.
__device__ __forceinline__ void find_places_plain(const AnyDispatch auto& a, const Tables& t, Token* s, int64_t token, const Early& early,
                                                  bool use_early, const Meta& m) {
  constexpr int kMost = Entries::kMost;
  const Entries mine = use_early ? early.mine : ask_entries(a, token, true);
  int id[kMost], dest[kMost];
#pragma unroll
  for (int k = 0; k < kMost; ++k) {
    id[k] = entry_of(a, mine, k);
    dest[k] = id[k] >= 0 ? t.owner[id[k]] : -1;
  }
  if (warp_id() * 32 < token) {
    uint32_t found[kMost] = {};  // pairs below, rows above
    const auto look_at = [&](int64_t u, const Entries& e) {
      uint32_t ranks = 0;
      int other[kMost];
#pragma unroll
      for (int j = 0; j < kMost; ++j) {
        other[j] = u < token ? entry_of(a, e, j) : -1;
        ranks |= other[j] >= 0 ? 1u << t.owner[other[j]] : 0;
      }
#pragma unroll
      for (int k = 0; k < kMost; ++k) {
        uint32_t n = 0;
#pragma unroll
        for (int j = 0; j < kMost; ++j) n += other[j] == id[k] ? 1 : 0;
        if (id[k] >= 0) found[k] += n | (ranks >> dest[k] & 1) << 16;
      }
    };
#pragma unroll 1
    for (int64_t u = thread(); u - lane_id() < token; u += num_threads())
      look_at(u, use_early && u == thread() ? early.other : ask_entries(a, u, u < token));
    uint32_t sum = 0;
#pragma unroll
    for (int k = 0; k < kMost; ++k) {
      const uint32_t all = __reduce_add_sync(kFull, found[k]);
      sum = lane_id() == k ? all : sum;
    }
    if (sum & 0xffff) atomicAdd(&m.pair[lane_id()], static_cast<int>(sum & 0xffff));
    if (sum >> 16) atomicAdd(&s->row[lane_id()], static_cast<int>(sum >> 16));
  }
  if (warp_id() != num_warps() - 1) return;
  const int k = lane_id();
  int my_id = -1, my_dest = -1, same = 0;
  bool first = true;
#pragma unroll
  for (int j = 0; j < kMost; ++j) {
    if (j == k) my_id = id[j], my_dest = dest[j];
  }
#pragma unroll
  for (int j = 0; j < kMost; ++j) {
    if (j < k && id[j] == my_id) ++same;
    if (j < k && dest[j] == my_dest) first = false;
  }
  const bool goes = my_id >= 0 && first;
  const uint32_t remote = __ballot_sync(kFull, goes && travels_to(a, my_dest));
  if (k == 0) s->remote = remote;
  if (k >= a.num_topk) return;
  s->id[k] = m.id[k] = my_id < 0 ? -1 : my_id;
  s->weight[k] = m.weight[k] = use_early ? early.weight : weight_of(a, token * a.num_topk + k);
  s->key[k] = goes ? my_dest : -2;
  if (my_id >= 0 && same) atomicAdd(&m.pair[k], same);
}
/// Before find_places_plain(), and a barrier.
__device__ __forceinline__ void clear_places(const AnyDispatch auto& a, Token* s, const Meta& m, int32_t* own_row) {
  const int k = thread();
  if (k == 0) *own_row = -1;
  if (k < a.num_topk) s->row[k] = m.pair[k] = 0;
}

/// The same for any number of experts and ranks: a warp looks at one earlier token, a lane at one of its entries (and the 32nd after it).
__device__ __forceinline__ void count_earlier(const AnyDispatch auto& a, const Tables& t, Token* s, int token) {
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
__device__ __forceinline__ void find_places(const AnyDispatch auto& a, const Tables& t, Token* s, int64_t token) {
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
    const int id = id_of(a, i);
    s->id[k] = id < 0 ? -1 : id;
    s->weight[k] = weight_of(a, i);
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
  count_earlier(a, t, s, static_cast<int>(token));
}

/// What the source keeps of a token's routing.
__device__ __forceinline__ void write_routing(const AnyDispatch auto& a, const Tables& t, const Token* s, const int32_t* pair, int64_t token) {
  const int k = thread();
  if (a.cached || k >= a.num_topk) return;
  const int64_t i = token * a.num_topk + k;
  const Routing& r = a.routing;
  const int id = s->id[k];
  r.topk_idx[i] = id;
  r.dest[i] = id >= 0 ? t.owner[id] : -1;
  if (a.has_weights) r.topk_weights[i] = s->weight[k];
  r.send_index[i] = s->key[k] >= 0 ? s->row[k] : -1;
  r.pair_index[i] = id >= 0 ? pair[k] : -1;
  if (s->key[k] == a.common.team.rank) r.own_tokens[s->row[k]] = static_cast<int32_t>(token);
}

/// Builds the row of `token` in shared memory; `own_row` (shared) becomes its place in this rank's own list, -1 if it does not
/// stay here. The whole block calls it, with everything else in shared memory at rest, and synchronises before it reads `own_row`.
/// `meanwhile()` asks for something.
template <bool kPlain, class Meanwhile>
__device__ __forceinline__ void prepare_token(const AnyDispatch auto& a, const RowFormat& f, const Tables& t, Token* s, int64_t token,
                                              const Early& early, bool use_early, std::byte* row, int32_t* own_row, Meanwhile meanwhile) {
  const int k = thread();
  const Meta m = meta_of(a, f, row);
  const bool plain = kPlain && !a.cached;
  if (plain) {
    if (!use_early) {
      clear_places(a, s, m, own_row);
      __syncthreads();
    }
    find_places_plain(a, t, s, token, early, use_early, m);
  } else {
    if (k == 0) *own_row = -1;
    find_places(a, t, s, token);
  }
  meanwhile();
  if constexpr (kPlain) build_row_plain(a, f, token, early, use_early, row);
  else build_row(a, f, token, row);
  bulk_can_read();
  __syncthreads();
  if (k < a.num_topk && s->key[k] == a.common.team.rank) *own_row = s->row[k];
  if (plain) return;
  if (k < a.num_topk && !a.cached) {
    m.id[k] = s->id[k];
    m.pair[k] = s->pair[k];
    m.weight[k] = s->weight[k];
  }
  const unsigned remote = __ballot_sync(kFull, k < min(a.num_topk, 32) && s->key[k] >= 0 && travels_to(a, s->key[k]));
  if (k == 0) s->remote = remote;
  __syncthreads();
}

/// To all ranks that it travels to.
template <bool kPlain>
__device__ __forceinline__ void send_row(const AnyDispatch auto& a, const RowFormat& f, const Token* s, Call call, const std::byte* row) {
  const Common& c = a.common;
  const auto send = [&](int k) {
    auto* to = reinterpret_cast<uint4*>(c.team.base[s->key[k]] + c.arena.ll_dispatch_at(c.lane, call.copy, c.team.rank, s->row[k]));
    store_words(f, to, row, warp_id() * 32, f.num_words, num_threads(), call.epoch);
  };
  if constexpr (kPlain) {
#pragma unroll 1
    for (uint32_t left = s->remote; left; left &= left - 1) send(__ffs(static_cast<int>(left)) - 1);
  } else {
#pragma unroll 1
    for (int k = 0; k < a.num_topk; ++k) {
      if (s->key[k] >= 0 && travels_to(a, s->key[k])) send(k);
    }
  }
}

}  // namespace turnout::engine::cuda::low_latency
