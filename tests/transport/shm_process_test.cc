// shm between processes: deaths, stops, limits, and what is left behind.
#include <fcntl.h>
#include <poll.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <fstream>
#include <iterator>
#include <set>

#include "ranks.h"
#include "transport/shm/shm.h"

namespace turnout::transport::testing {

namespace {

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr bool kSanitized = true;
#else
constexpr bool kSanitized = false;
#endif

/// A store of files in one folder; a rename publishes. It keeps a descriptor in reserve, so that ranks short of them can tell.
class FolderStore final : public Store {
 public:
  explicit FolderStore(std::string folder) : folder_(std::move(folder)) { keep(); }
  ~FolderStore() override { close(reserve_); }
  void set(const std::string& key, std::span<const std::byte> value) override {
    const std::string to = path(key), from = to + "." + std::to_string(getpid());
    close(reserve_);
    std::ofstream(from, std::ios::binary).write(reinterpret_cast<const char*>(value.data()), static_cast<std::streamsize>(value.size()));
    keep();
    std::filesystem::rename(from, to);
  }
  std::optional<std::vector<std::byte>> get(const std::string& key, std::chrono::milliseconds timeout) override {
    const auto until = Clock::now() + timeout;
    do {
      if (auto bytes = look(path(key))) return bytes;
      usleep(200);
    } while (Clock::now() < until);
    return std::nullopt;
  }

 private:
  std::string path(const std::string& key) const {
    std::string name = key;
    std::replace(name.begin(), name.end(), '/', '+');
    return folder_ + "/" + name;
  }
  std::optional<std::vector<std::byte>> look(const std::string& file) {
    close(reserve_);
    std::ifstream in(file, std::ios::binary);
    std::vector<char> bytes;
    const bool there = in.is_open();
    if (there) bytes.assign(std::istreambuf_iterator<char>(in), {});
    in.close();
    keep();
    if (!there) return std::nullopt;
    const auto* first = reinterpret_cast<const std::byte*>(bytes.data());
    return std::vector<std::byte>(first, first + bytes.size());
  }
  void keep() { reserve_ = open("/dev/null", O_RDONLY | O_CLOEXEC); }

  const std::string folder_;
  int reserve_ = -1;
};

/// Ranks as child processes. A child that throws ends with status 1 and says why.
class Family {
 public:
  Family(int num_ranks, const std::function<void(Bootstrap&)>& body) {
    char name[] = "/tmp/shm_process_test.XXXXXX";
    folder_ = mkdtemp(name);
    for (int rank = 0; rank < num_ranks; ++rank) {
      const pid_t pid = fork();
      if (pid != 0) {
        pids_.push_back(pid);
        continue;
      }
      int status = 0;
      try {
        const auto bootstrap = store_bootstrap(std::make_shared<FolderStore>(folder_), rank, num_ranks, "family", 20s);
        body(*bootstrap);
      } catch (const std::exception& error) {
        fprintf(stderr, "rank %d: %s\n", rank, error.what());
        status = 1;
      }
      _exit(status);
    }
  }
  Family(const Family&) = delete;
  Family& operator=(const Family&) = delete;
  ~Family() {
    for (int rank = 0; rank < static_cast<int>(pids_.size()); ++rank) kill(rank);
    std::filesystem::remove_all(folder_);
  }
  void send(int rank, int signal) const { ::kill(pids_[static_cast<size_t>(rank)], signal); }
  /// The exit status; -1 if a signal ended it.
  int join(int rank) {
    int status = 0;
    pid_t& pid = pids_[static_cast<size_t>(rank)];
    if (pid < 0 || waitpid(pid, &status, 0) != pid) return -1;
    pid = -1;
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  }
  void kill(int rank) {
    if (pids_[static_cast<size_t>(rank)] < 0) return;
    send(rank, SIGKILL);
    join(rank);
  }
  void expect_success() {
    for (int rank = 0; rank < static_cast<int>(pids_.size()); ++rank) EXPECT_EQ(join(rank), 0) << "rank " << rank;
  }

