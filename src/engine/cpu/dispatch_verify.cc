// Checksums of dispatched rows: made of what the source was given, compared with what lies in the result, once for each place of a row.
// Experts and weights are compared before they are used.
#include "engine/cpu/dispatch_call.h"
#include "engine/cpu/sums.h"

namespace turnout::engine {

using internal::Routing;

DispatchCall::Parts DispatchCall::parts_of_token(int64_t token) const {
  Parts parts{};
  parts.x = token_row(token, parts.scales);
  for (const TensorView& side : args_.side) parts.side.push_back(side.row(token));
  return parts;
}

/// In the result.
DispatchCall::Parts DispatchCall::parts_at(int64_t position) const {
  const auto at = static_cast<size_t>(position);
  Parts parts{};
  parts.x = x_ + position * x_stride_;
  if (format_.scale_bytes) parts.scales = memory_->data() + block_.scales + at * format_.scale_bytes;
  for (size_t s = 0; s < format_.side_bytes.size(); ++s) parts.side.push_back(memory_->data() + block_.side[s] + at * format_.side_bytes[s]);
  return parts;
}

uint64_t DispatchCall::data_sum(const SumKey& of, const Parts& parts) const {
  Hash hash(of);
  hash.add(parts.x, format_.x_bytes).add(parts.scales, format_.scale_bytes);
  for (size_t s = 0; s < format_.side_bytes.size(); ++s) hash.add(parts.side[s], format_.side_bytes[s]);
  return hash.value();
}

uint64_t DispatchCall::meta_sum(const SumKey& of, const void* idx, const void* weights) const {
  return Hash(of).add(idx, format_.idx_bytes).add(weights, format_.weight_bytes).value();
}

/// Of the token that is the `i`-th to go to `peer`.
RowSum DispatchCall::sum_of_token(int peer, Region region, int64_t i, int64_t token) const {
  const SumKey of = key(region, context_->rank, peer, i);
  int32_t idx[kMaxTopk] = {};
  float weights[kMaxTopk] = {};
  if (format_.idx_bytes) fill_meta(peer, token, idx, format_.weight_bytes ? weights : nullptr);
  return {meta_sum(of, idx, weights), data_sum(of, parts_of_token(token))};
}

/// Before records [first, end) of `source` are looked at. What their rows hold check_placed() compares.
void DispatchCall::check_records(int source, int64_t first, int64_t end) {
  const auto slots = static_cast<int64_t>(context_->layout.ring_bytes / format_.record_bytes);
  const std::byte* ring = context_->local + context_->layout.ring_at(lane_, copy_, source);
  if (held_) sums_->held.resize(static_cast<size_t>(routing().num_recv()));
  for (int64_t i = first; i < end; ++i) {
    const RowSum sum = sum_at(context_->layout.ring_sum_at(lane_, copy_, source, i % slots));
    const std::byte* record = ring + static_cast<size_t>(i % slots) * format_.record_bytes;
    check_sum(Region::ring, source, i, "experts and weights", sum.meta,
              meta_sum(key(Region::ring, source, context_->rank, i), record, record + format_.idx_bytes));
    count_sum(source, sum);
    if (held_ && i < admitted(source, context_->rank)) sums_->held[static_cast<size_t>(routing().recv_begin[static_cast<size_t>(source)] + i)] = sum;
  }
}

/// Rows that `source` has put in place.
void DispatchCall::check_block(int source, int64_t first, int64_t end) {
  const auto begin = routing().recv_begin[static_cast<size_t>(source)];
  for (int64_t i = first; i < end; ++i) {
    const auto row = static_cast<size_t>(begin + i);
    const RowSum sum = sum_at(context_->layout.row_sum_at(memory_->lease().offset + block_.x + row * format_.x_stride));
    const SumKey of = key(Region::block, source, context_->rank, i);
    const std::byte* block = memory_->data();
    check_sum(Region::block, source, i, "experts and weights", sum.meta,
              meta_sum(of, block + block_.topk_idx + row * format_.idx_bytes, block + block_.topk_weights + row * format_.weight_bytes));
    check_sum(Region::block, source, i, "data", sum.data, data_sum(of, parts_at(begin + i)));
    count_sum(source, sum);
  }
}

/// Rows [first, end) of `source`, at all their places. REQUIRES: their records are still here, or were held.
void DispatchCall::check_placed(int source, int64_t first, int64_t end) const {
  const Routing& r = routing();
  const int me = context_->rank;
  const bool own = source == me;
  const auto from = static_cast<size_t>(source), topk = static_cast<size_t>(r.num_topk);
  const auto slots = static_cast<int64_t>(context_->layout.ring_bytes / format_.record_bytes);
  const Region region = own ? Region::own : Region::ring;
  for (int64_t i = first; i < end; ++i) {
    const auto row = static_cast<size_t>(r.recv_begin[from] + i);
    const SumKey of = key(region, source, me, i);
    uint64_t sent = 0;
    if (own) sent = data_sum(of, parts_of_token(r.send_tokens[static_cast<size_t>(r.send_begin[from] + i)]));
    else if (held_) sent = sums_->held[row].data;
    else sent = sum_at(context_->layout.ring_sum_at(lane_, copy_, source, i % slots)).data;
    const auto check = [&](int64_t position) { check_sum(region, source, i, "data", sent, data_sum(of, parts_at(position))); };
    if (r.layout == Layout::rank_major) {
      check(static_cast<int64_t>(row));
      continue;
    }
    for (size_t k = 0; k < topk; ++k) {
      if (r.position[row * topk + k] >= 0) check(r.position[row * topk + k]);
    }
  }
}

void DispatchCall::check_totals() const {
  for (int source = 0; source < context_->num_ranks; ++source) {
    const bool direct = path_from(source) == Path::direct;
    check_total(direct ? Region::block : Region::ring, source, direct ? admitted(source, context_->rank) : rows(source, context_->rank));
  }
}

}  // namespace turnout::engine
