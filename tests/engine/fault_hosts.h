// A host that is cut off in the middle of the steps by which ranks meet: hosts are network namespaces with one cable, which is pulled.
#pragma once
#include <sys/wait.h>

#include <algorithm>
#include <memory>

#include "bootstrap/hosts.h"
#include "engine/fault_case.h"

namespace turnout::testing {

class CutHosts {
 public:
  /// Why hosts cannot be had; empty if they can.
  std::string make() {
    if (geteuid() != 0) return "network namespaces need root";
    if (std::system("ip -Version >/dev/null 2>&1") != 0) return "no command ip (Debian package iproute2)";  // NOLINT(concurrency-mt-unsafe)
    try {
      a_ = std::make_unique<testing_ranks::Host>();
      b_ = std::make_unique<testing_ranks::Host>();
    } catch (const std::runtime_error& e) {
      return e.what();
    }
    const bool cabled = a_->shell("ip link set lo up && ip link add near type veth peer name far netns " + b_->path() +
                                  " && ip addr add 10.77.0.1/24 dev near && ip link set near up") &&
                        b_->shell("ip link set lo up && ip addr add 10.77.0.2/24 dev far && ip link set far up");
    return cabled ? "" : "may not make a veth cable between network namespaces";
  }

  /// Ranks take one step after the other until the cable is pulled; each must say within its deadline who is missing. Returns how long each
  /// took, in microseconds. Throws: what went wrong.
  std::vector<int64_t> cut(const std::string& program, uint64_t seed) {
    Random random(seed);
    const int num_ranks = static_cast<int>(random.between(2, 8));
    const int num_near = static_cast<int>(random.between(1, num_ranks - 1));  // rank 0, which serves the store, is one of them
    const std::string folder = make_folder();
    std::vector<testing_ranks::Program> ranks;
    for (int rank = 0; rank < num_ranks; ++rank) {
      ranks.emplace_back(rank < num_near ? *a_ : *b_, std::vector<std::string>{program, "steps", std::to_string(kDeadline.count())},
                         std::vector<std::string>{"TURNOUT_RANK=" + std::to_string(rank), "TURNOUT_NUM_RANKS=" + std::to_string(num_ranks),
                                                  "TURNOUT_ROOT=10.77.0.1", "TURNOUT_PORT=4711", "XDG_RUNTIME_DIR=" + folder,
                                                  "TURNOUT_SECRET=the secret of this job", "TURNOUT_BOOTSTRAP_TIMEOUT_MS=30000"});
    }
    for (auto& rank : ranks) {
      if (rank.hear("met all\n").find("met all") == std::string::npos) throw std::runtime_error("ranks on two hosts have not met");
    }
    const auto pulled = std::chrono::steady_clock::now() + std::chrono::microseconds(random.below(20'000));
    while (std::chrono::steady_clock::now() < pulled) std::this_thread::yield();
    if (!b_->shell("ip link set far down")) throw std::runtime_error("cannot pull the cable");
    const int64_t cut_us = now_us();
    std::vector<int64_t> took;
    std::string trouble;
    for (int rank = 0; rank < num_ranks; ++rank) {
      const auto end = ranks[static_cast<size_t>(rank)].end();
      took.push_back(now_us() - cut_us);
      // Beyond its deadline a request has two seconds more, and ranks of one host find out from each other.
      const bool in_time = took.back() < 1000 * (kDeadline.count() + 3000 * kSlower);
      const bool says = end.text.find("missing ranks [") != std::string::npos || end.text.find("the store of rank 0") != std::string::npos;
      if (end.status != 2 || !says || !in_time) {
        trouble += "rank " + std::to_string(rank) + " of " + std::to_string(num_ranks) + " (" + std::to_string(num_near) + " near) ended with " +
                   std::to_string(end.status) + " after " + std::to_string(took.back() / 1000) + " ms: " + end.text;
      }
    }
    std::filesystem::remove_all(folder);
    if (!b_->shell("ip link set far up")) throw std::runtime_error("cannot plug the cable in");
    if (!trouble.empty()) throw std::runtime_error(trouble);
    return took;
  }

 private:
  static constexpr std::chrono::milliseconds kDeadline{800 * kSlower};
  static std::string make_folder() {
    std::string folder = ::testing::TempDir() + "turnout_cut_XXXXXX";
    if (!mkdtemp(folder.data())) throw std::runtime_error("no folder");
    return folder;
  }
  std::unique_ptr<testing_ranks::Host> a_, b_;
};

}  // namespace turnout::testing
