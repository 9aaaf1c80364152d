// The oracle's combine: for each token, its rows in the order of the sum tree, element by element, rounded where the tree says.
#include <algorithm>
#include <string>

#include "core/element.h"
#include "core/mutation.h"
#include "core/reference.h"
#include "core/scale.h"
#include "core/sum_tree.h"

namespace turnout::core {
namespace {

void require(bool holds, const std::string& otherwise) {
  if (!holds) throw InvalidArgument("reference: " + otherwise);
}

void check(const CombineProblem& p) {
  require(p.dispatch && p.received, "a combine needs its dispatch");
  const DispatchProblem& d = *p.dispatch;
  require(is_summable(p.dtype), "cannot add " + std::string(name(p.dtype)) + ", expected fp16, bf16, fp32 or fp64");
  require(p.topology.num_ranks() == d.experts.num_ranks() && p.ranks.size() == d.ranks.size() && p.received->size() == d.ranks.size(),
          "ranks of topology, rows and tokens differ");
  require(d.layout != Layout::rank_major || ((p.wire != Wire::rows || mutated(Mutation::sums_cross_as_rows)) && p.apply != CombineWeights::source),
          "rank_major rows are sums of experts already: no wire rows, no source weights");
  require(p.apply != CombineWeights::source || d.has_weights, "source weights were not dispatched");
  require(p.apply != CombineWeights::tokens || p.wire == Wire::rows,
          "weights of tokens are known where rows are added, and only wire rows brings them there");
  for (size_t r = 0; r < p.ranks.size(); ++r) {
    const auto rows = static_cast<size_t>((*p.received)[r].array_rows);
    const size_t side = p.with_side ? rows * static_cast<size_t>(d.layout == Layout::rank_major ? d.num_topk : 1) : 0;
    require(p.ranks[r].y.size() == rows * static_cast<size_t>(p.hidden) * size_of(p.dtype), "y of rank " + std::to_string(r) + " has another size");
    const size_t weights = p.apply == CombineWeights::rows ? rows : p.apply == CombineWeights::tokens ? d.ranks[r].topk_idx.size() : 0;
    require(p.ranks[r].weights.size() == weights, "weights of rank " + std::to_string(r) + " have another size");
    require(p.ranks[r].side.size() == side, "side of rank " + std::to_string(r) + " has another size");
  }
}

/// The values of a row, held exactly: float, or double for float64 payloads.
template <class T>
using Row = std::vector<T>;

template <class T>
Row<T> load(const CombineProblem& p, const Bytes& y, int64_t row) {
  const std::byte* data = y.data() + static_cast<size_t>(row) * static_cast<size_t>(p.hidden) * size_of(p.dtype);
  Row<T> values(static_cast<size_t>(p.hidden));
  for (size_t i = 0; i < values.size(); ++i) values[i] = load_element<T>(p.dtype, data, static_cast<int64_t>(i));
  return values;
}

/// What a partial sum is worth after crossing in the wire form.
template <class T>
Row<T> rounded(WireForm form, Row<T> values) {
  if (!form.block_scaled) {
    for (T& value : values) value = round_element(form.dtype, value);
    return values;
  }
  for (size_t begin = 0; begin < values.size(); begin += kScaleBlock) {  // fp8: by blocks, the last may be shorter
    const size_t n = std::min<size_t>(kScaleBlock, values.size() - begin);
    float block[kScaleBlock], scale = 0;
    uint8_t q[kScaleBlock];
    for (size_t i = 0; i < n; ++i) block[i] = static_cast<float>(values[begin + i]);
    quantize_block(block, static_cast<int64_t>(n), q, &scale, nullptr);
    for (size_t i = 0; i < n; ++i) values[begin + i] = static_cast<T>(dequantize(q[i], scale));
  }
  return values;
}

template <class T>
class Sums {  // of a row, element by element
 public:
  explicit Sums(int64_t hidden) : sums_(static_cast<size_t>(hidden)) { clear(); }
  void clear() { std::fill(sums_.begin(), sums_.end(), mutated(Mutation::sum_starts_at_zero) ? RunningSum<T>{T{0}, true} : RunningSum<T>{}); }
  void add(const Row<T>& row) {
    for (size_t i = 0; i < row.size(); ++i) sums_[i].add(row[i]);
  }
  void add(const Row<T>& row, T weight) {
    for (size_t i = 0; i < row.size(); ++i) sums_[i].add(row[i], weight);
  }
  Row<T> values() const {
    Row<T> values;
    for (const RunningSum<T>& sum : sums_) values.push_back(sum.value);
    return values;
  }

