// The ranks of sessions as processes: forked, joined over the rendezvous, their tallies read from a pipe. They may play several sessions one
// after the other: processes that start a GPU's driver take seconds.
#pragma once
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <functional>
#include <span>
#include <sstream>

#include "bootstrap/socket.h"
#include "engine/soak_session.h"

namespace turnout::testing {

/// The body of one rank's process: its words go to `out`. Never returns.
[[noreturn]] inline void be_rank(std::span<const Session> sessions, int rank, int port, int out,
                                 const std::function<Tally(const Session&, Communicator&)>& play) {
  std::string words;
  int status = 0;
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  uint64_t seed = 0;
  try {
    LaunchInfo info;
    info.rank = info.local_rank = rank;
    info.num_ranks = sessions.front().num_ranks;
    info.root_address = "127.0.0.1";
    info.port = port;
    info.launcher = info.job = "soak";
    const auto store = tcp_store(info);
    Tally all;
    for (const Session& s : sessions) {
      seed = s.seed;
      Communicator comm = Communicator::from_store(store, rank, s.num_ranks, "soak" + std::to_string(seed), s.options);
      add_to(all, play(s, comm));
    }
    for (const auto& [what, times] : all) words += std::to_string(times) + " " + what + "\n";
  } catch (const std::exception& e) {
    words = "seed " + std::to_string(seed) + ": " + e.what();
    status = 1;
  }
  // Longer than a pipe holds, if a message is: the parent reads while we write.
  for (size_t at = 0; at < words.size();) {
    const ssize_t n = write(out, words.data() + at, words.size() - at);
    if (n <= 0) break;
    at += static_cast<size_t>(n);
  }
  _exit(status);
}

/// All have as many ranks. Throws: what the lowest rank that failed has said.
inline Tally run_processes(std::span<const Session> sessions, const std::function<Tally(const Session&, Communicator&)>& play) {
  setenv("TURNOUT_SECRET", "a secret of the soak", 1);  // NOLINT(concurrency-mt-unsafe): no other thread lives between sessions
  int port = 0;
  const bootstrap::Fd reserved = bootstrap::reserve_port(port);
  std::vector<bootstrap::Fd> pipes;
  std::vector<pid_t> pids;
  std::fflush(stdout);
  const int num_ranks = sessions.front().num_ranks;
  for (int rank = 0; rank < num_ranks; ++rank) {
    int ends[2];
    if (pipe(ends) != 0) throw std::runtime_error("no pipe");
    pids.push_back(fork());
    if (pids.back() == 0) be_rank(sessions, rank, port, ends[1], play);
    close(ends[1]);
    pipes.emplace_back(ends[0]);
  }
  Tally all;
  std::string failure;
  for (int rank = 0; rank < num_ranks; ++rank) {
    std::string words;
    char buffer[4096];
    for (ssize_t n = 0; (n = read(pipes[static_cast<size_t>(rank)].get(), buffer, sizeof buffer)) > 0;) words.append(buffer, static_cast<size_t>(n));
    int status = 0;
    waitpid(pids[static_cast<size_t>(rank)], &status, 0);
    if (status != 0 && failure.empty()) failure = "rank " + std::to_string(rank) + " ended with status " + std::to_string(status) + ": " + words;
    if (status != 0) continue;
    std::istringstream lines(words);
    int64_t times = 0;
    for (std::string what; lines >> times && std::getline(lines >> std::ws, what);) all[what] += times;
  }
  if (!failure.empty()) throw std::runtime_error(failure);
  return all;
}

}  // namespace turnout::testing
