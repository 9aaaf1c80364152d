#include "tools/routing_source.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <set>

#include "turnout/error.h"

namespace turnout::tools {
namespace {

class TemporaryFile {
 public:
  TemporaryFile(const std::string& ending, const std::string& content)
      : path_(std::filesystem::temp_directory_path() / ("turnout_routing_" + std::to_string(getpid()) + ending)) {
    std::ofstream(path_, std::ios::binary) << content;
  }
  ~TemporaryFile() { std::filesystem::remove(path_); }
  std::string path() const { return path_.string(); }

 private:
  std::filesystem::path path_;
};

RoutingOptions options(const std::string& source) { return {.source = source, .num_experts = 32, .topk = 4, .num_tokens = 200, .seed = 7}; }

std::vector<int64_t> load(const RoutingTable& table, int num_experts) {
  std::vector<int64_t> count(static_cast<size_t>(num_experts));
  for (const int64_t e : table.topk_idx) {
    if (e >= 0) ++count[static_cast<size_t>(e)];
  }
  return count;
}

class DrawnRouting : public testing::TestWithParam<std::string> {};

TEST_P(DrawnRouting, ExpertsAreDistinctAndWeightsSumToOne) {
  const RoutingOptions o = options(GetParam());
  const RoutingTable table = make_routing(o, 1);
  ASSERT_EQ(table.topk_idx.size(), 800u);
  for (size_t t = 0; t < 200; ++t) {
    std::set<int64_t> experts;
    float sum = 0;
    for (size_t k = 0; k < 4; ++k) {
      const int64_t e = table.topk_idx[t * 4 + k];
      EXPECT_GE(e, 0);
      EXPECT_LT(e, 32);
      EXPECT_TRUE(experts.insert(e).second) << "token " << t << " chose expert " << e << " twice";
      sum += table.topk_weights[t * 4 + k];
    }
    EXPECT_NEAR(sum, 1.0f, 1e-5f);
  }
}

TEST_P(DrawnRouting, DependsOnSeedAndRankOnly) {
  RoutingOptions o = options(GetParam());
  const auto first = make_routing(o, 0).topk_idx;
  EXPECT_EQ(make_routing(o, 0).topk_idx, first);
  EXPECT_NE(make_routing(o, 1).topk_idx, first);
  o.seed = 8;
  EXPECT_NE(make_routing(o, 0).topk_idx, first);
}

TEST_P(DrawnRouting, MoreTopkThanExpertsLeavesNone) {
  RoutingOptions o = options(GetParam());
  o.num_experts = 3;
  const RoutingTable table = make_routing(o, 0);
  for (size_t t = 0; t < 200; ++t) {
    EXPECT_EQ(table.topk_idx[t * 4 + 3], -1);
    EXPECT_EQ(table.topk_weights[t * 4 + 3], 0.0f);
    EXPECT_EQ(std::set<int64_t>(&table.topk_idx[t * 4], &table.topk_idx[t * 4 + 3]), (std::set<int64_t>{0, 1, 2}));
  }
}

INSTANTIATE_TEST_SUITE_P(Sources, DrawnRouting, testing::Values("uniform", "zipf:1.2", "zipf:3", "one-expert"));

TEST(Routing, UniformIsEvenAndZipfIsNot) {
  RoutingOptions o = options("uniform");
  o.num_tokens = 8000;
  const auto even = load(make_routing(o, 0), 32);
  EXPECT_GT(*std::min_element(even.begin(), even.end()), 850);
  EXPECT_LT(*std::max_element(even.begin(), even.end()), 1150);
  o.source = "zipf:1.5";
  const auto skewed = load(make_routing(o, 0), 32);
  EXPECT_GT(*std::max_element(skewed.begin(), skewed.end()), 10 * *std::min_element(skewed.begin(), skewed.end()));
  EXPECT_EQ(std::max_element(skewed.begin(), skewed.end()) - skewed.begin(), [&] {
    const auto other = load(make_routing(o, 1), 32);  // the same expert is popular on all ranks
    return std::max_element(other.begin(), other.end()) - other.begin();
  }());
}

TEST(Routing, OneExpertGetsEveryToken) {
  const auto count = load(make_routing(options("one-expert"), 2), 32);
  EXPECT_EQ(count[0], 200);
}

TEST(Routing, TextSendsAWordToOnePlace) {
  const TemporaryFile file(".txt", "The cat, the hat: THE bat\nand a caf\xc3\xa9");
  EXPECT_EQ(words_of(read_text(file.path())), (std::vector<std::string>{"the", "cat", "the", "hat", "the", "bat", "and", "a", "caf\xc3\xa9"}));
  RoutingOptions o = options("text:" + file.path());
  o.num_tokens = 9;
  const auto idx = make_routing(o, 0).topk_idx;
  const auto token = [&](size_t t) { return std::vector<int64_t>(&idx[t * 4], &idx[t * 4 + 4]); };
  EXPECT_EQ(token(0), token(2));
  EXPECT_EQ(token(0), token(4));
  EXPECT_NE(token(0), token(1));
  EXPECT_EQ(make_routing(o, 1).topk_idx, idx) << "rank 1 goes on where the text starts again";
}

TEST(Routing, NpyGivesEachRankItsRows) {
  std::string header = "{'descr': '<i8', 'fortran_order': False, 'shape': (4, 2), }\n";
  std::string content = std::string("\x93NUMPY\x01\x00", 8) + static_cast<char>(header.size()) + '\0' + header;
  const std::vector<int64_t> values{0, 1, 2, 3, 4, 5, 6, -1};
  content.append(reinterpret_cast<const char*>(values.data()), values.size() * 8);
  const TemporaryFile file(".npy", content);
  RoutingOptions o = options(file.path());
  o.topk = 2;
  o.num_tokens = 3;
  EXPECT_EQ(make_routing(o, 0).topk_idx, (std::vector<int64_t>{0, 1, 2, 3, 4, 5}));
  EXPECT_EQ(make_routing(o, 1).topk_idx, (std::vector<int64_t>{6, -1, 0, 1, 2, 3}));
  EXPECT_EQ(make_routing(o, 1).topk_weights[1], 0.0f);
  o.num_experts = 6;
  EXPECT_THROW(make_routing(o, 1), InvalidArgument);
  o = options(file.path());
  EXPECT_THROW(make_routing(o, 0), InvalidArgument) << "top-k is not the number of columns";
}

TEST(Routing, RefusesWhatItDoesNotKnow) {
  for (const char* source : {"", "unifrom", "zipf:", "zipf:x", "zipf:-1", "zipf:nan", "text:/does/not/exist", "/does/not/exist.npy"}) {
    EXPECT_THROW(make_routing(options(source), 0), InvalidArgument) << source;
  }
}

}  // namespace
}  // namespace turnout::tools
