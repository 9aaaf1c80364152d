// The oracle: dispatch and combine over all ranks in one address space, written to be obviously right and not fast.
// What an engine delivers must equal this bit for bit, except where a comment says "unspecified".
#pragma once
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "core/routing.h"
#include "core/topology.h"
#include "turnout/buffer.h"
#include "turnout/types.h"

namespace turnout::core {

using Bytes = std::vector<std::byte>;

/// What one rank gives to a dispatch. Rows are dense.
struct DispatchInput {
  int64_t num_tokens = 0;
  Bytes x;                          ///< [T, hidden] of the problem's dtype
  std::vector<int64_t> topk_idx;    ///< [T, K]; -1 = none; a duplicate counts twice
  std::vector<float> topk_weights;  ///< [T, K], or empty on every rank
  std::vector<Bytes> side;          ///< each [T, width]
};

/// A dispatch of all ranks: the agreed facts, and each rank's tokens.
struct DispatchProblem {
  ExpertMap experts;
  int num_topk = 1;
  int64_t hidden = 0;
  DType dtype = DType::bf16;
  bool has_weights = false;
  std::vector<size_t> side_bytes;  ///< width of each side array, bytes per row
  Layout layout = Layout::rank_major;
  std::optional<int64_t> capacity;  ///< required for expert_slab
  int alignment = 1;                ///< expert_major
  Quantize quantize = Quantize::none;
  std::vector<DispatchInput> ranks;
};

/// The term that a row of a result carries.
struct RowOrigin {
  int source = -1;  ///< -1: a padding row, or one beyond the rows
  int64_t token = -1;
  int k = -1;  ///< rank_major: -1, the row stands for all k of the token that live on the rank
  friend bool operator==(const RowOrigin&, const RowOrigin&) = default;
};

/// What one rank receives. S, the first dimension of every row array, is
///   rank_major, expert_major: the capacity if there is one, else `num_rows`;   expert_slab: Le * capacity.
///
/// Rows are in this order, and with a capacity admitted in this order:
///   rank_major    (source, token); the first `capacity` are admitted.
///   expert_major  groups by local expert, each in (source, token, k) order. All (source, token, k) of the rank are admitted in
///                 that order while the groups with their padding fit in `capacity`; the first that does not fit ends admission.
///   expert_slab   row e * capacity + i is the i-th (source, token, k) of local expert e; each expert admits `capacity` rows.
///
/// Real rows are those with an origin. Rows that are not real:
///   expert_major padding (inside groups and up to num_rows): x, x_scales and side are 0, the weight is 0.
///   beyond num_rows, or beyond an expert's count in a slab: x, x_scales and side are unspecified (here 0); topk_idx is -1, the weight 0.
struct DispatchOutput {
  int64_t array_rows = 0;               ///< S
  Bytes x;                              ///< [S, hidden] of the dtype, or fp8 if quantised
  Bytes x_scales;                       ///< quantised: [S, ceil(hidden / 128)] fp32 or ue8m0
  std::vector<Bytes> side;              ///< each [S, width]
  std::vector<int32_t> topk_idx;        ///< rank_major only: [S, K] local expert, -1 where not local
  std::vector<float> topk_weights;      ///< if has_weights. rank_major: [S, K], 0 where not local; else [S]
  int64_t num_rows = 0;                 ///< rank_major: real rows; expert_major: padding included; slab: sum of expert_counts
  std::vector<int32_t> expert_counts;   ///< [Le] admitted (token, k) pairs of each local expert, padding not counted
  std::vector<int64_t> expert_offsets;  ///< [Le + 1] start of each group: rank_major in sorted_rows (no alignment), expert_major in x
                                        ///< (the last is num_rows), slab e * capacity
  std::vector<int32_t> sorted_rows;     ///< rank_major only: rows by local expert, then by (row, k); a duplicate lists its row twice
  int64_t num_dropped = 0;              ///< not admitted: rank_major token rows, else (token, k) rows
  std::vector<RowOrigin> origin;        ///< [S]; not part of a Buffer's result, the routing that combine needs
};

/// Throws: InvalidArgument (an id that is no expert and not -1, a slab without capacity, sizes that disagree).
std::vector<DispatchOutput> reference_dispatch(const DispatchProblem& problem);

/// What one rank gives to a combine: arrays over the S rows of its DispatchOutput.
struct CombineInput {
  Bytes y;                     ///< [S, hidden]; rows without an origin are never read
  std::vector<float> weights;  ///< CombineWeights::rows: [S]; tokens: [T, K]
  std::vector<float> side;     ///< with_side: rank_major [S, K], else [S]
};

struct CombineProblem {
  const DispatchProblem* dispatch = nullptr;              ///< gives tokens, ids and topk_weights
  const std::vector<DispatchOutput>* received = nullptr;  ///< of every rank
  Topology topology;
  int64_t hidden = 0;         ///< of y; need not be that of the dispatch
  DType dtype = DType::bf16;  ///< of y and of the result: fp16, bf16, fp32, fp64
  CombineWeights apply = CombineWeights::none;
  Wire wire = Wire::payload;
  bool with_side = false;
  std::vector<CombineInput> ranks;
};

struct CombineOutput {
  Bytes x;                        ///< [T, hidden] of the dtype; 0 for a token without terms
  std::vector<float> side;        ///< with_side: [T, K], bits as given; 0 where no row came back
  std::vector<int32_t> num_lost;  ///< [T] (token, k) terms that were dropped; all local k of a dropped rank_major row
};

/// Sums follow core/sum_tree.h.
/// Throws: InvalidArgument (a dtype that cannot be added; wire rows or source weights with rank_major; source weights where none
/// were dispatched; weights of tokens with another wire than rows; sizes that disagree).
std::vector<CombineOutput> reference_combine(const CombineProblem& problem);

}  // namespace turnout::core