 private:
  std::string folder_;
  std::vector<pid_t> pids_;
};

/// Words between the children and the test: a pipe that all inherit.
struct Pipe {
  Pipe() { require(pipe(ends) == 0, "pipe"); }
  ~Pipe() {
    close(ends[0]);
    close(ends[1]);
  }
  Pipe(const Pipe&) = delete;
  Pipe& operator=(const Pipe&) = delete;
  void say(char word) const { require(write(ends[1], &word, 1) == 1, "write"); }
  char hear() const {
    char word = 0;
    pollfd waiting{ends[0], POLLIN, 0};
    require(poll(&waiting, 1, 20'000) == 1, "no word came");
    require(read(ends[0], &word, 1) == 1, "read");
    return word;
  }
  int ends[2] = {-1, -1};
};

/// Everything of ours that outlives a process if somebody forgets it.
std::set<std::string> traces() {
  std::set<std::string> found;
  for (const char* folder : {"/dev/shm", "/tmp", "."}) {
    for (const auto& entry : std::filesystem::directory_iterator(folder)) {
      if (entry.path().filename().string().starts_with("turnout")) found.insert(entry.path());
    }
  }
  std::ifstream sockets("/proc/net/unix");
  for (std::string line; std::getline(sockets, line);) {
    if (const size_t at = line.find("turnout-"); at != std::string::npos) found.insert(line.substr(at));
  }
  return found;
}

void set_limit(int resource, rlim_t most) {
  const rlimit limit{most, most};
  require(setrlimit(static_cast<__rlimit_resource>(resource), &limit) == 0, "setrlimit");
}

/// Uses up all descriptors but `spare`.
void leave_descriptors(int spare) {
  set_limit(RLIMIT_NOFILE, 256);
  std::vector<int> filler;
  for (int fd = dup(0); fd >= 0; fd = dup(0)) filler.push_back(fd);
  require(errno == EMFILE && filler.size() > 3, "descriptors run out");
  for (int i = 0; i < spare; ++i) close(filler[static_cast<size_t>(i)]);
}

std::string error_of(const std::function<void()>& body) {
  try {
    body();
  } catch (const TransportError& error) {
    return error.what();
  }
  return "no TransportError";
}

}  // namespace

TEST(ShmProcess, RowsAndSignalsCross) {
  for (int num_ranks : {2, 3, 8}) {
    Family family(num_ranks, [&](Bootstrap& bootstrap) {
      const auto transport = make_shm(bootstrap);
      const auto window = transport->open("slots", static_cast<size_t>(num_ranks) * kSlot, 2 * num_ranks);
      exchange_rounds(*window, bootstrap.rank(), num_ranks, 50);
      bootstrap.barrier("done");
    });
    family.expect_success();
  }
}

TEST(ShmProcess, AKilledPeerIsGoneWithinASecond) {
  Pipe ready;
  Family family(3, [&](Bootstrap& bootstrap) {
    const auto transport = make_shm(bootstrap);
    const auto window = transport->open("w", 4096, 3);
    bootstrap.barrier("open");
    require(transport->peer_state(1) == PeerState::alive, "rank 1 is alive at first");
    ready.say('r');
    if (bootstrap.rank() == 1) pause();
    wait_until([&] { return transport->peer_state(1) == PeerState::gone; }, "rank 1 is gone", 10s);
    require(transport->peer_state(1 - bootstrap.rank() + 1) == PeerState::alive, "only rank 1 is gone");
    window->put(1, 0, "still mapped", 12);
    window->signal(1, bootstrap.rank(), 1);  // ignored
    ready.say('g');
    bootstrap.sub_group(std::vector<int>{0, 2}, "survivors")->barrier("done");
  });
  for (int i = 0; i < 3; ++i) ASSERT_EQ(ready.hear(), 'r');
  const auto start = Clock::now();
  family.send(1, SIGKILL);  // and not yet waited for: a zombie is gone too
  for (int i = 0; i < 2; ++i) ASSERT_EQ(ready.hear(), 'g');
  EXPECT_LT(Clock::now() - start, 1s);
  EXPECT_EQ(family.join(0), 0);
  EXPECT_EQ(family.join(2), 0);
}

TEST(ShmProcess, TheHeartStopsWithTheProcess) {
  Pipe to_test, to_child;
  Family family(2, [&](Bootstrap& bootstrap) {
    const auto transport = make_shm(bootstrap);
    if (bootstrap.rank() == 1) {
      bootstrap.barrier("open");
      pause();
    }
    bootstrap.barrier("open");
    uint64_t seen = transport->heartbeat(1);
    wait_until([&] { return transport->heartbeat(1) > seen + 2; }, "the heart beats");
    to_test.say('b');
    to_child.hear();  // now stopped
    seen = transport->heartbeat(1);
    usleep(400'000);
    require(transport->heartbeat(1) == seen, "the heart of a stopped process beats");
    require(transport->peer_state(1) == PeerState::alive, "a stopped process is not gone");
    to_test.say('s');
    wait_until([&] { return transport->heartbeat(1) > seen; }, "the heart beats again");
  });
  ASSERT_EQ(to_test.hear(), 'b');
  family.send(1, SIGSTOP);
  to_child.say('x');
  ASSERT_EQ(to_test.hear(), 's');
  family.send(1, SIGCONT);
  EXPECT_EQ(family.join(0), 0);
}

TEST(ShmProcess, NothingIsLeftAfterAllAreKilled) {
  const std::set<std::string> before = traces();
  for (int round = 0; round < 6; ++round) {
    Pipe opened;
    Family family(4, [&](Bootstrap& bootstrap) {
      const auto transport = make_shm(bootstrap);
      std::unique_ptr<Window> window;
      for (int i = 0;; ++i) {  // killed in the middle of opening, too
        window = transport->open("w", 1 << 20, 4);
        opened.say('o');
      }
    });
    for (int i = 0; i < 4 + round; ++i) opened.hear();
    for (int rank = 0; rank < 4; ++rank) family.send(rank, SIGKILL);
    for (int rank = 0; rank < 4; ++rank) EXPECT_EQ(family.join(rank), -1);
  }
  // Others on this machine may come and go meanwhile; what is ours would stay.
  std::set<std::string> left;
  const auto nothing_left = [&] {
    const std::set<std::string> now = traces();
    std::set<std::string> still;
    for (const std::string& name : now) {
      if (!before.contains(name)) still.insert(name);
    }
    left = still;
    return still.empty();
  };
  EXPECT_NO_THROW(wait_until(nothing_left, "nothing is left", 10s)) << "left: " << (left.empty() ? "" : *left.begin());
}

TEST(ShmProcess, TracesAreSeenWhileRanksLive) {
  // Shows that the test above looks where there is something to see.
  const std::set<std::string> before = traces();
  bool seen = false;
  Family family(2, [&](Bootstrap& bootstrap) {
    const auto transport = make_shm(bootstrap);
    while (true) transport->open("w", 4096, 1);
  });
  EXPECT_NO_THROW(wait_until(
      [&] {
        for (const std::string& name : traces()) seen |= !before.contains(name);
        return seen;
      },
      "a mailbox is seen"));
}

TEST(ShmProcess, TooManyOpenFilesSaysSoOnEveryRank) {
#if defined(__SANITIZE_ADDRESS__)
  // UBSan's check of vptr tests with a pipe whether memory can be read; without a descriptor to spare it reports right programs.
  GTEST_SKIP() << "UBSan needs descriptors itself";
#endif
  // A window needs three at a time: its file, its mailbox, and one for what arrives.
  for (int spare = 0; spare <= 3; ++spare) {
    Family family(3, [&](Bootstrap& bootstrap) {
      const auto transport = make_shm(bootstrap);
      bootstrap.barrier("made");
      if (bootstrap.rank() == 1) leave_descriptors(spare);
      const auto start = Clock::now();
      const std::string text = error_of([&] { transport->open("w", 4096, 1); });
      require(Clock::now() - start < 5s, "told too late");
      if (spare == 3) return require(text == "no TransportError", text);
      require(text.find("ulimit -n, now ") != std::string::npos, "no limit in: " + text);
      require(bootstrap.rank() == 1 || text.find("rank 1") != std::string::npos, "no rank in: " + text);
    });
    family.expect_success();
  }
}

TEST(ShmProcess, NoAddressSpaceSaysSoOnEveryRank) {
  if (kSanitized) GTEST_SKIP() << "sanitizers need the address space themselves";
  Family family(2, [&](Bootstrap& bootstrap) {
    const auto transport = make_shm(bootstrap);
    if (bootstrap.rank() == 0) set_limit(RLIMIT_AS, rlim_t{2} << 30);
    const std::string text = error_of([&] { transport->open("w", size_t{8} << 30, 1); });
    require(text.find("ulimit -v, now 2147483648") != std::string::npos, "no limit in: " + text);
    require(bootstrap.rank() == 0 || text.find("rank 0") != std::string::npos, "no rank in: " + text);
    const auto window = transport->open("small", 2 * kSlot, 4);
    exchange_rounds(*window, bootstrap.rank(), 2, 3);
    bootstrap.barrier("done");
  });
  family.expect_success();
}

TEST(ShmProcess, TheLimitOfFileSizesIsAnErrorAndNotTheEnd) {
  Family family(2, [&](Bootstrap& bootstrap) {
    const auto transport = make_shm(bootstrap);
    if (bootstrap.rank() == 0) set_limit(RLIMIT_FSIZE, rlim_t{1} << 20);
    const std::string text = error_of([&] { transport->open("w", size_t{8} << 20, 1); });
    require(text.find("ulimit -f, now 1048576") != std::string::npos, "no limit in: " + text);
    require(bootstrap.rank() == 0 || text.find("rank 0") != std::string::npos, "no rank in: " + text);
    const auto window = transport->open("small", 2 * kSlot, 4);
    exchange_rounds(*window, bootstrap.rank(), 2, 3);
    bootstrap.barrier("done");
  });
  family.expect_success();
}

TEST(ShmProcess, SignalsOfTheProgramRunOnItsOwnThreads) {
  Family family(1, [&](Bootstrap& bootstrap) {
    sigset_t usr1;
    sigemptyset(&usr1);
    sigaddset(&usr1, SIGUSR1);
    const auto transport = make_shm(bootstrap);
    // Blocked here, it must stay pending: the service thread, made before, must not take it and end the process.
    pthread_sigmask(SIG_BLOCK, &usr1, nullptr);
    ::kill(getpid(), SIGUSR1);
    sigset_t pending;
    sigpending(&pending);
    require(sigismember(&pending, SIGUSR1) == 1, "the service thread took a signal");
  });
  family.expect_success();
}

}  // namespace turnout::transport::testing
