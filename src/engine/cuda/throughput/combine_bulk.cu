// Combine of two-byte floats by bulk copies. In each block one warp looks up which rows come next (scout), one brings them to a ring in
// shared memory (loader), fourteen sum them, one announces what has been sent. A block first sums rows for other ranks and writes the
// partial sums to them; its own tokens come so much later that the partial sums of the others are here by then. Sums and roundings
// are those of combine.cu.
//
// Items are taken by ticket in ascending order, and a token's turn comes only when the partial sums that the others need up to there,
// and some more, have been taken before it in the same ring or by other blocks. So of all that wait, the block with the smallest token
// waits for a partial sum that nobody's wait holds up: no grid is too large for the SMs that are free.
#include <climits>

#include "engine/cuda/device/combine.cuh"
#include "engine/cuda/device/tickets.cuh"
#include "engine/cuda/kernels.h"
#include "engine/cuda/launch.h"
#include "engine/cuda/specialize.h"
#include "engine/cuda/throughput/bulk.h"

namespace turnout::engine::cuda {
namespace {

constexpr int kSummers = 14, kAnnouncer = kSummers, kLoader = kSummers + 1, kScout = kSummers + 2, kThreads = (kSummers + 3) * 32;
constexpr int kSumThreads = kSummers * 32;
constexpr int kMostStages = kMostCombineStages, kBatchItems = 8, kBatchPairs = 64, kPushRoom = 128;
constexpr int kAtOnce = 4;  ///< rows that the loader starts together: few, so that the ring never runs dry


#ifdef TURNOUT_HAS_BULK
enum Tag : uint32_t { kItemMask = 7, kRow = 8, kWeighted = 16, kEndPart = 32, kEndItem = 64, kPush = 128, kStop = 256 };

/// A row to add, and what to do after it.
struct Entry {
  const std::byte* row;
  const uint64_t* signal;  ///< to wait for first, or null
  float weight;
  uint32_t tag;
};
struct Batch {
  Entry entries[kBatchPairs + kBatchItems];
  std::byte* to[kBatchItems];
  uint32_t asked[kBatchItems], present[kBatchItems];  ///< own tokens: masks of k
  int token[kBatchItems];
  int num_entries, num_tokens, last;
};
struct Shared {
  alignas(8) uint64_t full[kMostStages];
  uint64_t empty[kMostStages];
  uint64_t batch_full[2], batch_empty[2];
  Batch batch[2];
  std::byte* to[kMostStages];
  float weight[kMostStages];
  uint32_t tag[kMostStages];
  uint32_t push_to[kPushRoom], push_mask[kPushRoom];  ///< rank << 25 | position, and the record's mask
  volatile uint32_t posted[kSummers], told, num_pushes, stopped;
  int32_t own_row[kBatchItems];
  int16_t part_rank[kBatchPairs];
  // Tables of the call.
  Offer offers[kMaxRanks];
  FactWords facts;
  int32_t begins[kMaxRanks + 1], sent[kMaxRanks], send_offset[kMaxRanks], record_begin[kMaxRanks];
};

template <bool kBf16>
struct Pair {
  static __device__ __forceinline__ float2 widen(uint32_t w) {
    if (kBf16) return {__uint_as_float(w << 16), __uint_as_float(w & 0xFFFF0000)};
    float2 f;
    asm("{.reg .b16 l,h; mov.b32 {l,h},%2; cvt.f32.f16 %0,l; cvt.f32.f16 %1,h;}" : "=f"(f.x), "=f"(f.y) : "r"(w));
    return f;
  }
  /// Rounded to nearest even; a NaN becomes the canonical one of core/dtype.h.
  static __device__ __forceinline__ uint32_t narrow(float2 f) {
    uint32_t w, nan;
    if (kBf16) {
      asm("cvt.rn.bf16x2.f32 %0,%1,%2;" : "=r"(w) : "f"(f.y), "f"(f.x));
      asm("set.nan.u32.bf16x2 %0,%1,%1;" : "=r"(nan) : "r"(w));
      return w ^ (nan & 0x003F003F);  // the hardware's is 7FFF
    }
    asm("cvt.rn.f16x2.f32 %0,%1,%2;" : "=r"(w) : "f"(f.y), "f"(f.x));
    asm("set.nan.u32.f16x2 %0,%1,%1;" : "=r"(nan) : "r"(w));
    return w ^ (nan & 0x01FF01FF);
  }
};

/// Ranks' rows in the order in which they are summed for: all sources in turn.
struct PushList {
  int others, most;
  __device__ PushList(const Shared& sh, int num_ranks, int me) : others(num_ranks - 1), most(0) {
    for (int s = 0; s < num_ranks; ++s) most = s == me ? most : max(most, sh.begins[s + 1] - sh.begins[s]);
  }
  __device__ int size() const { return others * most; }
};

class Scout {
 public:
  __device__ Scout(const CombineArgs& a, const CombineShape& p, Shared& sh, Call call)
      : a_(a), sh_(sh), call_(call), lead_(p.lead), k_(a.num_topk), me_(a.common.team.rank), ranks_(a.common.team.num_ranks) {}

