// Partial sums that are rows of y as they are: of rows by rank without weights the expert side has nothing to add, so one warp sends them
// through shared memory by bulk copies, and the other warps have their time for own tokens. (A NaN's bits cross as they are; whoever
// receives it rounds.) This warp waits for no rank: what own tokens of others wait for is never held up by own tokens, so neither needs
// to be ahead.
#pragma once
#include "engine/cuda/device/bulk_rows.cuh"
#include "engine/cuda/throughput/combine_scout.cuh"

namespace turnout::engine::cuda::bulk {

#ifdef TURNOUT_HAS_BULK
class Pusher {
 public:
  /// `ring`: p.push_stages stages.
  __device__ Pusher(const CombineArgs& a, const CombineShape& p, Shared& sh, std::byte* ring, Call call)
      : a_(a), p_(p), sh_(sh), ring_(ring), call_(call), ahead_((p.push_stages + 1) / 2) {}

  __device__ void run() {
    const PushList list(sh_, a_.common.team.num_ranks, a_.common.team.rank);
    Tickets tickets(a_.common.lane_control->tickets[call_.copy] + kPushTicket, list.size(), static_cast<int>(gridDim.x), p_.batch, kLeastRun);
    for (;;) {
      int item = -1, taken = 0;  // lane j holds the j-th item
      while (taken < p_.batch) {
        const int next = tickets.take();
        if (next < 0) break;
        if (lane_id() == taken) item = next;
        ++taken;
      }
      if (taken == 0 || __any_sync(kFull, sh_.stopped != 0)) break;
      push(list, item, taken);
    }
    while (stored_ < issued_) store();
    bulk_wait<0>();
    if (lane_id() == 0) {
      __threadfence_block();
      sh_.posted[0] = stored_;
      sh_.num_pushes = issued_;
    }
  }

 private:
  static constexpr int kUnderWay = 4;  ///< stores that may be incomplete when the row before them is announced

  __device__ void push(const PushList& list, int item, int taken) {
    const int ranks = a_.common.team.num_ranks, s = item < 0 ? 0 : (a_.common.team.rank + 1 + item % list.others) % ranks;
    const int i = item < 0 ? 0 : item / list.others;
    const int row = item >= 0 && sh_.begins[s] + i < sh_.begins[s + 1] ? sh_.begins[s] + i : -1;
    std::byte* record = row < 0 ? nullptr : offered_block(a_.common, s, sh_.offers[s]) + (sh_.record_begin[s] + i) * a_.record_bytes;
    const unsigned rows = __ballot_sync(kFull, row >= 0);
    const uint32_t first = issued_;
    while (issued_ + kBatchItems - sh_.told > kPushRoom) {
    }
    for (int j = 0; j < taken; ++j) {
      const int from = __shfl_sync(kFull, row, j);
      const auto to = __shfl_sync(kFull, reinterpret_cast<unsigned long long>(record), j);
      if (from >= 0) load(from, reinterpret_cast<std::byte*>(to));
      // What is told beside the rows is looked up while the first of them comes; none is posted before.
      if (j == 0 && row >= 0) tell(s, i, row, record, first + static_cast<uint32_t>(__popc(rows & ((1u << lane_id()) - 1))));
      __syncwarp();
    }
  }
  __device__ void tell(int s, int i, int row, std::byte* record, uint32_t at) {
    uint32_t mask = 0;
#pragma unroll 8
    for (int k = 0; k < a_.num_topk; ++k) mask |= (__ldg(a_.routing.recv_idx + static_cast<int64_t>(row) * a_.num_topk + k) >= 0 ? 1u : 0u) << k;
    *reinterpret_cast<uint64_t*>(record + a_.mask_offset) = mask;
    sh_.push_to[at % kPushRoom] = static_cast<uint32_t>(s) << 25 | static_cast<uint32_t>(i);
    sh_.push_mask[at % kPushRoom] = mask;
  }

  __device__ void load(int row, std::byte* to) {
    if (issued_ - stored_ == static_cast<uint32_t>(ahead_)) store();
    if (lane_id() == 0) {
      bulk_wait_read_at_most(p_.push_stages - ahead_);
      uint64_t* full = &sh_.push_full[in_];
      const auto bytes = static_cast<uint32_t>(a_.hidden * 2);
      sh_.push_record[in_] = to;
      barrier_expect(full, bytes);
      bulk_load(ring_ + static_cast<int64_t>(in_) * p_.stage_bytes, a_.y + row * a_.y_stride, bytes, full);
    }
    __syncwarp();
    in_ = in_ + 1 == p_.push_stages ? 0 : in_ + 1;
    ++issued_;
  }
  __device__ void store() {
    ++stored_;
    if (lane_id() == 0) {
      barrier_wait(&sh_.push_full[out_], phase_);
      bulk_store(sh_.push_record[out_], ring_ + static_cast<int64_t>(out_) * p_.stage_bytes, static_cast<uint32_t>(a_.hidden * 2));
      bulk_commit();
      bulk_wait<kUnderWay>();  // complete copies are visible to the thread that waits
      if (stored_ > kUnderWay) {
        __threadfence_block();
        sh_.posted[0] = stored_ - kUnderWay;
      }
    }
    __syncwarp();
    out_ = out_ + 1 == p_.push_stages ? 0 : out_ + 1;
    phase_ ^= out_ == 0;
  }

  const CombineArgs& a_;
  const CombineShape& p_;
  Shared& sh_;
  std::byte* ring_;
  Call call_;
  int ahead_, in_ = 0, out_ = 0;
  uint32_t issued_ = 0, stored_ = 0, phase_ = 0;
};
#endif

}  // namespace turnout::engine::cuda::bulk
