// Every rank is a process group of its own, so that what it starts ends with it. A rank that has ended stays unreaped until
// all have: as long as it does, its number cannot become another process's, and signals to its group hit nobody else.
#include "tools/launch.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <tuple>

#include "bootstrap/hmac.h"
#include "bootstrap/socket.h"
#include "turnout/error.h"
#include "util/env.h"

extern "C" char** environ;  // NOLINT: POSIX gives the environment no other name

namespace turnout::tools {

namespace {

using bootstrap::Clock;
using bootstrap::Fd;

constexpr auto kGrace = std::chrono::seconds(2);
constexpr size_t kLongestLine = 64 * 1024;

std::string reason(int error = errno) { return std::strerror(error); }  // NOLINT(concurrency-mt-unsafe)

std::pair<Fd, Fd> make_pipe() {
  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0) throw TransportError("launch: no pipe: " + reason());
  return {Fd(ends[0]), Fd(ends[1])};
}

/// Lines of one stream of one rank, passed on whole.
struct Output {
  Fd from;
  FILE* to = nullptr;
  std::string line;

  /// False at its end.
  bool pass_on(int rank) {
    std::array<char, 16 * 1024> bytes;
    const ssize_t n = read(from.get(), bytes.data(), bytes.size());
    if (n < 0 && errno == EINTR) return true;
    for (ssize_t i = 0; i < n; ++i) {
      if (bytes[static_cast<size_t>(i)] != '\n') line += bytes[static_cast<size_t>(i)];
      if (bytes[static_cast<size_t>(i)] == '\n' || line.size() >= kLongestLine) print(rank);
    }
    if (n <= 0 && !line.empty()) print(rank);
    std::fflush(to);
    if (n <= 0) from.reset();
    return n > 0;
  }

 private:
  void print(int rank) {
    std::fprintf(to, "[%d] %s\n", rank, line.c_str());
    line.clear();
  }
};

/// What the caller's environment says of the rendezvous. A rank's environment, in a launcher that a rank starts, speaks of its own job.
struct Wishes {
  std::string root = "127.0.0.1", job;
  int port = 0;  ///< 0: any

  static Wishes of(const util::Env& env) {
    Wishes wishes;
    if (env.rank) return wishes;
    wishes.job = env.job;
    wishes.port = env.port.value_or(0);
    if (env.root.empty()) return wishes;
    std::string error;
    const auto addresses = bootstrap::resolve(env.root, 1, error);
    if (!bootstrap::is_local(addresses)) {
      throw InvalidArgument("launch: TURNOUT_ROOT is '" + env.root + "', which is not this machine" + (error.empty() ? "" : " (" + error + ")") +
                            ", but turnout launch starts all ranks here: leave it out, or use a launcher of several machines");
    }
    wishes.root = env.root;
    return wishes;
  }
};

struct Rank {
  pid_t pid = -1;
  bool ended = false;
  std::array<Output, 2> outputs;
};

/// The signals of a launcher as a descriptor, while it lives.
class Signals {
 public:
  Signals() {
    signal(SIGCHLD, SIG_DFL);  // if it was ignored there would be nothing to wait for
    sigset_t set;
    sigemptyset(&set);
    for (int number : {SIGINT, SIGTERM, SIGHUP, SIGCHLD}) sigaddset(&set, number);
    pthread_sigmask(SIG_BLOCK, &set, &before_);
    fd_.reset(signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK));
    if (!fd_) throw TransportError("launch: signalfd: " + reason());
  }
  ~Signals() { restore(); }
  Signals(const Signals&) = delete;
  Signals& operator=(const Signals&) = delete;
  void restore() const { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  int fd() const { return fd_.get(); }
  /// The next one, 0 if there is none.
  int next() const {
    signalfd_siginfo info;
    return read(fd_.get(), &info, sizeof info) == sizeof info ? static_cast<int>(info.ssi_signo) : 0;
  }

 private:
  sigset_t before_{};
  Fd fd_;
};

/// What a rank's process needs until exec, made before the fork: after it, memory of a process with threads is not to be had.
struct Start {
  int rank = 0;
  pid_t launcher = getpid();
  std::array<Fd, 2> outputs;  ///< its ends, if its lines are tagged
  Fd trouble;                 ///< where errno goes if exec fails
  std::vector<char*> arguments, environment;

  static std::vector<char*> pointers(const std::vector<std::string>& words) {
    std::vector<char*> out;
    for (const std::string& word : words) out.push_back(const_cast<char*>(word.c_str()));
    out.push_back(nullptr);
    return out;
  }