  __device__ void run() {
    const PushList list(sh_, ranks_, me_);
    uint32_t* tickets = a_.common.lane_control->tickets[call_.copy];
    const int blocks = static_cast<int>(gridDim.x), most = min(kBatchItems, kBatchPairs / k_);
    Tickets push(tickets + kPushTicket, list.size(), blocks, most), own(tickets + kReduceTicket, static_cast<int>(a_.num_tokens), blocks, most);
    for (int n = 0;; ++n) {
      Batch& b = sh_.batch[n % 2];
      if (n >= 2) barrier_wait(&sh_.batch_empty[n % 2], static_cast<uint32_t>(n / 2 - 1) & 1);
      if (lane_id() == 0) b.num_entries = b.num_tokens = b.last = 0;
      __syncwarp();
      int taken = 0, item = -1;  // lane j holds the j-th item
      const bool tokens = may_own(own, push, list);
      while (taken < most && (tokens ? may_own(own, push, list) : push.peek() != INT_MAX)) {
        const int next = tokens ? own.take() : push.take();
        if (lane_id() == taken) item = next;
        ++taken;
      }
      const bool over = taken == 0 || sh_.stopped;
      if (over) {
        if (lane_id() == 0) b.last = 1;
      } else if (tokens) {
        own_batch(b, item, taken);
      } else {
        push_batch(b, list, item);
      }
      __syncwarp();
      if (lane_id() == 0) barrier_arrive(&sh_.batch_full[n % 2]);
      if (over) break;
    }
  }

 private:
  __device__ bool may_own(const Tickets& own, const Tickets& push, const PushList& list) const {
    const int token = own.peek(), ahead = push.peek();
    return token != INT_MAX && (ahead == INT_MAX || ahead >= (token + lead_) * list.others);
  }
  __device__ const std::byte* y_row(int64_t row) const { return a_.y + row * a_.y_stride; }
  __device__ uint32_t segment(uint64_t bits, int item) const { return static_cast<uint32_t>(bits >> (item * k_)) & (k_ == 32 ? ~0u : (1u << k_) - 1); }
  /// Exclusive prefix sum over the items' lanes; the total goes to num_entries.
  __device__ int entry_base(Batch& b, int count) const {
    int run = count;
    for (int d = 1; d < 32; d *= 2) {
      const int v = __shfl_up_sync(kFull, run, d);
      if (lane_id() >= d) run += v;
    }
    if (lane_id() == 31) b.num_entries = run;
    return run - count;
  }
  /// Of received row n, entry k: where its row of y is, or -1.
  __device__ int place_of(int64_t n, int k) const {
    return a_.layout == Layout::rank_major ? (__ldg(a_.routing.recv_idx + n * k_ + k) >= 0 ? static_cast<int>(n) : -1) : __ldg(a_.routing.position + n * k_ + k);
  }
  __device__ float weight_of(int64_t n, int k, int place) const {
    if (a_.apply == CombineWeights::rows) return weight_at(a_, place);
    return a_.apply == CombineWeights::source && a_.layout != Layout::rank_major ? __ldg(a_.routing.recv_weights + n * k_ + k) : 1.0f;
  }
  __device__ uint32_t weighted() const {
    return a_.apply == CombineWeights::rows || (a_.apply == CombineWeights::source && a_.layout != Layout::rank_major) ? kWeighted : 0;
  }
  /// Lookups of the received rows that the items' lanes hold (-1: none): a pair a lane, twice. Returns which pairs have a row.
  __device__ uint64_t look_up(int row, int (&place)[2], float (&weight)[2]) const {
    uint64_t bits = 0;
    int n[2];
    for (int h = 0; h < 2; ++h) {
      const int pair = h * 32 + lane_id(), item = pair / k_;
      n[h] = __shfl_sync(kFull, row, min(item, 31));
      if (item >= kBatchItems) n[h] = -1;
      place[h] = n[h] >= 0 ? place_of(n[h], pair % k_) : -1;
    }
    for (int h = 0; h < 2; ++h) {
      weight[h] = place[h] >= 0 ? weight_of(n[h], (h * 32 + lane_id()) % k_, place[h]) : 0.0f;
      bits |= static_cast<uint64_t>(__ballot_sync(kFull, place[h] >= 0)) << (h * 32);
    }
    return bits;
  }
  /// The terms of one rank for each item, behind `base` entries; the last has `end` in its tag.
  __device__ void put_terms(Batch& b, uint64_t bits, const int (&place)[2], const float (&weight)[2], int base, uint32_t end) const {
    const bool one = a_.layout == Layout::rank_major;  // one row for all k
    for (int h = 0; h < 2; ++h) {
      const int pair = h * 32 + lane_id(), item = pair / k_, k = pair % k_;
      const int begin = __shfl_sync(kFull, base, min(item, 31));
      const uint32_t ends = __shfl_sync(kFull, end, min(item, 31)), mine = segment(bits, min(item, kBatchItems - 1)), before = mine & ((1u << k) - 1);
      if (place[h] < 0 || (one && before)) continue;
      const bool last = one || (mine >> k) == 1;
      b.entries[begin + __popc(before)] = {y_row(place[h]), nullptr, weight[h], static_cast<uint32_t>(item) | kRow | weighted() | (last ? ends : 0)};
    }
  }

