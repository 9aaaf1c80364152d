// The committed docs/env.md is the one that the table prints.
#include <gtest/gtest.h>

#include <fstream>
#include <sstream>

#include "util/env.h"

namespace turnout::util {
namespace {

TEST(Docs, EnvPageIsPrintedFromTheTable) {
  std::ifstream file(TURNOUT_SOURCE_DIR "/docs/env.md");
  ASSERT_TRUE(file) << "docs/env.md is missing: run ./dev docs";
  std::ostringstream committed;
  committed << file.rdbuf();
  EXPECT_EQ(committed.str(), env_page()) << "run ./dev docs and commit docs/env.md";
}

TEST(Docs, EnvPageNamesEveryVariable) {
  const std::string page = env_page();
  for (const EnvVariable& v : env_table()) EXPECT_NE(page.find("| `" + std::string(v.name) + "` |"), std::string::npos) << v.name;
}

}  // namespace
}  // namespace turnout::util
