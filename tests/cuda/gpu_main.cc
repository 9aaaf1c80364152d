// main() of the tests on GPUs. A kernel that waits for ever cannot be stopped from outside, so a test that is over its deadline (or
// that crashes) has failed, and this process starts itself again with the tests that are left.
#include "cuda/gpu_main.h"

#include <dirent.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <condition_variable>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace {

constexpr const char* kFailedBefore = "TURNOUT_TEST_FAILED_BEFORE";
constexpr const char* kCasesBefore = "TURNOUT_TEST_CASES_BEFORE";  ///< what processes before this one did, as a report has it

std::string from_environment(const char* name) {
  const char* value = std::getenv(name);
  return value ? value : "";
}

/// The cases that have ended, and `current`, which has failed, as GoogleTest reports them.
std::string report_of_cases(const ::testing::TestInfo& current) {
  const ::testing::UnitTest& unit = *::testing::UnitTest::GetInstance();
  std::string text = from_environment(kCasesBefore);
  for (int s = 0; s < unit.total_test_suite_count(); ++s) {
    const ::testing::TestSuite& suite = *unit.GetTestSuite(s);
    for (int t = 0; t < suite.total_test_count(); ++t) {
      const ::testing::TestInfo& info = *suite.GetTestInfo(t);
      const bool failed = &info == &current || (info.should_run() && info.result()->Failed());
      if (info.should_run()) {
        text += std::string("<testcase name=\"") + info.name() + "\" classname=\"" + info.test_suite_name() + "\" status=\"run\" result=\"" +
                (info.result()->Skipped() ? "skipped" : "completed") + "\">" + (failed ? "<failure/>" : "") + "</testcase>\n";
      }
      if (&info == &current) return text;
    }
  }
  return text;
}

/// Puts those cases into the report of this process.
void complete_report() {
  const std::string cases = from_environment(kCasesBefore), output = GTEST_FLAG_GET(output);
  if (cases.empty() || output.rfind("xml:", 0) != 0) return;
  std::ifstream in(output.substr(4));
  std::string text((std::istreambuf_iterator<char>(in)), {});
  const size_t end = text.rfind("</testsuites>");
  if (end == std::string::npos) return;
  text.insert(end, "<testsuite name=\"before\">\n" + cases + "</testsuite>\n");
  std::ofstream(output.substr(4)) << text;
}

/// Ends the processes that this one has started.
void end_children() {
  DIR* all = opendir("/proc");
  if (!all) return;
  while (const dirent* entry = readdir(all)) {
    const int pid = std::atoi(entry->d_name);
    if (pid <= 0) continue;
    std::ifstream in(std::string("/proc/") + entry->d_name + "/stat");
    std::string line;
    std::getline(in, line);
    const size_t name_end = line.rfind(')');
    char state = 0;
    int parent = 0;
    if (name_end != std::string::npos && std::sscanf(line.c_str() + name_end + 1, " %c %d", &state, &parent) == 2 && parent == getpid()) {
      kill(pid, SIGKILL);
    }
  }
  closedir(all);
}

/// Starts this program again, made ready before each test so that a signal handler may use it.
class Again {
 public:
  explicit Again(const char* path) : path_(path) {}
  /// What is left after `current`.
  void prepare(const ::testing::TestInfo& current) {
    const ::testing::UnitTest& unit = *::testing::UnitTest::GetInstance();
    bool after = false;
    filter_ = "--gtest_filter=";
    name_ = std::string(current.test_suite_name()) + "." + current.name();
    size_t num_left = 0;
    for (int s = 0; s < unit.total_test_suite_count(); ++s) {
      const ::testing::TestSuite& suite = *unit.GetTestSuite(s);
      for (int t = 0; t < suite.total_test_count(); ++t) {
        const ::testing::TestInfo& info = *suite.GetTestInfo(t);
        if (&info == &current) {
          after = true;
        } else if (after && info.should_run()) {
          if (num_left++) filter_ += ':';
          filter_ += std::string(info.test_suite_name()) + "." + info.name();
        }
      }
    }
    if (num_left == 0) filter_ = "--gtest_filter=-*";
    const std::string before = from_environment(kFailedBefore);
    failed_ = (before.empty() ? "" : before + " ") + name_;
    cases_ = report_of_cases(current);
  }
  const std::string& name() const { return name_; }
  [[noreturn]] void start(const char* why) {
    std::fprintf(stdout, "%s\n[  FAILED  ] %s\n", why, name_.c_str());
    std::fflush(stdout);
    end_children();
    setenv(kFailedBefore, failed_.c_str(), 1);
    setenv(kCasesBefore, cases_.c_str(), 1);
    // The filter has the tests of this shard alone: they must not be dealt out once more.
    unsetenv("GTEST_TOTAL_SHARDS");
    unsetenv("GTEST_SHARD_INDEX");
    sigset_t none;
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, nullptr);
    char* argv[] = {path_.data(), filter_.data(), nullptr};
    execv("/proc/self/exe", argv);
    _exit(1);
  }

 private:
  std::string path_, filter_, name_, failed_, cases_;
};