  __device__ void push_batch(Batch& b, const PushList& list, int item) {
    const int s = item < 0 ? 0 : (me_ + 1 + item % max(list.others, 1)) % ranks_, i = item < 0 ? 0 : item / max(list.others, 1);
    const int row = item >= 0 && sh_.begins[s] + i < sh_.begins[s + 1] ? sh_.begins[s] + i : -1;
    const unsigned pushes = __ballot_sync(kFull, row >= 0);
    while (num_pushes_ + kBatchItems - sh_.told > kPushRoom && !sh_.stopped) {
    }
    int place[2];
    float weight[2];
    const uint64_t bits = look_up(row, place, weight);
    const uint32_t mask = row >= 0 ? segment(bits, lane_id()) : 0;
    const int terms = a_.layout == Layout::rank_major ? mask != 0 : __popc(mask);
    const int base = entry_base(b, row >= 0 ? max(terms, 1) : 0);
    if (row >= 0) {
      std::byte* record = offered_block(a_.common, s, sh_.offers[s]) + (sh_.record_begin[s] + i) * a_.record_bytes;
      b.to[lane_id()] = record;
      *reinterpret_cast<uint64_t*>(record + a_.mask_offset) = mask;
      const uint32_t at = (num_pushes_ + static_cast<uint32_t>(__popc(pushes & ((1u << lane_id()) - 1)))) % kPushRoom;
      sh_.push_to[at] = static_cast<uint32_t>(s) << 25 | static_cast<uint32_t>(i);
      sh_.push_mask[at] = mask;
      if (!mask) b.entries[base] = {nullptr, nullptr, 1.0f, static_cast<uint32_t>(lane_id()) | kEndItem | kPush};
    }
    put_terms(b, bits, place, weight, base, kEndPart | kEndItem | kPush);
    num_pushes_ += static_cast<uint32_t>(__popc(pushes));
  }

