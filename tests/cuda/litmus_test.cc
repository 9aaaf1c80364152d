// Decides by experiment what the wire forms of the protocol rest on: whether an access of 16 bytes is ever seen torn, and a line of 128.
#include "cuda/litmus.h"

#include "cuda/gpu_test.h"

namespace turnout::testing {
namespace {

constexpr int kMilliseconds = 300;

struct Pair {
  int writer, reader;
};

class LitmusTest : public ::testing::TestWithParam<Pair> {
 protected:
  void SetUp() override {
    if (const std::string reason = lacking(std::max(GetParam().writer, GetParam().reader) + 1); !reason.empty()) GTEST_SKIP() << reason;
  }
  static Litmus look(Access access) {
    const Litmus l = run_litmus(access, GetParam().writer, GetParam().reader, kMilliseconds);
    saw(R"({"litmus": "%s", "writer": %d, "reader": %d, "reads": %llu, "changes": %llu, "torn_words": %llu, "torn_lines": %llu, "lines_behind_flag": %llu})",
        name(access), GetParam().writer, GetParam().reader, static_cast<unsigned long long>(l.reads), static_cast<unsigned long long>(l.changes),
        static_cast<unsigned long long>(l.torn_words), static_cast<unsigned long long>(l.torn_lines),
        static_cast<unsigned long long>(l.lines_behind_flag));
    return l;
  }
};

TEST_P(LitmusTest, FlaggedWordsAreNeverTorn) {
  const Litmus l = look(Access::word);
  EXPECT_GT(l.changes, 10'000u) << "the reader saw too little for the answer to mean anything";
  EXPECT_EQ(l.torn_words, 0u);
}
/// What rows of low_latency dispatches rest on: eight lanes store a line in one instruction, and eight load it.
TEST_P(LitmusTest, LinesOfFlaggedWordsAreNeverTorn) {
  const Litmus l = look(Access::word);
  EXPECT_GT(l.changes, 10'000u);
  EXPECT_EQ(l.torn_lines, 0u);
  EXPECT_EQ(l.lines_behind_flag, 0u);
}
TEST_P(LitmusTest, VectorsOfSixteenBytesAreNeverTorn) {
  const Litmus l = look(Access::vector);
  EXPECT_GT(l.changes, 10'000u);
  EXPECT_EQ(l.torn_words, 0u);
}
/// The rows' accesses may stay in L1, so changes may be few; what is seen must be whole words.
TEST_P(LitmusTest, StreamedWordsAreNeverTorn) {
  const Litmus l = look(Access::stream);
  EXPECT_EQ(l.torn_words, 0u);
}
TEST_P(LitmusTest, WordsOfBulkCopiesAreNeverTorn) {
  const Litmus l = look(Access::bulk);
  EXPECT_EQ(l.torn_words, 0u);
}
/// The experiment can tell: two stores are seen in part.
TEST_P(LitmusTest, TwoHalvesAreSeenTorn) {
  const Litmus l = look(Access::two_halves);
  EXPECT_GT(l.torn_words, 0u) << "this experiment finds nothing, so it proves nothing";
}

INSTANTIATE_TEST_SUITE_P(Cuda, LitmusTest, ::testing::Values(Pair{0, 0}, Pair{0, 1}, Pair{1, 0}),
                         [](const auto& each) { return std::to_string(each.param.writer) + "_to_" + std::to_string(each.param.reader); });

}  // namespace
}  // namespace turnout::testing
