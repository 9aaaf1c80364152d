// Rows of a dispatch by bulk copies (TMA). Straight: every block sends; a few threads drive rings of rows, who copies a row is
// decided by ticket. Else a few blocks only send, so that the fences of their announcers wait for the link alone and rows arrive
// early; all others lay rows out as they arrive, and their own rank's rows from x, which wait for nobody's rows: with the padding they
// fill the time until the first rows come. The bits are those of move.cu.
#define TURNOUT_WAITS_CALL 1
#include "engine/cuda/kernels.h"
#include "engine/cuda/launch.h"
#include "engine/cuda/throughput/bulk.h"
#include "engine/cuda/throughput/move_send.cuh"
#include "engine/cuda/throughput/places.cuh"
#include "engine/cuda/throughput/take_rows.cuh"

namespace turnout::engine::cuda {
namespace {

using move::kThreads;

#ifdef TURNOUT_HAS_BULK
using namespace move;

/// Lays out one row at all its places; lane k knows the k-th (and the one 32 further).
__device__ __forceinline__ void place_stage(const DispatchArgs& a, const MoveShape& p, const std::byte* stage, const int (&to)[2]) {
  const uint64_t policy = evict_first_policy();
  // What lies beside rows shares lines with its neighbours, which come later: those lines stay in L2 until they are full.
  for (int h = 0; h < 2; ++h) {
    if (to[h] < 0) continue;
    bulk_store(a.out_x + to[h] * a.out_stride, stage, static_cast<uint32_t>(a.x_bytes), policy);
    if (a.scale_bytes) bulk_store(a.out_scales + to[h] * a.scale_bytes, stage + p.scales_at, static_cast<uint32_t>(a.scale_bytes));
#pragma unroll 1
    for (int s = 0; s < a.num_side; ++s) {
      bulk_store(a.side[s].out + static_cast<int64_t>(to[h]) * a.side[s].bytes, stage + p.side_at[s], static_cast<uint32_t>(a.side[s].bytes));
    }
  }
}

/// Where entries k and k + 32 of a row go, k being the lane, once the admit kernel has placed all pairs.
__device__ __forceinline__ void find_places(const DispatchArgs& a, int row, int (&to)[2]) {
  to[0] = lane_id() == 0 ? row : -1;
  to[1] = -1;
  if (a.layout == Layout::rank_major) return;
  for (int h = 0; h < 2; ++h) {
    const int k = h * 32 + lane_id();
    to[h] = k < a.num_topk ? __ldcg(a.routing.position + static_cast<int64_t>(row) * a.num_topk + k) : -1;
  }
}

/// A warp that lays out rows: its part of the ring. Where that begins is worked out when it is needed: registers are scarce.
struct Worker {
  std::byte* all;
  int slot = 0;
  uint32_t phases = 0;  ///< of the barriers, a bit each