  __device__ void own_batch(Batch& b, int token, int num_tokens) {
    // Parts of the tokens: a pair a lane, twice.
    uint64_t asked = 0, remote = 0;
    int rank[2], at[2];
    if (lane_id() < kBatchItems) sh_.own_row[lane_id()] = -1;
    __syncwarp();
    for (int h = 0; h < 2; ++h) {
      const int pair = h * 32 + lane_id(), item = pair / k_;
      const int64_t t = __shfl_sync(kFull, token, min(item, 31));
      const bool real = item < num_tokens;
      const int d = real ? __ldg(a_.routing.dest + t * k_ + pair % k_) : -1, i = real ? __ldg(a_.routing.send_index + t * k_ + pair % k_) : -1;
      const bool part = i >= 0 && i < sh_.sent[d];
      asked |= static_cast<uint64_t>(__ballot_sync(kFull, d >= 0)) << (h * 32);
      remote |= static_cast<uint64_t>(__ballot_sync(kFull, part && d != me_)) << (h * 32);
      rank[h] = part && d != me_ ? d : -1;
      at[h] = i;
      sh_.part_rank[pair] = static_cast<int16_t>(rank[h]);
      if (part && d == me_) sh_.own_row[item] = sh_.begins[me_] + i;
    }
    __syncwarp();
    int place[2];
    float weight[2];
    const bool real = lane_id() < num_tokens;
    const uint64_t bits = look_up(real ? sh_.own_row[lane_id()] : -1, place, weight);
    const uint32_t mine = real ? segment(bits, lane_id()) : 0;
    const int own = a_.layout == Layout::rank_major ? mine != 0 : __popc(mine), others = real ? __popc(segment(remote, lane_id())) : 0;
    const int base = entry_base(b, real ? max(own + others, 1) : 0);
    int earlier = 0;  // parts of ranks before this one
    for (int k = 0; real && k < k_; ++k) {
      const int d = sh_.part_rank[lane_id() * k_ + k];
      earlier += d >= 0 && d < me_;
    }
    if (real) {
      b.to[lane_id()] = a_.out + token * a_.out_stride;
      b.token[lane_id()] = token;
      b.asked[lane_id()] = segment(asked, lane_id());
      b.present[lane_id()] = mine;
      if (own + others == 0) b.entries[base] = {nullptr, nullptr, 1.0f, static_cast<uint32_t>(lane_id()) | kEndItem};
    }
    if (lane_id() == 0) b.num_tokens = num_tokens;
    put_terms(b, bits, place, weight, base + earlier, kEndPart | (earlier == others ? kEndItem : 0));
    put_parts(b, rank, at, base, own, own + others);
  }
  /// Partial sums of other ranks, in the order of ranks.
  __device__ void put_parts(Batch& b, const int (&rank)[2], const int (&at)[2], int base, int own, int count) const {
    const std::byte* block = a_.common.team.base[me_] + a_.block;
    for (int h = 0; h < 2; ++h) {
      const int pair = h * 32 + lane_id(), item = min(pair / k_, 31);
      const int begin = __shfl_sync(kFull, base, item), own_terms = __shfl_sync(kFull, own, item), all = __shfl_sync(kFull, count, item);
      if (rank[h] < 0) continue;
      int nth = rank[h] > me_ ? own_terms : 0;
      for (int j = item * k_; j < (item + 1) * k_; ++j) nth += sh_.part_rank[j] >= 0 && sh_.part_rank[j] < rank[h];
      const std::byte* signal = a_.common.team.base[me_] + a_.common.arena.row_at(a_.common.lane, call_.copy, rank[h], at[h]);
      b.entries[begin + nth] = {block + (sh_.send_offset[rank[h]] + at[h]) * a_.record_bytes, reinterpret_cast<const uint64_t*>(signal), 1.0f,
                                static_cast<uint32_t>(item) | kRow | kEndPart | (nth == all - 1 ? kEndItem : 0)};
    }
  }

  const CombineArgs& a_;
  Shared& sh_;
  Call call_;
  int lead_, k_, me_, ranks_;
  uint32_t num_pushes_ = 0;
};

class Loader {
 public:
  __device__ Loader(const CombineArgs& a, const CombineShape& p, Shared& sh, std::byte* ring, Call call) : a_(a), p_(p), sh_(sh), ring_(ring), call_(call) {}

