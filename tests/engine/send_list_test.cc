// Which tokens go to which rank, for few ranks (a word per token) and for more than a word has bits.
#include "engine/cpu/send_list.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "support/random_routing.h"

namespace turnout::engine {
namespace {

using testing::Random;

class SendList : public ::testing::TestWithParam<int> {};

TEST_P(SendList, ListsEveryTokenOncePerRankInOrder) {
  const int ranks = GetParam();
  const int experts = 3 * ranks + 1, topk = 6;
  Random random(static_cast<uint64_t>(ranks));
  const auto map = std::make_shared<const core::ExpertMap>(core::ExpertMap::split(experts, ranks));
  for (const int64_t tokens : {int64_t{0}, int64_t{1}, int64_t{2}, int64_t{31}, int64_t{33}, int64_t{700}}) {
    std::vector<int64_t> ids(static_cast<size_t>(tokens * topk));
    for (int64_t& id : ids) id = random.below(experts + 1) - 1;  // -1, and duplicates
    const auto r = list_sends(map, TensorView::dense(ids.data(), DType::i64, {tokens, topk}), TensorView(), tokens);
    ASSERT_EQ(r->send_begin.size(), static_cast<size_t>(ranks) + 1);
    ASSERT_EQ(r->send_begin[0], 0);
    for (int rank = 0; rank < ranks; ++rank) {
      std::vector<int32_t> wanted;
      for (int64_t token = 0; token < tokens; ++token) {
        const auto* first = ids.data() + token * topk;
        if (std::any_of(first, first + topk, [&](int64_t e) { return e >= 0 && map->rank_of(static_cast<int>(e)) == rank; }))
          wanted.push_back(static_cast<int32_t>(token));
      }
      const auto at = static_cast<size_t>(rank);
      const std::vector<int32_t> got(r->send_tokens.begin() + r->send_begin[at], r->send_tokens.begin() + r->send_begin[at + 1]);
      EXPECT_EQ(got, wanted) << "rank " << rank << " of " << ranks << ", " << tokens << " tokens";
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Ranks, SendList, ::testing::Values(1, 2, 5, 63, 64, 65, 130));

}  // namespace
}  // namespace turnout::engine
