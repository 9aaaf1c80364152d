// First kernel of calls whose routing is known, of refused calls, and of further rounds.
#include "engine/cuda/device/tell_host.cuh"
#include "engine/cuda/kernels.h"
#include "engine/cuda/launch.h"

namespace turnout::engine::cuda {
namespace {

/// Who refuses waits for the others too, or refusals in a row would overtake a rank that has yet to see the first. Who does not come is
/// left to the calls that need it: nothing fails here.
__device__ void await_call(const Common& c, Call call, int rank) {
  const auto* header = reinterpret_cast<const uint4*>(c.team.base[c.team.rank] + c.arena.header_at(c.lane, call.copy, rank));
  const uint64_t start = clock_ns();
  while (load_word(header).w != call.epoch && !is_aborted(c, true)) {
    const uint64_t now = clock_ns();
    if (now - start > c.control->busy_ns) return;
    if (!may_look(c, rank, now)) continue;
    const uint64_t abort = *reinterpret_cast<volatile uint64_t*>(&c.host->abort);
    if (abort > c.control->generation || is_lost(said_of_peer(c, rank))) return;
  }
}

/// Start of a call whose routing is known, or of a further round: facts and offers only. One block. Also how a refused call is told (no
/// offers then). A call that has failed keeps its rounds, without rows: ranks that did not wait for each other there would be too far
/// apart in the next call.
__global__ void __launch_bounds__(128, 1) hello_kernel(const __grid_constant__ HelloArgs h) {
  __shared__ FactWords facts;
  const Common& c = h.common;
  const Call call = call_of(c);
  clear_next_tickets(c, call);
  if (__syncthreads_or(is_over(c, call))) {  // all threads have read the epoch
    if (c.last_of_send) advance_epoch(c, call.epoch);
    return;
  }
  volatile uint32_t* failed = &c.lane_control->failed;
  const bool lost = h.round > 0 && (h.refused || *failed == call.epoch - 1), refused = h.refused && !lost;
  if (threadIdx.x == 0) fill_facts(c, call.epoch, refused, 0, &facts, h.room);
  __syncthreads();
  if (refused && threadIdx.x < sizeof(Reason) / 4) {
    static_assert(sizeof(Reason) == 8 * HeaderInts::kNumFacts && sizeof(Reason) / 4 <= 128);
    facts.words[HeaderInts::kFactValues + threadIdx.x] = reinterpret_cast<const uint32_t*>(h.why.text)[threadIdx.x];
    facts.words[HeaderInts::kRefused] = kSaysWhy;
  }
  __syncthreads();
  if (!refused || !h.counted) send_header(c, call, HeaderInts::kRows, [&](int, int i) { return facts.words[i]; });
  for (int d = static_cast<int>(threadIdx.x); !lost && d < c.team.num_ranks; d += static_cast<int>(blockDim.x)) {
    // A peer that has had the counts already (exact size) sees a refusal in the offer.
    if (refused) send_offer(c, call, d, 0, kRefusedOffer, 0);
    else send_offer(c, call, d, h.block, h.block_rows, h.channels);
  }
  if (refused) {
    for (int s = static_cast<int>(threadIdx.x); s < c.team.num_ranks; s += static_cast<int>(blockDim.x)) await_call(c, call, s);
  } else {
    const bool good = receive_headers(c, call, HeaderInts::kRows, &facts, [](int, int, uint32_t) {});
    if (good && c.through_host && !lost) gather_offers(c, call, nullptr, true);
    if (good && h.counts_for_host) {
      tell_rooms(c, call, h.counts_for_host);
      publish_counts(h.counts_for_host, call.epoch);
    }
  }
  if (lost && threadIdx.x == 0) *failed = call.epoch;
  __syncthreads();
  if (c.last_of_send) advance_epoch(c, call.epoch);
}

}  // namespace

cudaError_t launch_hello(const HelloArgs& h, cudaStream_t stream) {
  hello_kernel<<<1, 128, 0, stream>>>(h);
  return cudaGetLastError();
}
cudaError_t prepare_hello() { return load_kernel(reinterpret_cast<const void*>(hello_kernel)); }

}  // namespace turnout::engine::cuda
