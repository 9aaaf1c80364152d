// The command on GPUs: what the CPU's tests ask of it, with --device cuda. The program is $COMMAND_UNDER_TEST, or lies beside this one.
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>

#include "support/shell.h"

namespace turnout::tools {
namespace {

using support::Answer;
using support::answer_of;

std::string program() {
  if (const char* given = std::getenv("COMMAND_UNDER_TEST")) return given;  // NOLINT(concurrency-mt-unsafe)
  return (std::filesystem::read_symlink("/proc/self/exe").parent_path() / "turnout").string();
}

/// `and_errors`: both streams.
Answer ask(const std::string& words, bool and_errors = true) {
  const std::string line = "timeout -k 5 100 '" + program() + "' " + words + (and_errors ? " 2>&1" : "") + " </dev/null";
  return answer_of(line);
}

/// Lines "cuda: N: ..." of `turnout version`.
int num_gpus(const std::string& about) {
  int count = 0;
  while (about.find("\ncuda: " + std::to_string(count) + ": ") != std::string::npos) ++count;
  return count;
}

class CommandOnGpus : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!std::filesystem::exists(program())) GTEST_SKIP() << "no command at " << program() << ": set COMMAND_UNDER_TEST";
    const std::string about = ask("version").text;
    gpus = num_gpus(about);
    if (gpus == 0) GTEST_SKIP() << about;
  }
  /// Two ranks at once: processes on two GPUs, else threads on one.
  std::string two_ranks() const { return gpus > 1 ? " --ranks 2" : " --ranks 2 --placement threads"; }
  /// One case for each operation; sane, and of this kind.
  void expect_figures(const std::string& words, const std::string& placement, bool has_limit, size_t num_cases) const {
    const Answer a = ask(words + " --json -", false);
    ASSERT_EQ(a.status, 0) << words << "\n" << ask(words).text;
    const auto report = nlohmann::json::parse(a.text, nullptr, false);
    ASSERT_TRUE(report.is_object()) << a.text;
    EXPECT_NE(report["host"]["gpu"].get<std::string>().find(" x "), std::string::npos) << a.text;
    ASSERT_EQ(report["cases"].size(), num_cases) << a.text;
    EXPECT_EQ(report["link_GBps"].is_number(), has_limit);
    for (const auto& c : report["cases"]) {
      EXPECT_EQ(c["verified"], true);
      EXPECT_EQ(c["placement"], placement);
      EXPECT_EQ(c["transport"].get<std::string>().rfind("cuda_", 0), 0u) << c["transport"];
      EXPECT_GT(c["p50_us"].get<double>(), 1);
      EXPECT_GE(c["p99_us"].get<double>(), c["p50_us"].get<double>());
      EXPECT_EQ(c["limit_us"].is_number(), has_limit) << c.dump();
      if (!has_limit) continue;
      EXPECT_GT(c["p50_us"].get<double>(), c["limit_us"].get<double>() * 0.9) << "faster than the link";
      EXPECT_FALSE(c["limit_kind"].get<std::string>().empty());
    }
  }
  int gpus = 0;
};

TEST_F(CommandOnGpus, SelftestPasses) {
  const Answer a = ask("selftest --device auto --seconds 0.1" + two_ranks());
  EXPECT_EQ(a.status, 0) << a.text;
  EXPECT_NE(a.text.find("210 passed, 0 failed"), std::string::npos) << a.text;  // 202 cases, 8 of them timed
}

TEST_F(CommandOnGpus, SelftestPassesOnOneGpu) {
  const Answer a = ask("selftest --device cuda:0 --ranks 3 --seconds 0");
  EXPECT_EQ(a.status, 0) << a.text;
  EXPECT_NE(a.text.find("202 passed, 0 failed"), std::string::npos) << a.text;
}

TEST_F(CommandOnGpus, ACorruptSelftestFails) {
  const Answer a = ask("selftest --device cuda:0 --ranks 2 --corrupt");
  EXPECT_EQ(a.status, 1) << a.text;
  EXPECT_NE(a.text.find("FAILED throughput, rank_major, exact, bf16, wire payload: rank 1: x[0] differs"), std::string::npos) << a.text;
  EXPECT_NE(a.text.find("201 passed, 1 failed"), std::string::npos) << a.text;
}

TEST_F(CommandOnGpus, BenchReports) {
  const std::string words = "bench --device cuda --tokens 64 --hidden 512 --iters 5" + two_ranks();
  const bool several = gpus > 1;
  const std::string placement = several ? "processes" : "one_gpu";
  // Few runs: processes that start the driver at the same time take seconds each.
  expect_figures(words + " --size capacity --launch graph --num-sms 16", placement, several, 2);
  expect_figures(words + " --layout expert_slab --size capacity --dtype fp8 --mode low_latency", placement, several, 2);
  const std::string on_one = "bench --device cuda:0 --tokens 64 --hidden 512 --iters 5 --ranks 2 --placement threads";
  expect_figures(on_one + " --layout expert_major --wire rows --result fresh", "one_gpu", false, 2);
}

TEST_F(CommandOnGpus, BenchOnOneGpuHasNoLimit) {  // with what is usual otherwise
  expect_figures("bench --device cuda:0 --tokens 64 --hidden 512 --iters 5 --ranks 3 --placement threads", "one_gpu", false, 2);
}

TEST_F(CommandOnGpus, BenchTimesConstruction) {
  const Answer a = ask("bench --device cuda --op construct --iters 3 --tokens 64 --hidden 512" + two_ranks());
  EXPECT_EQ(a.status, 0) << a.text;
  EXPECT_NE(a.text.find("construct: p50"), std::string::npos) << a.text;
}

TEST_F(CommandOnGpus, DemoEqualsOneRank) {
  const Answer a = ask("demo --device cuda" + two_ranks());
  EXPECT_EQ(a.status, 0) << a.text;
  EXPECT_NE(a.text.find("bit for bit"), std::string::npos) << a.text;
  EXPECT_NE(a.text.find("the experts compute on the CPU"), std::string::npos) << a.text;
}

TEST_F(CommandOnGpus, ACorruptDemoFails) {
  const Answer a = ask("demo --device cuda:0 --corrupt --ranks 2 --placement threads");
  EXPECT_EQ(a.status, 1) << a.text;
  EXPECT_NE(a.text.find("FAIL: "), std::string::npos) << a.text;
}

TEST_F(CommandOnGpus, MistakesAreToldBeforeRanksStart) {
  const Answer absent = ask("bench --device cuda:99");
  EXPECT_EQ(absent.status, 2) << absent.text;
  EXPECT_NE(absent.text.find("there is no CUDA device 99"), std::string::npos) << absent.text;
  const Answer many = ask("bench --device cuda --num-sms 1000");
  EXPECT_EQ(many.status, 2) << many.text;
  EXPECT_NE(many.text.find("--num-sms 1000: the GPU has "), std::string::npos) << many.text;
  for (const Answer& a : {absent, many}) EXPECT_EQ(a.text.find("turnout launch: rank"), std::string::npos) << a.text;
}

}  // namespace
}  // namespace turnout::tools
