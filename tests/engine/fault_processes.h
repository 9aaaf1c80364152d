// A fault among processes over shm: the victim ends, or stops, itself at its step; all others must say so in time, keep nothing, and go on
// as a smaller group. A process more serves the rendezvous, so that any rank may die.
#pragma once
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>

#include <cerrno>
#include <cstdlib>

#include "bootstrap/socket.h"
#include "engine/fault_case.h"

namespace turnout::testing {

/// The process of one rank.
class FaultRank {
 public:
  FaultRank(const FaultCase& c, int rank, FaultReport& report)
      : c_(c), rank_(rank), mine_(report.ranks[static_cast<size_t>(rank)]), is_victim_(rank == c.victim) {}

  void play(const std::shared_ptr<Store>& store, const Expected& e, const Expected& after) {
    const Belongings before = belongings();
    {
      Communicator comm = Communicator::from_store(store, rank_, c_.num_ranks, "world", options_of(e.p, c_.run));
      Buffer buffer(comm, config_of(c_, e.p));
      if (is_victim_) be_victim(buffer, e);
      else be_survivor(buffer, e);
    }
    expect_belongings(before);
    if (is_victim_) return;
    const int rank = rank_ - (rank_ > c_.victim);
    play_on(Communicator::from_store(store, rank, c_.num_ranks - 1, "survivors", options_of(after.p, c_.run)), c_, after, mine_);
    expect_belongings(before);
  }

 private:
  void be_survivor(Buffer& buffer, const Expected& e) {
    expect_fault(c_, mine_, [&] { play_until_fault(buffer, c_, e, nullptr, mine_); });
    // Sticky: the next call fails, too, with the same words.
    expect_fault(c_, mine_, [&] { play_round(buffer, e, c_.run, mine_); });
  }

  /// Comes back only if it was stopped and went on: then its calls have ended, too.
  void be_victim(Buffer& buffer, const Expected& e) {
    FaultHook hook([&] { die(); });
    try {
      play_until_fault(buffer, c_, e, &hook, mine_);
    } catch (const PeerTimeout&) {
    } catch (const PeerFailed&) {
    }
    if (c_.kind != FaultKind::stop) throw std::logic_error("the victim lives");
  }

  void die() {
    mine_.died_us = now_us();
    switch (c_.kind) {
      case FaultKind::segfault: end_by(SIGSEGV); break;
      case FaultKind::abort: end_by(SIGABRT); break;
      case FaultKind::exit: _exit(3);
      case FaultKind::stop: raise(SIGSTOP); break;
      default: raise(SIGKILL);
    }
  }
  static void end_by(int signal) {
    std::signal(signal, SIG_DFL);
    raise(signal);
  }

  const FaultCase& c_;
  const int rank_;
  RankReport& mine_;
  const bool is_victim_;
};

class FaultProcesses {
 public:
  /// Throws: what went wrong.
  FaultProcesses(const FaultCase& c, FaultReport& report) : c_(c), report_(report) {
    prctl(PR_SET_CHILD_SUBREAPER, 1);
    setenv("TURNOUT_SECRET", "a secret of the faults", 1);  // NOLINT(concurrency-mt-unsafe): no other thread lives between cases
    const auto e = expected_of(c.seed, c.limits), after = expected_of(c.seed + 2, limits_after(c));
    const auto memory_files = shared_memory();
    if (pipe2(door_, O_CLOEXEC) != 0) throw std::runtime_error("no pipe");
    {
      const bootstrap::Fd reserved = bootstrap::reserve_port(port_);
      std::fflush(nullptr);
      start([&] { serve(); });
      for (int rank = 0; rank < c.num_ranks; ++rank) start([&, rank] { be(rank, *e, *after); });
      close(door_[0]);
      watch();
    }
    if (waitpid(-1, nullptr, WNOHANG) != -1 || errno != ECHILD) complain("a process of the job was left behind");
    if (shared_memory() != memory_files) complain("files were left in /dev/shm");
    if (!trouble_.empty()) throw std::runtime_error(trouble_);
  }

 private:
  void complain(const std::string& what) { trouble_ += (trouble_.empty() ? "" : "; ") + what; }

  void start(const std::function<void()>& body) {
    const pid_t pid = fork();
    if (pid < 0) throw std::runtime_error("no process");
    if (pid > 0) return pids_.push_back(pid);
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    const rlimit none{0, 0};
    setrlimit(RLIMIT_CORE, &none);
    body();
    _exit(0);
  }

