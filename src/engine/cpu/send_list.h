// From top-k ids to lists of tokens per destination rank.
#pragma once
#include <memory>

#include "engine/routing.h"
#include "turnout/tensor.h"

namespace turnout::engine {

/// The source side of a new routing. A token is listed once per rank, however many of its experts live there.
/// Null if some id is neither -1 nor an expert of `experts`.
std::shared_ptr<internal::Routing> list_sends(std::shared_ptr<const core::ExpertMap> experts, const TensorView& topk_idx,
                                              const TensorView& topk_weights, int64_t num_tokens);

}  // namespace turnout::engine
