// The steps of a dispatch, and its result.
#include "engine/cpu/dispatch_call.h"

#include <algorithm>
#include <cstring>

#include "core/bytes.h"

namespace turnout::engine {

using core::BufferLayout;
using internal::Routing;

DispatchCall::DispatchCall(const std::shared_ptr<Context>& context, int lane, uint64_t epoch, uint64_t first_epoch, const KnownFacts& known,
                           const DispatchArgs& args, std::shared_ptr<Routing> fresh_routing, std::shared_ptr<const Routing> cached)
    : Call(context, lane, epoch, first_epoch, known, cached ? cached->id : 0),
      args_(args),
      fresh_(std::move(fresh_routing)),
      cached_(std::move(cached)) {
  const Routing& r = routing();
  low_latency_ = known.facts.mode == static_cast<int64_t>(Mode::low_latency);
  const auto hidden = static_cast<size_t>(args_.x.shape[1]);
  const bool quantised = args_.quantize != Quantize::none;
  format_.x_bytes = quantised ? hidden : hidden * size_of(args_.x.dtype);
  if (quantised) format_.scale_bytes = (hidden + 127) / 128 * (args_.quantize == Quantize::fp8_e4m3 ? 4 : 1);
  for (const TensorView& side : args_.side) format_.side_bytes.push_back(static_cast<size_t>(side.shape[1]) * size_of(side.dtype));
  if (fresh_) {
    format_.idx_bytes = static_cast<size_t>(r.num_topk) * sizeof(int32_t);
    if (r.has_weights) format_.weight_bytes = static_cast<size_t>(r.num_topk) * sizeof(float);
  }
  format_.derive();

  const auto ranks = static_cast<size_t>(context_->num_ranks);
  next_.assign(ranks, 0);
  arrived_.assign(ranks, 0);
  for (size_t d = 0; d < ranks; ++d) {
    my_rows_[d] = static_cast<int32_t>(r.send_begin[d + 1] - r.send_begin[d]);
    if (static_cast<int>(d) != context_->rank) sends_left_ += my_rows_[d];
  }
  if (fresh_ && r.layout != Layout::rank_major) {
    my_expert_rows_.resize(ranks);
    for (size_t d = 0; d < ranks; ++d) my_expert_rows_[d].assign(static_cast<size_t>(r.experts->num_local(static_cast<int>(d))), 0);
    for (const int32_t e : r.topk_idx) {
      if (e >= 0) ++my_expert_rows_[static_cast<size_t>(r.experts->rank_of(e))][static_cast<size_t>(r.experts->local_of(e))];
    }
  }
  check_room();
  make_offer();
}

bool DispatchCall::progress() {
  if (finished_ || given_up_) return false;
  bool moved = exchange_headers();
  if (!planned_ && all_headers_seen() && all_headers_sent()) {
    if (!counted_) {
      check_headers();
      plan_sends();
      plan_receives();
      counted_ = moved = true;
      if (mine_.owes_verdict) give_verdict(misfit_.empty());
    }
    planned_ = check_verdicts(misfit_);
    moved |= planned_;
  }
  moved |= send();
  if (planned_) {
    moved |= receive();
    // Not in plan(): a lock waits for every store under way, and by now the rows have left.
    if (trim_to_ > 0) memory_->trim(trim_to_);
    trim_to_ = 0;
    if (rows_left_ == 0 && sent() && !finished_) {
      finish();
      moved = true;
    }
  }
  return moved;
}

Waiting DispatchCall::waiting() const {
  Waiting w;
  const int me = context_->rank;
  auto missing = [&](const char* phase, bool arrival) {
    w.phase = phase;
    w.for_arrival = arrival;
    return !w.peers.empty();
  };
  for (int peer = 0; peer < context_->num_ranks; ++peer) {
    if (!header_seen(peer)) w.peers.push_back(peer);
  }
  w.expected = epoch_;
  if (!w.peers.empty()) w.seen = read(w.peers[0], BufferLayout::kHeader);
  if (missing("header", true)) return w;
  const auto depth = static_cast<uint64_t>(context_->layout.depth);
  for (int peer = 0; peer < context_->num_ranks; ++peer) {
    if (peer != me && !header_sent(peer)) w.peers.push_back(peer);
  }
  if (!w.peers.empty()) {
    w.expected = epoch_ - depth;
    w.seen = read(w.peers[0], BufferLayout::kSpace) >> 32;
  }
  if (missing("consumed", true)) return w;
  for (int peer = 0; peer < context_->num_ranks && !planned_; ++peer) {
    if (peer != me && owes_verdict(peer)) w.peers.push_back(peer);
  }
  w.expected = kFits;
  w.seen = 0;
  if (missing("verdict", false) || !planned_) return w;
  for (int peer = 0; peer < context_->num_ranks; ++peer) {
    if (path_to(peer) != Path::streamed || next_[static_cast<size_t>(peer)] >= my_rows_[static_cast<size_t>(peer)]) continue;
    w.peers.push_back(peer);
    w.expected = static_cast<uint64_t>(my_rows_[static_cast<size_t>(peer)]);
    w.seen = static_cast<uint64_t>(count_of(peer, BufferLayout::kSpace));
  }
  if (missing("space", true)) return w;
  for (int source = 0; source < context_->num_ranks; ++source) {
    const auto expected = static_cast<uint64_t>(path_from(source) == Path::direct ? admitted(source, me) : rows(source, me));
    const auto seen = static_cast<uint64_t>(received_[static_cast<size_t>(source)]);
    if (source == me || seen >= expected) continue;
    w.peers.push_back(source);
    w.expected = expected;
    w.seen = seen;
  }
  missing("rows", false);
  return w;
}

void DispatchCall::give_up() noexcept {
  if (given_up_ || finished_) return;
  given_up_ = true;
  try {
    // Ranks that disagree put nothing in place, so nobody writes the block; after an abort somebody may.
    if (offer_) offer_->retire();
    offer_.reset();
    if (memory_) memory_->retire();
    memory_.reset();
    held_memory_.reset();
    leave();
  } catch (...) {
    // The peers are gone; there is nobody to tell.
  }
}

/// Everything is here: what came beside the rows, the groups, the padding.
void DispatchCall::finish() {
  const int me = context_->rank;
  if (sums_) [[unlikely]]
    check_totals();
  if (fresh_) {
    Routing& r = *fresh_;
    const auto topk = static_cast<size_t>(r.num_topk);
    for (int source = 0; source < context_->num_ranks; ++source) {
      if (path_from(source) != Path::direct) continue;
      const auto first = static_cast<size_t>(r.recv_begin[static_cast<size_t>(source)]);
      const auto count = static_cast<size_t>(admitted(source, me));
      core::copy_bytes(r.recv_idx.data() + first * topk, memory_->data() + block_.topk_idx + first * format_.idx_bytes, count * format_.idx_bytes);
      if (r.has_weights) {
        core::copy_bytes(r.recv_weights.data() + first * topk, memory_->data() + block_.topk_weights + first * format_.weight_bytes,
                         count * format_.weight_bytes);
      }
    }
    if (held_) settle_held();
    if (!routed_) finish_routing(r, me);
  }
  const Routing& r = routing();
  if (r.layout == Layout::expert_major) zero_padding();
  consume_all();
  finished_ = true;
}

namespace {

constexpr size_t kFewTerms = 64;
/// So many offsets behind the last may be written meanwhile.
constexpr size_t kOffsetsBeyond = 7;

/// group_rows() for few terms: they are sorted, and the offsets filled from one expert that has any to the next.
void group_few_rows(Routing& r, size_t num_terms) {
  uint64_t terms[kFewTerms];  // expert, then row
  size_t n = 0;
  const int32_t* expert = r.recv_idx.data();
  const int32_t* const end = expert + num_terms;
  for (uint64_t row = 0; expert < end; ++row) {
    for (int k = 0; k < r.num_topk; ++k, ++expert) {
      if (*expert < 0) continue;
      const uint64_t term = static_cast<uint64_t>(*expert) << 32 | row;
      size_t at = n++;
      for (; at > 0 && terms[at - 1] > term; --at) terms[at] = terms[at - 1];
      terms[at] = term;
    }
  }
  r.sorted_rows.resize_for_overwrite(n);
  int32_t *const sorted = r.sorted_rows.data(), *const counts = r.expert_counts.data();
  int64_t *const offsets = r.expert_offsets.data(), *const last = offsets + r.expert_offsets.size();
  int64_t* next = offsets;  // the first that is not known yet
  const auto fill_up_to = [&next](int64_t* until, int64_t value) {
    // What is written too far the next fill overwrites, or nobody reads.
    for (int64_t* at = next; at < until; at += kOffsetsBeyond + 1) std::fill_n(at, kOffsetsBeyond + 1, value);
    next = until;
  };
  for (size_t i = 0; i < n; ++i) {
    const size_t e = terms[i] >> 32;
    ++counts[e];
    sorted[i] = static_cast<int32_t>(terms[i]);
    fill_up_to(offsets + e + 1, static_cast<int64_t>(i));
  }
  fill_up_to(last, static_cast<int64_t>(n));
}

/// Lists rank_major rows by local expert: counts, offsets, and the rows of the first `num_terms` entries of recv_idx.
void group_rows(Routing& r, size_t local, size_t num_terms) {
  r.expert_counts.assign(local, 0);
  r.expert_offsets.resize_for_overwrite(local + 1 + kOffsetsBeyond);
  r.expert_offsets.resize_for_overwrite(local + 1);
  if (num_terms <= kFewTerms) return group_few_rows(r, num_terms);
  const auto topk = static_cast<size_t>(r.num_topk);
  const int32_t* const expert = r.recv_idx.data();
  int32_t* const counts = r.expert_counts.data();
  int64_t* const offsets = r.expert_offsets.data();
  for (size_t i = 0; i < num_terms; ++i) {
    if (expert[i] >= 0) ++counts[expert[i]];
  }
  int64_t sum = 0;
  for (size_t e = 0; e < local; ++e) {
    offsets[e] = sum;
    sum += counts[e];
  }
  offsets[local] = sum;
  // While rows are listed each offset moves from the start of its group to its end, and back afterwards.
  r.sorted_rows.resize_for_overwrite(static_cast<size_t>(sum));
  int32_t* const sorted = r.sorted_rows.data();
  size_t i = 0;
  for (size_t row = 0; i < num_terms; ++row) {
    for (size_t k = 0; k < topk; ++k, ++i) {
      if (expert[i] >= 0) sorted[offsets[expert[i]]++] = static_cast<int32_t>(row);
    }
  }
  for (size_t e = 0; e < local; ++e) offsets[e] -= counts[e];
}

}  // namespace

/// Groups of rank_major rows by expert; weights by row of the other layouts. Everything past the rows is -1 or 0.
void DispatchCall::finish_routing(Routing& r, int rank) {
  const auto topk = static_cast<size_t>(r.num_topk);
  const size_t n = static_cast<size_t>(r.num_recv());
  if (r.layout == Layout::rank_major) {
    group_rows(r, static_cast<size_t>(r.experts->num_local(rank)), n * topk);
    if (r.capacity >= 0) {  // arrays have the capacity's size
      r.recv_idx.resize(static_cast<size_t>(r.capacity) * topk, -1);
      if (r.has_weights) r.recv_weights.resize(static_cast<size_t>(r.capacity) * topk, 0.0f);
    }
    return;
  }
  if (!r.has_weights) return;
  r.row_weights.assign(static_cast<size_t>(r.result_rows()), 0.0f);
  for (size_t i = 0; i < n * topk; ++i) {
    if (r.position[i] >= 0) r.row_weights[static_cast<size_t>(r.position[i])] = r.recv_weights[i];
  }
}

void DispatchCall::zero_padding() const {
  const Routing& r = routing();
  for (size_t e = 0; e < r.expert_counts.size(); ++e) {
    for (int64_t row = r.expert_offsets[e] + r.expert_counts[e]; row < r.expert_offsets[e + 1]; ++row) {
      const auto at = static_cast<size_t>(row);
      std::memset(x_ + row * x_stride_, 0, format_.x_bytes);
      if (format_.scale_bytes) std::memset(memory_->data() + block_.scales + at * format_.scale_bytes, 0, format_.scale_bytes);
      for (size_t s = 0; s < format_.side_bytes.size(); ++s) {
        std::memset(memory_->data() + block_.side[s] + at * format_.side_bytes[s], 0, format_.side_bytes[s]);
      }
    }
  }
}

DispatchOutcome DispatchCall::take() {
  return {fresh_ ? std::shared_ptr<const Routing>(std::move(fresh_)) : std::move(cached_), std::move(memory_), x_, x_stride_, block_};
}

}  // namespace turnout::engine