  __device__ explicit Worker(std::byte* ring) : all(ring) {}
  __device__ std::byte* stage(const MoveShape& p) const { return all + static_cast<int64_t>(warp_id() * p.work_ring + slot) * p.stage_bytes; }
  __device__ static uint64_t* full(Shared& sh, int slot) { return sh.own + warp_id() * kMostWorkRing + slot; }
  __device__ void advance(const MoveShape& p) { slot = slot + 1 == p.work_ring ? 0 : slot + 1; }
};

/// After a row has been laid out: whoever counts rows is told.
__device__ __forceinline__ void count_arrival(const DispatchArgs& a, int source) {
  bulk_commit();
  if (!a.arrived) return;
  bulk_wait<0>();
  __syncwarp();
  if (lane_id() != 0) return;
  __threadfence_system();
  atomicAdd_system(reinterpret_cast<unsigned long long*>(&a.arrived[source]), 1ull);
}

/// A warp lays out rows that stay, until no tickets are left. Bulk loads bring the next row while one is laid out, and the first ones
/// before it is known where rows go. What it takes to find a row's places is asked for a row ahead, its token two: no row waits for
/// answers one after the other.
class OwnRows {
 public:
  __device__ __forceinline__ OwnRows(const DispatchArgs& a, const MoveShape& p, Shared& sh, Worker* w, Call call)
      : a_(a), p_(p), sh_(sh), w_(w), call_(call), finds_(a.chained && a.layout != Layout::rank_major) {}
  /// Takes a first row, once the rows of this rank's tokens are placed.
  __device__ __forceinline__ void begin() {
    const int me = a_.common.team.rank;
    tickets_ = OneTicket(&a_.common.lane_control->tickets[call_.copy][kOwnTicket], sh_.begins[me + 1] - sh_.begins[me]);
    take();
    load();
  }
  /// What the first row's places take, before the tables are made: rows are placed before pairs are.
  __device__ __forceinline__ void look() {
    if (!finds_ || item_ < 0) return;
    if (lane_id() == 0) wait_local(a_.common, call_.epoch, &a_.flags[kPlaced + token_ / p_.chunk_tokens]);
    __syncwarp();
    asked_.ask(a_, token_);
    looked_ = true;
  }
  __device__ __forceinline__ void run() {
    const int me = a_.common.team.rank;
    if (!looked_ && finds_ && item_ >= 0) asked_.ask(a_, token_);
    while (item_ >= 0) {
      const int slot = w_->slot, row = sh_.begins[me] + item_;
      const std::byte* stage = w_->stage(p_);
      const OwnPairs asked = asked_;
      const PairWeights weights(a_, a_.routing.topk_weights + static_cast<int64_t>(token_) * a_.num_topk);
      w_->advance(p_);
      load();
      if (finds_ && item_ >= 0) asked_.ask(a_, token_);
      Pairs pairs;
      if (finds_) pairs = asked.get(a_);
      int to[2];
      if (finds_) places_of(a_, me, row, pairs, to);
      else find_places(a_, row, to);
      barrier_wait(Worker::full(sh_, slot), w_->phases >> slot & 1);
      w_->phases ^= 1u << slot;
      place_stage(a_, p_, stage, to);
      count_arrival(a_, me);
      if (move_places(a_)) note_places(a_, row, pairs, to, weights);
    }
  }
  /// Instead of that: no copy may be under way when the block ends.
  __device__ __forceinline__ void drop() const {
    if (item_ >= 0) barrier_wait(Worker::full(sh_, w_->slot), w_->phases >> w_->slot & 1);
  }

 private:
  __device__ __forceinline__ void take() {
    next_ = tickets_.take();
    if (next_ < 0) return;
    tickets_.ask();
    next_token_ = __ldcg(a_.routing.own_tokens + next_);
  }
  /// The row that has been taken, and takes one more.
  __device__ __forceinline__ void load() {
    item_ = next_;
    token_ = next_token_;
    if (item_ < 0) return;
    take();
    if (!quantised_.wait(a_, token_, call_)) {
      item_ = -1;
      return;
    }
    bulk_wait_read_at_most(p_.work_ring - 2);  // the row before is not stored yet
    __syncwarp();
    load_stage(a_, p_, w_->stage(p_), Worker::full(sh_, w_->slot), token_);
  }

