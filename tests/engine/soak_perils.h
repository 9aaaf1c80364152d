// Sessions in which ranks die and others join: processes that live through many groups, one after the other. In each they play, one is late
// and all recover; then one is killed, the others find out and keep nothing of the group, and with some that are started anew they form the next.
#pragma once
#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>

#include "engine/soak_player.h"
#include "engine/soak_processes.h"
#include "support/belongings.h"

namespace turnout::testing {

/// What the test tells a rank: the group to form next. None: the end.
struct PerilCommand {
  int port = 0, rank = 0, num_ranks = 0, late_rank = -1;
  uint64_t seed = 0;
};
/// What a rank tells the test.
struct PerilWord {
  enum class Kind { plays, lost_a_peer, ends, fails } kind = Kind::fails;
  int64_t compared = 0;
  char text[1024] = {};
};

inline Session peril_session(const PerilCommand& command) {
  SoakChoices choices;
  choices.num_ranks = command.num_ranks;
  choices.transport = "shm";
  Session s = random_session(command.seed, choices);
  s.lane_threads = false;
  s.num_buffers = 1;
  s.slow_rank = -1;
  return s;
}

/// One rank's process, through all of its groups.
class PerilRank {
 public:
  explicit PerilRank(int socket) : socket_(socket) {}

  [[noreturn]] void live() {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    try {
      for (PerilCommand c; hear(c) && c.num_ranks > 0;) {
        be_in_group(c);
        flat_.look();
        say(PerilWord::Kind::lost_a_peer);
      }
      say(PerilWord::Kind::ends);
    } catch (const std::exception& e) {
      say(PerilWord::Kind::fails, e.what());
    }
    _exit(0);
  }

 private:
  bool hear(PerilCommand& c) const { return recv(socket_, &c, sizeof c, 0) == sizeof c; }
  void say(PerilWord::Kind kind, const std::string& text = "") {
    PerilWord word{.kind = kind, .compared = std::exchange(compared_, 0)};
    std::snprintf(word.text, sizeof word.text, "%s", text.c_str());
    if (send(socket_, &word, sizeof word, MSG_NOSIGNAL) != sizeof word) _exit(2);
  }

  void be_in_group(const PerilCommand& c) {
    LaunchInfo info;
    info.rank = info.local_rank = c.rank + 1;  // 0 is the process that serves the store
    info.num_ranks = c.num_ranks + 1;
    info.root_address = "127.0.0.1";
    info.port = c.port;
    info.launcher = info.job = "perils";
    const auto store = tcp_store(info, std::chrono::seconds(30 * kSlower));
    Session s = peril_session(c);
    Communicator comm = Communicator::from_store(store, c.rank, c.num_ranks, "perils", s.options);
    if (c.late_rank >= 0) recover_from_a_late_rank(s, comm, c);
    Buffer buffer(comm, s.config);
    say(PerilWord::Kind::plays);
    try {
      for (uint64_t script = c.seed;; script += 1'000'000) play(s, buffer, script, s.num_steps);
    } catch (const PeerFailed&) {
    }
  }

  void play(const Session& s, Buffer& buffer, uint64_t script, int num_steps) {
    std::vector<int> lanes;
    for (int lane = 0; lane < s.config.num_lanes; ++lane) lanes.push_back(lane);
    if (s.maps.size() > 1) buffer.set_expert_to_rank(s.maps[0]);  // where every script begins
    Player player(s, buffer, std::make_unique<Place>(), lanes, script);
    const Tally tally = player.play(num_steps);
    if (tally.count(Player::kCompared)) compared_ += tally.at(Player::kCompared);
  }

  /// One rank makes fewer calls than the others and is late until they have given up. The same Buffer goes on afterwards.
  void recover_from_a_late_rank(const Session& s, Communicator& comm, const PerilCommand& c) {
    BufferConfig config = s.config;
    config.timeouts.timeout = config.timeouts.busy_timeout = kLate;
    Buffer buffer(comm, config);
    bool given_up = false;
    try {
      if (c.rank == c.late_rank) {
        play(s, buffer, c.seed, 10);
        const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(20 * kSlower);
        while (*buffer.status_word() == 0 && std::chrono::steady_clock::now() < until) std::this_thread::yield();
      }
      play(s, buffer, c.seed, 400);
    } catch (const PeerTimeout&) {
      given_up = true;
    }
    if (!given_up) throw std::runtime_error("nobody gave up on the late rank");
    buffer.recover();
    play(s, buffer, c.seed + 1, 20);
  }

  static constexpr std::chrono::milliseconds kLate{400 * kSlower};
  const int socket_;
  int64_t compared_ = 0;
  Flat flat_;
};

/// The test's side.
class Perils {
 public:
  /// Throws what the first rank that failed has said.
  static Tally run(uint64_t seed, int num_groups) {
    Perils perils(seed);
    for (int group = 0; group < num_groups; ++group) perils.play_group();
    perils.end();
    return perils.tally_;
  }

