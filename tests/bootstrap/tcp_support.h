// Jobs over TCP on loopback, for the tests of this folder.
#pragma once
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <string>

#include "bootstrap/ranks.h"
#include "bootstrap/socket.h"
#include "bootstrap/tcp_store.h"
#include "support/errors.h"

namespace turnout::testing_ranks {

using bootstrap::TcpOptions;
using support::message_of;

/// A port of our own, a folder of our own, and the facts of a job there.
class Job {
 public:
  explicit Job(int num_ranks) : reserved_(bootstrap::reserve_port(port_)) {
    folder_ = testing::TempDir() + "turnout_job_XXXXXX";
    if (!mkdtemp(folder_.data())) throw std::runtime_error("mkdtemp");
    options.secret = "a secret of this test";
    facts.num_ranks = num_ranks;
    facts.root_address = "127.0.0.1";
    facts.port = port_;
    facts.launcher = "test";
    facts.job = "test";
    options.runtime_folder = folder_;
  }
  /// The same job as another rank sees it, with another secret perhaps.
  Job(const LaunchInfo& same, const std::string& secret) : Job(same.num_ranks) {
    facts = same;
    options.secret = secret;
  }
  ~Job() { std::filesystem::remove_all(folder_); }

  LaunchInfo info(int rank) const {
    LaunchInfo info = facts;
    info.rank = rank;
    return info;
  }
  std::shared_ptr<Store> open(int rank, std::chrono::milliseconds timeout = std::chrono::seconds(20)) const {
    return bootstrap::open_tcp_store(info(rank), options, timeout);
  }
  std::unique_ptr<Bootstrap> world(const std::shared_ptr<Store>& store, int rank,
                                   std::chrono::milliseconds timeout = std::chrono::seconds(20)) const {
    return store_bootstrap(store, rank, facts.num_ranks, "world", timeout);
  }
  /// All ranks join and gather once, as threads.
  void expect_forms() const {
    run(facts.num_ranks, [&](int rank) {
      auto store = open(rank);
      const auto all = world(store, rank)->all_gather("who", bytes(std::to_string(rank)));
      for (int peer = 0; peer < facts.num_ranks; ++peer) EXPECT_EQ(text(all[static_cast<size_t>(peer)]), std::to_string(peer));
    });
  }
  int port() const { return port_; }
  const std::string& folder() const { return folder_; }
  size_t num_files() const { return static_cast<size_t>(std::distance(std::filesystem::directory_iterator(folder_), {})); }

  LaunchInfo facts;
  TcpOptions options;

 private:
  int port_ = 0;
  bootstrap::Fd reserved_;
  std::string folder_;
};

#define EXPECT_HAS(text, part) EXPECT_NE(std::string(text).find(part), std::string::npos) << (text)

}  // namespace turnout::testing_ranks
