#include "tools/models.h"

#include <gtest/gtest.h>

#include <set>
#include <vector>

namespace turnout::tools {
namespace {

// A second copy of the published numbers, so that a slip of the pen in one of them shows.
TEST(Models, HaveTheNumbersOfTheirConfigurations) {
  struct Published {
    const char* name;
    int num_experts, topk;
    int64_t hidden;
  };
  const std::vector<Published> published = {{"DeepSeek-V3", 256, 8, 7168}, {"DeepSeek-V4-Pro", 384, 6, 7168},  {"DeepSeek-V2-Lite", 64, 6, 2048},
                                            {"Kimi-K2", 384, 8, 7168},     {"Qwen3-235B-A22B", 128, 8, 4096},  {"Qwen3-30B-A3B", 128, 8, 2048},
                                            {"Mixtral-8x7B", 8, 2, 4096},  {"gpt-oss-120b", 128, 4, 2880},     {"gpt-oss-20b", 32, 4, 2880},
                                            {"GLM-4.5", 160, 8, 5120},     {"Llama-4-Maverick", 128, 1, 5120}, {"MiniMax-M2", 256, 8, 3072}};
  EXPECT_EQ(models().size(), published.size());
  for (const Published& want : published) {
    const auto model = find_model(want.name);
    ASSERT_TRUE(model) << want.name;
    EXPECT_EQ(model->num_experts, want.num_experts) << want.name;
    EXPECT_EQ(model->topk, want.topk) << want.name;
    EXPECT_EQ(model->hidden, want.hidden) << want.name;
  }
}

TEST(Models, EachIsPossibleAndCited) {
  std::set<std::string_view> names;
  for (const Model& m : models()) {
    EXPECT_TRUE(names.insert(m.name).second) << m.name;
    EXPECT_GE(m.num_experts, m.topk) << m.name;
    EXPECT_GE(m.topk, 1) << m.name;
    EXPECT_EQ(m.hidden % 64, 0) << m.name;
    EXPECT_NE(m.source.find("config.json"), std::string_view::npos) << m.name;
  }
}

TEST(Models, NamesIgnoreCase) {
  const auto model = find_model("deepseek-v3");
  ASSERT_TRUE(model);
  EXPECT_EQ(model->num_experts, 256);
  EXPECT_EQ(model->topk, 8);
  EXPECT_EQ(model->hidden, 7168);
  EXPECT_FALSE(find_model("deepseek"));
  EXPECT_NE(model_names().find("Mixtral-8x7B"), std::string::npos);
}

}  // namespace
}  // namespace turnout::tools
