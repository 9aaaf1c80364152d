// shm between processes: deaths, stops, limits, and what is left behind.
#include <sys/resource.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <fstream>
#include <set>

#include "processes.h"
#include "transport/shm/shm.h"

namespace turnout::transport::testing {

namespace {

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr bool kSanitized = true;
#else
constexpr bool kSanitized = false;
#endif

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

TEST(ShmProcess, ProcessesMayHoldSeveralRanks) {
  Family family(2, [](const std::shared_ptr<Store>& store, int process) {
    run_threads(2, [&](int thread) {
      const auto bootstrap = store_bootstrap(store, 2 * process + thread, 4, "ranks", 20s);
      const auto transport = make_shm(*bootstrap);
      const auto window = transport->open("slots", 4 * kSlot, 8);
      exchange_rounds(*window, bootstrap->rank(), 4, 50);
      bootstrap->barrier("done");
    });
  });
  family.expect_success();
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
