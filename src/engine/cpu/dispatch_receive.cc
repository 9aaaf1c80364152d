// The receive side of a dispatch: the plan once all headers are here, rows laid out as they arrive, the result.
#include <algorithm>
#include <cstring>
#include <utility>

#include "core/bytes.h"
#include "engine/cpu/dispatch_call.h"
#include "engine/cpu/mutation.h"

namespace turnout::engine {

using core::BufferLayout;
using internal::Routing;

namespace {
/// So many bytes of records are asked for at once.
constexpr int64_t kPrefetchBytes = 16 << 10;
}  // namespace

/// All headers are here and agree: who sends what to whom, what is admitted, and where the rows of this rank go.
void DispatchCall::plan_sends() {
  const auto ranks = static_cast<size_t>(context_->num_ranks);
  const int me = context_->rank;
  const Routing& r = routing();
  const bool by_rank = r.layout == Layout::rank_major;
  const bool limited = by_rank && r.capacity >= 0;
  admitted_.resize_for_overwrite(ranks * ranks);
  total_.resize_for_overwrite(ranks);
  path_to_.assign(ranks, Path::none);
  for (int d = 0; d < context_->num_ranks; ++d) {
    int64_t total = 0;
    for (int s = 0; s < context_->num_ranks; ++s) {
      const int64_t fits = limited ? std::clamp<int64_t>(r.capacity - total, 0, rows(s, d)) : rows(s, d);
      admitted_[static_cast<size_t>(s) * ranks + static_cast<size_t>(d)] = fits;
      total += fits;
    }
    total_[static_cast<size_t>(d)] = total;
  }
  for (int peer = 0; peer < context_->num_ranks; ++peer) {
    const auto at = static_cast<size_t>(peer);
    if (peer == me || my_rows_[at] == 0) continue;
    const int64_t offered = by_rank ? header(peer).offer_bytes : 0;
    const BlockFormat block = offered ? format_.block(block_rows(peer), format_.idx_bytes > 0) : BlockFormat();
    path_to_[at] = choose_path(me, peer, offered && block.num_bytes <= static_cast<size_t>(offered));
    if (path_to_[at] != Path::direct) continue;
    if (targets_.empty()) targets_.assign(ranks, Target());
    Target& target = targets_[at];
    const auto base = static_cast<size_t>(header(peer).offer_offset);
    target.x = base + block.x;
    target.scales = base + block.scales;
    target.topk_idx = base + block.topk_idx;
    target.topk_weights = base + block.topk_weights;
    target.admitted = admitted(me, peer);
    target.block_rows = block_rows(peer);
    for (int s = 0; s < me; ++s) target.first_row += admitted(s, peer);
    direct_peers_.push_back(peer);
  }
}

/// What arrives, and where it goes.
void DispatchCall::plan_receives() {
  const auto ranks = static_cast<size_t>(context_->num_ranks);
  const int me = context_->rank;
  const Routing& r = routing();
  if (fresh_) {
    fresh_->sent.resize_for_overwrite(ranks);
    fresh_->recv_begin.assign(ranks + 1, 0);
    for (int s = 0; s < context_->num_ranks; ++s) {
      const auto at = static_cast<size_t>(s);
      fresh_->sent[at] = admitted(me, s);
      fresh_->recv_begin[at + 1] = fresh_->recv_begin[at] + admitted(s, me);
      if (r.layout == Layout::rank_major) fresh_->num_dropped += rows(s, me) - admitted(s, me);
    }
    const auto n = static_cast<size_t>(fresh_->num_recv());
    fresh_->recv_idx.resize_for_overwrite(n * static_cast<size_t>(r.num_topk));  // each row fills its part
    if (r.has_weights) fresh_->recv_weights.resize_for_overwrite(n * static_cast<size_t>(r.num_topk));
    fresh_->num_rows = fresh_->num_recv();
    if (r.layout != Layout::rank_major) plan_experts();
  }
  const bool fits_here = make_room();
  large_ = std::max(r.send_begin.back(), r.num_recv()) * static_cast<int64_t>(format_.x_bytes) > kCacheBytes;
  path_from_.resize_for_overwrite(ranks);
  received_.assign(ranks, 0);
  rows_left_ = 0;
  for (int s = 0; s < context_->num_ranks; ++s) {
    const Path path = path_from_[static_cast<size_t>(s)] = choose_path(s, me, fits_here);
    direct_sources_ += path == Path::direct;
    rows_left_ += path == Path::direct ? admitted(s, me) : rows(s, me);
  }
}

/// Group offsets and the first position of every source in every group. What exceeds a capacity of expert_major is
/// known only once every token's experts are: then rows are held back and laid out at the end.
void DispatchCall::plan_experts() {
  Routing& r = *fresh_;
  const int me = context_->rank;
  const auto local = static_cast<size_t>(r.experts->num_local(me));
  const auto ranks = static_cast<size_t>(context_->num_ranks);
  r.position.assign(r.recv_idx.size(), -1);
  r.expert_counts.assign(local, 0);
  r.expert_offsets.assign(local + 1, 0);
  expert_next_.assign(ranks * local, 0);
  int64_t at = 0;
  for (size_t e = 0; e < local; ++e) {
    int64_t count = 0;
    for (int s = 0; s < context_->num_ranks; ++s) {
      expert_next_[static_cast<size_t>(s) * local + e] = (r.layout == Layout::expert_major ? at : 0) + count;
      count += expert_rows(s, static_cast<int>(e));
    }
    if (r.layout == Layout::expert_slab) {
      r.num_dropped += std::max<int64_t>(0, count - r.capacity);
      count = std::min(count, r.capacity);
      r.expert_offsets[e] = static_cast<int64_t>(e) * r.capacity;
      at += count;
    } else {
      r.expert_offsets[e] = at;
      at += core::align_up(count, r.alignment);
    }
    r.expert_counts[e] = static_cast<int32_t>(count);
  }
  r.expert_offsets[local] = r.layout == Layout::expert_slab ? static_cast<int64_t>(local) * r.capacity : at;
  r.num_rows = at;
  held_ = r.layout == Layout::expert_major && r.capacity >= 0 && at > r.capacity;
}

/// Memory for the result: the offered block if all rows fit, the caller's, a lease, or memory of the allocator. Whether it is
/// the block that was offered to the peers.
bool DispatchCall::make_room() {
  const Routing& r = routing();
  if (held_ && r.num_recv() > 0) {
    held_memory_ = new_memory(context_->shared_from_this(), static_cast<size_t>(r.num_recv()) * format_.record_bytes);
  }
  const int64_t n = r.layout == Layout::rank_major ? block_rows(context_->rank) : r.result_rows();
  bool offered = offer_ && r.layout == Layout::rank_major;
  if (offered) {
    block_ = format_.block(n, format_.idx_bytes > 0);
    offered = block_.num_bytes <= offer_->lease().num_bytes;
  }
  if (!offered) block_ = format_.block(n, false);
  x_stride_ = static_cast<int64_t>(format_.x_stride);
  if (offered) {
    memory_ = std::move(offer_);
    trim_to_ = std::max(block_.num_bytes, size_t{1});  // of a result without rows, too
  } else {
    std::shared_ptr<ResultMemory> lease;
    if (r.layout != Layout::rank_major && wants_lease() && !memory_) lease = offer_ ? std::move(offer_) : lease_of(block_.num_bytes);
    offer_.reset();
    if (lease) memory_ = std::move(lease);
    else if (args_.result == ResultKind::lease && block_.num_bytes > 0) misfit_ = no_lease(block_.num_bytes);
    else if (!memory_) memory_ = fresh_memory(block_.num_bytes);
  }
  if (memory_) x_ = memory_->data() + block_.x;
  if (args_.out.defined()) {
    x_ = static_cast<std::byte*>(args_.out.data);
    x_stride_ = args_.out.strides[static_cast<size_t>(args_.out.ndim - 2)] * static_cast<int64_t>(size_of(args_.out.dtype));
    misfit_ = no_room(n);
  }
  return offered;
}

bool DispatchCall::receive() {
  bool moved = false;
  const int me = context_->rank;
  for (int step = 0; step < context_->num_ranks; ++step) {
    const int source = (me + context_->num_ranks - step) % context_->num_ranks;
    const auto at = static_cast<size_t>(source);
    const int64_t expected = rows(source, me);
    if (source == me) {
      if (received_[at] < expected) moved |= receive_from(source, std::min(expected, received_[at] + 32));
      continue;
    }
    switch (path_from(source)) {
      case Path::none: break;
      case Path::streamed: moved |= receive_from(source, std::min(expected, count_of(source, BufferLayout::kProduced))); break;
      case Path::direct: {
        const int64_t there = std::min(admitted(source, me), count_of(source, BufferLayout::kRows));
        if (there <= received_[at]) break;
        if (sums_) [[unlikely]]
          check_block(source, received_[at], there);
        rows_left_ -= there - received_[at];
        received_[at] = there;
        std::atomic_ref(arrived_[at]).store(there, std::memory_order_release);
        moved = true;
      }
    }
  }
  return moved;
}

/// Lays out the records of `source` up to `available`, then gives their ring slots back.
bool DispatchCall::receive_from(int source, int64_t available) {
  const auto at = static_cast<size_t>(source);
  const int64_t first = received_[at];
  if (available <= first) return false;
  const bool own = source == context_->rank;
  const Routing& r = routing();
  const auto slots = static_cast<int64_t>(context_->layout.ring_bytes / format_.record_bytes);
  const std::byte* ring = context_->local + context_->layout.ring_at(lane_, copy_, source);
  const int64_t admitted_here = admitted(source, context_->rank);
  const int64_t end = std::min(available, admitted_here);
  const int64_t base = routing().recv_begin[at];
  auto record_of = [&](int64_t i) { return ring + static_cast<size_t>(i % slots) * format_.record_bytes; };
  auto token_of = [&](int64_t i) { return static_cast<int64_t>(r.send_tokens[static_cast<size_t>(r.send_begin[at] + i)]); };
  if (sums_ && !own) [[unlikely]]
    check_records(source, first, available);
  if (fresh_) {
    int32_t idx[kMaxTopk];
    float weights[kMaxTopk];
    for (int64_t i = first; i < end; ++i) {
      if (own) {
        fill_meta(source, token_of(i), idx, r.has_weights ? weights : nullptr);
        admit(source, base + i, idx, r.has_weights ? weights : nullptr);
      } else {
        const std::byte* record = record_of(i);
        admit(source, base + i, reinterpret_cast<const int32_t*>(record),
              r.has_weights ? reinterpret_cast<const float*>(record + format_.idx_bytes) : nullptr);
      }
    }
  }
  if (mutated(Mutation::space_before_laid_out) && !own && available < rows(source, context_->rank)) {
    raise(source, BufferLayout::kSpace, progress_value(epoch_, static_cast<uint64_t>(available)));
  }
  // Rows of a small call are on their way while their experts are counted.
  const bool few = (end - first) * static_cast<int64_t>(format_.record_bytes) <= kPrefetchBytes;
  if (!own && few) prefetch_row(record_of(first), static_cast<size_t>(end - first) * format_.record_bytes);
  if (fresh_ && rows_left_ == available - first && !held_ && direct_sources_ == 0) {
    finish_routing(*fresh_, context_->rank);
    routed_ = true;
  }
  context_->parallel_for(end - first, 4, [&](int64_t from, int64_t to) {
    for (int64_t i = first + from; i < first + to; ++i) {
      const std::byte* record = own ? nullptr : record_of(i);
      if (held_ && !own) {
        std::memcpy(held_memory_->data() + static_cast<size_t>(base + i) * format_.record_bytes, record, format_.record_bytes);
      } else if (!held_) {
        Row row{nullptr, nullptr, record, own ? token_of(i) : 0, base + i};
        row.x = own ? token_row(row.token, row.scales) : record + format_.x_at;
        if (!own && format_.scale_bytes) row.scales = record + format_.scales_at;
        if (!own && !few) prefetch_row(row.x, format_.x_bytes);
        lay_out(row);
      }
    }
  });
  if (sums_ && !held_) [[unlikely]]
    check_placed(source, first, end);
  received_[at] = available;
  rows_left_ -= available - first;
  std::atomic_ref(arrived_[at]).store(std::min(available, admitted_here), std::memory_order_release);
  // The last records are given back by consume_all().
  if (!own && available < rows(source, context_->rank)) raise(source, BufferLayout::kSpace, progress_value(epoch_, static_cast<uint64_t>(available)));
  return true;
}

/// Notes the experts and weights of row `i` and gives each of its terms a position.
void DispatchCall::admit(int source, int64_t i, const int32_t* idx, const float* weights) {
  Routing& r = *fresh_;
  const auto at = static_cast<size_t>(i) * static_cast<size_t>(r.num_topk);
  std::copy_n(idx, r.num_topk, r.recv_idx.begin() + static_cast<int64_t>(at));
  if (weights) std::copy_n(weights, r.num_topk, r.recv_weights.begin() + static_cast<int64_t>(at));
  if (r.layout == Layout::rank_major || held_) return;
  const size_t local = r.expert_counts.size();
  for (int k = 0; k < r.num_topk; ++k) {
    if (idx[k] < 0) continue;
    const auto e = static_cast<size_t>(idx[k]);
    const int64_t position = expert_next_[static_cast<size_t>(source) * local + e]++;
    if (r.layout == Layout::expert_major) r.position[at + static_cast<size_t>(k)] = position;
    else if (position < r.capacity) r.position[at + static_cast<size_t>(k)] = static_cast<int64_t>(e) * r.capacity + position;
  }
}

/// Copies a row to all its positions.
void DispatchCall::lay_out(const Row& row) const {
  const Routing& r = routing();
  auto place = [&](int64_t position) {
    const auto p = static_cast<size_t>(position);
    util::probe::at(util::probe::Step::copy);
    store_row(x_ + position * x_stride_, row.x, format_.x_bytes);
    if (row.scales) std::memcpy(memory_->data() + block_.scales + p * format_.scale_bytes, row.scales, format_.scale_bytes);
    for (size_t s = 0; s < format_.side_bytes.size(); ++s) {
      const std::byte* side = row.record ? row.record + format_.side_at[s] : args_.side[s].row(row.token);
      core::copy_bytes(memory_->data() + block_.side[s] + p * format_.side_bytes[s], side, format_.side_bytes[s]);
    }
  };
  if (r.layout == Layout::rank_major) return place(row.index);
  const auto at = static_cast<size_t>(row.index) * static_cast<size_t>(r.num_topk);
  for (size_t k = 0; k < static_cast<size_t>(r.num_topk); ++k) {
    if (r.position[at + k] >= 0) place(r.position[at + k]);
  }
}

/// expert_major beyond its capacity: admits terms in (source, token, k) order until the padded total would exceed it,
/// then lays out what was held.
void DispatchCall::settle_held() {
  Routing& r = *fresh_;
  const auto local = r.expert_counts.size();
  std::vector<int64_t> counts(local, 0);
  int64_t padded = 0;
  size_t num_admitted = 0, num_terms = 0;
  bool full = false;
  for (const int32_t e : r.recv_idx) {
    if (e < 0) continue;
    ++num_terms;
    if (full) continue;
    const auto at = static_cast<size_t>(e);
    const int64_t grown = padded - core::align_up(counts[at], r.alignment) + core::align_up(counts[at] + 1, r.alignment);
    if (grown > r.capacity) {
      full = true;
      continue;
    }
    padded = grown;
    ++counts[at];
    ++num_admitted;
  }
  r.num_dropped = static_cast<int64_t>(num_terms - num_admitted);
  r.num_rows = padded;
  std::vector<int64_t> next(local);
  int64_t offset = 0;
  for (size_t e = 0; e < local; ++e) {
    r.expert_counts[e] = static_cast<int32_t>(counts[e]);
    r.expert_offsets[e] = next[e] = offset;
    offset += core::align_up(counts[e], r.alignment);
  }
  r.expert_offsets[local] = offset;
  for (size_t i = 0, seen = 0; i < r.recv_idx.size() && seen < num_admitted; ++i) {
    if (r.recv_idx[i] < 0) continue;
    r.position[i] = next[static_cast<size_t>(r.recv_idx[i])]++;
    ++seen;
  }
  for (int source = 0; source < context_->num_ranks; ++source) {
    const auto at = static_cast<size_t>(source);
    for (int64_t i = r.recv_begin[at]; i < r.recv_begin[at + 1]; ++i) {
      const bool own = source == context_->rank;
      const std::byte* record = own ? nullptr : held_memory_->data() + static_cast<size_t>(i) * format_.record_bytes;
      Row row{nullptr, nullptr, record, own ? r.send_tokens[static_cast<size_t>(r.send_begin[at] + i - r.recv_begin[at])] : 0, i};
      row.x = own ? token_row(row.token, row.scales) : record + format_.x_at;
      if (!own && format_.scale_bytes) row.scales = record + format_.scales_at;
      lay_out(row);
    }
    if (sums_) [[unlikely]]
      check_placed(source, 0, r.recv_begin[at + 1] - r.recv_begin[at]);
  }
  held_memory_.reset();
}

}  // namespace turnout::engine
