// Calls in low_latency mode: one kernel each, or one that sends when the call is issued and one that receives at its wait. Whether a
// call is one is decided by the configuration and by facts that all ranks compare, so that all decide alike; what only one rank knows
// (its tokens, how its rows are aligned) the kernels take as it is, or the call is refused on all ranks.
#include <algorithm>
#include <string>

#include "engine/cuda/engine.h"
#include "engine/cuda/kernels.h"
#include "engine/cuda/pending.h"
#include "engine/cuda/throughput/bulk.h"
#include "transport/device/driver.h"

namespace turnout::engine::cuda {

using transport::device::check;

namespace {

/// A rank with more tokens than there is staging for is refused in words: the others have sent their rows already.
void require_room(const char* call, int64_t num_tokens, const Arena& arena) {
  if (num_tokens <= arena.ll_tokens) return;
  throw InvalidArgument(std::string(call) + ": mode is low_latency with " + std::to_string(num_tokens) +
                        " tokens, but such calls of this Buffer take at most " + std::to_string(arena.ll_tokens) + "; use throughput");
}

}  // namespace

/// Flagged words need memory that answers at once: across PCIe, in words of 16 bytes that all warps look at, they take milliseconds.
bool Engine::is_low_latency(const DispatchArgs& a) const {
  if (a.common.through_host || a.common.facts.mode != static_cast<int64_t>(Mode::low_latency) || !can_ll_dispatch(a)) return false;
  require_room("dispatch", a.num_tokens, a.common.arena);
  return true;
}

bool Engine::is_low_latency(const CombineArgs& a) const {
  if (a.common.through_host || a.common.facts.mode != static_cast<int64_t>(Mode::low_latency) || !can_ll_combine(a)) return false;
  require_room("combine", a.num_tokens, a.common.arena);
  return true;
}

/// Half of the copies of staging may hold low_latency calls that this rank has sent and not received: before it sends call n it receives call
/// n - half, so all ranks have sent that one, before which they received call n - 2 half, and the copy of call n - max_outstanding - 1 is
/// free. Before a call in throughput mode ranks receive less (receive_earlier()), so where call n - half is one, or one before it is the last
/// that this rank has heard of, the calls since are received, too: then call n - 1 has been heard of.
void Engine::receive_half(int lane, cudaStream_t stream) {
  LaneState& state = lanes_[static_cast<size_t>(lane)];
  if (state.last_low_latency != state.num_sends) state.last_throughput = state.num_sends;
  if (state.open.empty()) return;
  const uint64_t half = static_cast<uint64_t>(config_.max_outstanding + 1) / 2, call = state.num_sends + 1;
  const bool mixed = state.last_throughput > 0 && call <= state.last_throughput + half;
  receive_if(lane, stream, [&](const PendingCall& c) { return c.epoch + half <= call || (mixed && c.ll_blocks > 0); });
}

/// The kernel that sends has been issued.
template <class KernelArgs>
void Engine::note_low_latency(PendingCall& call, KernelArgs& a) {
  LaneState& lane = lanes_[static_cast<size_t>(call.lane)];
  ++lane.outstanding;
  call.epoch = lane.last_low_latency = ++lane.num_sends;
  call.receives_now = a.receives;
  if (a.receives) return;
  a.common.last_of_send = a.sends = false;
  a.receives = true;
  call.stay_open();
}

void Engine::dispatch_low_latency(const turnout::DispatchArgs& args, PendingCall& call, std::shared_ptr<const RoutingMemory> cached,
                                  bool counts_arrivals, bool receives_now) {
  const cudaStream_t stream = call.stream;
  DispatchArgs& a = call.dispatch;
  receive_half(call.lane, stream);
  if (cached) {
    a.common.facts.generation = cached->generation;
    a.common.max_local = cached->max_local;
    a.block_rows = cached->block_rows;
    a.result_rows = cached->result_rows;
    a.num_local = cached->num_local;
    call.routing = std::move(cached);
  } else {
    a.block_rows = most_block_rows(a.layout, a.capacity);
    a.result_rows = most_result_rows(a.layout, a.capacity);
    const std::shared_ptr<RoutingMemory> fresh = new_routing(args, call.on());
    const int64_t slot_rows = a.layout == Layout::expert_slab ? a.common.arena.ll_tokens * num_ranks_ : 0;
    add_receive_side(*fresh, a.block_rows, a.result_rows, a.num_topk, a.has_weights, a.layout, slot_rows, call.on());
    call.routing = fresh;
  }
  a.routing = call.routing->view;
  place_result(args, a, &call.result, call.on());
  a.columns.at_once = a.columns.to && !call.zero_tail && ll_lays_columns(a);
  if (counts_arrivals) {
    call.counters = std::make_shared<Hold>(shared_, shared_->own, static_cast<size_t>(num_ranks_) * 8, call.on());
    a.arrived = reinterpret_cast<int64_t*>(call.counters->data());
    check(cudaMemsetAsync(a.arrived, 0, static_cast<size_t>(num_ranks_) * 8, stream), "cudaMemset");
  }
  a.common.last_of_send = true;
  a.chained = has_bulk() && sharers_ == 1;
  a.receives = receives_now;
  call.ll_blocks = blocks(args.num_sms > 0 ? args.num_sms : ll_dispatch_blocks(a, num_sms_));
  check(launch_ll_dispatch(a, call.ll_blocks, stream), "low_latency dispatch kernel");
  note_low_latency(call, a);
}

/// Rows of low_latency calls say which experts they are for, and their receiver looks where those are.
void Engine::receive_with_this_map() {
  for (const LaneState& lane : lanes_) {
    const std::vector<PendingCall*> open = lane.open;
    for (PendingCall* call : open) {
      if (call->is_dispatch && call->ll_blocks > 0) call->receive();
    }
  }
}

void Engine::combine_low_latency(const turnout::CombineArgs& args, PendingCall& call, bool receives_now) {
  CombineArgs& a = call.combine;
  receive_half(call.lane, call.stream);
  a.chained = has_bulk() && sharers_ == 1;
  place_sums(args, a, &call.result, call.on());
  a.receives = receives_now;
  call.ll_blocks = blocks(args.num_sms > 0 ? args.num_sms : ll_combine_blocks(a, num_sms_));
  check(launch_ll_combine(a, call.ll_blocks, call.stream), "low_latency combine kernel");
  note_low_latency(call, a);
}

}  // namespace turnout::engine::cuda
