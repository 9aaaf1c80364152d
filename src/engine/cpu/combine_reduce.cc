// The source side of a combine: a token's terms in the order of the sum tree (core/sum_tree.h), added once all are there.
#include <algorithm>
#include <cstring>

#include "core/math.h"
#include "engine/cpu/combine_call.h"

namespace turnout::engine {

using core::BufferLayout;
using internal::Routing;

namespace {
constexpr int64_t kMostTokensPerRound = 32;
}

/// The terms of one token. An own partial sum that must be made first is made in add().
struct CombineCall::TokenTerms {
  int64_t token = 0;
  std::vector<RowRef> rows;
  std::vector<float> weights;
  std::vector<int> node_end;  ///< rows[...] of one node end here
  int own = -1;               ///< index of the own term that must be computed first
  int near = -1;              ///< index of an own term that need not: this processor has it
  int64_t own_row = -1;
};

bool CombineCall::stream_ended(int source) const {
  return header_seen(source) && taken_[static_cast<size_t>(source)] >= rows(source, context_->rank);
}

const CombineCall::Meta* CombineCall::next_record(int source) const {
  const auto at = static_cast<size_t>(source);
  if (!header_seen(source) || stream_ended(source)) return nullptr;
  if (count_of(source, BufferLayout::kProduced) <= taken_[at]) return nullptr;
  const size_t offset = context_->layout.ring_at(lane_, copy_, source) + static_cast<size_t>(taken_[at] % slots_) * record_bytes_;
  if (sums_) [[unlikely]]
    return checked(source, context_->local + offset);
  return reinterpret_cast<const Meta*>(context_->local + offset);
}

bool CombineCall::reduce() {
  const Routing& r = *routing_;
  if (next_token_ >= r.num_tokens) return false;
  // Slots are given back only after the sums that read them, so a round must not need more than a ring holds.
  const int64_t most = std::max<int64_t>(1, std::min(kMostTokensPerRound, rows_wire() ? slots_ / std::max(1, r.num_topk) / 2 : slots_ / 2));
  thread_local std::vector<TokenTerms> round;
  if (round.size() < static_cast<size_t>(most)) round.resize(static_cast<size_t>(most));
  int64_t n = 0;
  while (n < most && next_token_ + n < r.num_tokens && gather(next_token_ + n, round[static_cast<size_t>(n)])) ++n;
  if (n == 0) return false;
  std::vector<TokenTerms>& terms = round;
  context_->parallel_for(n, 2, [&](int64_t from, int64_t to) {
    prefetch(terms[static_cast<size_t>(from)]);
    for (int64_t i = from; i < to; ++i) {
      if (i + 1 < to) prefetch(terms[static_cast<size_t>(i + 1)]);
      add(terms[static_cast<size_t>(i)]);
    }
  });
  next_token_ += n;
  if (sums_) [[unlikely]]
    check_taken();
  for (int source = 0; source < context_->num_ranks; ++source) {
    const auto at = static_cast<size_t>(source);
    if (taken_[at] == released_[at]) continue;
    released_[at] = taken_[at];
    // The last records are given back by consume_all().
    if (!stream_ended(source)) raise(source, BufferLayout::kSpace, progress_value(epoch_, static_cast<uint64_t>(taken_[at])));
  }
  return true;
}

/// Collects the terms of a token; false, and nothing taken, if some are not here yet.
bool CombineCall::gather(int64_t token, TokenTerms& terms) {
  terms.token = token;
  terms.rows.clear();
  terms.weights.clear();
  terms.node_end.clear();
  terms.own = terms.near = -1;
  return rows_wire() ? gather_rows(token, terms) : gather_partials(token, terms);
}

bool CombineCall::gather_partials(int64_t token, TokenTerms& terms) {
  const Routing& r = *routing_;
  const auto on_rank = [&](int rank) {
    const auto at = static_cast<size_t>(rank);
    const int64_t i = r.send_begin[at] + ordinal_[at];
    return i < r.send_begin[at + 1] && r.send_tokens[static_cast<size_t>(i)] == token;
  };
  for (int rank = 0; rank < context_->num_ranks; ++rank) {
    if (rank == context_->rank || !on_rank(rank)) continue;
    if (!header_seen(rank)) return false;
    if (header(rank).pull_offset < 0 && !next_record(rank) && !stream_ended(rank)) return false;
  }
  int32_t lost = 0;
  const auto terms_of = [&](int rank) {
    int32_t count = 0;
    for (int k = 0; k < r.num_topk; ++k) {
      const int32_t e = r.topk_idx[static_cast<size_t>(token * r.num_topk + k)];
      count += e >= 0 && r.experts->rank_of(e) == rank;
    }
    return count;
  };
  for (int node = 0; node < context_->topology.num_nodes(); ++node) {
    for (int rank : context_->topology.ranks_of(node)) {
      if (!on_rank(rank)) continue;
      const auto at = static_cast<size_t>(rank);
      const int64_t ordinal = ordinal_[at]++;
      if (rank == context_->rank) {
        lost += gather_own(ordinal, token, terms);
        continue;
      }
      if (header(rank).pull_offset >= 0) {
        if (ordinal < r.sent[at]) terms.rows.push_back({pulled_row(rank, ordinal), nullptr});
        else lost += terms_of(rank);
        continue;
      }
      const Meta* record = next_record(rank);
      if (!record || record->ordinal != ordinal) {
        lost += terms_of(rank);
        continue;
      }
      ++taken_[at];
      lost += record->lost_or_k > 0 ? record->lost_or_k : 0;
      const auto* bytes = reinterpret_cast<const std::byte*>(record);
      terms.rows.push_back({bytes + row_at_, scale_bytes_ ? reinterpret_cast<const float*>(bytes + scales_at_) : nullptr});
      if (side_floats_) merge_side(token, rank, reinterpret_cast<const float*>(bytes + sizeof(Meta)));
    }
    terms.node_end.push_back(static_cast<int>(terms.rows.size()));
  }
  out_.num_lost[static_cast<size_t>(token)] = lost;
  return true;
}

/// The partial sum of this rank's own row of the token. Returns how many of its terms are lost.
int32_t CombineCall::gather_own(int64_t ordinal, int64_t token, TokenTerms& terms) {
  const Routing& r = *routing_;
  const auto me = static_cast<size_t>(context_->rank);
  const int64_t row = r.recv_begin[me] + ordinal;
  const bool as_it_is = r.layout == Layout::rank_major && args_.apply == CombineWeights::none && wire_dtype() == args_.y.dtype;
  if (as_it_is && !args_.side.defined() && row < r.recv_begin[me + 1]) {
    terms.near = static_cast<int>(terms.rows.size());
    terms.rows.push_back({y_row(row), nullptr});
    return 0;
  }
  int32_t present = 0, all = 0;
  for (int k = 0; k < r.num_topk; ++k) {
    const int32_t e = r.topk_idx[static_cast<size_t>(token * r.num_topk + k)];
    if (e < 0 || r.experts->rank_of(e) != context_->rank) continue;
    ++all;
    if (row >= r.recv_begin[me + 1]) continue;
    const auto at = static_cast<size_t>(row * r.num_topk + k);
    if (r.layout != Layout::rank_major && r.position[at] < 0) continue;
    ++present;
    if (args_.side.defined()) out_.side[static_cast<size_t>(token * r.num_topk + k)] = side_of(row, k);
  }
  if (present == 0) return all;
  terms.own_row = row;
  if (as_it_is) {
    terms.rows.push_back({y_row(row), nullptr});
  } else {
    terms.own = static_cast<int>(terms.rows.size());
    terms.rows.push_back({});
  }
  return all - present;
}

void CombineCall::merge_side(int64_t token, int rank, const float* side) {
  const Routing& r = *routing_;
  for (int k = 0; k < r.num_topk; ++k) {
    const auto at = static_cast<size_t>(token * r.num_topk + k);
    const int32_t e = r.topk_idx[at];
    if (e >= 0 && r.experts->rank_of(e) == rank) out_.side[at] = side[k];
  }
}

/// The weight that this rank has for an entry of its [T, K].
float CombineCall::own_weight(size_t flat) const {
  return args_.apply == CombineWeights::source   ? routing_->topk_weights[flat]
         : args_.apply == CombineWeights::tokens ? weight_at(static_cast<int64_t>(flat))
                                                 : 1.0f;
}

bool CombineCall::gather_rows(int64_t token, TokenTerms& terms) {
  const Routing& r = *routing_;
  const int32_t* idx = r.topk_idx.data() + token * r.num_topk;
  // A rank's records of this token are all here once a later one is, or the stream ends, or as many as it can have.
  for (int rank = 0; rank < context_->num_ranks; ++rank) {
    if (rank == context_->rank || !header_seen(rank)) {
      if (rank != context_->rank && !header_seen(rank)) return false;
      continue;
    }
    const int64_t wanted = std::count_if(idx, idx + r.num_topk, [&](int32_t e) { return e >= 0 && r.experts->rank_of(e) == rank; });
    if (wanted == 0) continue;
    const auto at = static_cast<size_t>(rank);
    const int64_t here = std::min(count_of(rank, BufferLayout::kProduced), rows(rank, context_->rank));
    if (here >= rows(rank, context_->rank) || here - taken_[at] >= wanted) continue;
    bool later = false;
    for (int64_t i = taken_[at]; i < here && !later; ++i) {
      const size_t offset = context_->layout.ring_at(lane_, copy_, rank) + static_cast<size_t>(i % slots_) * record_bytes_;
      later = reinterpret_cast<const Meta*>(context_->local + offset)->ordinal > ordinal_[at];
    }
    if (!later) return false;
  }
  int32_t lost = 0;
  std::vector<char> seen(static_cast<size_t>(context_->num_ranks), 0);
  for (int k = 0; k < r.num_topk; ++k) {
    if (idx[k] < 0) continue;
    const int rank = r.experts->rank_of(idx[k]);
    const auto at = static_cast<size_t>(rank);
    const auto flat = static_cast<size_t>(token * r.num_topk + k);
    seen[at] = 1;
    if (rank == context_->rank) {
      const int64_t row = r.recv_begin[at] + ordinal_[at];
      const int64_t position = r.position[static_cast<size_t>(row * r.num_topk + k)];
      if (position < 0) {
        ++lost;
        continue;
      }
      terms.rows.push_back({y_row(position), nullptr});
      terms.weights.push_back(args_.apply == CombineWeights::rows ? weight_at(position) : own_weight(flat));
      if (side_floats_) out_.side[flat] = side_of(row, k);
      continue;
    }
    const Meta* record = next_record(rank);
    if (!record || record->ordinal != ordinal_[at] || record->lost_or_k != k) {
      ++lost;
      continue;
    }
    ++taken_[at];
    const auto* bytes = reinterpret_cast<const std::byte*>(record);
    terms.rows.push_back({bytes + row_at_, nullptr});
    terms.weights.push_back(args_.apply == CombineWeights::rows ? record->weight : own_weight(flat));
    if (side_floats_) out_.side[flat] = *reinterpret_cast<const float*>(bytes + sizeof(Meta));
  }
  for (size_t rank = 0; rank < seen.size(); ++rank) ordinal_[rank] += seen[rank];
  out_.num_lost[static_cast<size_t>(token)] = lost;
  return true;
}

void CombineCall::prefetch(const TokenTerms& terms) const {
  for (int i = 0; i < static_cast<int>(terms.rows.size()); ++i) {
    const void* const row = terms.rows[static_cast<size_t>(i)].data;
    if (row && i != terms.near) prefetch_row(row, wire_bytes_);
  }
}

/// One token's sum: own partial first if it has to be made, then nodes, then the whole.
void CombineCall::add(const TokenTerms& terms) const {
  std::byte* const place = out_.x + terms.token * out_.x_stride;
  util::probe::at(util::probe::Step::copy);
  if (!large_) return add_into(place, terms);
  // Summed in the first-level cache, then written past the others: the line of the result is not read first.
  thread_local std::vector<std::byte> staged;
  const size_t out_bytes = static_cast<size_t>(hidden_) * size_of(args_.y.dtype);
  if (staged.size() < out_bytes) staged.resize(out_bytes);
  add_into(staged.data(), terms);
  context_->kernels.copy_row_streaming(place, staged.data(), out_bytes);
}

void CombineCall::add_into(std::byte* out, const TokenTerms& terms) const {
  const RowRef* rows = terms.rows.data();
  int n = static_cast<int>(terms.rows.size());
  if (rows_wire()) {
    context_->kernels.sum_rows(rows, args_.apply == CombineWeights::none ? nullptr : terms.weights.data(), n, args_.y.dtype, hidden_, out, nullptr,
                               args_.y.dtype, in_double());
    return;
  }
  thread_local std::vector<RowRef> made;
  if (terms.own >= 0 || context_->topology.num_nodes() > 1) {
    made = terms.rows;
    n = make_partials(terms, made);
    rows = made.data();
  }
  context_->kernels.sum_rows(rows, nullptr, n, wire_dtype(), hidden_, out, nullptr, args_.y.dtype, in_double());
}

/// Makes the own partial sum, then those of the nodes if there are several. Returns how many `rows` are left to add.
int CombineCall::make_partials(const TokenTerms& terms, std::vector<RowRef>& rows) const {
  thread_local std::vector<std::byte> own, partials;
  const size_t scales_offset = static_cast<size_t>(core::align_up(static_cast<int64_t>(wire_bytes_), 64));
  const size_t form_bytes = scales_offset + static_cast<size_t>(core::align_up(static_cast<int64_t>(scale_bytes_), 64));
  const auto form_at = [&](std::vector<std::byte>& memory, size_t i) {
    std::byte* data = memory.data() + i * form_bytes;
    return RowRef{data, scale_bytes_ ? reinterpret_cast<const float*>(data + scales_offset) : nullptr};
  };
  const auto scales_of = [](const RowRef& row) { return const_cast<float*>(row.scales); };
  if (terms.own >= 0) {
    own.resize(form_bytes);
    const RowRef form = form_at(own, 0);
    partial_sum(terms.own_row, const_cast<void*>(form.data), scales_of(form));
    rows[static_cast<size_t>(terms.own)] = form;
  }
  if (context_->topology.num_nodes() == 1) return static_cast<int>(rows.size());
  partials.resize(form_bytes * terms.node_end.size());
  size_t used = 0;
  int begin = 0;
  for (int end : terms.node_end) {
    if (end > begin) {
      const RowRef form = form_at(partials, used);
      context_->kernels.sum_rows(rows.data() + begin, nullptr, end - begin, wire_dtype(), hidden_, const_cast<void*>(form.data), scales_of(form),
                                 wire_dtype(), in_double());
      rows[used++] = form;  // in the place of rows that are added already
    }
    begin = end;
  }
  return static_cast<int>(used);
}

}  // namespace turnout::engine
