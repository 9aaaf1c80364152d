// The environment is read by a table: defaults, limits, and messages that say what would do.
#include "util/env.h"

#include <gtest/gtest.h>

#include <map>
#include <set>

namespace turnout::util {
namespace {

Env read(const std::map<std::string, std::string>& variables) {
  return read_env([&](const char* name) -> const char* {
    const auto found = variables.find(name);
    return found == variables.end() ? nullptr : found->second.c_str();
  });
}

std::string complaint(const std::map<std::string, std::string>& variables) {
  try {
    read(variables);
  } catch (const InvalidArgument& e) {
    return e.what();
  }
  return "";
}

TEST(Env, DefaultsAreThoseOfTheTable) {
  const Env e = read({});
  EXPECT_EQ(e.log_level, LogLevel::warn);
  EXPECT_EQ(e.transport, "auto");
  EXPECT_EQ(e.cpu_isa, "auto");
  EXPECT_EQ(e.timeout_ms, 60'000);
  EXPECT_EQ(e.busy_timeout_ms, 1'800'000);
  EXPECT_EQ(e.bootstrap_timeout_ms, 60'000);
  EXPECT_FALSE(e.rank || e.num_ranks || e.local_rank || e.node_id || e.port || e.spin_us || e.num_threads);
}

TEST(Env, ReadsEveryKind) {
  const Env e =
      read({{"TURNOUT_LOG", "debug"}, {"TURNOUT_RANK", "3"}, {"TURNOUT_PORT", "65535"}, {"TURNOUT_SECRET", "s p"}, {"TURNOUT_SPIN_US", "0"}});
  EXPECT_EQ(e.log_level, LogLevel::debug);
  EXPECT_EQ(e.rank, 3);
  EXPECT_EQ(e.port, 65535);
  EXPECT_EQ(e.secret, "s p");
  EXPECT_EQ(e.spin_us, 0);
}

TEST(Env, AnEmptyValueIsNoValue) {
  const Env e = read({{"TURNOUT_RANK", ""}, {"TURNOUT_LOG", ""}, {"TURNOUT_TIMEOUT_MS", ""}});
  EXPECT_FALSE(e.rank);
  EXPECT_EQ(e.log_level, LogLevel::warn);
  EXPECT_EQ(e.timeout_ms, 60'000);
}

TEST(Env, MalformedValuesAreNamedWithWhatWouldDo) {
  for (const auto& [name, value] : std::map<std::string, std::string>{{"TURNOUT_PORT", "65536"},
                                                                      {"TURNOUT_RANK", "-1"},
                                                                      {"TURNOUT_NUM_RANKS", "0"},
                                                                      {"TURNOUT_TIMEOUT_MS", "10s"},
                                                                      {"TURNOUT_SPIN_US", "99999999999999999999"},
                                                                      {"TURNOUT_NUM_THREADS", " 1"},
                                                                      {"TURNOUT_LOG", "loud"},
                                                                      {"TURNOUT_TRANSPORT", "SHM"},
                                                                      {"TURNOUT_CPU_ISA", "sse"}}) {
    const std::string text = complaint({{name, value}});
    EXPECT_NE(text.find(name), std::string::npos) << name << ": " << text;
    EXPECT_NE(text.find("'" + value + "'"), std::string::npos) << name << ": " << text;
    EXPECT_NE(text.find("must be"), std::string::npos) << name << ": " << text;
  }
}

TEST(Env, EveryRowOfTheTableIsRead) {
  std::set<std::string> asked, listed;
  read_env([&](const char* name) -> const char* {
    asked.insert(name);
    return nullptr;
  });
  for (const EnvVariable& v : env_table()) {
    listed.insert(std::string(v.name));
    if (!v.alias.empty()) listed.insert(std::string(v.alias));
  }
  EXPECT_EQ(asked, listed);
}

TEST(Env, NamesOfOtherLibrariesAreReadWhereOursAreAbsent) {
  EXPECT_EQ(read({{"DEEP_EP_RDMA_CHUNK_SIZE", "65536"}, {"NVSHMEM_IB_SL", "3"}}).staging_bytes, 65536);
  EXPECT_EQ(read({{"NVSHMEM_IB_SL", "3"}}).ib_service_level, 3);
  EXPECT_EQ(read({{"NVSHMEM_IB_SL", "3"}, {"TURNOUT_IB_SL", "5"}}).ib_service_level, 5);
  EXPECT_EQ(complaint({{"NVSHMEM_IB_SL", "16"}}), "NVSHMEM_IB_SL is '16', but must be an integer from 0 to 15");
  const auto lines = [](const std::map<std::string, std::string>& variables) {
    return aliases_in_use([&](const char* name) -> const char* {
      const auto found = variables.find(name);
      return found == variables.end() ? nullptr : found->second.c_str();
    });
  };
  EXPECT_EQ(lines({{"NVSHMEM_IB_SL", "3"}}), std::vector<std::string>{"NVSHMEM_IB_SL=3 is read as TURNOUT_IB_SL=3"});
  EXPECT_TRUE(lines({{"NVSHMEM_IB_SL", "3"}, {"TURNOUT_IB_SL", "5"}}).empty());
}

TEST(Env, TheMessageIsWhole) {
  EXPECT_EQ(complaint({{"TURNOUT_PORT", "0"}}), "TURNOUT_PORT is '0', but must be an integer from 1 to 65535");
  EXPECT_EQ(complaint({{"TURNOUT_NODE_ID", "-1"}}), "TURNOUT_NODE_ID is '-1', but must be an integer of at least 0");
  EXPECT_EQ(complaint({{"TURNOUT_LOG", "loud"}}), "TURNOUT_LOG is 'loud', but must be error, warn, info or debug");
}

TEST(Env, EveryTypeThatIsNotFreeTextRefusesNonsense) {
  const std::set<std::string_view> free_text = {"text", "path", "name", "host name or address"};
  for (const EnvVariable& v : env_table()) {
    if (free_text.contains(v.type)) continue;
    for (const char* nonsense : {"x", "1x", " 1", "1.5", "-5", "99999999999999999999"}) {
      EXPECT_NE(complaint({{std::string(v.name), nonsense}}), "") << v.name << "=" << nonsense;
    }
  }
}

TEST(Env, TheLevelOfTheLogNeverThrows) {
  EXPECT_EQ(read_log_level([](const char*) -> const char* { return "loud"; }), LogLevel::warn);
  EXPECT_EQ(read_log_level([](const char*) -> const char* { return "error"; }), LogLevel::error);
  EXPECT_EQ(read_log_level([](const char*) -> const char* { return nullptr; }), LogLevel::warn);
}

TEST(Env, UnknownVariablesGetTheNearestName) {
  EXPECT_TRUE(unknown_variables({"TURNOUT_LOG", "PATH", "LOG"}).empty());
  EXPECT_TRUE(unknown_variables({"TURNOUT_TEST_ANYTHING"}).empty());
  const auto lines = unknown_variables({"TURNOUT_TRANSPRT"});
  ASSERT_EQ(lines.size(), 1u);
  EXPECT_NE(lines[0].find("TURNOUT_TRANSPORT?"), std::string::npos) << lines[0];
  for (const char* far : {"TURNOUT_FOO", "TURNOUT_", "TURNOUT_LO", "TURNOUT_VERBOSITY", "TURNOUT_X"}) {
    const auto told = unknown_variables({far});
    ASSERT_EQ(told.size(), 1u) << far;
    EXPECT_EQ(told[0].find("did you mean"), std::string::npos) << told[0];
  }
  EXPECT_TRUE(unknown_variables({"TURNOUT_CUDA"}).empty()) << "an option of the build";
}

TEST(Env, RowsAreNamedOnceAndSayASentence) {
  std::set<std::string_view> names;
  for (const EnvVariable& v : env_table()) {
    EXPECT_TRUE(v.name.starts_with("TURNOUT_")) << v.name;
    EXPECT_TRUE(names.insert(v.name).second) << v.name << " twice";
    EXPECT_TRUE(v.sentence.ends_with('.')) << v.name;
    EXPECT_EQ(v.sentence.find('|'), std::string_view::npos) << v.name << ": breaks the table of the page";
  }
}

TEST(Env, ThePageNamesEveryVariable) {
  for (const EnvVariable& v : env_table()) EXPECT_NE(env_page().find("| `" + std::string(v.name) + "` |"), std::string::npos) << v.name;
}

}  // namespace
}  // namespace turnout::util