  const DispatchArgs& a_;
  const MoveShape& p_;
  Shared& sh_;
  Worker* w_;
  Call call_;
  bool finds_;  ///< own rows' places from the tables: the admit kernel may not have come so far
  Quantised quantised_;
  OneTicket tickets_;
  int item_ = -1, token_ = 0, next_ = -1, next_token_ = 0;
  bool looked_ = false;
  OwnPairs asked_;
};

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
constexpr bool kAsksAhead = false;  // ptxas would spill
#else
constexpr bool kAsksAhead = true;
#endif

/// The same for rows that arrive. False: given up.
__device__ bool lay_out_arrived(const DispatchArgs& a, const MoveShape& p, Shared& sh, Worker* w, Call call) {
  const Common& c = a.common;
  const int me = c.team.rank, others = c.team.num_ranks - 1;
  if (move_places(a)) {
    barrier_wait(&sh.admitted, 0);
    if (!sh.is_admitted) return false;
  } else if (a.chained && a.layout != Layout::rank_major) {
    wait_for_previous();  // for the places
  }
  int most = 0;
  for (int s = 0; s < c.team.num_ranks; ++s) most = s == me ? most : max(most, sh.begins[s + 1] - sh.begins[s]);
  OneTicket tickets(&c.lane_control->tickets[call.copy][kRowTicket], most * others);
  // The next row that a source has sent.
  int s = 0, row = 0;
  const auto next = [&] {
    for (;;) {
      const int item = tickets.take();
      if (item < 0) return false;
      s = (me + 1 + item % others) % c.team.num_ranks;
      row = sh.begins[s] + item / others;
      if (row < sh.begins[s + 1]) return true;
      tickets.ask();
    }
  };
  Pairs next_pairs;
  bool more = next();
  if (more && move_places(a)) next_pairs = received_pairs(a, p, row);
  while (more) {
    const int source = s, at = row;
    const Pairs pairs = next_pairs;
    tickets.ask();
    int to[2];
    if (move_places(a)) {
      places_of(a, source, at, pairs, to);
    } else {
      find_places(a, at, to);
    }
    bool came = true;
    if (lane_id() == 0) {
      const std::byte* signal = c.team.base[me] + c.arena.row_at(c.lane, call.copy, source, at - sh.begins[source]);
      came = wait_signal(c, Phase::rows, source, call.epoch, true, reinterpret_cast<const uint64_t*>(signal), nullptr);
    }
    if (!__shfl_sync(kFull, came, 0)) return false;
    bulk_wait_read_at_most(p.work_ring - 1);
    __syncwarp();
    std::byte* stage = w->stage(p);
    w->advance(p);
    fetch_arrived(a, p, at, stage);
    const PairWeights weights(a, received<float>(a, p.block_weights) + static_cast<int64_t>(at) * a.num_topk);
    // What the next row's places take comes while this one is stored, where there are registers for it.
    more = next();
    if (kAsksAhead && more && move_places(a)) next_pairs = received_pairs(a, p, row);
    fence_shared_to_bulk();
    __syncwarp();
    place_stage(a, p, stage, to);
    count_arrival(a, source);
    if (move_places(a)) note_places(a, at, pairs, to, weights);
    if (!kAsksAhead && more && move_places(a)) next_pairs = received_pairs(a, p, row);
  }
  return true;
}

/// The same for rows that arrive in memory of the host.
__device__ bool take_arrived(const DispatchArgs& a, const MoveShape& p, Shared& sh, std::byte* ring, Call call) {
  if (a.chained && a.layout != Layout::rank_major) wait_for_previous();  // for the places
  Taker taker(a, p, sh, ring, call);
  return taker.run([&](int row, int source, const std::byte* stage) {
    int to[2];
    find_places(a, row, to);
    place_stage(a, p, stage, to);
    count_arrival(a, source);
  });
}

/// Padding of expert_major groups is zero. The warps that lay no rows out and look for nothing do it: all blocks about as much, and as soon as
/// it is known where, while the memory has little else to do. Where there are more warps than experts, a few share one.
__device__ void pad_groups(const DispatchArgs& a, const MoveShape& p, const std::byte* zeros, int index, int count) {
  const int warps = (kWarps - 1 - p.workers) * count, parts = max(1, warps / max(a.num_local, 1));
  const uint64_t policy = evict_first_policy();
#pragma unroll 1
  for (int u = index + (warp_id() - p.workers) * count; u < a.num_local * parts; u += warps) {
    const int e = u % a.num_local;
    const int64_t begin = __ldcg(a.routing.expert_offsets + e), n = __ldcg(a.routing.expert_counts + e),
                  end = __ldcg(a.routing.expert_offsets + e + 1);
#pragma unroll 1
    for (int64_t i = begin + n + u / a.num_local * 32 + lane_id(); i < end; i += parts * 32) {
      bulk_store(a.out_x + i * a.out_stride, zeros, static_cast<uint32_t>(a.x_bytes), policy);
      if (a.scale_bytes) bulk_store(a.out_scales + i * a.scale_bytes, zeros, static_cast<uint32_t>(a.scale_bytes));
#pragma unroll 1
      for (int s = 0; s < a.num_side; ++s) bulk_store(a.side[s].out + i * a.side[s].bytes, zeros, static_cast<uint32_t>(a.side[s].bytes));
    }
  }
  bulk_commit();
}

/// `index` of `count` blocks that pad groups; -1: this one does not.
__device__ void receive_part(const DispatchArgs& a, const MoveShape& p, Shared& sh, std::byte* ring, int index, int count, Call call) {
  const int warp = warp_id();
  // Half of the warps begin with what is here already. One warp of those that lay out no rows looks for the block.
  const bool begins_with_own = warp < p.workers && !p.receivers && warp % 2 == 0;
  Worker worker(ring);
  OwnRows own(a, p, sh, &worker, call);
  if (begins_with_own) own.begin(), own.look();
  // Counts of experts, and the places of this rank's pairs.
  const int chunk = static_cast<int>(threadIdx.x) - 32;
  bool counted = true;
  if (a.chained && threadIdx.x == kThreads - 32) counted = wait_local(a.common, call.epoch, &a.flags[kCounted]);
  if (a.chained && chunk >= 0 && chunk < p.num_chunks) counted = wait_local(a.common, call.epoch, &a.flags[kPlaced + chunk]);
  if (!__syncthreads_and(counted)) return own.drop();
  if (move_places(a) && threadIdx.x == kThreads - 32) {
    sh.is_admitted = wait_local(a.common, call.epoch, &a.flags[kAdmitted]);
    barrier_arrive(&sh.admitted);
  }
  if (warp >= p.workers && warp < kWarps - 1 && p.zero_bytes && index >= 0) pad_groups(a, p, ring + p.zero_at, index, count);
  // Through the host a few blocks take what arrives, before what is here already.
  if (p.receivers && index < p.receivers) {
    const bool good = warp < p.takers ? take_arrived(a, p, sh, ring, call) : true;
    bulk_wait_read<0>();
    if (!__syncthreads_and(good)) return bulk_wait<0>();
  }
  if (warp < p.workers) {
    if (!begins_with_own && !p.receivers && !lay_out_arrived(a, p, sh, &worker, call)) return bulk_wait<0>();
    if (!begins_with_own) own.begin();
    own.run();
    if (begins_with_own) lay_out_arrived(a, p, sh, &worker, call);
  }
  bulk_wait<0>();
}
#endif

/// Registers as if there were 512 threads: a block of the kernel that quantises ahead fits beside one of these on an SM.
template <bool kSend, bool kReceive>
__global__ void __launch_bounds__(512, 1) bulk_move_kernel(const __grid_constant__ DispatchArgs a, const __grid_constant__ MoveShape p) {
#ifdef TURNOUT_HAS_BULK
  extern __shared__ __align__(128) std::byte ring[];
  __shared__ Shared sh;
  const Common& c = a.common;
  const Call call = call_of(c);
  const int blocks = static_cast<int>(gridDim.x);
  clear(p, sh, ring);
  // A block may wait only for blocks that have started: who is what goes by the order of starting.
  if (threadIdx.x == 0) {
    sh.role = 0;
    if (a.straight ? kReceive : kSend) {
      sh.role = static_cast<int>(atomicAdd(&c.lane_control->tickets[call.copy][a.straight ? kReceiveRoleTicket : kSendRoleTicket], 1u));
    }
  }
  __syncthreads();
  if (a.fp8 && !a.chained) fence_global_to_bulk();
  const int role = sh.role, senders = min(p.senders, blocks);
  const bool sends = kSend && (a.straight || role < senders);
  FirstRows first;
  const bool loads = sends && warp_id() < p.pushers;
  if (loads) first.load(a, p, sh, ring, call);
  const bool found = !loads || first.find(a, p, ring, call);
  const bool ready = set_up(a, p, sh, found, call);
  if (!ready && loads) first.drop(p, sh);
  if (ready) {
    if (sends) send_part(a, p, sh, ring, &first, call);
    if (kSend && a.layout == Layout::rank_major && !c.through_host) signal_channel(c, call);
    if (kReceive && a.straight) {
      if (sh.role % blocks == blocks - 1) wait_channels(a, sh.offers, sh.begins, call);
    } else if (kReceive) {
      const bool all = !kSend || senders == blocks;
      if (all) receive_part(a, p, sh, ring, static_cast<int>(blockIdx.x), blocks, call);
      else receive_part(a, p, sh, ring, role - senders, blocks - senders, call);
    }
  }
  if (a.chained) wait_for_previous();
  __syncthreads();
  if (kReceive && blockIdx.x == 0 && !a.cached && is_over(c, call)) clear_counts(a);
  if (kSend && c.last_of_send) advance_epoch(c, call.epoch);
#endif
}

bool aligned(const void* p, int64_t a = 0, int64_t b = 0) {
  return (reinterpret_cast<uintptr_t>(p) | static_cast<uintptr_t>(a) | static_cast<uintptr_t>(b)) % 16 == 0;
}

}  // namespace

/// `ahead`: x is quantised before.
static bool can_move(const DispatchArgs& a, bool ahead) {
  if (!has_bulk() || a.round != 0 || a.block_rows != a.total_rows || a.x_bytes == 0 || a.num_tokens >= 1 << 25 || a.block_rows >= 1 << 25)
    return false;
  if (!aligned(nullptr, a.x_bytes, a.x_block_stride) || (!ahead && !aligned(a.x, a.x_stride))) return false;
  if (!a.straight && !aligned(a.out_x, a.out_stride)) return false;
  if (a.quantize != Quantize::none) {
    if (!ahead || a.scale_bytes % 16 != 0 || (!a.straight && !aligned(a.out_scales))) return false;
  }
  for (int s = 0; s < a.num_side; ++s) {
    const SideArray& side = a.side[s];
    if (side.bytes == 0 || !aligned(side.src, side.src_stride, side.bytes) || (!a.straight && !aligned(side.out))) return false;
  }
  const MoveShape p = move_shape(a, 1);
  return p.zero_at / p.stage_bytes >= 4;  // rows so long that no ring holds them go the general way
}

bool can_move_bulk(const DispatchArgs& a) { return can_move(a, a.fp8 != nullptr); }
bool can_quantize_ahead(const DispatchArgs& a) { return a.quantize != Quantize::none && can_move(a, true); }

cudaError_t launch_move_bulk(const DispatchArgs& a, bool send, bool receive, int blocks, cudaStream_t stream) {
  const MoveShape p = move_shape(a, blocks);
  const bool chained = a.chained && send && receive;
  if (send && receive) return launch_kernel(bulk_move_kernel<true, true>, blocks, kThreads, kRingBytes, stream, chained, a, p);
  if (send) return launch_kernel(bulk_move_kernel<true, false>, blocks, kThreads, kRingBytes, stream, false, a, p);
  return launch_kernel(bulk_move_kernel<false, true>, blocks, kThreads, kRingBytes, stream, false, a, p);
}

cudaError_t prepare_move_bulk() {
  for (const void* kernel :
       {reinterpret_cast<const void*>(bulk_move_kernel<true, true>), reinterpret_cast<const void*>(bulk_move_kernel<true, false>),
        reinterpret_cast<const void*>(bulk_move_kernel<false, true>)}) {
    if (const cudaError_t bad = load_kernel(kernel, has_bulk() ? kRingBytes : 0)) return bad;
  }
  return cudaSuccess;
}

}  // namespace turnout::engine::cuda
