// Two passes over the ids: count, then fill.
#include "engine/cpu/send_list.h"

#include <algorithm>
#include <cstring>

#include "engine/cpu/block_cache.h"
#include "engine/cpu/inline_vector.h"

namespace turnout::engine {

namespace {

int32_t to_int32(int64_t id) { return static_cast<int32_t>(id); }

void copy_ids(internal::Routing& r, const TensorView& topk_idx) {
  const size_t n = static_cast<size_t>(r.num_tokens) * static_cast<size_t>(r.num_topk);
  r.topk_idx.resize_for_overwrite(n);
  if (topk_idx.dtype == DType::i64) std::transform(topk_idx.as<const int64_t>(), topk_idx.as<const int64_t>() + n, r.topk_idx.data(), to_int32);
  else std::copy_n(topk_idx.as<const int32_t>(), n, r.topk_idx.data());
}

void copy_weights(internal::Routing& r, const TensorView& topk_weights) {
  const size_t n = static_cast<size_t>(r.num_tokens) * static_cast<size_t>(r.num_topk);
  r.topk_weights.resize_for_overwrite(n);
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
  const auto for_each_pair = [&](auto&& body) {
    last.assign(ranks, -1);
    int64_t* const last_of = last.data();
    const int32_t* expert = r.topk_idx.data();
    const int* const owner = r.experts->owners().data();
    for (int64_t token = 0; token < num_tokens; ++token) {
      for (size_t k = 0; k < topk; ++k, ++expert) {
        if (*expert < 0) continue;
        const auto rank = static_cast<size_t>(owner[*expert]);
        if (last_of[rank] == token) continue;
        last_of[rank] = token;
        body(rank, token);
      }
    }
  };
  r.send_begin.assign(ranks + 1, 0);
  int64_t* const begin = r.send_begin.data();
  for_each_pair([begin](size_t rank, int64_t) { ++begin[rank + 1]; });
  for (size_t rank = 0; rank < ranks; ++rank) begin[rank + 1] += begin[rank];
  r.send_tokens.resize_for_overwrite(static_cast<size_t>(begin[ranks]));
  next.append(begin, ranks);
  for_each_pair([at = next.data(), tokens = r.send_tokens.data()](size_t rank, int64_t token) { tokens[at[rank]++] = static_cast<int32_t>(token); });
  return routing;
}

}  // namespace turnout::engine
