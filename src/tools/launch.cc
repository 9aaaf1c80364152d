// Every rank is its own process group, so that what a rank starts ends with it.
#include "tools/launch.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>

#include "turnout/error.h"

namespace turnout::tools {

namespace {

using Clock = std::chrono::steady_clock;

std::atomic<int> signal_caught{0};  // a handler can reach nothing else
void catch_signal(int number) { signal_caught.store(number, std::memory_order_relaxed); }

std::string random_secret() {
  unsigned char bytes[32];
  if (getrandom(bytes, sizeof bytes, 0) != sizeof bytes) throw TransportError(std::string("launch: no random bytes: ") + std::strerror(errno));
  std::string hex;
  for (unsigned char byte : bytes) {
    hex += "0123456789abcdef"[byte >> 4];
    hex += "0123456789abcdef"[byte & 15];
  }
  return hex;
}

/// A port that was free a moment ago, outside what other jobs of this tool were given: the kernel hands them out in turn.
int free_port() {
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof address;
  const bool good = fd >= 0 && bind(fd, reinterpret_cast<sockaddr*>(&address), length) == 0 &&
                    getsockname(fd, reinterpret_cast<sockaddr*>(&address), &length) == 0;
  const int error = errno;
  if (fd >= 0) close(fd);
  if (!good) throw TransportError(std::string("launch: no free port: ") + std::strerror(error));
  return ntohs(address.sin_port);
}

struct Rank {
  pid_t pid = -1;
  int output = -1;  ///< our end of its tagged output
  std::string line;
};

class Job {
 public:
  explicit Job(const LaunchOptions& options) : options_(options), secret_(random_secret()), port_(free_port()) {
    for (int rank = 0; rank < options.num_ranks; ++rank) ranks_.push_back(start(rank));
  }
  Job(const Job&) = delete;
  Job& operator=(const Job&) = delete;
  ~Job() {
    kill_all(SIGKILL);
    for (Rank& rank : ranks_) {
      if (rank.pid > 0) waitpid(rank.pid, nullptr, 0);
      if (rank.output >= 0) close(rank.output);
    }
  }

  int wait() {
    const auto begun = Clock::now();
    int status = 0;
    bool ending = false;
    Clock::time_point kill_at{};
    const auto end = [&](int why) {
      if (ending) return;
      ending = true;
      status = why;
      kill_all(SIGTERM);
      kill_at = Clock::now() + std::chrono::seconds(2);
    };
    while (num_running() > 0) {
      pump(20);
      for (Rank& rank : ranks_) {
        int how = 0;
        if (rank.pid <= 0 || waitpid(rank.pid, &how, WNOHANG) != rank.pid) continue;
        kill(-rank.pid, SIGKILL);  // what it left behind
        rank.pid = -1;
        const int code = WIFEXITED(how) ? WEXITSTATUS(how) : 128 + WTERMSIG(how);
        if (code != 0) end(code);
      }
      if (const int caught = signal_caught.load(std::memory_order_relaxed)) end(128 + caught);
      const std::chrono::duration<double> passed = Clock::now() - begun;
      if (options_.timeout_s > 0 && passed.count() > options_.timeout_s) end(124);
      if (ending && Clock::now() > kill_at) kill_all(SIGKILL);
    }
    for (int round = 0; round < 100 && pump(0); ++round) {
    }
    return status;
  }

 private:
  Rank start(int rank) {
    int pipe_ends[2] = {-1, -1};
    if (options_.tag && pipe2(pipe_ends, O_CLOEXEC) != 0) throw TransportError(std::string("launch: no pipe: ") + std::strerror(errno));
    const std::map<std::string, std::string> variables = {
        {"TURNOUT_RANK", std::to_string(rank)},       {"TURNOUT_NUM_RANKS", std::to_string(options_.num_ranks)},
        {"TURNOUT_LOCAL_RANK", std::to_string(rank)}, {"TURNOUT_ROOT", "127.0.0.1"},
        {"TURNOUT_PORT", std::to_string(port_)},      {"TURNOUT_JOB", "launch-" + std::to_string(getpid())},
        {"TURNOUT_SECRET", secret_}};
    std::vector<char*> arguments;
    for (const std::string& word : options_.command) arguments.push_back(const_cast<char*>(word.c_str()));
    arguments.push_back(nullptr);
    const pid_t parent = getpid();
    const pid_t pid = fork();
    if (pid < 0) throw TransportError(std::string("launch: cannot start a process: ") + std::strerror(errno));
    if (pid == 0) {
      setpgid(0, 0);
      prctl(PR_SET_PDEATHSIG, SIGKILL);
      if (getppid() != parent) _exit(127);
      signal(SIGINT, SIG_DFL);
      signal(SIGTERM, SIG_DFL);
      for (const auto& [name, value] : variables) setenv(name.c_str(), value.c_str(), 1);
      if (options_.tag) {
        dup2(pipe_ends[1], STDOUT_FILENO);
        dup2(pipe_ends[1], STDERR_FILENO);
      }
      execvp(arguments[0], arguments.data());
      std::fprintf(stderr, "turnout launch: cannot run '%s': %s\n", arguments[0], std::strerror(errno));
      _exit(127);
    }
    setpgid(pid, pid);
    if (pipe_ends[1] >= 0) close(pipe_ends[1]);
    return {pid, pipe_ends[0], ""};
  }

  int num_running() const {
    int n = 0;
    for (const Rank& rank : ranks_) n += rank.pid > 0;
    return n;
  }

  void kill_all(int number) const {
    for (const Rank& rank : ranks_) {
      if (rank.pid > 0) kill(-rank.pid, number);
    }
  }

  /// Passes tagged lines on; waits up to `ms`. True if something came.
  bool pump(int ms) {
    std::vector<pollfd> watched;
    for (const Rank& rank : ranks_) watched.push_back({rank.output, POLLIN, 0});
    if (poll(watched.data(), watched.size(), ms) <= 0) return false;
    for (size_t r = 0; r < ranks_.size(); ++r) {
      if (!watched[r].revents) continue;
      char bytes[4096];
      const ssize_t n = read(ranks_[r].output, bytes, sizeof bytes);
      if (n <= 0) {
        if (!ranks_[r].line.empty()) std::printf("[%zu] %s\n", r, ranks_[r].line.c_str());
        close(ranks_[r].output);
        ranks_[r].output = -1;
        continue;
      }
      for (ssize_t i = 0; i < n; ++i) {
        if (bytes[i] != '\n') {
          ranks_[r].line += bytes[i];
          continue;
        }
        std::printf("[%zu] %s\n", r, ranks_[r].line.c_str());
        ranks_[r].line.clear();
      }
      std::fflush(stdout);
    }
    return true;
  }

  const LaunchOptions& options_;
  const std::string secret_;
  const int port_;
  std::vector<Rank> ranks_;
};

}  // namespace

int run_launch(const LaunchOptions& options) {
  if (options.num_ranks < 1) throw InvalidArgument("launch: the number of ranks is " + std::to_string(options.num_ranks) + ", but must be 1 or more");
  if (options.command.empty()) throw InvalidArgument("launch: no command; write `turnout launch -n N -- PROGRAM ARGUMENTS`");
  struct sigaction action {};
  action.sa_handler = catch_signal;
  sigaction(SIGINT, &action, nullptr);
  sigaction(SIGTERM, &action, nullptr);
  Job job(options);
  return job.wait();
}

}  // namespace turnout::tools
