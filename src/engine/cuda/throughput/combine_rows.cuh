// The warps of a combine by bulk copies that bring rows to shared memory and sum them.
#pragma once
#include "engine/cuda/throughput/combine_scout.cuh"

namespace turnout::engine::cuda::bulk {

#ifdef TURNOUT_HAS_BULK
class Loader {
 public:
  __device__ Loader(const CombineArgs& a, const CombineShape& p, Shared& sh, std::byte* ring, Call call)
      : a_(a), p_(p), sh_(sh), ring_(ring), call_(call) {}

  __device__ void run() {
    bool good = true;
    for (int n = 0;; ++n) {
      Batch& b = sh_.batch[n % 2];
      barrier_wait(&sh_.batch_full[n % 2], static_cast<uint32_t>(n / 2) & 1);
      if (b.last) break;
      if (p_.push_stages) good = await(b);
      else look(b);
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
      if (!p_.push_stages) sh_.num_pushes = num_pushes_;
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
  /// Nothing is ahead of what comes: until all of the batch is here, and one fence for it, in the time of the rows in the ring. False: given up.
  __device__ bool await(Batch& b) {
    bool any = false, good = true;
    for (int i = lane_id(); i < b.num_entries; i += 32) {
      Entry& e = b.entries[i];
      if (!e.signal) continue;
      uint32_t mask = 0;
      good = good && wait_signal(a_.common, Phase::partials, peer_of(e.signal), call_.epoch, true, e.signal, &mask);
      atomicOr(&b.present[e.tag & kItemMask], mask);
      if (!mask) e.tag &= ~kRow;
      e.signal = nullptr;
      any = true;
    }
    if (__any_sync(kFull, any)) fence_global_to_bulk();
    __syncwarp();
    return __all_sync(kFull, good);
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
    const auto at =
        static_cast<size_t>(reinterpret_cast<const std::byte*>(signal) - c.team.base[c.team.rank]) - c.arena.row_at(c.lane, call_.copy, 0, 0);
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
  /// narrow(widen(w)).
  static __device__ __forceinline__ uint32_t canonical(uint32_t w) {
    uint32_t nan;
    if (kBf16) asm("set.nan.u32.bf16x2 %0,%1,%1;" : "=r"(nan) : "r"(w));
    else asm("set.nan.u32.f16x2 %0,%1,%1;" : "=r"(nan) : "r"(w));
    return (w & ~nan) | (nan & (kBf16 ? 0x7FC07FC0 : 0x7E007E00));
  }
};

/// Fourteen warps; a thread sums 8 elements at each of kEach places of a row. `part_` is what one rank has added so far, `total_` what
/// the ranks before it have. A part of one row without weight needs no rounding, and an item of one such part is a copy.
template <bool kBf16, int kEach>
class Summer {
 public:
  __device__ Summer(const CombineArgs& a) : words_(static_cast<int>(a.hidden / 8)) {}

  __device__ void run(const CombineShape& p, Shared& sh, const std::byte* ring) {
    uint32_t pushed = 0, phase = 0;
    for (int slot = 0;;) {
      barrier_wait(&sh.full[slot], phase);
      const uint32_t tag = sh.tag[slot];
      if (tag & kStop) return;
      std::byte* to = sh.to[slot];
      const bool written = take(tag, sh.weight[slot], reinterpret_cast<const uint4*>(ring + static_cast<int64_t>(slot) * p.stage_bytes), to);
      __syncwarp();
      if (lane_id() == 0) barrier_arrive(&sh.empty[slot]);
      if (++slot == p.stages) slot = 0, phase ^= 1;
      if ((tag & kEndPart) && has_part_) end_part();
      if (!(tag & kEndItem)) continue;
      if (!written && (has_total_ || !(tag & kPush))) write(to);
      has_total_ = false;
      if (!(tag & kPush)) continue;
      __syncwarp();
      if (lane_id() == 0) {
        __threadfence_block();
        sh.posted[warp_id()] = ++pushed;
      }
    }
  }

 private:
  /// What `f` does at each of the thread's places: f(j, place).
  template <class F>
  __device__ __forceinline__ void at_places(F f) const {
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
      const int at = static_cast<int>(threadIdx.x) + j * kSumThreads;
      if (at < words_) f(j, at);
    }
  }
  template <bool kFirst, bool kWeigh>
  __device__ __forceinline__ void add(float2 (&sum)[kEach][4], const uint4* row, float weight) {
    at_places([&](int j, int at) {
      const uint4 v = row[at];
      const uint32_t w[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float2 f = Pair<kBf16>::widen(w[i]);
        if (kWeigh) f = {__fmul_rn(f.x, weight), __fmul_rn(f.y, weight)};
        sum[j][i] = kFirst ? f : float2{__fadd_rn(sum[j][i].x, f.x), __fadd_rn(sum[j][i].y, f.y)};
      }
    });
  }
  /// Returns whether the item has been written already.
  __device__ __forceinline__ bool take(uint32_t tag, float weight, const uint4* row, std::byte* to) {
    if (!(tag & kRow)) return false;
    if (tag & kWeighted) {
      has_part_ ? add<false, true>(part_, row, weight) : add<true, true>(part_, row, weight);
      has_part_ = true;
    } else if (has_part_ || !(tag & kEndPart)) {
      has_part_ ? add<false, false>(part_, row, 1.0f) : add<true, false>(part_, row, 1.0f);
      has_part_ = true;
    } else if (has_total_ || !(tag & kEndItem)) {
      has_total_ ? add<false, false>(total_, row, 1.0f) : add<true, false>(total_, row, 1.0f);
      has_total_ = true;
    } else {
      at_places([&](int, int at) {
        const uint4 v = row[at];
        using P = Pair<kBf16>;
        store_stream(reinterpret_cast<uint4*>(to) + at, uint4{P::canonical(v.x), P::canonical(v.y), P::canonical(v.z), P::canonical(v.w)});
      });
      return true;
    }
    return false;
  }
  __device__ __forceinline__ void end_part() {
    at_places([&](int j, int) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 f = Pair<kBf16>::widen(Pair<kBf16>::narrow(part_[j][i]));
        total_[j][i] = has_total_ ? float2{__fadd_rn(total_[j][i].x, f.x), __fadd_rn(total_[j][i].y, f.y)} : f;
      }
    });
    has_part_ = false;
    has_total_ = true;
  }
  __device__ __forceinline__ void write(std::byte* to) {
    at_places([&](int j, int at) {
      uint32_t w[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) w[i] = has_total_ ? Pair<kBf16>::narrow(total_[j][i]) : 0;
      store_stream(reinterpret_cast<uint4*>(to) + at, uint4{w[0], w[1], w[2], w[3]});
    });
  }

  int words_;
  float2 part_[kEach][4] = {}, total_[kEach][4] = {};
  bool has_part_ = false, has_total_ = false;
};
#endif

}  // namespace turnout::engine::cuda::bulk