 private:
  std::vector<RunningSum<T>> sums_;
};

/// The sum of one token's terms; no terms give zeros.
template <class T>
Row<T> sum_of(const CombineProblem& p, int source, int64_t token, std::span<SumTerm> terms) {
  const WireForm form = wire_form(mutated(Mutation::wire_is_payload) && p.wire == Wire::fp8 ? Wire::payload : p.wire, p.dtype);
  const DispatchInput& in = p.dispatch->ranks[static_cast<size_t>(source)];
  Sums<T> rank(p.hidden), node(p.hidden), total(p.hidden);
  for (const SumTerm& term : terms) {
    const CombineInput& at = p.ranks[static_cast<size_t>(term.rank)];
    const Row<T> row = load<T>(p, at.y, term.row);
    if (p.apply == CombineWeights::none || mutated(Mutation::weights_are_ignored)) {
      rank.add(row);
    } else {
      const auto own = static_cast<size_t>(token * p.dispatch->num_topk + term.k);
      const float weight = p.apply == CombineWeights::rows     ? at.weights[static_cast<size_t>(term.row)]
                           : p.apply == CombineWeights::tokens ? p.ranks[static_cast<size_t>(source)].weights[own]
                                                               : in.topk_weights[own];
      rank.add(mutated(Mutation::partial_is_rounded_before_weights) ? rounded(form, row) : row, static_cast<T>(weight));
    }
    if (term.ends_rank) {
      const bool keep = mutated(Mutation::own_partial_is_not_rounded) && term.rank == source;
      node.add(keep ? rank.values() : rounded(form, rank.values()));
      rank.clear();
    }
    if (term.ends_node) {
      total.add(mutated(Mutation::node_partial_is_not_rounded) ? node.values() : rounded(form, node.values()));
      node.clear();
    }
  }
  if (p.wire == Wire::rows) return rank.values();
  return !terms.empty() && terms.back().ends_node ? total.values() : node.values();
}

/// The rows of each token of `source`: [T] lists of terms.
std::vector<std::vector<SumTerm>> terms_of(const CombineProblem& p, int source) {
  std::vector<std::vector<SumTerm>> terms(static_cast<size_t>(p.dispatch->ranks[static_cast<size_t>(source)].num_tokens));
  for (int rank = 0; rank < p.topology.num_ranks(); ++rank) {
    const std::vector<RowOrigin>& origin = (*p.received)[static_cast<size_t>(rank)].origin;
    for (size_t row = 0; row < origin.size(); ++row) {
      if (mutated(Mutation::padding_is_read) && origin[row].source < 0) terms[0].push_back({.rank = rank, .row = static_cast<int64_t>(row)});
      if (origin[row].source != source) continue;
      terms[static_cast<size_t>(origin[row].token)].push_back({.rank = rank, .k = origin[row].k, .row = static_cast<int64_t>(row)});
    }
  }
  return terms;
}

/// The term that brings entry k of a token home, or null if it was dropped.
const SumTerm* term_of(const CombineProblem& p, std::span<const SumTerm> terms, int64_t expert, int k) {
  for (const SumTerm& term : terms) {
    if (term.k == k || (term.k < 0 && term.rank == p.dispatch->experts.rank_of(static_cast<int>(expert)))) return &term;
  }
  return nullptr;
}

void put_in_order(const CombineProblem& p, std::vector<SumTerm>& terms) {
  const int last_rank = p.topology.num_ranks() - 1, last_k = p.dispatch->num_topk - 1;
  std::vector<int> node_of_rank;
  for (int r = 0; r <= last_rank; ++r) {
    const int rank = mutated(Mutation::ranks_in_descending_order) ? last_rank - r : r;
    node_of_rank.push_back(mutated(Mutation::nodes_are_ignored) ? 0 : p.topology.node_of(rank));
  }
  const Topology topology = Topology::of(node_of_rank);
  auto turn_round = [&] {  // wrong orders are right orders of numbers counted from the other end
    for (SumTerm& term : terms) {
      if (mutated(Mutation::ranks_in_descending_order)) term.rank = last_rank - term.rank;
      if (mutated(Mutation::k_in_descending_order)) term.k = last_k - term.k;
    }
  };
  turn_round();
  order_sum(terms, topology, p.wire);
  turn_round();
  if (mutated(Mutation::rows_by_rank)) std::stable_sort(terms.begin(), terms.end(), [](auto& a, auto& b) { return a.rank < b.rank; });
}

template <class T>
CombineOutput combine_at(const CombineProblem& p, int source) {
  const DispatchInput& in = p.dispatch->ranks[static_cast<size_t>(source)];
  const int num_topk = p.dispatch->num_topk;
  CombineOutput out;
  out.x.resize(static_cast<size_t>(in.num_tokens * p.hidden) * size_of(p.dtype));
  if (p.with_side) out.side.assign(in.topk_idx.size(), 0.0f);
  out.num_lost.assign(static_cast<size_t>(in.num_tokens), 0);

  std::vector<std::vector<SumTerm>> terms = terms_of(p, source);
  for (int64_t token = 0; token < in.num_tokens; ++token) {
    std::vector<SumTerm>& mine = terms[static_cast<size_t>(token)];
    for (int k = 0; k < num_topk; ++k) {
      const int64_t at = token * num_topk + k, expert = in.topk_idx[static_cast<size_t>(at)];
      if (expert < 0) continue;
      const SumTerm* term = term_of(p, mine, expert, k);
      if (!term) {
        int32_t& lost = out.num_lost[static_cast<size_t>(token)];
        lost = mutated(Mutation::lost_counts_rows) ? 1 : lost + 1;
      } else if (p.with_side) {
        const int64_t scalar = term->k < 0 ? term->row * num_topk + k : term->row;
        out.side[static_cast<size_t>(mutated(Mutation::side_to_first_k) ? token * num_topk : at)] =
            p.ranks[static_cast<size_t>(term->rank)].side[static_cast<size_t>(scalar)];
      }
    }
    put_in_order(p, mine);
    if (mutated(Mutation::last_row_is_forgotten) && mine.size() > 1) mine.pop_back();
    const Row<T> sum = sum_of<T>(p, source, token, mine);
    for (int64_t i = 0; i < p.hidden; ++i) {
      const int64_t at = token * p.hidden + i;
      store_element(p.dtype, out.x.data(), at, sum[static_cast<size_t>(i)]);
      if (mutated(Mutation::nan_has_a_sign)) out.x[static_cast<size_t>(at + 1) * size_of(p.dtype) - 1] |= std::byte{0x80};
    }
  }
  return out;
}

}  // namespace

std::vector<CombineOutput> reference_combine(const CombineProblem& problem) {
  check(problem);
  std::vector<CombineOutput> all;
  for (int rank = 0; rank < problem.topology.num_ranks(); ++rank) {
    const bool in_double = sums_in_double(problem.dtype) && !mutated(Mutation::double_sums_in_float);
    all.push_back(in_double ? combine_at<double>(problem, rank) : combine_at<float>(problem, rank));
  }
  return all;
}

}  // namespace turnout::core
