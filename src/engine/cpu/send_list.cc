// Two passes over the ids: count, then fill.
#include "engine/cpu/send_list.h"

#include <cstring>

#include "engine/cpu/block_cache.h"
#include "engine/cpu/inline_vector.h"

namespace turnout::engine {

namespace {

void copy_ids(internal::Routing& r, const TensorView& topk_idx) {
  const size_t n = static_cast<size_t>(r.num_tokens) * static_cast<size_t>(r.num_topk);
  r.topk_idx.resize(n);
  for (size_t i = 0; i < n; ++i) {
    r.topk_idx[i] = topk_idx.dtype == DType::i64 ? static_cast<int32_t>(topk_idx.as<const int64_t>()[i]) : topk_idx.as<const int32_t>()[i];
  }
}

void copy_weights(internal::Routing& r, const TensorView& topk_weights) {
  const size_t n = static_cast<size_t>(r.num_tokens) * static_cast<size_t>(r.num_topk);
  r.topk_weights.resize(n);
  if (n == 0) return;
  if (topk_weights.dtype == DType::fp32) {
    std::memcpy(r.topk_weights.data(), topk_weights.data, n * sizeof(float));
    return;
  }
  for (size_t i = 0; i < n; ++i) {
    const uint32_t bits = static_cast<uint32_t>(topk_weights.as<const uint16_t>()[i]) << 16;
    std::memcpy(&r.topk_weights[i], &bits, sizeof bits);
  }
}

}  // namespace

std::shared_ptr<internal::Routing> list_sends(std::shared_ptr<const core::ExpertMap> experts, const TensorView& topk_idx,
                                              const TensorView& topk_weights, int64_t num_tokens) {
  auto routing = std::allocate_shared<internal::Routing>(CachedAllocator<internal::Routing>());
  internal::Routing& r = *routing;
  r.experts = std::move(experts);
  r.num_tokens = num_tokens;
  r.num_topk = static_cast<int>(topk_idx.shape[1]);
  r.has_weights = topk_weights.defined();
  copy_ids(r, topk_idx);
  if (r.has_weights) copy_weights(r, topk_weights);

  const auto ranks = static_cast<size_t>(r.experts->num_ranks());
  const auto topk = static_cast<size_t>(r.num_topk);
  // `last[rank]` is the token last listed for a rank: tokens come in order, so it tells whether this one is listed already.
  PerRank<int64_t> last, next;
  r.send_begin.assign(ranks + 1, 0);
  const auto for_each_pair = [&](auto&& body) {
    last.assign(ranks, -1);
    for (int64_t token = 0; token < num_tokens; ++token) {
      for (size_t k = 0; k < topk; ++k) {
        const int32_t e = r.topk_idx[static_cast<size_t>(token) * topk + k];
        if (e < 0) continue;
        const auto rank = static_cast<size_t>(r.experts->rank_of(e));
        if (last[rank] == token) continue;
        last[rank] = token;
        body(rank, token);
      }
    }
  };
  for_each_pair([&](size_t rank, int64_t) { ++r.send_begin[rank + 1]; });
  for (size_t rank = 0; rank < ranks; ++rank) r.send_begin[rank + 1] += r.send_begin[rank];
  r.send_tokens.resize(static_cast<size_t>(r.send_begin[ranks]));
  next.append(r.send_begin.data(), ranks);
  for_each_pair([&](size_t rank, int64_t token) { r.send_tokens[static_cast<size_t>(next[rank]++)] = static_cast<int32_t>(token); });
  return routing;
}

}  // namespace turnout::engine
