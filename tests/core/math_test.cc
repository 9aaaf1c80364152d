// Rounding of sizes.
#include "core/math.h"

#include <gtest/gtest.h>

namespace turnout::core {
namespace {

TEST(Math, CeilDivIsTheLeastNumberOfPiecesThatCover) {
  for (int64_t n = 0; n <= 300; ++n) {
    for (int64_t by = 1; by <= 140; ++by) {
      int64_t pieces = 0;
      while (pieces * by < n) ++pieces;
      ASSERT_EQ(ceil_div(n, by), pieces) << n << " by " << by;
      ASSERT_EQ(align_up(n, by), pieces * by) << n << " to " << by;
    }
  }
}

TEST(Math, SizesBeyondThirtyTwoBits) {
  EXPECT_EQ(ceil_div((int64_t{1} << 40) + 1, 128), (int64_t{1} << 33) + 1);
  EXPECT_EQ(align_up((int64_t{3} << 32) + 1, 4096), (int64_t{3} << 32) + 4096);
  EXPECT_EQ(align_up(int64_t{1} << 62, int64_t{1} << 21), int64_t{1} << 62);
}

}  // namespace
}  // namespace turnout::core