  __device__ void run() {
    bool good = true;
    for (int n = 0;; ++n) {
      Batch& b = sh_.batch[n % 2];
      barrier_wait(&sh_.batch_full[n % 2], static_cast<uint32_t>(n / 2) & 1);
      if (b.last) break;
      look(b);
      for (int first = 0; good && first < b.num_entries; first += kAtOnce) good = issue(b, first);
      __syncwarp();
      if (good && lane_id() < b.num_tokens) a_.num_lost[b.token[lane_id()]] = __popc(b.asked[lane_id()] & ~b.present[lane_id()]);
      if (!good) sh_.stopped = 1;  // the scout need not go on
      __syncwarp();
      if (lane_id() == 0) barrier_arrive(&sh_.batch_empty[n % 2]);
    }
    if (lane_id() == 0) {
      wait_slot(num_issued_);
      const int slot = num_issued_ % p_.stages;
      sh_.tag[slot] = kStop;
      barrier_expect(&sh_.full[slot], 0);
      sh_.num_pushes = num_pushes_;
    }
  }

 private:
  __device__ void wait_slot(int m) {
    if (m >= p_.stages) barrier_wait(&sh_.empty[m % p_.stages], static_cast<uint32_t>(m / p_.stages - 1) & 1);
  }
  __device__ void start(int slot, const Entry& e, const Batch& b) {
    sh_.tag[slot] = e.tag;
    sh_.weight[slot] = e.weight;
    sh_.to[slot] = b.to[e.tag & kItemMask];
    const auto bytes = static_cast<uint32_t>(a_.hidden * 2);
    barrier_expect(&sh_.full[slot], e.tag & kRow ? bytes : 0);
    if (e.tag & kRow) bulk_load(ring_ + static_cast<int64_t>(slot) * p_.stage_bytes, e.row, bytes, &sh_.full[slot]);
  }
  /// What has arrived already need not be asked for again, entry by entry.
  __device__ void look(Batch& b) {
    bool any = false;
    for (int i = lane_id(); i < b.num_entries; i += 32) {
      Entry& e = b.entries[i];
      if (!e.signal) continue;
      const uint64_t v = load_acquire(e.signal);
      if (static_cast<uint32_t>(v >> 32) != call_.epoch) continue;
      const auto mask = static_cast<uint32_t>(v);
      atomicOr(&b.present[e.tag & kItemMask], mask);
      if (!mask) e.tag &= ~kRow;  // the other rank dropped all of them
      e.signal = nullptr;
      any = true;
    }
    if (__any_sync(kFull, any)) fence_global_to_bulk();
    __syncwarp();
  }
  /// A few entries, a lane each: those that are here, then those that must arrive. False: given up.
  __device__ bool issue(Batch& b, int first) {
    const int n = min(kAtOnce, b.num_entries - first), m = num_issued_ + lane_id(), slot = m % p_.stages;
    const bool mine = lane_id() < n;
    Entry e{};
    if (mine) {
      e = b.entries[first + lane_id()];
      wait_slot(m);
    }
    __syncwarp();
    if (mine && !e.signal) start(slot, e, b);
    __syncwarp();
    bool good = true;
    uint32_t mask = 0;
    if (mine && e.signal) {
      const int peer = peer_of(e.signal);
      good = wait_signal(a_.common, Phase::partials, peer, call_.epoch, true, e.signal, &mask);
    }
    if (!__all_sync(kFull, good)) {
      // What was started before this entry stays in order: the ring must have no gap.
      if (mine && e.signal) {
        e.tag &= ~kRow;
        start(slot, e, b);
      }
    } else if (mine && e.signal) {
      atomicOr(&b.present[e.tag & kItemMask], mask);
      if (!mask) e.tag &= ~kRow;  // the other rank dropped all of them
      fence_global_to_bulk();
      start(slot, e, b);
    }
    num_pushes_ += static_cast<uint32_t>(__popc(__ballot_sync(kFull, mine && (e.tag & kPush))));
    num_issued_ += n;
    return __all_sync(kFull, good);
  }
  __device__ int peer_of(const uint64_t* signal) const {
    const Common& c = a_.common;
    const auto at = static_cast<size_t>(reinterpret_cast<const std::byte*>(signal) - c.team.base[c.team.rank]) - c.arena.row_at(c.lane, call_.copy, 0, 0);
    return static_cast<int>(at / (static_cast<size_t>(c.arena.max_tokens) * 8));
  }

