// Hosts that are network namespaces of this machine, joined by virtual cables, and programs that run on them. A namespace
// lives as long as its descriptor, so nothing is left when a test ends, however it ends.
#pragma once
#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sched.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstring>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "bootstrap/socket.h"

namespace turnout::testing_ranks {

class Host {
 public:
  /// Throws: std::runtime_error if this process may not make namespaces.
  Host() {
    std::string trouble;
    std::thread([&] {
      if (unshare(CLONE_NEWNET) != 0) {
        trouble = std::string("cannot make a network namespace: ") + std::strerror(errno);
      } else {
        space_.reset(open("/proc/thread-self/ns/net", O_RDONLY | O_CLOEXEC));
      }
    }).join();
    if (!trouble.empty() || !space_) throw std::runtime_error(trouble.empty() ? "no /proc" : trouble);
    path_ = "/proc/" + std::to_string(getpid()) + "/fd/" + std::to_string(space_.get());
  }

  /// As `ip` takes it for a namespace.
  const std::string& path() const { return path_; }
  /// This thread, and what it starts, is on the host from now on.
  void enter() const {
    if (setns(space_.get(), CLONE_NEWNET) != 0) throw std::runtime_error(std::string("setns: ") + std::strerror(errno));
  }
  void run(const std::function<void()>& body) const {
    std::thread([&] {
      enter();
      body();
    }).join();
  }
  /// True if the command of a shell succeeded there.
  bool shell(const std::string& command) const {
    int status = -1;
    run([&] { status = std::system((command + " 2>&1").c_str()); });  // NOLINT(concurrency-mt-unsafe): its thread is alone in here
    return status == 0;
  }
  /// Whether somebody there can connect to an address; `error` says why not.
  bool connects(const std::string& address, int port, std::string& error) const {
    bool connected = false;
    run([&] {
      const auto all = bootstrap::resolve(address, port, error);
      if (!all.empty()) connected = static_cast<bool>(bootstrap::connect_to(all.front(), bootstrap::Clock::now() + std::chrono::seconds(5), error));
    });
    return connected;
  }

 private:
  bootstrap::Fd space_;
  std::string path_;
};

/// A program that runs on a host; it is killed when this goes.
class Program {
 public:
  struct End {
    int status = -1;   ///< exit status, or minus the signal that ended it
    std::string text;  ///< everything it said that was not heard before
  };

  Program(const Host& host, std::vector<std::string> words, std::vector<std::string> environment) {
    int in[2], out[2];
    if (pipe2(in, O_CLOEXEC) != 0 || pipe2(out, O_CLOEXEC) != 0) throw std::runtime_error("no pipe");
    std::vector<char*> argv, envp;
    for (auto& word : words) argv.push_back(word.data());
    for (auto& variable : environment) envp.push_back(variable.data());
    argv.push_back(nullptr);
    envp.push_back(nullptr);
    host.run([&] {
      pid_ = fork();
      if (pid_ != 0) return;
      dup2(in[0], 0);
      dup2(out[1], 1);
      dup2(out[1], 2);
      execve(argv[0], argv.data(), envp.data());
      _exit(127);
    });
    close(in[0]);
    close(out[1]);
    in_.reset(in[1]);
    out_.reset(out[0]);
  }
  Program(Program&& other) noexcept : pid_(std::exchange(other.pid_, -1)), in_(std::move(other.in_)), out_(std::move(other.out_)) {}
  Program& operator=(Program&&) = delete;
  ~Program() {
    if (pid_ < 0) return;
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
  }

  void say(const std::string& text) const { EXPECT_EQ(write(in_.get(), text.data(), text.size()), static_cast<ssize_t>(text.size())); }

  /// What it says until `word` has come; without it, up to its end.
  std::string hear(const std::string& word, std::chrono::seconds patience = std::chrono::seconds(30)) const {
    const auto deadline = bootstrap::Clock::now() + patience;
    std::string text;
    char c = 0;
    while ((word.empty() || text.find(word) == std::string::npos) && bootstrap::wait_for(out_.get(), POLLIN, deadline) &&
           read(out_.get(), &c, 1) == 1) {
      text += c;
    }
    return text;
  }

  End end() {
    End result;
    result.text = hear("");
    int status = 0;
    if (bootstrap::wait_for(out_.get(), POLLIN, bootstrap::Clock::now())) {  // its output has ended, so it has or is about to
      waitpid(std::exchange(pid_, -1), &status, 0);
      result.status = WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
    }
    return result;
  }

 private:
  pid_t pid_ = -1;
  bootstrap::Fd in_, out_;
};

}  // namespace turnout::testing_ranks
