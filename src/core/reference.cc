// The oracle. Every loop goes over everything in the order that the contract names; nothing is shared with the engines but
// the conversions of core/dtype.h and core/scale.h and the order of core/sum_tree.h.
#include "core/reference.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "core/element.h"
#include "core/math.h"
#include "core/mutation.h"
#include "core/sum_tree.h"

namespace turnout::core {
namespace {

void require(bool holds, const std::string& otherwise) {
  if (!holds) throw InvalidArgument("reference: " + otherwise);
}

void check_size(size_t came, int64_t expected, const char* what, size_t rank) {
  require(static_cast<int64_t>(came) == expected,
          std::string(what) + " of rank " + std::to_string(rank) + " has " + std::to_string(came) + " entries, expected " + std::to_string(expected));
}

void check(const DispatchProblem& p) {
  require(static_cast<int>(p.ranks.size()) == p.experts.num_ranks(),
          std::to_string(p.ranks.size()) + " ranks give tokens, but the experts are on " + std::to_string(p.experts.num_ranks()));
  require(p.layout != Layout::expert_slab || p.capacity, "expert_slab needs a capacity");
  require(!p.capacity || *p.capacity >= 0, "the capacity is negative");
  require(p.alignment >= 1, "the alignment is " + std::to_string(p.alignment) + ", expected at least 1");
  for (size_t r = 0; r < p.ranks.size(); ++r) {
    const DispatchInput& in = p.ranks[r];
    check_size(in.x.size(), in.num_tokens * p.hidden * static_cast<int64_t>(size_of(p.dtype)), "x", r);
    check_size(in.topk_idx.size(), in.num_tokens * p.num_topk, "topk_idx", r);
    check_size(in.topk_weights.size(), p.has_weights ? in.num_tokens * p.num_topk : 0, "topk_weights", r);
    check_size(in.side.size(), static_cast<int64_t>(p.side_bytes.size()), "side", r);
    for (size_t i = 0; i < in.side.size(); ++i)
      check_size(in.side[i].size(), in.num_tokens * static_cast<int64_t>(p.side_bytes[i]), "a side array", r);
    for (int64_t id : in.topk_idx) {
      if (mutated(Mutation::unknown_id_is_accepted)) break;
      require(id >= -1 && id < p.experts.num_experts(), "topk_idx of rank " + std::to_string(r) + " holds " + std::to_string(id) +
                                                            ", expected -1 to " + std::to_string(p.experts.num_experts() - 1));
    }
  }
}

/// Local expert of entry (token, k) of `source` at `rank`, or -1.
int local_expert(const DispatchProblem& p, int rank, int source, int64_t token, int k) {
  const int64_t* ids = p.ranks[static_cast<size_t>(source)].topk_idx.data() + token * p.num_topk;
  int64_t id = ids[k];
  if (mutated(Mutation::minus_one_is_expert_0) && id == -1) id = 0;
  if (mutated(Mutation::duplicates_count_once) && std::find(ids, ids + k, id) != ids + k) return -1;
  if (id < 0 || id >= p.experts.num_experts() || p.experts.rank_of(static_cast<int>(id)) != rank) return -1;
  return mutated(Mutation::local_number_is_global_id) ? static_cast<int>(id) % p.experts.num_local(rank) : p.experts.local_of(static_cast<int>(id));
}

/// Every (token, k) of the group that lives on `rank`, in (source, token, k) order.
std::vector<RowOrigin> entries_of(const DispatchProblem& p, int rank) {
  std::vector<RowOrigin> entries;
  for (int source = 0; source < p.experts.num_ranks(); ++source) {
    for (int64_t token = 0; token < p.ranks[static_cast<size_t>(source)].num_tokens; ++token) {
      for (int k = 0; k < p.num_topk; ++k) {
        if (local_expert(p, rank, source, token, k) >= 0) entries.push_back({source, token, k});
      }
    }
  }
  if (mutated(Mutation::tokens_in_descending_order)) {
    std::stable_sort(entries.begin(), entries.end(),
                     [](const RowOrigin& a, const RowOrigin& b) { return a.source == b.source && a.token > b.token; });
  }
  if (mutated(Mutation::k_before_token)) {
    std::stable_sort(entries.begin(), entries.end(), [](const RowOrigin& a, const RowOrigin& b) { return a.source == b.source && a.k < b.k; });
  }
  return entries;
}

void place_rank_major(const DispatchProblem& p, int rank, DispatchOutput& out) {
  const int64_t capacity = p.capacity ? *p.capacity + mutated(Mutation::admits_one_more) : -1;
  RowOrigin last;  // of which token was the entry before
  for (const RowOrigin& entry : entries_of(p, rank)) {
    const bool same_token = entry.source == last.source && entry.token == last.token;
    last = entry;
    if (same_token && !mutated(Mutation::row_per_expert)) {
      out.num_dropped += mutated(Mutation::dropped_counts_pairs) && out.num_dropped > 0;
    } else if (p.capacity && static_cast<int64_t>(out.origin.size()) >= capacity) {
      ++out.num_dropped;
    } else {
      out.origin.push_back({entry.source, entry.token, -1});
    }
  }
  out.num_rows = static_cast<int64_t>(out.origin.size());
  for (int e = 0; e < p.experts.num_local(rank); ++e) {
    out.expert_offsets.push_back(static_cast<int64_t>(out.sorted_rows.size()));
    for (size_t row = 0; row < out.origin.size(); ++row) {
      for (int k = 0; k < p.num_topk; ++k) {
        if (local_expert(p, rank, out.origin[row].source, out.origin[row].token, k) != e) continue;
        out.sorted_rows.push_back(static_cast<int32_t>(row));
        if (mutated(Mutation::sorted_rows_by_row)) break;
      }
    }
    out.expert_counts.push_back(static_cast<int32_t>(static_cast<int64_t>(out.sorted_rows.size()) - out.expert_offsets.back()));
  }
  out.expert_offsets.push_back(static_cast<int64_t>(out.sorted_rows.size()));
  if (p.capacity) out.origin.resize(static_cast<size_t>(*p.capacity));
}

/// Rows that groups of these sizes take, padding included.
int64_t padded_total(const std::vector<std::vector<RowOrigin>>& groups, int64_t alignment) {
  int64_t total = 0;
  for (const auto& group : groups) total += align_up(static_cast<int64_t>(group.size()), alignment);
  return total;
}

void place_by_expert(const DispatchProblem& p, int rank, DispatchOutput& out) {
  const bool slab = p.layout == Layout::expert_slab;
  const int64_t alignment = mutated(Mutation::groups_are_not_aligned) ? 1 : p.alignment;
  std::vector<std::vector<RowOrigin>> groups(static_cast<size_t>(p.experts.num_local(rank)));
  bool full = false;  // expert_major: the first that does not fit ends admission
  for (const RowOrigin& entry : entries_of(p, rank)) {
    auto& group = groups[static_cast<size_t>(local_expert(p, rank, entry.source, entry.token, entry.k))];
    group.push_back(entry);
    const bool fits = slab ? static_cast<int64_t>(group.size()) <= *p.capacity
                           : !p.capacity || padded_total(groups, mutated(Mutation::padding_is_free) ? 1 : alignment) <= *p.capacity;
    if (!fits && (!slab || mutated(Mutation::slab_shares_its_capacity))) full = !mutated(Mutation::later_rows_may_fit);
    if (fits && !full) continue;
    group.pop_back();
    ++out.num_dropped;
  }

  for (const auto& group : groups) {
    out.expert_offsets.push_back(static_cast<int64_t>(out.origin.size()));
    out.expert_counts.push_back(static_cast<int32_t>(group.size()));
    out.origin.insert(out.origin.end(), group.begin(), group.end());
    const int64_t size = slab ? *p.capacity : align_up(static_cast<int64_t>(group.size()), alignment);
    out.origin.resize(static_cast<size_t>(out.expert_offsets.back() + size));
    out.num_rows += slab ? static_cast<int64_t>(group.size()) : size;
  }
  out.expert_offsets.push_back(static_cast<int64_t>(out.origin.size()));
  if (!slab && p.capacity) out.origin.resize(static_cast<size_t>(*p.capacity));
}

void copy_row(const Bytes& from, int64_t from_row, Bytes& to, size_t to_row, size_t row_bytes) {
  if (row_bytes) std::memcpy(to.data() + to_row * row_bytes, from.data() + static_cast<size_t>(from_row) * row_bytes, row_bytes);
}

/// A row of x as fp8 blocks with their scales.
void quantize_row(const DispatchProblem& p, const std::byte* x, std::byte* q, std::byte* scales) {
  const bool ue8m0 = p.quantize == Quantize::fp8_e4m3_ue8m0;
  for (int64_t begin = 0; begin < p.hidden; begin += kScaleBlock) {
    const int64_t n = std::min(kScaleBlock, p.hidden - begin);
    if (mutated(Mutation::short_block_is_skipped) && n < kScaleBlock) return;
    float values[kScaleBlock], scale = 0;
    for (int64_t i = 0; i < n; ++i) values[i] = load_element<float>(p.dtype, x, begin + i);
    quantize_block(values, n, reinterpret_cast<uint8_t*>(q) + begin, &scale,
                   ue8m0 ? reinterpret_cast<uint8_t*>(scales) + begin / kScaleBlock : nullptr);
    if (mutated(Mutation::exponent_is_one_up) && ue8m0)
      scales[begin / kScaleBlock] = static_cast<std::byte>(static_cast<int>(scales[begin / kScaleBlock]) + 1);
    if (!ue8m0) std::memcpy(scales + begin / kScaleBlock * 4, &scale, sizeof scale);
  }
}

void fill_rows(const DispatchProblem& p, int rank, DispatchOutput& out) {
  const bool quantised = p.quantize != Quantize::none;
  const size_t num_rows = out.origin.size(), num_topk = static_cast<size_t>(p.num_topk);
  const size_t in_bytes = static_cast<size_t>(p.hidden) * size_of(p.dtype), x_bytes = quantised ? static_cast<size_t>(p.hidden) : in_bytes;
  const size_t scale_bytes = quantised ? static_cast<size_t>(ceil_div(p.hidden, kScaleBlock)) * (p.quantize == Quantize::fp8_e4m3 ? 4 : 1) : 0;
  const bool by_rank = p.layout == Layout::rank_major;
  out.array_rows = static_cast<int64_t>(num_rows);
  out.x.resize(num_rows * x_bytes);
  out.x_scales.resize(num_rows * scale_bytes);
  for (size_t width : p.side_bytes) out.side.emplace_back(num_rows * width);
  if (by_rank) out.topk_idx.assign(num_rows * num_topk, mutated(Mutation::rest_is_expert_0) ? 0 : -1);
  if (p.has_weights) out.topk_weights.assign(by_rank ? num_rows * num_topk : num_rows, 0.0f);

  for (size_t row = 0; row < num_rows; ++row) {
    const auto [source, token, k_of_row] = out.origin[row];
    if (source < 0) continue;
    const DispatchInput& in = p.ranks[static_cast<size_t>(source)];
    if (quantised) {
      quantize_row(p, in.x.data() + static_cast<size_t>(token) * in_bytes, out.x.data() + row * x_bytes, out.x_scales.data() + row * scale_bytes);
    } else {
      copy_row(in.x, token, out.x, row, x_bytes);
    }
    for (size_t i = 0; i < in.side.size(); ++i) {
      copy_row(in.side[i], mutated(Mutation::side_of_first_token) ? 0 : token, out.side[i], row, p.side_bytes[i]);
    }
    const float* weights = in.topk_weights.data() + (p.has_weights ? token * p.num_topk : 0);
    if (!by_rank) {
      if (p.has_weights) out.topk_weights[row] = weights[mutated(Mutation::weight_of_first_k) ? 0 : k_of_row];
      continue;
    }
    for (int k = 0; k < p.num_topk; ++k) {
      const size_t at = row * num_topk + static_cast<size_t>(k);
      out.topk_idx[at] = local_expert(p, rank, source, token, k);
      if (p.has_weights && (out.topk_idx[at] >= 0 || mutated(Mutation::foreign_weights_stay))) out.topk_weights[at] = weights[k];
    }
  }
}

}  // namespace

std::vector<DispatchOutput> reference_dispatch(const DispatchProblem& problem) {
  check(problem);
  std::vector<DispatchOutput> all;
  for (int rank = 0; rank < problem.experts.num_ranks(); ++rank) {
    DispatchOutput& out = all.emplace_back();
    if (problem.layout == Layout::rank_major) {
      place_rank_major(problem, rank, out);
    } else {
      place_by_expert(problem, rank, out);
    }
    fill_rows(problem, rank, out);
  }
  return all;
}

}  // namespace turnout::core