  const CombineArgs& a_;
  const CombineShape& p_;
  Shared& sh_;
  std::byte* ring_;
  Call call_;
  int num_issued_ = 0;
  uint32_t num_pushes_ = 0;
};

/// Fourteen warps; a thread sums 8 elements at each of kEach places of a row.
template <bool kBf16, int kEach>
__device__ void sum_rows(const CombineArgs& a, const CombineShape& p, Shared& sh, const std::byte* ring) {
  const int tid = static_cast<int>(threadIdx.x), words = static_cast<int>(a.hidden / 8);
  float2 part[kEach][4] = {}, total[kEach][4] = {};
  bool has_part = false, has_total = false;
  uint32_t pushed = 0, phase = 0;
  for (int slot = 0;;) {
    barrier_wait(&sh.full[slot], phase);
    const uint32_t tag = sh.tag[slot];
    if (tag & kStop) return;
    const float weight = tag & kWeighted ? sh.weight[slot] : 1.0f;
    std::byte* to = sh.to[slot];
    if (tag & kRow) {
#pragma unroll
      for (int j = 0; j < kEach; ++j) {
        if (tid + j * kSumThreads >= words) break;
        const uint4 v = reinterpret_cast<const uint4*>(ring + static_cast<int64_t>(slot) * p.stage_bytes)[tid + j * kSumThreads];
        const uint32_t w[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          float2 f = Pair<kBf16>::widen(w[i]);
          if (tag & kWeighted) f = {__fmul_rn(f.x, weight), __fmul_rn(f.y, weight)};
          part[j][i] = has_part ? float2{__fadd_rn(part[j][i].x, f.x), __fadd_rn(part[j][i].y, f.y)} : f;
        }
      }
      has_part = true;
    }
    __syncwarp();
    if (lane_id() == 0) barrier_arrive(&sh.empty[slot]);
    if (++slot == p.stages) slot = 0, phase ^= 1;
    if ((tag & kEndPart) && has_part) {
#pragma unroll
      for (int j = 0; j < kEach; ++j) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float2 f = Pair<kBf16>::widen(Pair<kBf16>::narrow(part[j][i]));
          total[j][i] = has_total ? float2{__fadd_rn(total[j][i].x, f.x), __fadd_rn(total[j][i].y, f.y)} : f;
        }
      }
      has_part = false;
      has_total = true;
    }
    if (!(tag & kEndItem)) continue;
    if (has_total || !(tag & kPush)) {
#pragma unroll
      for (int j = 0; j < kEach; ++j) {
        if (tid + j * kSumThreads >= words) break;
        uint32_t w[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) w[i] = has_total ? Pair<kBf16>::narrow(total[j][i]) : 0;
        store_stream(reinterpret_cast<uint4*>(to) + tid + j * kSumThreads, uint4{w[0], w[1], w[2], w[3]});
      }
    }
    has_total = false;
    if (!(tag & kPush)) continue;
    __syncwarp();
    if (lane_id() == 0) {
      __threadfence_block();
      sh.posted[warp_id()] = ++pushed;
    }
  }
}

/// Tells the other ranks of partial sums that all summers have written. A system fence waits for the stores of its SM: none of them
/// executes one.
__device__ void announce(const CombineArgs& a, Shared& sh, Call call) {
  const Common& c = a.common;
  uint32_t told = 0;
  for (;;) {
    const uint32_t total = sh.num_pushes, have = __reduce_min_sync(kFull, lane_id() < kSummers ? sh.posted[lane_id()] : ~0u);
    if (have != told) {
      __threadfence_block();
      fence_system();
      for (uint32_t i = told + static_cast<uint32_t>(lane_id()); i < have; i += 32) {
        const uint32_t to = sh.push_to[i % kPushRoom];
        std::byte* p = c.team.base[to >> 25] + c.arena.row_at(c.lane, call.copy, c.team.rank, to & ((1u << 25) - 1));
        store_relaxed(reinterpret_cast<uint64_t*>(p), signal_of(call.epoch, sh.push_mask[i % kPushRoom]));
      }
      told = have;
      __syncwarp();
      if (lane_id() == 0) sh.told = told;
    }
    if (__all_sync(kFull, told == total)) return;
  }
}

