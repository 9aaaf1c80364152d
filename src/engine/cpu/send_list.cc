// Counted, then filled.
#include "engine/cpu/send_list.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <type_traits>

#include "engine/cpu/block_cache.h"
#include "engine/cpu/inline_vector.h"

namespace turnout::engine {

namespace {

/// Whether all `n` ids are -1 or below `num_experts`.
template <class Id>
bool narrow(const Id* ids, size_t n, int num_experts, int32_t* to) {
  using Unsigned = std::make_unsigned_t<Id>;
  bool good = true;
  for (size_t i = 0; i < n; ++i) {
    good &= static_cast<Unsigned>(ids[i]) + 1 <= static_cast<Unsigned>(num_experts);
    to[i] = static_cast<int32_t>(ids[i]);
  }
  return good;
}

bool copy_ids(internal::Routing& r, const TensorView& topk_idx) {
  const size_t n = static_cast<size_t>(r.num_tokens) * static_cast<size_t>(r.num_topk);
  r.topk_idx.resize_for_overwrite(n);
  const int experts = r.experts->num_experts();
  return topk_idx.dtype == DType::i64 ? narrow(topk_idx.as<const int64_t>(), n, experts, r.topk_idx.data())
                                      : narrow(topk_idx.as<const int32_t>(), n, experts, r.topk_idx.data());
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

/// From counts at send_begin[rank + 1] to where each rank's tokens begin; `next` is where its next one goes.
void begin_lists(internal::Routing& r, size_t ranks, PerRank<int64_t>& next) {
  int64_t* const begin = r.send_begin.data();
  for (size_t rank = 0; rank < ranks; ++rank) begin[rank + 1] += begin[rank];
  r.send_tokens.resize_for_overwrite(static_cast<size_t>(begin[ranks]));
  next.append(begin, ranks);
}

/// A word per token says to which ranks it goes.
void list_by_masks(internal::Routing& r, size_t ranks) {
  const auto topk = static_cast<size_t>(r.num_topk);
  const auto tokens = static_cast<size_t>(r.num_tokens);
  const int* const owner = r.experts->owners().data();
  InlineVector<uint64_t, 32> goes_to;
  goes_to.resize_for_overwrite(tokens);
  const int32_t* expert = r.topk_idx.data();
  for (uint64_t& mask : goes_to) {
    mask = 0;
    for (const int32_t* const end = expert + topk; expert < end; ++expert) {
      if (*expert >= 0) mask |= uint64_t{1} << owner[*expert];
    }
    for (uint64_t left = mask; left; left &= left - 1) ++r.send_begin[static_cast<size_t>(std::countr_zero(left)) + 1];
  }
  PerRank<int64_t> next;
  begin_lists(r, ranks, next);
  int64_t* const at = next.data();
  int32_t* const list = r.send_tokens.data();
  for (size_t token = 0; token < tokens; ++token) {
    for (uint64_t left = goes_to[token]; left; left &= left - 1) list[at[std::countr_zero(left)]++] = static_cast<int32_t>(token);
  }
}

/// The same for any number of ranks: `last[rank]` is the token last listed for a rank, so it tells whether this one is listed already.
void list_by_last_token(internal::Routing& r, size_t ranks) {
  PerRank<int64_t> last, next;
  const auto for_each_pair = [&](auto&& body) {
    last.assign(ranks, -1);
    const int32_t* expert = r.topk_idx.data();
    for (int64_t token = 0; token < r.num_tokens; ++token) {
      for (int k = 0; k < r.num_topk; ++k, ++expert) {
        if (*expert < 0) continue;
        const auto rank = static_cast<size_t>(r.experts->rank_of(*expert));
        if (last[rank] == token) continue;
        last[rank] = token;
        body(rank, token);
      }
    }
  };
  for_each_pair([&](size_t rank, int64_t) { ++r.send_begin[rank + 1]; });
  begin_lists(r, ranks, next);
  for_each_pair([&](size_t rank, int64_t token) { r.send_tokens[static_cast<size_t>(next[rank]++)] = static_cast<int32_t>(token); });
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
  if (!copy_ids(r, topk_idx)) return nullptr;
  if (r.has_weights) copy_weights(r, topk_weights);

  const auto ranks = static_cast<size_t>(r.experts->num_ranks());
  r.send_begin.assign(ranks + 1, 0);
  if (ranks <= 64) list_by_masks(r, ranks);
  else list_by_last_token(r, ranks);
  return routing;
}

}  // namespace turnout::engine
