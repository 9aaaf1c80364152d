// A dispatch on a GPU: memory is found, arguments become those of the kernels, kernels are launched.
#include <algorithm>
#include <chrono>
#include <thread>

#include "engine/cuda/engine.h"
#include "engine/cuda/host_link.h"
#include "engine/cuda/kernels.h"
#include "engine/cuda/pending.h"
#include "engine/cuda/specialize.h"
#include "engine/cuda/throughput/bulk.h"
#include "transport/device/driver.h"

namespace turnout::engine::cuda {

using transport::device::check;
using transport::device::CurrentDevice;

namespace {

constexpr std::chrono::milliseconds kAskEvery{1};  ///< while the host waits for a kernel

int64_t up(int64_t n, int64_t to) { return core::align_up(n, to); }

}  // namespace

DispatchArgs Engine::dispatch_args(const turnout::DispatchArgs& args, const CallFacts& facts, const RoutingFacts& routing) const {
  DispatchArgs a;
  a.common = common(args.lane, facts, 0, false);
  a.x = static_cast<const std::byte*>(args.x.data);
  a.x_stride = row_stride(args.x);
  a.num_tokens = args.x.shape[0];
  a.num_topk = routing.num_topk;
  a.has_weights = routing.has_weights;
  a.cached = args.handle != nullptr;
  if (!a.cached) {
    a.topk_idx = args.topk_idx.data;
    a.topk_weights = args.topk_weights.data;
    a.ids_are_64 = args.topk_idx.dtype == DType::i64;
    a.weights_are_bf16 = args.topk_weights.defined() && args.topk_weights.dtype == DType::bf16;
  }
  a.hidden = args.x.shape[1];
  a.dtype = args.x.dtype;
  a.quantize = args.quantize;
  const bool quantised = args.quantize != Quantize::none;
  a.x_bytes = quantised ? a.hidden : a.hidden * static_cast<int64_t>(size_of(a.dtype));
  a.scale_bytes = quantised ? core::ceil_div(a.hidden, 128) * (args.quantize == Quantize::fp8_e4m3 ? 4 : 1) : 0;
  if (args.scale_order == ScaleOrder::columns) a.columns.words = static_cast<int32_t>(core::scale_words(a.scale_bytes));
  a.x_block_stride = up(a.x_bytes, 128);
  a.num_side = static_cast<int>(args.side.size());
  for (size_t s = 0; s < args.side.size(); ++s) {
    const TensorView& side = args.side[s];
    a.side[s].src = static_cast<const std::byte*>(side.data);
    a.side[s].src_stride = row_stride(side);
    a.side[s].bytes = static_cast<int32_t>(side.shape[1] * static_cast<int64_t>(size_of(side.dtype)));
  }
  a.layout = routing.layout;
  a.capacity = routing.capacity;
  a.alignment = routing.alignment;
  a.num_local = num_local_[static_cast<size_t>(rank_)];
  const LaneState& lane = lanes_[static_cast<size_t>(args.lane)];
  a.chunk_counts = lane.chunk_counts;
  a.flags = lane.flags;
  a.begins = lane.begins;
  return a;
}

/// The block that peers write: rows, scales, side arrays, then ids, weights and positions.
void Engine::place_block(DispatchArgs& a, std::shared_ptr<Hold>* block, OnStream on) const {
  std::optional<Lease> lease;
  if (a.block_rows > 0 || a.total_rows == 0)
    lease = shared_->region.take(static_cast<size_t>(block_offsets(a, a.block_rows, a.total_rows).num_bytes), on);
  if (!lease) {
    const bool in_rounds = a.block_rows < a.total_rows;
    const int64_t bytes = block_offsets(a, in_rounds ? 1 : a.total_rows, a.total_rows).num_bytes;
    throw InvalidArgument("dispatch: " + std::to_string(a.total_rows) + (in_rounds ? " rows, one at a time, need " : " rows need ") +
                          std::to_string(bytes) + " bytes of the receive region, which has " + std::to_string(shared_->region.num_bytes()) +
                          " bytes, " + std::to_string(shared_->region.largest_gap()) +
                          " of them free in one piece: release results, or make the Buffer with a larger receive_bytes");
  }
  *block = std::make_shared<Hold>(shared_, *lease);
  a.block = lease->block.offset;
}

/// Where the rows of the result go, if not where they land.
void Engine::place_result(const turnout::DispatchArgs& args, DispatchArgs& a, std::shared_ptr<Hold>* result, OnStream on) const {
  const int64_t rows = a.result_rows;
  const bool is_slab = a.layout == Layout::expert_slab;
  if (args.out.defined()) {
    const int64_t room = args.out.num_elements() / args.out.shape[static_cast<size_t>(args.out.ndim - 1)];
    if (room < rows) {
      throw InvalidArgument("dispatch: out has room for " + std::to_string(room) + " rows, but the result has " + std::to_string(rows) +
                            "; nothing was delivered on any rank");
    }
  }
  int64_t at = 0;
  const auto take = [&](int64_t bytes) {
    const int64_t here = at;
    at = up(at + bytes, 128);
    return here;
  };
  a.out_stride = up(a.x_bytes, 128);
  const int64_t x_at = take(args.out.defined() ? 0 : rows * a.out_stride);
  const int64_t scales_at = take(rows * a.scale_bytes);
  const int64_t columns = is_slab ? a.columns.place(a.num_local, a.capacity, true) : a.columns.place(1, rows, false);
  const int64_t columns_at = take(args.out_scales.defined() ? 0 : columns);
  std::vector<int64_t> side_at;
  for (int s = 0; s < a.num_side; ++s) side_at.push_back(take(rows * a.side[s].bytes));
  std::optional<Lease> lease;
  if (args.result != ResultKind::fresh && !args.out.defined()) lease = shared_->region.take(static_cast<size_t>(at), on);
  if (!lease && args.result == ResultKind::lease) {
    throw InvalidArgument("dispatch: result=lease, but the receive region has no " + std::to_string(at) + " bytes free in one piece (" +
                          std::to_string(shared_->region.largest_gap()) +
                          " at most): release results, or make the Buffer with a larger receive_bytes");
  }
  *result = lease ? std::make_shared<Hold>(shared_, *lease)
                  : std::make_shared<Hold>(shared_, shared_->results, static_cast<size_t>(std::max<int64_t>(at, 128)), on);
  std::byte* base = (*result)->data();
  a.out_x = base + x_at;
  a.out_scales = base + scales_at;
  if (a.columns.words > 0) a.columns.to = reinterpret_cast<uint32_t*>(args.out_scales.defined() ? args.out_scales.data : base + columns_at);
  for (int s = 0; s < a.num_side; ++s) a.side[s].out = base + side_at[static_cast<size_t>(s)];
  if (args.out.defined()) {
    a.out_x = static_cast<std::byte*>(args.out.data);
    a.out_stride = row_stride(args.out);
  }
}

/// Until a kernel has told what the headers of all ranks say.
const volatile int64_t* Engine::wait_for_words(cudaStream_t stream) {
  using Clock = std::chrono::steady_clock;
  volatile int64_t* words = counts_->host();
  Clock::time_point next = Clock::now() + kAskEvery;
  for (uint32_t i = 0; words[CountWords::kEpoch] == 0; ++i) {
    if (i % 1024) continue;
    raise_failure();
    // The driver is asked rarely: it has locks, and the rank that all wait for needs them to come.
    const Clock::time_point now = Clock::now();
    if (now < next) continue;
    next = now + kAskEvery;
    std::this_thread::yield();
    const cudaError_t e = cudaStreamQuery(stream);
    if (e != cudaErrorNotReady) {
      check(e, "dispatch");
      raise_failure();
      if (words[CountWords::kEpoch] == 0) throw_record();
    }
  }
  words[CountWords::kEpoch] = 0;
  return words;
}

/// Exact: the host waits for the counts of all ranks.
void Engine::wait_for_counts(DispatchArgs& a, RoutingMemory& r, cudaStream_t stream) {
  const volatile int64_t* words = wait_for_words(stream);
  const auto ranks = static_cast<size_t>(num_ranks_), me = static_cast<size_t>(rank_);
  const volatile int64_t *counts = words + CountWords::rows(num_ranks_), *expert_pairs = words + CountWords::pairs(num_ranks_);
  int64_t pairs = 0, padded = 0, sent = 0;
  r.rows_of_rank.assign(ranks, 0);
  for (size_t i = 0; i < ranks * ranks; ++i) r.rows_of_rank[i % ranks] += counts[i];
  for (size_t d = 0; d < ranks; ++d) sent += counts[me * ranks + d];
  for (int e = 0; e < r.num_local; ++e) {
    pairs += expert_pairs[e];
    padded += up(expert_pairs[e], a.alignment);
  }
  a.total_rows = r.rows_of_rank[me];
  a.block_rows = rows_that_fit(a, a.total_rows, words[CountWords::kRooms + rank_]);
  a.result_rows = a.layout == Layout::rank_major ? a.total_rows : padded;
  r.num_rows = a.result_rows;
  r.num_pairs = pairs;
  r.sent_total = sent;
  LaneState& lane = lanes_[static_cast<size_t>(a.common.lane)];
  lane.rounds = num_rounds(a, r, words + CountWords::kRooms);
  r.in_rounds = lane.rounds > 1;
}

/// The routing of ids that are new. Exact size: counted already when this returns.
void Engine::make_routing(const turnout::DispatchArgs& args, PendingCall& call, int plan_blocks) {
  DispatchArgs& a = call.dispatch;
  const std::shared_ptr<RoutingMemory> fresh = new_routing(args, call.on());
  call.routing = fresh;
  a.routing = fresh->view;
  if (a.capacity >= 0) {
    a.block_rows = a.total_rows = most_block_rows(a.layout, a.capacity);
    a.result_rows = most_result_rows(a.layout, a.capacity);
  } else {
    if (call.capture)
      throw InvalidArgument("dispatch: size is exact, so the host must wait for counts, but the stream is being captured; give a capacity");
    a.room = room();
    a.counts_for_host = counts_->device();
    check(launch_plan(a, num_ranks_, config_.num_experts, plan_blocks, call.stream), "plan kernel");
    wait_for_counts(a, *fresh, call.stream);
    a.counts_for_host = nullptr;
  }
  add_receive_side(*fresh, a.total_rows, a.result_rows, a.num_topk, a.has_weights, a.layout, 0, call.on());
  a.routing = fresh->view;
}

void Engine::reuse_routing(PendingCall& call, std::shared_ptr<const RoutingMemory> cached) const {
  DispatchArgs& a = call.dispatch;
  a.common.facts.generation = cached->generation;
  a.block_rows = a.total_rows = cached->block_rows;
  a.result_rows = cached->result_rows;
  a.num_local = cached->num_local;
  a.routing = cached->view;
  a.room = ~0u;  // nothing is asked, or this rank is being captured and takes all rows at once
  if (may_need_rounds(a, *cached) && !call.capture) {
    a.room = room();
    a.counts_for_host = counts_->device();
    a.block_rows = rows_that_fit(a, a.total_rows, a.room * kRoomUnit);
  }
  call.routing = std::move(cached);
}

/// Memory for what comes.
void Engine::place_call(const turnout::DispatchArgs& args, PendingCall& call) const {
  DispatchArgs& a = call.dispatch;
  const bool stays = args.result != ResultKind::fresh && !args.out.defined() && a.columns.words == 0;
  const bool in_block = a.layout == Layout::rank_major && stays && a.block_rows == a.total_rows;
  a.straight = in_block && !a.common.through_host;  // else they land in one half of the block and are laid out in the other
  place_block(a, &call.block, call.on());
  if (!in_block) return place_result(args, a, &call.result, call.on());
  std::byte* base = call.block->data();
  const BlockOffsets offsets = block_offsets(a, a.block_rows);
  a.out_x = base;
  a.out_stride = a.x_block_stride;
  a.out_scales = base + offsets.scales;
  for (int s = 0; s < a.num_side; ++s) a.side[s].out = base + side_offset(a, offsets, a.block_rows, s);
  call.result = call.block;
}

/// What bulk copies move, in memory of its own. Blocks of the plan kernel, which share an SM with nobody, find some free.
void Engine::quantize_ahead(PendingCall& call, int num_sms) const {
  DispatchArgs& a = call.dispatch;
  const int64_t scales = up(a.num_tokens * a.x_block_stride, 128), bytes = scales + a.num_tokens * a.scale_bytes;
  call.fp8 = std::make_shared<Hold>(shared_, shared_->own, static_cast<size_t>(std::max<int64_t>(bytes, 128)), call.on());
  a.fp8 = call.fp8->data();
  a.fp8_scales = a.fp8 + scales;
  a.plans_beside = sharers_ == 1 && !a.cached && a.capacity >= 0;
  const int most = std::max(num_sms_ / 2, num_sms_ - num_chunks(a.num_tokens));
  check(launch_quantize_ahead(a, blocks(num_sms > 0 ? std::min(num_sms, most) : most), call.stream), "quantize_ahead kernel");
}

/// The first kernel of a call but for exact size, where it is the second.
void Engine::open_call(PendingCall& call, int plan_blocks) {
  DispatchArgs& a = call.dispatch;
  if (!a.cached) {
    const auto launch = a.capacity < 0 ? launch_meta : launch_plan;
    return check(launch(a, num_ranks_, config_.num_experts, plan_blocks, call.stream), a.capacity < 0 ? "meta kernel" : "plan kernel");
  }
  check(launch_hello(hello_of(a), call.stream), "hello kernel");
  if (!a.counts_for_host) return;
  a.counts_for_host = nullptr;
  const volatile int64_t* words = wait_for_words(call.stream);
  lanes_[static_cast<size_t>(call.lane)].rounds = num_rounds(a, *call.routing, words + CountWords::kRooms);
}

std::unique_ptr<DevicePending> Engine::dispatch(const turnout::DispatchArgs& args, const CallFacts& facts, const RoutingFacts& routing,
                                                std::shared_ptr<const DeviceRouting> cached, bool receive_now) {
  CurrentDevice current(device_);
  std::lock_guard lock(mutex_);
  require_memory();
  raise_failure();
  const auto stream = static_cast<cudaStream_t>(args.stream.native);
  note_stream(stream);
  LaneState& lane = lanes_[static_cast<size_t>(args.lane)];
  auto pending = std::make_unique<PendingCall>(shared_from_this(), args.lane, stream);
  pending->is_dispatch = true;
  pending->zero_tail = args.zero_tail && routing.capacity >= 0;
  DispatchArgs& a = pending->dispatch;
  a = dispatch_args(args, facts, routing);
  if (is_low_latency(a)) {
    const bool counts_arrivals = args.receive == Receive::resident && !receive_now;
    dispatch_low_latency(args, *pending, std::static_pointer_cast<const RoutingMemory>(cached), counts_arrivals,
                         receive_now || args.receive != Receive::deferred);
    return pending;
  }
  receive_earlier(args.lane, stream);
  const int plan_blocks = blocks(args.num_sms > 0 ? args.num_sms : kMaxChunks);
  const int move_blocks = blocks(args.num_sms > 0 ? args.num_sms : a.common.through_host ? kHostMoveSms : num_sms_);
  if (cached) reuse_routing(*pending, std::static_pointer_cast<const RoutingMemory>(cached));
  else make_routing(args, *pending, plan_blocks);
  place_call(args, *pending);
  // Bulk copies need few SMs where they only send; offers say how many blocks will announce.
  const bool ahead = can_quantize_ahead(a), bulk = ahead || can_move_bulk(a);
  a.move_blocks = bulk ? blocks(args.num_sms > 0 ? args.num_sms : default_move_sms(a)) : move_blocks;
  // Kernels that wait for the ones before them while they hold SMs must not keep out what those wait for: another rank's kernels on
  // this GPU. So only alone on it.
  a.chained = bulk && sharers_ == 1 && !cached && a.capacity >= 0 && receive_now;
  if (args.receive == Receive::resident && !receive_now) {
    // Counters, then what the receive in the background does not share with later calls: local signals, and the epoch.
    const size_t bytes = static_cast<size_t>(num_ranks_) * 8 + (kNumFlags + 1) * 4;
    pending->counters = std::make_shared<Hold>(shared_, shared_->own, bytes, pending->on());
    a.arrived = reinterpret_cast<int64_t*>(pending->counters->data());
    a.common.own_epoch = reinterpret_cast<uint32_t*>(a.arrived + num_ranks_) + kNumFlags;
    check(cudaMemsetAsync(a.arrived, 0, bytes, stream), "cudaMemset");
  }
  if (ahead) quantize_ahead(*pending, args.num_sms);
  open_call(*pending, plan_blocks);
  prepare_rounds(lane, stream);
  ++lane.num_sends;
  ++lane.outstanding;
  pending->epoch = lane.num_sends;
  pending->receives_now = receive_now || lane.rounds > 1;
  a.common.last_of_send = true;
  if (pending->receives_now) {
    if (!cached) check(launch_admit(a, blocks(args.num_sms > 0 ? std::min(args.num_sms, 32) : 32), stream), "admit kernel");
    check(launch_move(a, true, true, a.move_blocks, stream), "move kernel");
    lane.rounds_issued = 1;
    issue_rounds(*pending, move_blocks);
    lane.rounds = lane.rounds_issued = 0;
    pending->fp8.reset();
    return pending;
  }
  check(launch_move(a, true, false, a.move_blocks, stream), "move kernel");
  lane.rounds = 0;
  a.common.last_of_send = false;
  if (args.receive == Receive::resident) {
    if (!lane.resident) lane.resident = transport::device::borrow_stream(device_);
    pending->receive_on(lane.resident.get());
  }
  pending->stay_open();
  return pending;
}

}  // namespace turnout::engine::cuda
