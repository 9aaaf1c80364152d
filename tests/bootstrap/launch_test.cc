// `turnout launch` with real processes, and mpirun where it is installed.
#include "tools/launch.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "turnout/error.h"

namespace turnout::tools {
namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

std::string read_all(const std::string& path) {
  std::ifstream file(path);
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

size_t count(const std::string& text, const std::string& part) {
  size_t n = 0;
  for (size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++n;
  return n;
}

/// Waits until `done`, for 10 seconds at most.
bool eventually(const std::function<bool()>& done) {
  const auto deadline = Clock::now() + 10s;
  while (!done() && Clock::now() < deadline) usleep(5000);
  return done();
}

class Launch : public testing::Test {
 protected:
  Launch() : folder_(testing::TempDir() + "turnout_launch_XXXXXX") {
    if (!mkdtemp(folder_.data())) throw std::runtime_error("mkdtemp");
  }
  ~Launch() override { std::filesystem::remove_all(folder_); }

  /// A launcher in a process of its own; its output goes to files.
  void start(int num_ranks, std::vector<std::string> command, bool tag = false, double timeout_s = 0) {
    std::fflush(nullptr);  // the child must not write our lines again
    launcher_ = fork();
    if (launcher_ != 0) return;
    dup2(open((folder_ + "/out").c_str(), O_WRONLY | O_CREAT | O_APPEND, 0600), STDOUT_FILENO);
    dup2(open((folder_ + "/err").c_str(), O_WRONLY | O_CREAT | O_APPEND, 0600), STDERR_FILENO);
    if (chdir(folder_.c_str()) != 0) _exit(99);
    int status = 98;
    try {
      status = run_launch({.num_ranks = num_ranks, .command = std::move(command), .tag = tag, .timeout_s = timeout_s});
    } catch (const std::exception& e) {
      std::fprintf(stderr, "%s\n", e.what());
    }
    std::fflush(nullptr);
    _exit(status);
  }
  int finish() {
    int status = -1;
    waitpid(launcher_, &status, 0);
    out_ = read_all(folder_ + "/out");
    err_ = read_all(folder_ + "/err");
    return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
  }
  int launch(int num_ranks, const std::string& script, bool tag = false, double timeout_s = 0) {
    start(num_ranks, {"sh", "-c", script}, tag, timeout_s);
    return finish();
  }
  bool there(const std::string& file) const { return std::filesystem::exists(folder_ + "/" + file); }
  /// The process whose number is in that file, 0 while there is none.
  pid_t pid_in(const std::string& file) const { return static_cast<pid_t>(std::atoi(read_all(folder_ + "/" + file).c_str())); }
  static bool alive(pid_t pid) {
    const std::string stat = read_all("/proc/" + std::to_string(pid) + "/stat");
    return !stat.empty() && stat.find(") Z") == std::string::npos;
  }

  std::string folder_, out_, err_;
  pid_t launcher_ = -1;
};

TEST_F(Launch, GivesEveryRankItsPlaceAndOneSecret) {
  EXPECT_EQ(launch(3, "echo $TURNOUT_RANK/$TURNOUT_NUM_RANKS/$TURNOUT_LOCAL_RANK $TURNOUT_ROOT:$TURNOUT_PORT $TURNOUT_JOB $TURNOUT_SECRET"), 0)
      << err_;
  std::vector<std::string> lines;
  std::istringstream text(out_);
  for (std::string line; std::getline(text, line);) lines.push_back(line);
  std::sort(lines.begin(), lines.end());
  ASSERT_EQ(lines.size(), 3u);
  for (size_t rank = 0; rank < 3; ++rank) {
    EXPECT_EQ(lines[rank].substr(0, 5), std::to_string(rank) + "/3/" + std::to_string(rank));
    EXPECT_EQ(lines[rank].substr(5), lines[0].substr(5));
  }
  EXPECT_GE(lines[0].size() - lines[0].rfind(' '), 65u) << "32 random bytes";
}

TEST_F(Launch, ItsRanksMeet) {
  for (int num_ranks : {1, 2, 3, 4, 5, 7, 8}) {
    start(num_ranks, {TURNOUT_JOB_PROGRAM});
    EXPECT_EQ(finish(), 0) << err_;
    EXPECT_EQ(count(out_, "of " + std::to_string(num_ranks) + ", local"), static_cast<size_t>(num_ranks)) << out_;
  }
}

TEST_F(Launch, JobsSideBySideDoNotMeet) {
  std::vector<pid_t> launchers;
  for (int i = 0; i < 5; ++i) {
    start(3, {TURNOUT_JOB_PROGRAM});
    launchers.push_back(launcher_);
  }
  for (pid_t pid : launchers) {
    launcher_ = pid;
    EXPECT_EQ(finish(), 0) << err_;
  }
  EXPECT_EQ(count(out_, "of 3, local"), 15u);
}

TEST_F(Launch, ReturnsTheStatusOfTheRankThatFailedAndEndsTheOthers) {
  const auto begun = Clock::now();
  EXPECT_EQ(launch(3, "test $TURNOUT_RANK = 1 && exit 7; exec sleep 60"), 7);
  EXPECT_LT(Clock::now() - begun, 20s);
  EXPECT_NE(err_.find("rank 1 exited with status 7; ending the others"), std::string::npos) << err_;
  EXPECT_EQ(launch(2, "test $TURNOUT_RANK = 1 && kill -9 $$; exec sleep 60"), 128 + SIGKILL);
  EXPECT_NE(err_.find("rank 1 was killed by signal 9"), std::string::npos) << err_;
}

TEST_F(Launch, RanksThatIgnoreTheirEndAreKilled) {
  const auto begun = Clock::now();
  EXPECT_EQ(launch(2,
                   "if test $TURNOUT_RANK = 0; then trap '' TERM; touch deaf; while :; do sleep 0.1; done; fi;"
                   "while ! test -e deaf; do sleep 0.01; done; exit 5"),
            5);
  EXPECT_GE(Clock::now() - begun, 2s) << "the grace";
  EXPECT_LT(Clock::now() - begun, 20s);
}

TEST_F(Launch, SignalsArePassedOn) {
  for (int number : {SIGINT, SIGTERM}) {
    const std::string name = number == SIGINT ? "INT" : "TERM";
    start(2, {"sh", "-c", "trap 'touch " + name + "$TURNOUT_RANK; exit 0' " + name + "; touch ready$TURNOUT_RANK; while :; do sleep 0.05; done"});
    ASSERT_TRUE(eventually([&] { return there("ready0") && there("ready1"); }));
    kill(launcher_, number);
    EXPECT_EQ(finish(), 0);
    EXPECT_TRUE(there(name + "0") && there(name + "1"));
    std::filesystem::remove(folder_ + "/ready0");
    std::filesystem::remove(folder_ + "/ready1");
  }
}

TEST_F(Launch, TheSecondSignalKills) {
  start(2, {"sh", "-c", "trap 'touch asked$TURNOUT_RANK' INT; touch ready$TURNOUT_RANK; while :; do sleep 0.05; done"});
  ASSERT_TRUE(eventually([&] { return there("ready0") && there("ready1"); }));
  kill(launcher_, SIGINT);
  ASSERT_TRUE(eventually([&] { return there("asked0") && there("asked1"); }));
  kill(launcher_, SIGINT);
  EXPECT_EQ(finish(), 128 + SIGKILL);
}

TEST_F(Launch, TheTimeoutEndsTheJob) {
  const auto begun = Clock::now();
  EXPECT_EQ(launch(2, "exec sleep 60", false, 0.2), 124);
  EXPECT_LT(Clock::now() - begun, 20s);
  EXPECT_NE(err_.find("timeout of 0.2 s"), std::string::npos) << err_;
}

TEST_F(Launch, NothingSurvivesALauncherThatIsKilled) {
  // Rank 0 starts a process of its own, which the kernel does not end with the launcher.
  start(2, {"sh", "-c", "sleep 300 & echo $! > child$TURNOUT_RANK; echo $$ > rank$TURNOUT_RANK; wait"});
  ASSERT_TRUE(eventually([&] { return pid_in("child0") && pid_in("child1") && pid_in("rank0") && pid_in("rank1"); }));
  const std::string children = "/proc/" + std::to_string(launcher_) + "/task/" + std::to_string(launcher_) + "/children";
  ASSERT_TRUE(eventually([&] { return count(read_all(children), " ") == 3; })) << "two ranks and the guardian";
  kill(launcher_, SIGKILL);
  EXPECT_EQ(finish(), -SIGKILL);
  for (const char* file : {"rank0", "rank1", "child0", "child1"}) {
    EXPECT_TRUE(eventually([&] { return !alive(pid_in(file)); })) << file;
  }
}

TEST_F(Launch, WhatRanksLeaveBehindEndsWithTheJob) {
  EXPECT_EQ(launch(1, "sleep 300 & echo $! > child0"), 0);
  EXPECT_TRUE(eventually([&] { return !alive(pid_in("child0")); }));
}

TEST_F(Launch, TaggedLinesAreWholeAndLoseNothing) {
  EXPECT_EQ(launch(4, "for i in 1 2 3 4 5 6 7 8 9; do printf 'line '; echo $i; done; printf 'no end'; echo oops >&2", true), 0);
  for (int rank = 0; rank < 4; ++rank) {
    const std::string tag = "[" + std::to_string(rank) + "] ";
    for (int i = 1; i <= 9; ++i) EXPECT_EQ(count(out_, tag + "line " + std::to_string(i) + "\n"), 1u) << out_;
    EXPECT_EQ(count(out_, tag + "no end\n"), 1u);
    EXPECT_EQ(count(err_, tag + "oops\n"), 1u);
  }
  EXPECT_EQ(launch(2, "head -c 1000000 /dev/zero | tr '\\0' x", true), 0);
  EXPECT_EQ(count(out_, "x"), 2'000'000u) << "long lines come in pieces";
}

TEST_F(Launch, ACommandThatCannotBeRun) {
  start(2, {"/nowhere/program"});
  EXPECT_EQ(finish(), 127);
  EXPECT_NE(err_.find("cannot run '/nowhere/program': No such file"), std::string::npos) << err_;
  start(2, {"/"});
  EXPECT_EQ(finish(), 126);
  EXPECT_THROW(run_launch({.num_ranks = 0, .command = {"true"}}), InvalidArgument);
  EXPECT_THROW(run_launch({.num_ranks = 1, .command = {}}), InvalidArgument);
}

TEST_F(Launch, OnlyRankZeroHasTheInput) {
  const std::string input = folder_ + "/in";
  std::ofstream(input) << "hello\n";
  const int saved = dup(STDIN_FILENO);
  const int fd = open(input.c_str(), O_RDONLY | O_CLOEXEC);
  dup2(fd, STDIN_FILENO);
  EXPECT_EQ(launch(3, "cat > got$TURNOUT_RANK"), 0);
  dup2(saved, STDIN_FILENO);
  close(fd);
  close(saved);
  EXPECT_EQ(read_all(folder_ + "/got0"), "hello\n");
  EXPECT_EQ(read_all(folder_ + "/got1") + read_all(folder_ + "/got2"), "");
}

TEST_F(Launch, OpenMpisMpirun) {
  if (std::system("mpirun --version 2>/dev/null | grep -q 'Open MPI'") != 0) return;  // NOLINT: where it is not installed
  const std::string command = "mpirun --allow-run-as-root --oversubscribe -n 3 " TURNOUT_JOB_PROGRAM " > " + folder_ + "/out 2>&1";
  EXPECT_EQ(std::system(command.c_str()), 0) << read_all(folder_ + "/out");
  EXPECT_EQ(count(read_all(folder_ + "/out"), "openmpi: rank "), 3u) << read_all(folder_ + "/out");
}

}  // namespace
}  // namespace turnout::tools
