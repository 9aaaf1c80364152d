// `turnout selftest`: what it says of a good installation, and that it fails where it must.
#include <gtest/gtest.h>
#include <unistd.h>

#include <nlohmann/json.hpp>
#include <string>

#include "support/shell.h"

namespace turnout::tools {
namespace {

using support::Answer;
using support::answer_of;

Answer ask(const std::string& words, const std::string& environment = "") {
  return answer_of(environment + " timeout 100 " TURNOUT_COMMAND " selftest " + words + " </dev/null");
}

/// One that other runs of this test do not use.
std::string port() { return std::to_string(20000 + getpid() % 10000); }

bool has(const Answer& a, const std::string& words) { return a.text.find(words) != std::string::npos; }

TEST(Selftest, PassesAndTellsInOneTable) {
  const Answer a = ask("--device cpu --seconds 0.02 2>&1");
  EXPECT_EQ(a.status, 0) << a.text;
  for (const char* words : {"equal to the reference", "throughput   rank_major", "low_latency  expert_slab", "x limit", "limit: memcpy", "0 failed",
                            "selftest: throughput, rank_major: 33 of 190 cases done"}) {
    EXPECT_TRUE(has(a, words)) << words << "\n" << a.text;
  }
}

TEST(Selftest, EveryNumberOfRanks) {
  for (const char* ranks : {"1", "5"}) {
    const Answer a = ask("--device cpu --seconds 0 --placement threads -n " + std::string(ranks) + " 2>&1");
    EXPECT_EQ(a.status, 0) << a.text;
    EXPECT_TRUE(has(a, "190 passed, 0 failed")) << a.text;
  }
}

TEST(Selftest, TheReportHasCasesAndSpeed) {
  const Answer a = ask("--device cpu --seconds 0.02 -n 2 --json - 2>/dev/null");
  ASSERT_EQ(a.status, 0) << a.text;
  const auto report = nlohmann::json::parse(a.text, nullptr, false);  // standard output is the report's alone
  ASSERT_TRUE(report.is_object()) << a.text;
  EXPECT_EQ(report["tests"]["passed"], 194);
  EXPECT_EQ(report["tests"]["failed"], 0);
  EXPECT_EQ(report["tests"]["names"].size(), 194u);
  ASSERT_EQ(report["cases"].size(), 4u);
  for (const auto& c : report["cases"]) {
    EXPECT_EQ(c["verified"], true);
    EXPECT_GT(c["p50_us"].get<double>(), 0);
    EXPECT_GT(c["limit_us"].get<double>(), 0);
  }
}

TEST(Selftest, AChangedBitFailsOneCase) {
  for (const char* where : {"-n 2", "-n 3 --placement threads", "-n 1"}) {
    const Answer a = ask("--device cpu --corrupt " + std::string(where) + " 2>/dev/null");
    EXPECT_EQ(a.status, 1) << a.text;
    EXPECT_TRUE(has(a, "FAILED throughput, rank_major, exact, bf16, wire payload: rank ")) << a.text;
    EXPECT_TRUE(has(a, "189 passed, 1 failed")) << a.text;
    EXPECT_FALSE(has(a, "x limit")) << "what is wrong was timed\n" << a.text;
  }
}

TEST(Selftest, SlowIsAFailureWhereAsked) {
  const Answer a = ask("--device cpu --seconds 0.02 -n 2 --max-ratio 0.001 2>/dev/null");
  EXPECT_EQ(a.status, 1) << a.text;
  EXPECT_TRUE(has(a, "times the limit, --max-ratio 0.001")) << a.text;
  EXPECT_TRUE(has(a, "192 passed, 2 failed")) << a.text;  // the two throughput calls
}

TEST(Selftest, GpusAreUsedWhereTheyAre) {
  const std::string no_library = "TURNOUT_CUDA_LIBRARY=/does/not/exist.so";
  const Answer chosen = ask("--seconds 0 -n 2 2>/dev/null", no_library);
  EXPECT_EQ(chosen.status, 0) << chosen.text;
  EXPECT_TRUE(has(chosen, "GPUs are not used: ") && has(chosen, "/does/not/exist.so")) << chosen.text;
  const Answer asked = ask("--device cuda 2>&1", no_library);
  EXPECT_EQ(asked.status, 3) << asked.text;
  EXPECT_TRUE(has(asked, "--device cuda: ") && has(asked, "/does/not/exist.so")) << asked.text;
  EXPECT_FALSE(has(asked, "turnout launch: rank")) << "ranks were started\n" << asked.text;
}

// As torchrun says it.
TEST(Selftest, ARankThatDoesNotCome) {
  const Answer a = ask("2>&1", "RANK=0 WORLD_SIZE=2 LOCAL_RANK=0 MASTER_ADDR=127.0.0.1 MASTER_PORT=" + port() + " TURNOUT_BOOTSTRAP_TIMEOUT_MS=400");
  EXPECT_EQ(a.status, 3) << a.text;
  EXPECT_TRUE(has(a, "missing ranks [1]")) << a.text;
}

TEST(Selftest, AWrongWorld) {
  const std::string address =
      " MASTER_ADDR=127.0.0.1 MASTER_PORT=" + port() + " TURNOUT_BOOTSTRAP_TIMEOUT_MS=20000 timeout 60 " TURNOUT_COMMAND " selftest 2>&1";
  const Answer differ =
      answer_of("RANK=0 WORLD_SIZE=2" + address + " & RANK=1 WORLD_SIZE=3" + address + "; first=$?; wait $!; exit $((first * 10 + $?))");
  EXPECT_EQ(differ.status, 22) << differ.text;
  EXPECT_TRUE(has(differ, "ranks disagree about their number")) << differ.text;
  const Answer beyond = ask("2>&1", "RANK=5 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=" + port());
  EXPECT_EQ(beyond.status, 2) << beyond.text;
  EXPECT_TRUE(has(beyond, "the environment of torchrun says rank 5 of 2 ranks")) << beyond.text;
  const Answer half = ask("2>&1", "RANK=0");
  EXPECT_EQ(half.status, 2) << half.text;
  EXPECT_TRUE(has(half, "WORLD_SIZE")) << half.text;
  const Answer other = ask("--ranks 3 2>&1", "RANK=0 WORLD_SIZE=2 LOCAL_RANK=0 MASTER_ADDR=127.0.0.1 MASTER_PORT=" + port());
  EXPECT_EQ(other.status, 2) << other.text;
  EXPECT_TRUE(has(other, "--ranks 3: this is one of the 2 ranks that torchrun has started")) << other.text;
}

}  // namespace
}  // namespace turnout::tools