 private:
  struct Rank {
    pid_t pid = -1;
    bootstrap::Fd socket;
  };

  explicit Perils(uint64_t seed) : random_(seed) {
    setenv("TURNOUT_SECRET", "a secret of the perils", 1);  // NOLINT(concurrency-mt-unsafe): no other thread lives between sessions
    ++tally_["sessions with deaths and joins"];
    for (int64_t n = random_.between(2, 4); n > 0; --n) add_rank();
  }
  Perils(const Perils&) = delete;
  Perils& operator=(const Perils&) = delete;
  ~Perils() {
    for (const Rank& rank : ranks_) {
      kill(rank.pid, SIGKILL);
      waitpid(rank.pid, nullptr, 0);
    }
    stop_serving();
  }

  void add_rank() {
    int ends[2];
    if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) != 0) throw std::runtime_error("no socket");
    std::fflush(nullptr);
    const pid_t pid = fork();
    if (pid == 0) {
      close(ends[0]);
      for (const Rank& other : ranks_) close(other.socket.get());
      PerilRank(ends[1]).live();
    }
    close(ends[1]);
    ranks_.push_back({pid, bootstrap::Fd(ends[0])});
  }

  /// A process that serves the store of one group.
  int serve(int num_ranks) {
    int port = 0;
    reserved_ = bootstrap::reserve_port(port);
    int ends[2];
    if (pipe2(ends, O_CLOEXEC) != 0) throw std::runtime_error("no pipe");
    server_ = fork();
    if (server_ == 0) {
      prctl(PR_SET_PDEATHSIG, SIGKILL);
      close(ends[1]);
      try {
        LaunchInfo info;
        info.num_ranks = num_ranks + 1;
        info.root_address = "127.0.0.1";
        info.port = port;
        info.launcher = info.job = "perils";
        const auto store = tcp_store(info, std::chrono::seconds(30 * kSlower));
        char word = 0;
        while (read(ends[0], &word, 1) < 0 && errno == EINTR) {
        }
      } catch (const std::exception& e) {
        std::fprintf(stderr, "the store of a group: %s\n", e.what());
      }
      _exit(0);
    }
    close(ends[0]);
    door_.reset(ends[1]);
    return port;
  }
  void stop_serving() {
    door_.reset();
    if (server_ > 0) waitpid(std::exchange(server_, -1), nullptr, 0);
  }

  void play_group() {
    PerilCommand c;
    c.num_ranks = static_cast<int>(ranks_.size());
    c.port = serve(c.num_ranks);
    c.seed = random_.bits();
    c.late_rank = random_.chance(0.3) ? static_cast<int>(random_.below(c.num_ranks)) : -1;
    for (c.rank = 0; c.rank < c.num_ranks; ++c.rank) tell(ranks_[static_cast<size_t>(c.rank)], c);
    for (const Rank& rank : ranks_) expect(rank, PerilWord::Kind::plays);
    if (c.late_rank >= 0) ++tally_["groups recovered from a late rank"];
    poll(nullptr, 0, static_cast<int>(random_.between(0, 60)));
    const auto victim = ranks_.begin() + random_.below(c.num_ranks);
    kill(victim->pid, SIGKILL);
    waitpid(victim->pid, nullptr, 0);
    ranks_.erase(victim);
    ++tally_["ranks killed"];
    for (const Rank& rank : ranks_) expect(rank, PerilWord::Kind::lost_a_peer);
    stop_serving();
    for (int64_t n = ranks_.size() < 2 ? 1 : random_.between(0, 2); n > 0 && ranks_.size() < 5; --n) {
      add_rank();
      ++tally_["ranks joined"];
    }
  }

  void end() {
    for (const Rank& rank : ranks_) tell(rank, PerilCommand());
    for (const Rank& rank : ranks_) expect(rank, PerilWord::Kind::ends);
    for (const Rank& rank : ranks_) waitpid(rank.pid, nullptr, 0);
    ranks_.clear();
  }

  static void tell(const Rank& rank, const PerilCommand& c) {
    if (send(rank.socket.get(), &c, sizeof c, MSG_NOSIGNAL) != sizeof c) throw std::runtime_error("a rank does not listen");
  }
  void expect(const Rank& rank, PerilWord::Kind kind) {
    pollfd waiting{rank.socket.get(), POLLIN, 0};
    PerilWord word;
    const bool came = poll(&waiting, 1, 60'000 * kSlower) == 1 && recv(rank.socket.get(), &word, sizeof word, 0) == sizeof word;
    if (!came) throw std::runtime_error("perils: process " + std::to_string(rank.pid) + " hangs or has ended");
    tally_[Player::kCompared] += word.compared;
    if (word.kind != kind) throw std::runtime_error(std::string("perils: a rank says: ") + (word.text[0] ? word.text : "another word than expected"));
  }

  Random random_;
  std::vector<Rank> ranks_;
  bootstrap::Fd reserved_, door_;
  pid_t server_ = -1;
  Tally tally_;
};

}  // namespace turnout::testing
