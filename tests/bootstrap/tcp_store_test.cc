// The rendezvous over TCP: jobs that form, and what is said when they cannot.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>

#include <atomic>
#include <barrier>
#include <fstream>

#include "bootstrap/message.h"
#include "bootstrap/secret.h"
#include "bootstrap/tcp_support.h"

namespace turnout {
namespace {

using namespace std::chrono_literals;
using testing_ranks::bytes;
using testing_ranks::Job;
using testing_ranks::message_of;
using testing_ranks::run;
using testing_ranks::text;

class Tcp : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, Tcp, testing::Values(1, 2, 3, 4, 5, 7, 8));

TEST_P(Tcp, StepsOverTheStore) {
  Job job(GetParam());
  run(GetParam(), [&](int rank) {
    auto store = job.open(rank);
    auto world = job.world(store, rank);
    for (int round = 0; round < 10; ++round) {
      const std::string mine(static_cast<size_t>(rank * round * 100), static_cast<char>('a' + rank));
      const auto all = world->all_gather("sizes", bytes(mine));
      for (int peer = 0; peer < GetParam(); ++peer) {
        EXPECT_EQ(text(all[static_cast<size_t>(peer)]), std::string(static_cast<size_t>(peer * round * 100), static_cast<char>('a' + peer)));
      }
    }
  });
}

TEST_P(Tcp, OnOneHostNoSecretIsNeededAndNoFileStays) {
  Job job(GetParam());
  job.options.secret.clear();
  run(GetParam(), [&](int rank) {
    auto store = job.open(rank);
    EXPECT_EQ(job.num_files(), 0u) << "removed once all have joined";
    job.world(store, rank)->barrier("meet");
  });
}

TEST(TcpStore, RanksThatAreProcesses) {
  Job job(4);
  job.options.secret.clear();
  std::vector<pid_t> children;
  for (int rank = 0; rank < 4; ++rank) {
    const pid_t pid = fork();
    if (pid == 0) {
      int status = 1;
      try {
        auto store = job.open(rank);
        const auto all = job.world(store, rank)->all_gather("pids", bytes(std::to_string(getpid())));
        status = text(all[static_cast<size_t>(rank)]) == std::to_string(getpid()) ? 0 : 2;
      } catch (const std::exception& e) {
        std::fprintf(stderr, "rank %d: %s\n", rank, e.what());
      }
      _exit(status);
    }
    children.push_back(pid);
  }
  for (pid_t pid : children) {
    int status = -1;
    waitpid(pid, &status, 0);
    EXPECT_EQ(status, 0);
  }
  EXPECT_EQ(job.num_files(), 0u);
}

TEST(TcpStore, RankZeroMayLeaveAStepFirst) {
  Job job(4);
  run(4, [&](int rank) {
    for (int round = 0; round < 20; ++round) {  // the store goes as soon as rank 0 is through, every time
      auto store = job.open(rank);
      job.world(store, rank)->barrier("last step");
    }
  });
}

TEST(TcpStore, WhatRankZeroSetLastIsHandedOut) {
  for (int round = 0; round < 30; ++round) {
    Job job(2);
    run(2, [&](int rank) {
      auto store = job.open(rank);
      for (int i = 0; rank == 0 && i < 50; ++i) store->set("key" + std::to_string(i), bytes(std::string(5000, 'v')));
      if (rank == 0) return;
      const auto last = store->get("key49", 20s);
      ASSERT_TRUE(last);
      EXPECT_EQ(last->size(), 5000u);
    });
  }
}

TEST(TcpStore, WhenRankZeroIsGoneTheOthersLearnIt) {
  Job job(3);
  std::barrier met(3);
  run(3, [&](int rank) {
    auto store = job.open(rank);
    met.arrive_and_wait();
    if (rank == 0) return;
    const auto start = std::chrono::steady_clock::now();
    EXPECT_HAS(message_of<TransportError>([&] { store->get("never", 60s); }), "rank 0");
    EXPECT_LT(std::chrono::steady_clock::now() - start, 30s);
    EXPECT_THROW(for (int i = 0; i < 100; ++i) store->set("key", {}), TransportError);
    store->erase("key");
  });
}

TEST(TcpStore, AStoppedRankZeroIsNoticed) {
  Job job(2);
  const pid_t root = fork();
  if (root == 0) {
    auto store = job.open(0);
    store->get("joined", 20s);
    raise(SIGSTOP);
    _exit(0);
  }
  auto store = job.open(1);
  store->set("joined", {});
  int status = 0;
  waitpid(root, &status, WUNTRACED);
  ASSERT_TRUE(WIFSTOPPED(status));
  const auto start = std::chrono::steady_clock::now();
  EXPECT_HAS(message_of<PeerTimeout>([&] { store->get("key", 100ms); }), "is its process stopped?");
  store.reset();
  EXPECT_LT(std::chrono::steady_clock::now() - start, 10s);
  kill(root, SIGKILL);
  waitpid(root, &status, 0);
}

TEST(TcpStore, AMissingRankIsNamedOnAllOthersInTime) {
  for (const bool with_secret : {true, false}) {
    Job job(4);
    if (!with_secret) job.options.secret.clear();
    std::atomic<int> told = 0;
    run(4, [&](int rank) {
      if (rank == 2) return;
      const auto start = std::chrono::steady_clock::now();
      try {
        job.open(rank, 500ms);
        ADD_FAILURE() << "rank " << rank << " joined a job of three";
      } catch (const PeerTimeout& e) {
        ++told;
        EXPECT_EQ(e.record().peers, std::vector<int>{2});
        EXPECT_EQ(e.record().phase, "join the rendezvous");
        EXPECT_HAS(e.what(), "missing ranks [2]");
      }
      EXPECT_LT(std::chrono::steady_clock::now() - start, 5s);
    });
    EXPECT_EQ(told, 3);
    EXPECT_EQ(job.num_files(), 0u);
  }
}

TEST(TcpStore, AMissingRankZeroIsNamed) {
  Job job(2);
  try {
    job.open(1, 200ms);
    FAIL();
  } catch (const PeerTimeout& e) {
    EXPECT_EQ(e.record().peers, std::vector<int>{0});
    EXPECT_HAS(e.what(), "missing ranks [0]");
    EXPECT_HAS(e.what(), "refused");
  }
  job.options.secret.clear();
  EXPECT_HAS(message_of<PeerTimeout>([&] { job.open(1, 200ms); }), "has not left a secret");
}

TEST(TcpStore, AnotherSecretIsRefused) {
  Job job(3);
  run(3, [&](int rank) {
    Job mine(job.facts, rank == 2 ? "another one altogether" : "the secret of this job");
    if (rank == 2) {
      EXPECT_HAS(message_of<TransportError>([&] { mine.open(2, 10s); }), "do not have the same secret");
    } else {
      const std::string what = message_of<PeerTimeout>([&] { mine.open(rank, 1s); });
      EXPECT_HAS(what, "missing ranks [2]");
      if (rank == 0) {
        EXPECT_HAS(what, "refused 127.0.0.1: the secret is another one");
      }
    }
  });
}

TEST(TcpStore, RanksThatCountDifferently) {
  Job job(2);
  std::jthread root([&] {
    const auto start = std::chrono::steady_clock::now();
    EXPECT_HAS(message_of<InvalidArgument>([&] { job.open(0, 60s); }), "ranks disagree about their number: rank 1 counts 3 ranks, rank 0 counts 2");
    EXPECT_LT(std::chrono::steady_clock::now() - start, 30s);  // at once, not at its deadline
  });
  Job three(job.facts, job.options.secret);
  three.facts.num_ranks = 3;
  EXPECT_HAS(message_of<InvalidArgument>([&] { three.open(1, 10s); }), "ranks disagree about their number: rank 1 counts 3 ranks, rank 0 counts 2");
}

TEST(TcpStore, TwoProcessesOfOneRank) {
  Job job(3);
  std::atomic<int> refused = 0;
  run(3, [&](int thread) {
    try {
      job.open(thread == 0 ? 0 : 1, 1s);
    } catch (const InvalidArgument& e) {
      ++refused;
      EXPECT_HAS(e.what(), "rank 1 has joined already");
    } catch (const PeerTimeout& e) {
      EXPECT_EQ(e.record().peers, std::vector<int>{2});
    }
  });
  EXPECT_EQ(refused, 1);
}

TEST(TcpStore, Ipv6Loopback) {
  std::string error;
  if (!bootstrap::Fd(socket(AF_INET6, SOCK_STREAM, 0))) return;  // a machine without IPv6
  Job job(3);
  for (const char* root : {"::1", "localhost"}) {
    job.facts.root_address = root;
    job.options.secret = "a secret of this test";
    job.expect_forms();
    job.options.secret.clear();
    job.expect_forms();
  }
}

TEST(TcpStore, TheNameOfThisHostWithAndWithoutSecret) {
  char name[256] = {};
  ASSERT_EQ(gethostname(name, sizeof name - 1), 0);
  std::string error;
  if (bootstrap::resolve(name, 1, error).empty()) return;  // a machine that does not know itself
  Job job(3);
  job.facts.root_address = name;
  job.expect_forms();
  job.options.secret.clear();
  job.expect_forms();
}

TEST(TcpStore, ChosenInterface) {
  Job job(2);
  job.options.interface = "lo";
  job.expect_forms();
  job.options.secret.clear();
  job.expect_forms();
  job.options.interface = "nosuch0";
  EXPECT_HAS(message_of<InvalidArgument>([&] { job.open(0, 1s); }), "lo");
}

TEST(TcpStore, ASecondHostIsToldWhatToExport) {
  Job job(2);
  job.facts.root_address = "192.0.2.1";  // an address for documentation: nobody's
  job.options.secret.clear();
  const std::string what = message_of<InvalidArgument>([&] { job.open(1, 5s); });
  EXPECT_HAS(what, "another host than rank 0 (192.0.2.1)");
  EXPECT_HAS(what, "export TURNOUT_SECRET");
}

TEST(TcpStore, APortThatIsTaken) {
  Job job(2);
  const bootstrap::Fd other = bootstrap::listen_on(bootstrap::loopback(AF_INET, job.port()));
  ASSERT_TRUE(other);
  const std::string what = message_of<TransportError>([&] { job.open(0, 5s); });
  EXPECT_HAS(what, "port " + std::to_string(job.port()));
  EXPECT_HAS(what, "process " + std::to_string(getpid()));
  EXPECT_HAS(what, "set TURNOUT_PORT");
  job.options.secret.clear();
  message_of<TransportError>([&] { job.open(0, 5s); });
  EXPECT_EQ(job.num_files(), 0u);
}

TEST(TcpStore, SeveralStoresOfOneProcessOnOnePort) {
  Job job(3);
  run(3, [&](int rank) {
    auto first = job.open(rank), second = job.open(rank), third = job.open(rank);
    job.world(second, rank)->barrier("second");
    first.reset();
    job.world(third, rank)->barrier("third");
  });
}

TEST(TcpStore, LargestValuesAndKeys) {
  Job job(2);
  run(2, [&](int rank) {
    auto store = job.open(rank);
    const std::string largest(bootstrap::kMostValueBytes, 'v'), key(bootstrap::kMostKeyBytes, 'k');
    if (rank == 1) {
      store->set(key, bytes(largest));
    } else {
      const auto value = store->get(key, 60s);
      ASSERT_TRUE(value);
      EXPECT_EQ(value->size(), largest.size());
      store->erase(key);
    }
    EXPECT_HAS(message_of<InvalidArgument>([&] { store->set("k", bytes(largest + "v")); }), std::to_string(bootstrap::kMostValueBytes));
    EXPECT_HAS(message_of<InvalidArgument>([&] { store->set(key + "k", {}); }), std::to_string(bootstrap::kMostKeyBytes));
    EXPECT_THROW(store->get("", 1s), InvalidArgument);
    job.world(store, rank, 60s)->barrier("end");
  });
}

TEST(TcpStore, ThreadsOfOneRankShareTheStore) {
  Job job(2);
  run(2, [&](int rank) {
    auto store = job.open(rank);
    run(4, [&](int thread) {
      for (int i = 0; i < 50; ++i) {
        const std::string name = std::to_string(thread) + "." + std::to_string(i);
        if (rank == thread % 2) store->set(name, bytes(name));
        const auto value = store->get(name, 20s);
        ASSERT_TRUE(value);
        EXPECT_EQ(text(*value), name);
      }
    });
    EXPECT_FALSE(store->get("never", 20ms));
    job.world(store, rank)->barrier("end");
  });
}

}  // namespace
}  // namespace turnout
