// Calls in low_latency mode: one kernel each, in full when it is issued. Whether a call is one is decided by the configuration and by
// facts that all ranks compare, so that all decide alike; what only one rank knows (its tokens, how its rows are aligned) the kernels
// take as it is, or the call is refused on all ranks.
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

void Engine::dispatch_low_latency(const turnout::DispatchArgs& args, PendingCall& call, std::shared_ptr<const RoutingMemory> cached,
                                  bool counts_arrivals) {
  const cudaStream_t stream = call.stream;
  DispatchArgs& a = call.dispatch;
  if (cached) {
    a.common.facts.generation = cached->generation;
    a.common.max_local = cached->max_local;
    a.block_rows = cached->block_rows;
    a.result_rows = cached->result_rows;
    a.num_local = cached->num_local;
    call.routing = std::move(cached);
  } else {
    const int64_t most = config_.max_tokens_per_rank * num_ranks_;
    a.block_rows = a.layout == Layout::expert_slab ? most : a.layout == Layout::rank_major ? a.capacity : std::min(a.capacity, most);
    a.result_rows = a.layout == Layout::expert_slab ? a.capacity * a.num_local : a.capacity;
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
  const int grid = blocks(args.num_sms > 0 ? args.num_sms : ll_dispatch_blocks(a, num_sms_));
  check(launch_ll_dispatch(a, grid, stream), "low_latency dispatch kernel");
  LaneState& lane = lanes_[static_cast<size_t>(call.lane)];
  ++lane.outstanding;
  call.epoch = ++lane.num_sends;
}

void Engine::combine_low_latency(const turnout::CombineArgs& args, PendingCall& call) {
  CombineArgs& a = call.combine;
  a.chained = has_bulk() && sharers_ == 1;
  place_sums(args, a, &call.result, call.on());
  const int grid = blocks(args.num_sms > 0 ? args.num_sms : ll_combine_blocks(a, num_sms_));
  check(launch_ll_combine(a, grid, call.stream), "low_latency combine kernel");
  LaneState& lane = lanes_[static_cast<size_t>(call.lane)];
  ++lane.outstanding;
  call.epoch = ++lane.num_sends;
}

}  // namespace turnout::engine::cuda
