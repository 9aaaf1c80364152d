// Small dispatches written by hand, for the tests of the oracle: rows say where they come from.
#pragma once
#include <cstring>
#include <initializer_list>
#include <vector>

#include "core/reference.h"

namespace turnout::core {

/// Ids of every token of one rank.
using Ids = std::vector<std::vector<int64_t>>;

template <class T>
Bytes bytes_of(const std::vector<T>& values) {
  Bytes bytes(values.size() * sizeof(T));
  if (!bytes.empty()) std::memcpy(bytes.data(), values.data(), bytes.size());
  return bytes;
}

template <class T>
std::vector<T> values_of(const Bytes& bytes) {
  std::vector<T> values(bytes.size() / sizeof(T));
  if (!bytes.empty()) std::memcpy(values.data(), bytes.data(), bytes.size());
  return values;
}

/// Rows are two bytes {source + 1, token}, the side array one int32 source * 100 + token + 1, and the weight of (source, token, k)
/// is 100 * source + 10 * token + k + 1.
inline DispatchProblem problem_of(const ExpertMap& experts, Layout layout, const std::vector<Ids>& ranks) {
  DispatchProblem p;
  p.experts = experts;
  p.hidden = 2;
  p.dtype = DType::u8;
  p.has_weights = true;
  p.side_bytes = {4};
  p.layout = layout;
  for (const Ids& tokens : ranks) {
    if (!tokens.empty()) p.num_topk = static_cast<int>(tokens[0].size());
  }
  for (size_t source = 0; source < ranks.size(); ++source) {
    DispatchInput& in = p.ranks.emplace_back();
    in.num_tokens = static_cast<int64_t>(ranks[source].size());
    std::vector<uint8_t> x;
    std::vector<int32_t> side;
    for (size_t token = 0; token < ranks[source].size(); ++token) {
      x.insert(x.end(), {static_cast<uint8_t>(source + 1), static_cast<uint8_t>(token)});
      side.push_back(static_cast<int32_t>(source * 100 + token + 1));
      for (size_t k = 0; k < ranks[source][token].size(); ++k) {
        in.topk_idx.push_back(ranks[source][token][k]);
        in.topk_weights.push_back(static_cast<float>(100 * source + 10 * token + k + 1));
      }
    }
    in.x = bytes_of(x);
    in.side = {bytes_of(side)};
  }
  return p;
}

/// {source, token, k} of every row; {-1, -1, -1} where there is none.
inline std::vector<std::vector<int64_t>> origins(const DispatchOutput& out) {
  std::vector<std::vector<int64_t>> rows;
  for (const RowOrigin& o : out.origin) rows.push_back({o.source, o.token, o.k});
  return rows;
}
using Origins = std::vector<std::vector<int64_t>>;
inline const std::vector<int64_t> kNoRow = {-1, -1, -1};

/// A combine of fp32 rows of one element; `y[rank]` are the rows.
inline CombineProblem combine_of(const DispatchProblem& dispatch, const std::vector<DispatchOutput>& received,
                                 const std::vector<std::vector<float>>& y) {
  CombineProblem c;
  c.dispatch = &dispatch;
  c.received = &received;
  c.topology = Topology::single(dispatch.experts.num_ranks());
  c.hidden = 1;
  c.dtype = DType::fp32;
  for (const auto& rows : y) c.ranks.push_back({.y = bytes_of(rows), .weights = {}, .side = {}});
  return c;
}

}  // namespace turnout::core