Again* again = nullptr;
pid_t main_process = 0;

void crashed(int signal) {
  if (getpid() != main_process) _exit(128 + signal);
  static const std::array<char, 32> kWhy = {"crashed"};
  std::signal(signal, SIG_DFL);
  again->start(kWhy.data());
}

int deadline_seconds() {
  const int seconds = std::atoi(from_environment("TURNOUT_TEST_DEADLINE").c_str());  // for tools that slow everything down
  return seconds > 0 ? seconds : 30;
}

class Deadline : public ::testing::EmptyTestEventListener {
 public:
  Deadline() : limit_(deadline_seconds()) {
    thread_ = std::thread([this] { watch(); });
  }
  ~Deadline() override {
    {
      const std::lock_guard lock(mutex_);
      ended_ = true;
    }
    changed_.notify_all();
    thread_.join();
  }
  void OnTestStart(const ::testing::TestInfo& info) override {
    const std::lock_guard lock(mutex_);
    again->prepare(info);
    start_ = std::chrono::steady_clock::now();
    running_ = true;
    ++number_;
    changed_.notify_all();
  }
  void OnTestEnd(const ::testing::TestInfo&) override {
    const std::lock_guard lock(mutex_);
    running_ = false;
    changed_.notify_all();
    const auto& is_lost = turnout::testing::gpu_is_lost();
    if (is_lost && is_lost()) again->start("this process has lost its GPU");
  }

 private:
  void watch() {
    std::unique_lock lock(mutex_);
    while (!ended_) {
      const int number = number_;
      const auto moved_on = [&] { return ended_ || number_ != number || !running_; };
      if (!running_) {
        changed_.wait(lock, [&] { return ended_ || running_; });
      } else if (!changed_.wait_until(lock, start_ + limit_, moved_on)) {
        const std::string why = "not done within its deadline of " + std::to_string(limit_.count()) + " s";
        again->start(why.c_str());
      }
    }
  }
  std::mutex mutex_;
  std::condition_variable changed_;
  std::chrono::seconds limit_;
  std::chrono::steady_clock::time_point start_;
  bool running_ = false, ended_ = false;
  int number_ = 0;
  std::thread thread_;
};

}  // namespace

int main(int argc, char** argv) {
  // Every virtual rank has a stream that must not wait for another's.
  setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0);
  // Ranks that wait for one that has failed are to say so before the test is over its deadline: theirs would be 60 s, too.
  setenv("TURNOUT_BOOTSTRAP_TIMEOUT_MS", std::to_string(deadline_seconds() * 400).c_str(), 0);
  ::testing::InitGoogleTest(&argc, argv);
  Again me(argv[0]);
  again = &me;
  main_process = getpid();
  for (int signal : {SIGSEGV, SIGBUS, SIGABRT, SIGFPE, SIGILL}) std::signal(signal, crashed);
  ::testing::UnitTest::GetInstance()->listeners().Append(new Deadline);  // GoogleTest owns it
  int status = RUN_ALL_TESTS();
  complete_report();
  if (const std::string before = from_environment(kFailedBefore); !before.empty()) {
    std::printf("[  FAILED  ] before this process: %s\n", before.c_str());
    status = 1;
  }
  return status;
}
