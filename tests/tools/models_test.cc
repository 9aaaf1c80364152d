#include "tools/models.h"

#include <gtest/gtest.h>

#include <set>

namespace turnout::tools {
namespace {

TEST(Models, KnowsTheTwelve) {
  EXPECT_EQ(models().size(), 12u);
  for (const char* name : {"DeepSeek-V3", "DeepSeek-V4-Pro", "DeepSeek-V2-Lite", "Kimi-K2", "Qwen3-235B-A22B", "Qwen3-30B-A3B", "Mixtral-8x7B",
                           "gpt-oss-120b", "gpt-oss-20b", "GLM-4.5", "Llama-4-Maverick", "MiniMax-M2"}) {
    EXPECT_TRUE(find_model(name)) << name;
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