__device__ bool set_up(const CombineArgs& a, const CombineShape& p, Shared& sh, Call call) {
  const Common& c = a.common;
  const int tid = static_cast<int>(threadIdx.x);
  for (int r = tid; r <= c.team.num_ranks; r += kThreads) {
    sh.begins[r] = a.routing.recv_begin[r];
    if (r == c.team.num_ranks) break;
    sh.sent[r] = a.routing.sent[r];
    sh.send_offset[r] = a.routing.send_offset[r];
    sh.record_begin[r] = a.routing.record_begin[r];
  }
  if (tid < p.stages) barrier_init(&sh.full[tid], 1), barrier_init(&sh.empty[tid], kSummers);
  if (tid < 2) barrier_init(&sh.batch_full[tid], 1), barrier_init(&sh.batch_empty[tid], 1);
  if (tid < kSummers) sh.posted[tid] = 0;
  if (tid == 0) sh.told = 0, sh.num_pushes = ~0u, sh.stopped = 0;
  fence_shared_to_bulk();
  if (!__syncthreads_and(!is_over(c, call))) return false;
  return start_call(a, call, take_role(c, call, kRoleTicket), sh.offers, &sh.facts);
}
#endif

template <bool kBf16, int kEach>
__global__ void __launch_bounds__(kThreads, 1) bulk_combine_kernel(const __grid_constant__ CombineArgs a, const __grid_constant__ CombineShape p) {
#ifdef TURNOUT_HAS_BULK
  extern __shared__ __align__(128) std::byte ring[];
  __shared__ Shared sh;
  const Common& c = a.common;
  const Call call = call_of(c);
  if (set_up(a, p, sh, call)) {
    if (warp_id() == kScout) Scout(a, p, sh, call).run();
    else if (warp_id() == kLoader) Loader(a, p, sh, ring, call).run();
    else if (warp_id() == kAnnouncer) announce(a, sh, call);
    else sum_rows<kBf16, kEach>(a, p, sh, ring);
  }
  if (__syncthreads_or(is_over(c, call))) {
    poison(a, static_cast<int64_t>(blockIdx.x) * num_warps() + warp_id(), static_cast<int64_t>(gridDim.x) * num_warps());
  }
  __syncthreads();
  if (c.last_of_send) advance_epoch(c, call.epoch);
#endif
}

using Kernel = void (*)(CombineArgs, CombineShape);
template <bool kBf16>
Kernel kernel_of(int each) {
  return each == 1 ? bulk_combine_kernel<kBf16, 1> : each == 2 ? bulk_combine_kernel<kBf16, 2> : bulk_combine_kernel<kBf16, 3>;
}
int each_of(int64_t hidden) {
  const int64_t n = (hidden / 8 + kSumThreads - 1) / kSumThreads;
  return n <= 3 ? static_cast<int>(n) : 0;
}
bool aligned(const void* p, int64_t a) { return (reinterpret_cast<uintptr_t>(p) | static_cast<uintptr_t>(a)) % 16 == 0; }

}  // namespace

bool can_combine_bulk(const CombineArgs& a) {
  if (!has_bulk() || (a.dtype != DType::bf16 && a.dtype != DType::fp16) || a.wire != Wire::payload || a.side || a.node_of_rank) return false;
  if (a.num_topk > 32 || a.num_tokens >= 1 << 24 || a.hidden % 8 != 0 || a.hidden < 8 || each_of(a.hidden) == 0) return false;
  return aligned(a.y, a.y_stride) && aligned(a.out, a.out_stride) && combine_shape(a).stages >= kAtOnce + 2;
}

cudaError_t launch_combine_bulk(const CombineArgs& a, int blocks, cudaStream_t stream) {
  const Kernel kernel = a.dtype == DType::bf16 ? kernel_of<true>(each_of(a.hidden)) : kernel_of<false>(each_of(a.hidden));
  return launch_kernel(kernel, blocks, kThreads, kRingBytes, stream, false, a, combine_shape(a));
}

cudaError_t prepare_combine_bulk() {
  for (const int each : {1, 2, 3}) {
    for (const Kernel kernel : {kernel_of<true>(each), kernel_of<false>(each)}) {
      cudaFuncAttributes unused;
      const auto* address = reinterpret_cast<const void*>(kernel);
      const cudaError_t bad = has_bulk() ? cudaFuncSetAttribute(address, cudaFuncAttributeMaxDynamicSharedMemorySize, kRingBytes)
                                         : cudaFuncGetAttributes(&unused, address);
      if (bad) return bad;
    }
  }
  return cudaSuccess;
}

}  // namespace turnout::engine::cuda
