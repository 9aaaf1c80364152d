// What can be made wrong in the oracle (mutation.h); tests/core/mutation_main.cc names the test that notices.
#pragma once

namespace turnout::core {

enum class Mutation {
  none,
  // dispatch
  duplicates_count_once,
  minus_one_is_expert_0,
  unknown_id_is_accepted,
  local_number_is_global_id,
  tokens_in_descending_order,
  row_per_expert,
  k_before_token,
  groups_are_not_aligned,
  padding_is_free,
  later_rows_may_fit,
  slab_shares_its_capacity,
  dropped_counts_pairs,
  admits_one_more,
  foreign_weights_stay,
  weight_of_first_k,
  side_of_first_token,
  sorted_rows_by_row,
  short_block_is_skipped,
  exponent_is_one_up,
  rest_is_expert_0,
  // combine
  last_row_is_forgotten,
  ranks_in_descending_order,
  nodes_are_ignored,
  k_in_descending_order,
  own_partial_is_not_rounded,
  node_partial_is_not_rounded,
  sum_starts_at_zero,
  partial_is_rounded_before_weights,
  weights_are_ignored,
  rows_by_rank,
  double_sums_in_float,
  wire_is_payload,
  side_to_first_k,
  sums_cross_as_rows,
  padding_is_read,
  nan_has_a_sign,
  lost_counts_rows,
  last,
};

}  // namespace turnout::core
