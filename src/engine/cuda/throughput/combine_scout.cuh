// What the warps of a block share in a combine by bulk copies, and the warp that looks up which rows come next.
#pragma once
#include <climits>

#include "engine/cuda/device/combine.cuh"
#include "engine/cuda/device/tickets.cuh"
#include "engine/cuda/specialize.h"

namespace turnout::engine::cuda::bulk {

inline constexpr int kSummers = 14, kThreads = (kSummers + 4) * 32, kSumThreads = kSummers * 32;

#ifdef TURNOUT_HAS_BULK
inline constexpr int kAnnouncer = kSummers, kLoader = kSummers + 1, kScout = kSummers + 2, kPusher = kSummers + 3;
inline constexpr int kMostStages = kMostCombineStages, kBatchItems = 8, kBatchPairs = 64, kPushRoom = 128;
inline constexpr int kLeastRun = 2;
inline constexpr int kAtOnce = 4;  ///< rows that the loader starts together: few, so that the ring never runs dry

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
  uint64_t push_full[kMostPushStages];  ///< of the pusher's own ring
  std::byte* push_record[kMostPushStages];
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
      : a_(a),
        sh_(sh),
        call_(call),
        lead_(p.lead),
        batch_(p.batch),
        pushes_(p.push_stages == 0),
        k_(a.num_topk),
        me_(a.common.team.rank),
        ranks_(a.common.team.num_ranks) {}

  __device__ void run() {
    const PushList list(sh_, ranks_, me_);
    uint32_t* tickets = a_.common.lane_control->tickets[call_.copy];
    const int blocks = static_cast<int>(gridDim.x), most = min(batch_, kBatchPairs / k_);
    Tickets push, own(tickets + kReduceTicket, static_cast<int>(a_.num_tokens), blocks, most, pushes_ ? 1 : min(kLeastRun, most));
    if (pushes_) push = Tickets(tickets + kPushTicket, list.size(), blocks, most);
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
  __device__ uint32_t segment(uint64_t bits, int item) const {
    return static_cast<uint32_t>(bits >> (item * k_)) & (k_ == 32 ? ~0u : (1u << k_) - 1);
  }
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
    return a_.layout == Layout::rank_major ? (__ldg(a_.routing.recv_idx + n * k_ + k) >= 0 ? static_cast<int>(n) : -1)
                                           : __ldg(a_.routing.position + n * k_ + k);
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
  int lead_, batch_;
  bool pushes_;  ///< not another warp
  int k_, me_, ranks_;
  uint32_t num_pushes_ = 0;
};
#endif

}  // namespace turnout::engine::cuda::bulk
