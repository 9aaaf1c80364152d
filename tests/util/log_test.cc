// Log lines: which levels pass, where they go, once or every time.
#include "util/log.h"

#include <gtest/gtest.h>

#include <string>
#include <thread>
#include <vector>

namespace turnout::util {
namespace {

/// Catches the lines written while it lives. The level is the default (warn) unless the environment says otherwise.
class Catcher {
 public:
  Catcher() {
    set_log_callback([this](LogLevel, std::string_view text, int) { lines.emplace_back(text); });
  }
  ~Catcher() { set_log_callback({}); }
  Catcher(const Catcher&) = delete;
  Catcher& operator=(const Catcher&) = delete;
  std::vector<std::string> lines;
};

TEST(Log, CallbackGetsErrorsInOrder) {
  Catcher catcher;
  log(LogLevel::error, "first");
  log(LogLevel::error, "second");
  EXPECT_EQ(catcher.lines, (std::vector<std::string>{"first", "second"}));
}

TEST(Log, WithoutACallbackLinesGoToStderr) {
  testing::internal::CaptureStderr();
  log(LogLevel::error, "a line");
  log(LogLevel::error, "of a rank", 3);
  EXPECT_EQ(testing::internal::GetCapturedStderr(), "turnout error: a line\nturnout [rank 3] error: of a rank\n");
}

TEST(Log, OnceIsOncePerText) {
  Catcher catcher;
  for (int i = 0; i < 3; ++i) log_once(LogLevel::error, "said once");
  log_once(LogLevel::error, "another");
  EXPECT_EQ(catcher.lines, (std::vector<std::string>{"said once", "another"}));
}

TEST(Log, ACallbackMayAskForMoreThanTheEnvironment) {
  std::vector<std::string> lines;
  util::set_log_callback([&](LogLevel level, std::string_view text, int rank) { lines.push_back(line_of(level, text, rank)); }, LogLevel::info);
  EXPECT_TRUE(admits(LogLevel::info));
  EXPECT_FALSE(admits(LogLevel::debug));
  log(LogLevel::info, "of a rank", 2);
  log(LogLevel::debug, "too fine");
  log(LogLevel::error, "of the process");
  util::set_log_callback({}, LogLevel::debug);  // nobody asks any more: the environment counts
  testing::internal::CaptureStderr();
  log(LogLevel::info, "not admitted");
  log(LogLevel::warn, "admitted");
  EXPECT_EQ(testing::internal::GetCapturedStderr(), "turnout warn: admitted\n");
  EXPECT_EQ(lines, (std::vector<std::string>{"turnout [rank 2] info: of a rank\n", "turnout error: of the process\n"}));
}

TEST(Log, LinesOfSeveralThreadsAllArrive) {
  Catcher catcher;
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([] {
      for (int i = 0; i < 100; ++i) log(LogLevel::error, "line");
    });
  }
  for (std::thread& t : threads) t.join();
  EXPECT_EQ(catcher.lines, std::vector<std::string>(400, "line"));
}

}  // namespace
}  // namespace turnout::util
