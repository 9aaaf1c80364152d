// The arrays of a routing: memory for them, and the same as bytes that are the caller's.
#include <algorithm>

#include "core/math.h"
#include "engine/cuda/carver.h"
#include "engine/cuda/engine.h"
#include "transport/device/driver.h"

namespace turnout::engine::cuda {

using transport::device::check;
using transport::device::CurrentDevice;

namespace {

size_t carve_source_side(Routing& r, std::byte* base, int64_t tokens, int topk, bool has_weights, int num_ranks, int num_local) {
  Carver at(base);
  const int64_t pairs = tokens * topk, ranks = num_ranks;
  r.topk_idx = at.take<int32_t>(pairs);
  r.topk_weights = has_weights ? at.take<float>(pairs) : nullptr;
  r.dest = at.take<int32_t>(pairs);
  r.send_index = at.take<int32_t>(pairs);
  r.pair_index = at.take<int32_t>(pairs);
  r.own_tokens = at.take<int32_t>(tokens);
  r.rows = at.take<int32_t>(ranks * ranks);
  r.send_begin = at.take<int32_t>(ranks);
  r.sent = at.take<int32_t>(ranks);
  r.send_offset = at.take<int32_t>(ranks + 1);
  r.source_tokens = at.take<int32_t>(ranks);
  r.recv_begin = at.take<int32_t>(ranks + 1);
  r.record_begin = at.take<int32_t>(ranks);
  r.expert_base = at.take<int32_t>(ranks * num_local);
  r.expert_counts = at.take<int32_t>(num_local);
  r.expert_offsets = at.take<int64_t>(num_local + 1);
  r.cut = at.take<int32_t>(2);
  r.num_rows = at.take<int64_t>(1);
  r.num_dropped = at.take<int64_t>(1);
  return at.num_bytes();
}

size_t carve_receive_side(Routing& r, std::byte* base, int64_t block_rows, int64_t result_rows, int topk, bool has_weights, Layout layout,
                          int64_t slot_rows) {
  Carver at(base);
  const bool by_rank = layout == Layout::rank_major;
  // rank_major hands its ids and weights out as results, as long as the row arrays are.
  const int64_t rows = by_rank ? std::max(block_rows, result_rows) : block_rows;
  r.recv_idx = at.take<int32_t>(rows * topk);
  r.recv_weights = has_weights ? at.take<float>(rows * topk) : nullptr;
  r.position = by_rank ? nullptr : at.take<int32_t>(rows * topk);
  r.row_weights = !by_rank && has_weights ? at.take<float>(result_rows) : nullptr;
  r.sorted_rows = by_rank ? at.take<int32_t>(rows * topk) : nullptr;
  r.slots = slot_rows > 0 ? at.take<int32_t>(slot_rows * topk) : nullptr;  // last: with and without them the rest lies alike
  return at.num_bytes();
}

/// Both sides of a routing as bytes. Returns how many; `receive_at`: where the second one begins.
size_t carve(Routing& r, std::byte* base, const RoutingFacts& f, int num_ranks, int max_local, int64_t block_rows, int64_t result_rows,
             size_t* receive_at) {
  const size_t source = carve_source_side(r, base, f.num_tokens, f.num_topk, f.has_weights, num_ranks, max_local);
  *receive_at = static_cast<size_t>(core::align_up(static_cast<int64_t>(source), 128));
  return *receive_at + carve_receive_side(r, base ? base + *receive_at : nullptr, block_rows, result_rows, f.num_topk, f.has_weights, f.layout, 0);
}

}  // namespace

/// With a capacity, of the block that peers write.
int64_t Engine::most_block_rows(Layout layout, int64_t capacity) const {
  const int64_t most = config_.max_tokens_per_rank * num_ranks_;
  // rank_major results are as long as the capacity says, and they may stay in the block.
  return layout == Layout::expert_slab ? most : layout == Layout::rank_major ? capacity : std::min(capacity, most);
}

int64_t Engine::most_result_rows(Layout layout, int64_t capacity) const {
  return layout == Layout::expert_slab ? capacity * num_local_[static_cast<size_t>(rank_)] : capacity;
}

std::shared_ptr<RoutingMemory> Engine::new_routing(const turnout::DispatchArgs& args, OnStream on) const {
  auto r = std::make_shared<RoutingMemory>();
  const int64_t tokens = args.x.shape[0];
  const auto topk = static_cast<int>(args.topk_idx.shape[1]);
  const bool weights = args.topk_weights.defined();
  const int local = num_local_[static_cast<size_t>(rank_)];
  const size_t bytes = carve_source_side(r->view, nullptr, tokens, topk, weights, num_ranks_, max_local_);
  r->source_side = std::make_shared<Hold>(shared_, shared_->own, bytes, on);
  carve_source_side(r->view, r->source_side->data(), tokens, topk, weights, num_ranks_, max_local_);
  r->num_local = local;
  r->max_local = max_local_;
  r->generation = experts_hash_;
  return r;
}

void Engine::add_receive_side(RoutingMemory& r, int64_t block_rows, int64_t result_rows, int num_topk, bool has_weights, Layout layout,
                              int64_t slot_rows, OnStream on) const {
  r.block_rows = block_rows;
  r.result_rows = result_rows;
  const size_t bytes = carve_receive_side(r.view, nullptr, block_rows, result_rows, num_topk, has_weights, layout, slot_rows);
  r.receive_side = std::make_shared<Hold>(shared_, shared_->own, std::max<size_t>(bytes, 128), on);
  carve_receive_side(r.view, r.receive_side->data(), block_rows, result_rows, num_topk, has_weights, layout, slot_rows);
}

size_t Engine::routing_bytes(const RoutingFacts& f) const {
  Routing none;
  size_t receive_at = 0;
  return carve(none, nullptr, f, num_ranks_, max_local_, most_block_rows(f.layout, f.capacity), most_result_rows(f.layout, f.capacity), &receive_at);
}

void Engine::store_routing(const DeviceRouting& routing, const RoutingFacts& f, std::byte* to, Stream stream) const {
  CurrentDevice current(device_);
  const auto& r = static_cast<const RoutingMemory&>(routing);
  Routing none;
  size_t receive_at = 0;
  const size_t all = carve(none, nullptr, f, num_ranks_, r.max_local, r.block_rows, r.result_rows, &receive_at);
  const auto copy = [&](std::byte* place, const std::byte* from, size_t num_bytes) {
    if (num_bytes == 0) return;
    check(cudaMemcpyAsync(place, from, num_bytes, cudaMemcpyDeviceToDevice, static_cast<cudaStream_t>(stream.native)), "copying a routing");
  };
  copy(to, r.source_side->data(), receive_at);
  copy(to + receive_at, r.receive_side->data(), all - receive_at);
}

std::shared_ptr<const DeviceRouting> Engine::routing_at(const RoutingFacts& f, const std::byte* from) const {
  auto r = std::make_shared<RoutingMemory>();
  r->block_rows = most_block_rows(f.layout, f.capacity);
  r->result_rows = most_result_rows(f.layout, f.capacity);
  r->num_local = num_local_[static_cast<size_t>(rank_)];
  r->max_local = max_local_;
  r->generation = experts_hash_;
  size_t receive_at = 0;
  // Calls along a known routing only read it.
  carve(r->view, const_cast<std::byte*>(from), f, num_ranks_, max_local_, r->block_rows, r->result_rows, &receive_at);  // NOLINT
  return r;
}

}  // namespace turnout::engine::cuda