  [[noreturn]] void become_rank(const Signals& signals) const {
    setpgid(0, 0);
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != launcher) _exit(127);
    // A process in the background may not read the terminal, and only one can have other input.
    if (rank != 0 || isatty(STDIN_FILENO)) {
      const int null = open("/dev/null", O_RDONLY | O_CLOEXEC);
      if (null >= 0) dup2(null, STDIN_FILENO);
    }
    if (outputs[0]) dup2(outputs[0].get(), STDOUT_FILENO);
    if (outputs[1]) dup2(outputs[1].get(), STDERR_FILENO);
    signals.restore();
    execvpe(arguments[0], arguments.data(), environment.data());
    const int error = errno;
    [[maybe_unused]] const ssize_t n = write(trouble.get(), &error, sizeof error);
    _exit(127);
  }
};

class Job {
 public:
  explicit Job(const LaunchOptions& options)
      : options_(options), secret_(bootstrap::hex(bootstrap::random_digest())), port_(wishes_.port), reserved_(bootstrap::reserve_port(port_)) {
    std::tie(guard_read_, guard_write_) = make_pipe();
  }
  Job(const Job&) = delete;
  Job& operator=(const Job&) = delete;
  ~Job();
  int run();

 private:
  bool start(int rank);
  std::vector<std::string> environment_of(int rank) const;
  void start_guardian();
  void wait_for_something();
  void look_for_ended();
  void handle_signals();
  void end(int status);
  void kill_all(int number) const;
  void drain();
  bool all_ended() const {
    return std::all_of(ranks_.begin(), ranks_.end(), [](const Rank& r) { return r.ended; });
  }

  const LaunchOptions& options_;
  const Wishes wishes_ = Wishes::of(util::env());
  const std::string secret_;
  int port_;
  Fd reserved_;  ///< the port stays ours until rank 0 listens there
  Signals signals_;
  Fd guard_read_, guard_write_;
  pid_t guardian_ = -1;
  std::vector<Rank> ranks_;
  int status_ = 0;
  int num_signals_ = 0;
  bool ending_ = false;
  Clock::time_point kill_at_ = Clock::time_point::max();
  Clock::time_point timeout_at_ = Clock::time_point::max();
};

Job::~Job() {
  kill_all(SIGKILL);
  for (const Rank& r : ranks_) waitpid(r.pid, nullptr, 0);
  if (guardian_ < 0) return;
  [[maybe_unused]] const ssize_t n = write(guard_write_.get(), "", 1);  // all is well: it only has to go
  waitpid(guardian_, nullptr, 0);
}

int Job::run() {
  ranks_.reserve(static_cast<size_t>(options_.num_ranks));
  for (int rank = 0; rank < options_.num_ranks; ++rank) {
    if (!start(rank)) return status_;
  }
  start_guardian();
  if (options_.timeout_s > 0)
    timeout_at_ = Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(options_.timeout_s));
  while (!all_ended()) {
    wait_for_something();
    handle_signals();
    look_for_ended();
    if (!ending_ && Clock::now() >= timeout_at_) {
      std::fprintf(stderr, "turnout launch: the timeout of %g s is over; ending all ranks\n", options_.timeout_s);
      end(124);
    }
    if (Clock::now() >= kill_at_) {
      kill_all(SIGKILL);
      kill_at_ = Clock::time_point::max();
    }
  }
  kill_all(SIGKILL);  // what ranks that have ended left running
  drain();
  return status_;
}

std::vector<std::string> Job::environment_of(int rank) const {
  std::vector<std::string> all = {"TURNOUT_RANK=" + std::to_string(rank),
                                  "TURNOUT_NUM_RANKS=" + std::to_string(options_.num_ranks),
                                  "TURNOUT_LOCAL_RANK=" + std::to_string(rank),
                                  "TURNOUT_ROOT=" + wishes_.root,
                                  "TURNOUT_PORT=" + std::to_string(port_),
                                  "TURNOUT_JOB=" + (wishes_.job.empty() ? "launch-" + std::to_string(getpid()) : wishes_.job),
                                  "TURNOUT_SECRET=" + secret_};
  const size_t num_ours = all.size();
  for (char** entry = environ; entry && *entry; ++entry) {
    const std::string_view variable = *entry;
    const std::string_view name = variable.substr(0, variable.find('=') + 1);
    const bool ours =
        std::any_of(all.begin(), all.begin() + static_cast<ptrdiff_t>(num_ours), [&](const std::string& s) { return s.starts_with(name); });
    // Those two speak of several hosts; here loopback is right.
    if (!ours && name != "TURNOUT_INTERFACE=" && name != "TURNOUT_SECRET_FILE=") all.emplace_back(variable);
  }
  return all;
}

