// The steps of a combine, and its result.
#include "engine/cpu/combine_call.h"

#include <algorithm>
#include <cstring>

#include "core/math.h"
#include "engine/cpu/mutation.h"

namespace turnout::engine {

using core::BufferLayout;
using internal::Routing;

CombineCall::CombineCall(const std::shared_ptr<Context>& context, int lane, uint64_t epoch, uint64_t first_epoch, const KnownFacts& known,
                         const CombineArgs& args, std::shared_ptr<const Routing> routing)
    : Call(context, lane, epoch, first_epoch, known, routing->id), args_(args), routing_(std::move(routing)) {
  const Routing& r = *routing_;
  hidden_ = args_.y.shape[static_cast<size_t>(args_.y.ndim - 1)];
  const auto hidden = static_cast<size_t>(hidden_);
  wire_bytes_ = hidden * size_of(wire_dtype());
  if (args_.wire == Wire::fp8) scale_bytes_ = (hidden + 127) / 128 * sizeof(float);
  if (args_.side.defined()) side_floats_ = rows_wire() ? 1 : static_cast<size_t>(r.num_topk);
  row_at_ = static_cast<size_t>(core::align_up(static_cast<int64_t>(sizeof(Meta) + side_floats_ * sizeof(float)), 64));
  scales_at_ = static_cast<size_t>(core::align_up(static_cast<int64_t>(row_at_ + wire_bytes_), 16));
  record_bytes_ = static_cast<size_t>(core::align_up(static_cast<int64_t>(scales_at_ + scale_bytes_), 64));
  slots_ = static_cast<int64_t>(context_->layout.ring_bytes / record_bytes_);

  const auto ranks = static_cast<size_t>(context_->num_ranks);
  next_.assign(ranks, 0);
  ordinal_.assign(ranks, 0);
  taken_.assign(ranks, 0);
  released_.assign(ranks, 0);
  pull_ = can_be_pulled();
  if (pull_) {
    mine_.pull_offset = static_cast<const std::byte*>(args_.y.data) - context_->local;
    mine_.pull_stride = args_.y.strides[0] * static_cast<int64_t>(size_of(args_.y.dtype));
    my_pull_first_.append(r.recv_begin.data(), ranks);
    if (sums_) [[unlikely]]
      seal_pulled_rows();
  } else {
    outgoing_.resize(ranks);
  }
  for (int source = 0; source < context_->num_ranks && !pull_; ++source) {
    if (source == context_->rank) continue;
    list_outgoing(source);
    my_rows_[static_cast<size_t>(source)] = static_cast<int32_t>(outgoing_[static_cast<size_t>(source)].size());
    sends_left_ += my_rows_[static_cast<size_t>(source)];
  }

  const size_t row_bytes = hidden * size_of(args_.y.dtype);
  large_ = static_cast<int64_t>(row_bytes) * r.num_tokens > kCacheBytes;
  if (args_.out.defined()) {
    out_.x = static_cast<std::byte*>(args_.out.data);
    out_.x_stride = args_.out.strides[0] * static_cast<int64_t>(size_of(args_.out.dtype));
  } else if (r.num_tokens > 0) {
    out_.x_stride = static_cast<int64_t>(row_bytes);
    out_.memory = new_memory(context_->shared_from_this(), row_bytes * static_cast<size_t>(r.num_tokens));
    out_.x = out_.memory->data();
  }
  out_.num_lost.assign(static_cast<size_t>(r.num_tokens), 0);
  if (args_.side.defined()) out_.side.assign(static_cast<size_t>(r.num_tokens) * static_cast<size_t>(r.num_topk), 0.0f);
}

bool CombineCall::can_be_pulled() const {
  const Routing& r = *routing_;
  if (r.layout != Layout::rank_major || args_.apply != CombineWeights::none || args_.side.defined()) return false;
  if (args_.wire != Wire::payload || r.num_recv() == 0) return false;
  const auto* data = static_cast<const std::byte*>(args_.y.data);
  const std::byte* arena = context_->local;
  if (data < arena || data >= arena + context_->layout.num_bytes) return false;
  for (int peer = 0; peer < context_->num_ranks; ++peer) {
    if (!context_->peer(peer)) return false;
  }
  return true;
}

bool CombineCall::all_pulled() const {
  for (int peer = 0; peer < context_->num_ranks && pull_ && !mutated(Mutation::rows_freed_while_pulled); ++peer) {
    if (peer != context_->rank && !has_consumed(peer)) return false;
  }
  return true;
}

/// The row that `rank` keeps for this rank's token number `ordinal` on it. REQUIRES: its header says so.
const std::byte* CombineCall::pulled_row(int rank, int64_t ordinal) const {
  const Header& h = header(rank);
  const int64_t offset = h.pull_offset + (h.pull_first + ordinal) * h.pull_stride;
  check_address(Region::pulled, rank, ordinal, static_cast<size_t>(offset), wire_bytes_);
  return context_->peer(rank) + offset;
}

DType CombineCall::wire_dtype() const {
  switch (args_.wire) {
    case Wire::fp32: return DType::fp32;
    case Wire::fp8: return DType::fp8_e4m3;
    default: return args_.y.dtype;
  }
}

/// A row all of whose terms were dropped sends nothing: its source sees the gap in the ordinals.
void CombineCall::list_outgoing(int source) {
  const Routing& r = *routing_;
  const auto at = static_cast<size_t>(source);
  auto& list = outgoing_[at];
  list.reserve(static_cast<size_t>(r.recv_begin[at + 1] - r.recv_begin[at]));
  for (int64_t row = r.recv_begin[at]; row < r.recv_begin[at + 1]; ++row) {
    if (r.layout == Layout::rank_major) {
      list.push_back({row, -1});
      continue;
    }
    for (int k = 0; k < r.num_topk; ++k) {
      if (r.position[static_cast<size_t>(row * r.num_topk + k)] < 0) continue;
      list.push_back({row, rows_wire() ? k : -1});
      if (!rows_wire()) break;
    }
  }
}

bool CombineCall::progress() {
  if (finished_ || given_up_) return false;
  bool moved = exchange_headers();
  if (!checked_ && all_headers_seen() && all_headers_sent()) {
    check_headers();
    checked_ = true;
    moved = true;
  }
  moved |= send();
  moved |= reduce();
  if (checked_ && next_token_ == routing_->num_tokens && sent() && !consumed_) {
    if (sums_) [[unlikely]]
      check_totals();
    consume_all();
    consumed_ = true;
    moved = true;
  }
  if (consumed_ && !finished_ && all_pulled()) finished_ = moved = true;
  return moved;
}

Waiting CombineCall::waiting() const {
  Waiting w;
  w.expected = epoch_;
  for (int peer = 0; peer < context_->num_ranks; ++peer) {
    if (!header_seen(peer)) w.peers.push_back(peer);
  }
  if (!w.peers.empty()) {
    w.phase = "header";
    w.for_arrival = true;
    w.seen = read(w.peers[0], BufferLayout::kHeader);
    return w;
  }
  const auto depth = static_cast<uint64_t>(context_->layout.depth);
  for (int peer = 0; peer < context_->num_ranks; ++peer) {
    if (peer != context_->rank && !header_sent(peer)) w.peers.push_back(peer);
  }
  if (!w.peers.empty()) {
    w.phase = "consumed";
    w.for_arrival = true;
    w.expected = epoch_ - depth;
    w.seen = read(w.peers[0], BufferLayout::kSpace) >> 32;
    return w;
  }
  for (int peer = 0; peer < context_->num_ranks; ++peer) {
    const auto at = static_cast<size_t>(peer);
    if (outgoing_.empty() || next_[at] >= static_cast<int64_t>(outgoing_[at].size())) continue;
    w.peers.push_back(peer);
    w.phase = "space";
    w.for_arrival = true;
    w.expected = outgoing_[at].size();
    w.seen = static_cast<uint64_t>(count_of(peer, BufferLayout::kSpace));
  }
  if (!w.peers.empty()) return w;
  for (int peer = 0; peer < context_->num_ranks && pull_ && consumed_; ++peer) {
    if (peer != context_->rank && !has_consumed(peer)) w.peers.push_back(peer);
  }
  if (!w.peers.empty()) {
    w.phase = "consumed";
    w.for_arrival = true;
    return w;
  }
  w.phase = "rows";
  for (int source = 0; source < context_->num_ranks; ++source) {
    if (source == context_->rank || stream_ended(source)) continue;
    if (count_of(source, BufferLayout::kProduced) > taken_[static_cast<size_t>(source)]) continue;
    w.peers.push_back(source);
    w.expected = static_cast<uint64_t>(rows(source, context_->rank));
    w.seen = static_cast<uint64_t>(taken_[static_cast<size_t>(source)]);
  }
  return w;
}

void CombineCall::give_up() noexcept {
  if (given_up_ || finished_) return;
  given_up_ = true;
  // A missed check must not pass for data.
  for (int64_t token = 0; token < routing_->num_tokens && out_.x; ++token) fill_failed(out_.x + token * out_.x_stride, args_.y.dtype, hidden_);
  try {
    leave();
  } catch (...) {
    // The peers are gone; there is nobody to tell.
  }
}

CombineOutcome CombineCall::take() { return std::move(out_); }

}  // namespace turnout::engine