  std::shared_ptr<Store> store(int place) const {
    LaunchInfo info;
    info.rank = info.local_rank = place;
    info.num_ranks = c_.num_ranks + 1;
    info.root_address = "127.0.0.1";
    info.port = port_;
    info.launcher = info.job = "faults";
    return tcp_store(info, kPatience);
  }

  /// Until the test closes its door.
  void serve() const {
    try {
      close(door_[1]);
      const auto served = store(0);
      char word = 0;
      while (read(door_[0], &word, 1) < 0 && errno == EINTR) {
      }
    } catch (const std::exception& e) {
      std::fprintf(stderr, "the rendezvous: %s\n", e.what());
    }
  }

  void be(int rank, const Expected& e, const Expected& after) const {
    close(door_[0]);
    close(door_[1]);
    RankReport& mine = report_.ranks[static_cast<size_t>(rank)];
    try {
      FaultRank(c_, rank, report_).play(store(rank + 1), e, after);
      mine.finished = 1;
    } catch (const std::exception& error) {
      mine.say(error.what());
    }
  }

  static std::vector<std::string> shared_memory() {
    std::vector<std::string> names;
    for (const auto& entry : std::filesystem::directory_iterator("/dev/shm")) {
      if (entry.path().filename().string().find("turnout") != std::string::npos) names.push_back(entry.path());
    }
    std::sort(names.begin(), names.end());
    return names;
  }

  bool all_have_caught() const {
    for (int rank = 0; rank < c_.num_ranks; ++rank) {
      if (rank != c_.victim && report_.ranks[static_cast<size_t>(rank)].caught_us == 0) return false;
    }
    return true;
  }

  /// Waits for the ranks; lets a stopped one go on once all others have found it; then for the rendezvous.
  void watch() {
    const auto until = std::chrono::steady_clock::now() + 2 * kPatience;
    std::vector<int> statuses(pids_.size(), -1);
    size_t left = pids_.size();
    bool resumed = c_.kind != FaultKind::stop, door_open = true;
    while (left > 0) {
      for (size_t i = 0; i < pids_.size(); ++i) {
        if (statuses[i] >= 0 || waitpid(pids_[i], &statuses[i], WNOHANG) != pids_[i]) continue;
        --left;
      }
      if (!resumed && all_have_caught()) {
        kill(pids_[1 + static_cast<size_t>(c_.victim)], SIGCONT);
        resumed = true;
      }
      if (door_open && left == 1 && statuses[0] < 0) {
        close(door_[1]);
        door_open = false;
      }
      if (left > 0 && std::chrono::steady_clock::now() > until) {
        for (size_t i = 0; i < pids_.size(); ++i) {
          if (statuses[i] >= 0) continue;
          if (i > 0) complain("rank " + std::to_string(i - 1) + " hangs");
          kill(pids_[i], SIGKILL);
          waitpid(pids_[i], &statuses[i], 0);
        }
        break;
      }
      if (left > 0) poll(nullptr, 0, 1);
    }
    if (door_open) close(door_[1]);
    for (int rank = 0; rank < c_.num_ranks; ++rank) check_end(rank, statuses[1 + static_cast<size_t>(rank)]);
  }

  void check_end(int rank, int status) {
    const RankReport& r = report_.ranks[static_cast<size_t>(rank)];
    if (r.words[0]) return complain("rank " + std::to_string(rank) + ": " + r.words);
    const auto signalled = [&](int signal) { return WIFSIGNALED(status) && WTERMSIG(status) == signal; };
    bool good = WIFEXITED(status) && WEXITSTATUS(status) == 0 && r.finished == 1;
    if (rank == c_.victim) {
      if (c_.kind == FaultKind::kill) good = signalled(SIGKILL);
      if (c_.kind == FaultKind::segfault) good = signalled(SIGSEGV);
      if (c_.kind == FaultKind::abort) good = signalled(SIGABRT);
      if (c_.kind == FaultKind::exit) good = WIFEXITED(status) && WEXITSTATUS(status) == 3;
    }
    if (!good) complain("rank " + std::to_string(rank) + " ended with status " + std::to_string(status));
  }

  const FaultCase& c_;
  FaultReport& report_;
  int port_ = 0;
  int door_[2] = {-1, -1};
  std::vector<pid_t> pids_;  ///< the rendezvous, then the ranks
  std::string trouble_;
};

}  // namespace turnout::testing