/// False, with the status to return, if there is no such program.
bool Job::start(int rank) {
  Rank r;
  Start start{.rank = rank, .outputs = {}, .trouble = {}, .arguments = Start::pointers(options_.command), .environment = {}};
  const std::vector<std::string> environment = environment_of(rank);
  start.environment = Start::pointers(environment);
  Fd trouble;
  std::tie(trouble, start.trouble) = make_pipe();
  for (size_t i = 0; options_.tag && i < r.outputs.size(); ++i) {
    std::tie(r.outputs[i].from, start.outputs[i]) = make_pipe();
    r.outputs[i].to = i == 0 ? stdout : stderr;
  }
  r.pid = fork();
  if (r.pid < 0) throw TransportError("launch: cannot start rank " + std::to_string(rank) + ": " + reason());
  if (r.pid == 0) start.become_rank(signals_);
  setpgid(r.pid, r.pid);  // whoever of the two comes first
  ranks_.push_back(std::move(r));
  start.trouble.reset();
  int error = 0;
  if (read(trouble.get(), &error, sizeof error) != sizeof error) return true;
  std::fprintf(stderr, "turnout launch: cannot run '%s': %s\n", options_.command[0].c_str(), reason(error).c_str());
  status_ = error == ENOENT ? 127 : 126;
  return false;
}

/// A process that does nothing but notice our end, however sudden: then it kills what the ranks have started. (The ranks
/// themselves have the kernel's word for that, but their children do not.)
void Job::start_guardian() {
  guardian_ = fork();
  if (guardian_ < 0) throw TransportError("launch: cannot start a process: " + reason());
  if (guardian_ > 0) return;
  setpgid(0, 0);
  sigset_t all;
  sigfillset(&all);
  sigprocmask(SIG_BLOCK, &all, nullptr);
  guard_write_.reset();
  reserved_.reset();
  // It must not keep open what others wait to see closed.
  for (int fd : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) close(fd);
  for (Rank& r : ranks_) {
    for (Output& o : r.outputs) o.from.reset();
  }
  char byte;
  ssize_t n;
  while ((n = read(guard_read_.get(), &byte, 1)) < 0 && errno == EINTR) {
  }
  if (n == 0) kill_all(SIGKILL);
  _exit(0);
}

void Job::wait_for_something() {
  std::vector<pollfd> polled = {{.fd = signals_.fd(), .events = POLLIN, .revents = 0}};
  for (const Rank& r : ranks_) {
    for (const Output& o : r.outputs) polled.push_back({.fd = o.from.get(), .events = POLLIN, .revents = 0});  // -1 is passed over
  }
  const auto next = std::min({kill_at_, ending_ ? Clock::time_point::max() : timeout_at_, Clock::now() + std::chrono::hours(1)});
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(next - Clock::now()).count();
  if (poll(polled.data(), polled.size(), static_cast<int>(std::max<int64_t>(left, 0))) <= 0) return;
  for (size_t i = 1; i < polled.size(); ++i) {
    if (polled[i].revents) ranks_[(i - 1) / 2].outputs[(i - 1) % 2].pass_on(static_cast<int>((i - 1) / 2));
  }
}

void Job::look_for_ended() {
  for (size_t rank = 0; rank < ranks_.size(); ++rank) {
    siginfo_t info{};
    Rank& r = ranks_[rank];
    if (r.ended || waitid(P_PID, static_cast<id_t>(r.pid), &info, WEXITED | WNOHANG | WNOWAIT) != 0 || info.si_pid != r.pid) continue;
    r.ended = true;
    const bool exited = info.si_code == CLD_EXITED;
    if ((exited && info.si_status == 0) || ending_) continue;
    std::fprintf(stderr, "turnout launch: rank %zu %s %d%s\n", rank, exited ? "exited with status" : "was killed by signal", info.si_status,
                 all_ended() ? "" : "; ending the others");
    end(exited ? info.si_status : 128 + info.si_status);
  }
}

void Job::handle_signals() {
  while (const int number = signals_.next()) {
    if (number == SIGCHLD) continue;
    kill_all(++num_signals_ == 1 ? number : SIGKILL);
  }
}

void Job::end(int status) {
  ending_ = true;
  status_ = status;
  kill_all(SIGTERM);
  kill_at_ = Clock::now() + kGrace;
}

void Job::kill_all(int number) const {
  for (const Rank& r : ranks_) kill(-r.pid, number);
}

/// What ranks have written and we have not read; a second at most, should somebody else hold their pipes.
void Job::drain() {
  const auto deadline = Clock::now() + std::chrono::seconds(1);
  for (size_t rank = 0; rank < ranks_.size(); ++rank) {
    for (Output& o : ranks_[rank].outputs) {
      while (o.from && bootstrap::wait_for(o.from.get(), POLLIN, deadline) && o.pass_on(static_cast<int>(rank))) {
      }
    }
  }
}

}  // namespace

int run_launch(const LaunchOptions& options) {
  if (options.num_ranks < 1) throw InvalidArgument("launch: the number of ranks is " + std::to_string(options.num_ranks) + ", but must be 1 or more");
  if (options.command.empty()) throw InvalidArgument("launch: no command; write `turnout launch -n N -- PROGRAM ARGUMENTS`");
  return Job(options).run();
}

}  // namespace turnout::tools
