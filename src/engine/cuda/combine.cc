// A combine on a GPU, and the ends of pending calls.
#include <algorithm>

#include "core/sum_tree.h"
#include "engine/cuda/engine.h"
#include "engine/cuda/host_link.h"
#include "engine/cuda/kernels.h"
#include "engine/cuda/pending.h"
#include "engine/cuda/tail.h"
#include "engine/cuda/throughput/bulk.h"
#include "transport/device/driver.h"

namespace turnout::engine::cuda {

using transport::device::check;
using transport::device::CurrentDevice;

namespace {

int64_t up(int64_t n, int64_t to) { return core::align_up(n, to); }

/// The record of a partial sum: elements (and scales) in the form of the wire, scalars, mask.
void shape_record(CombineArgs& a) {
  const core::WireForm form = core::wire_form(a.wire, a.dtype);
  const auto size = static_cast<int64_t>(size_of(form.dtype));
  // Scales lie behind the elements. wire = rows: a row for each k.
  const int64_t row_bytes = form.block_scaled ? (a.hidden + 3) / 4 * 4 + form.num_scales(a.hidden) * 4 : a.hidden * size;
  a.wire_row_stride = up(row_bytes, 16);
  a.side_offset = (a.wire == Wire::rows ? a.num_topk : 1) * a.wire_row_stride;
  const int64_t scalars = (a.has_side ? a.num_topk : 0) + (a.wire == Wire::rows && a.apply == CombineWeights::rows ? a.num_topk : 0);
  // Weights lie behind the places of the side scalars, whether there are any or not.
  a.mask_offset = up(a.side_offset + (scalars ? 2 * a.num_topk * 4 : 0), 8);
  a.record_bytes = up(a.mask_offset + 8, 128);
}

}  // namespace

/// The result: rows, num_lost, scalars.
void Engine::place_sums(const turnout::CombineArgs& args, CombineArgs& a, std::shared_ptr<Hold>* result, OnStream on) const {
  const int64_t row_bytes = a.hidden * static_cast<int64_t>(size_of(a.dtype));
  a.out_stride = up(row_bytes, 16);
  const int64_t x_bytes = args.out.defined() ? 0 : up(a.num_tokens * a.out_stride, 128);
  const int64_t lost_bytes = up(a.num_tokens * 4, 128), side_bytes = a.has_side ? a.num_tokens * a.num_topk * 4 : 0;
  *result = std::make_shared<Hold>(shared_, shared_->results, static_cast<size_t>(std::max<int64_t>(x_bytes + lost_bytes + side_bytes, 128)), on);
  std::byte* base = (*result)->data();
  a.out = base;
  if (args.out.defined()) {
    a.out = static_cast<std::byte*>(args.out.data);
    a.out_stride = row_stride(args.out);
  }
  a.num_lost = reinterpret_cast<int32_t*>(base + x_bytes);
  a.out_side = a.has_side ? reinterpret_cast<float*>(base + x_bytes + lost_bytes) : nullptr;
}

/// Where no host waits, calls may be captured, in any number of graphs: were each to have records of its own, the region would soon be
/// full. So these lie in one place for good, which is as large as any call of the Buffer needs, one copy for each that may be in flight.
/// False: they would take more than half of the region.
bool Engine::place_lasting_records(CombineArgs& a, LaneState& lane, OnStream on) const {
  const int64_t most = config_.max_tokens_per_rank * std::min(num_ranks_, a.num_topk);
  const auto each = static_cast<size_t>(most * a.record_bytes);
  if (lane.records.empty() || lane.record_bytes < each) {
    const size_t all = each * static_cast<size_t>(shared_->arena.depth);
    if (all > shared_->region.num_bytes() / 2) return false;
    const std::optional<Lease> lease = shared_->region.take(all, on);
    if (!lease) return false;
    lane.records.push_back(std::make_shared<Hold>(shared_, *lease));
    lane.record_bytes = each;
    lane.record_offset = lease->block.offset;
  }
  a.block = lane.record_offset;
  a.block_stride = lane.record_bytes;
  return true;
}

std::unique_ptr<DevicePending> Engine::combine(const turnout::CombineArgs& args, const CallFacts& facts, const RoutingFacts& routing,
                                               std::shared_ptr<const DeviceRouting> handle, bool receive_now) {
  CurrentDevice current(device_);
  std::lock_guard lock(mutex_);
  require_memory();
  raise_failure();
  const auto stream = static_cast<cudaStream_t>(args.stream.native);
  note_stream(stream);
  auto pending = std::make_unique<PendingCall>(shared_from_this(), args.lane, stream);
  pending->routing = std::static_pointer_cast<const RoutingMemory>(handle);
  CombineArgs& a = pending->combine;
  a.common = common(args.lane, facts, 0, true);
  a.common.facts.generation = pending->routing->generation;
  a.y = static_cast<const std::byte*>(args.y.data);
  a.y_stride = row_stride(args.y);
  a.dtype = args.y.dtype;
  a.hidden = args.y.shape[static_cast<size_t>(args.y.ndim - 1)];
  a.wire = args.wire;
  a.apply = args.apply;
  if (args.weights.defined()) a.weights = args.weights.data, a.weights_are_bf16 = args.weights.dtype == DType::bf16;
  a.has_side = args.side.defined();
  if (a.has_side) a.side = args.side.as<const float>();
  a.layout = routing.layout;
  a.capacity = routing.capacity;
  a.num_tokens = routing.num_tokens;
  a.num_topk = routing.num_topk;
  a.routing = pending->routing->view;
  a.node_of_rank = topology_.num_nodes() > 1 ? node_of_rank_ : nullptr;
  shape_record(a);
  if (is_low_latency(a)) {
    combine_low_latency(args, *pending, receive_now);
    return pending;
  }
  receive_earlier(args.lane, stream);
  // Room for what may come back: known for exact size, else each token from as many ranks as it can have gone to.
  const int64_t records = pending->routing->sent_total >= 0 ? pending->routing->sent_total : a.num_tokens * std::min(num_ranks_, a.num_topk);
  a.block_rows = records;
  LaneState& lane = lanes_[static_cast<size_t>(args.lane)];
  const bool lasting = a.wire == Wire::rows && a.capacity >= 0 && place_lasting_records(a, lane, pending->on());
  std::optional<Lease> lease;
  if (!lasting) lease = shared_->region.take(static_cast<size_t>(records * a.record_bytes), pending->on());
  if (!lasting && !lease) {
    throw InvalidArgument("combine: partial sums need " + std::to_string(records * a.record_bytes) + " bytes of the receive region, which has " +
                          std::to_string(shared_->region.num_bytes()) + " bytes, " + std::to_string(shared_->region.largest_gap()) +
                          " of them free in one piece: release results, or make the Buffer with a larger receive_bytes");
  }
  if (lease) {
    pending->block = std::make_shared<Hold>(shared_, *lease);
    a.block = lease->block.offset;
  }
  place_sums(args, a, &pending->result, pending->on());

  const int sms = args.num_sms > 0 ? args.num_sms : a.common.through_host ? kHostCombineSms : num_sms_;
  check(launch_combine(a, true, receive_now, blocks(sms), stream), "combine kernel");
  ++lane.num_sends;
  ++lane.outstanding;
  pending->epoch = lane.num_sends;
  pending->receives_now = receive_now;
  a.common.last_of_send = false;
  if (!receive_now) pending->stay_open();
  return pending;
}

PendingCall::~PendingCall() {
  if (!is_open_) return;  // one that could not be issued goes while the mutex is held
  std::lock_guard lock(engine_->mutex_);
  std::erase(engine_->lanes_[static_cast<size_t>(lane)].open, this);
}

void PendingCall::stay_open() {
  engine_->lanes_[static_cast<size_t>(lane)].open.push_back(this);
  is_open_ = true;
}

/// A copy of staging belongs to every max_outstanding + 1st call, so before a rank sends call n all ranks must have received call
/// n - max_outstanding - 1, in whatever order callers wait. To send a call in throughput mode is to hear of all ranks, so they have sent call
/// n - 1, before which they received call n - 1 - max_outstanding. A deferred low_latency call hears of nobody until it is received, and
/// receive_half() says how many of those there may be. `num_calls` in throughput mode are about to be issued.
void Engine::receive_earlier(int lane, cudaStream_t stream, int64_t num_calls) {
  const uint64_t last = lanes_[static_cast<size_t>(lane)].num_sends + static_cast<uint64_t>(num_calls);
  const auto most = static_cast<uint64_t>(config_.max_outstanding);
  receive_if(lane, stream, [&](const PendingCall& call) { return call.ll_blocks > 0 || call.epoch + most <= last; });
}

/// The calls in flight of a lane that are `wanted`, in order.
void Engine::receive_if(int lane, cudaStream_t stream, const std::function<bool(const PendingCall&)>& wanted) {
  const std::vector<PendingCall*> open = lanes_[static_cast<size_t>(lane)].open;
  for (PendingCall* call : open) {
    if (!wanted(*call)) continue;
    call->receive();
    if (call->stream == stream) continue;
    cudaEvent_t done = nullptr;
    check(cudaEventCreateWithFlags(&done, cudaEventDisableTiming), "cudaEventCreate");
    check(cudaEventRecord(done, call->stream), "cudaEventRecord");
    check(cudaStreamWaitEvent(stream, done, 0), "cudaStreamWaitEvent");
    cudaEventDestroy(done);
  }
}

void PendingCall::receive() {
  if (receives_now) return;
  receives_now = true;
  Engine::LaneState& state = engine_->lanes_[static_cast<size_t>(lane)];
  std::erase(state.open, this);
  const int back = static_cast<int>(state.num_sends - epoch) + 1;
  dispatch.common.back = combine.common.back = back;
  if (received) {
    check(cudaStreamWaitEvent(stream, received, 0), "cudaStreamWaitEvent");
    cudaEventDestroy(received);
    received = nullptr;
  } else if (ll_blocks > 0) {
    if (is_dispatch) check(launch_ll_dispatch(dispatch, ll_blocks, stream), "low_latency dispatch kernel");
    else check(launch_ll_combine(combine, ll_blocks, stream), "low_latency combine kernel");
  } else if (is_dispatch) {
    if (!dispatch.cached) check(launch_admit(dispatch, engine_->blocks(32), stream), "admit kernel");
    check(launch_move(dispatch, false, true, engine_->blocks(dispatch.move_blocks), stream), "move kernel");
  } else {
    check(launch_combine(combine, false, true, engine_->blocks(engine_->num_sms_), stream), "combine kernel");
  }
}

void PendingCall::join() {
  std::lock_guard lock(engine_->mutex_);
  if (generation != engine_->generation_) throw InvalidArgument("the call was lost in recover()");
  --engine_->lanes_[static_cast<size_t>(lane)].outstanding;
  if (receives_now) return;  // nothing is asked of the driver
  CurrentDevice current(engine_->device_);
  receive();
}

void PendingCall::receive_on(cudaStream_t side) {
  cudaEvent_t sent = nullptr;
  check(cudaEventCreateWithFlags(&sent, cudaEventDisableTiming), "cudaEventCreate");
  check(cudaEventCreateWithFlags(&received, cudaEventDisableTiming), "cudaEventCreate");
  check(cudaEventRecord(sent, stream), "cudaEventRecord");
  check(cudaStreamWaitEvent(side, sent, 0), "cudaStreamWaitEvent");
  cudaEventDestroy(sent);
  // Later calls of the lane go on beside this: it takes its epoch from where the sending part left it, and has signals of its own.
  dispatch.common.back = 1;
  dispatch.flags = reinterpret_cast<uint32_t*>(counters->data() + engine_->num_ranks_ * 8);
  if (!dispatch.cached) check(launch_admit(dispatch, engine_->blocks(32), side), "admit kernel");
  check(launch_move(dispatch, false, true, engine_->blocks(dispatch.move_blocks), side), "move kernel");
  check(cudaEventRecord(received, side), "cudaEventRecord");
}

/// In order of the stream, after what receives.
void PendingCall::zero_tail_of_result() {
  const DispatchArgs& a = dispatch;
  const Routing& r = routing->view;
  const bool by_expert = a.layout == Layout::expert_slab, by_rank = a.layout == Layout::rank_major;
  TailArgs tail;
  tail.num_groups = by_expert ? a.num_local : 1;
  tail.group_rows = by_expert ? a.capacity : a.result_rows;
  tail.counts = by_expert ? r.expert_counts : nullptr;
  tail.num_rows = r.num_rows;
  tail.add(a.out_x, a.out_stride, a.x_bytes);
  tail.add(a.out_scales, a.scale_bytes, a.scale_bytes);
  for (int s = 0; s < a.num_side; ++s) tail.add(a.side[s].out, a.side[s].bytes, a.side[s].bytes);
  const int64_t weights = by_rank ? int64_t{4} * a.num_topk : 4;
  if (a.has_weights && !a.cached) tail.add(by_rank ? r.recv_weights : r.row_weights, weights, weights);
  CurrentDevice current(engine_->device_);
  check(launch_zero_tail(tail, engine_->num_sms_, stream), "zero_tail kernel");
}

/// The same.
void PendingCall::turn_scales() {
  const DispatchArgs& a = dispatch;
  const Routing& r = routing->view;
  const bool by_expert = a.layout == Layout::expert_slab;
  TurnArgs turn{a.out_scales, a.scale_bytes, a.columns.to, a.columns.words, a.columns.length, by_expert ? a.num_local : 1, a.columns.group_rows};
  if (!zero_tail) {
    turn.counts = by_expert ? r.expert_counts : nullptr;
    turn.num_rows = by_expert ? nullptr : r.num_rows;
  }
  CurrentDevice current(engine_->device_);
  check(launch_turn_scales(turn, engine_->num_sms_, stream), "turn_scales kernel");
}

DeviceDispatch PendingCall::finish_dispatch() {
  join();
  if (zero_tail) zero_tail_of_result();
  if (dispatch.columns.to && !dispatch.columns.at_once) turn_scales();
  DispatchArgs& a = dispatch;
  DeviceDispatch out;
  struct Keep {
    std::shared_ptr<Hold> result, counters;
    std::shared_ptr<const RoutingMemory> routing;
  };
  out.memory = std::make_shared<Keep>(Keep{result, counters, routing});
  out.routing = routing;
  out.x = a.out_x;
  out.x_stride = a.out_stride;
  out.x_scales = a.columns.to ? reinterpret_cast<std::byte*>(a.columns.to) : a.out_scales;
  for (int s = 0; s < a.num_side; ++s) out.side.push_back(a.side[s].out);
  out.array_rows = a.result_rows;
  out.num_rows = routing->num_rows;
  out.num_pairs = routing->num_pairs;
  const Routing& r = routing->view;
  out.topk_idx = r.recv_idx;
  out.topk_weights = a.layout == Layout::rank_major ? r.recv_weights : r.row_weights;
  out.num_rows_at = r.num_rows;
  out.num_dropped_at = r.num_dropped;
  out.expert_counts = r.expert_counts;
  out.expert_offsets = r.expert_offsets;
  out.sorted_rows = r.sorted_rows;
  out.arrived = a.arrived;
  out.is_lease = result->is_lease();
  block.reset();
  fp8.reset();
  return out;
}

DeviceCombine PendingCall::finish_combine() {
  join();
  CombineArgs& a = combine;
  DeviceCombine out;
  out.memory = result;
  out.x = a.out;
  out.x_stride = a.out_stride;
  out.side = a.out_side;
  out.num_lost = a.num_lost;
  block.reset();
  return out;
}

}  // namespace turnout::engine::cuda
