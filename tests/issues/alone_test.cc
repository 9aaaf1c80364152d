// Ranks of one machine need no network.
#include <gtest/gtest.h>
#include <net/if.h>
#include <sched.h>
#include <unistd.h>

#include <fstream>

#include "issues/job.h"
#include "support/sanitizer.h"
#include "transport/processes.h"

namespace turnout::testing {
namespace {

using transport::testing::Family;
using transport::testing::require;

constexpr int kHidden = 77, kSkipped = 2;

/// In a network of its own, whose only interface is a loopback that is down.
int job_without_network() {
  if (unshare(CLONE_NEWUSER | CLONE_NEWNET) != 0 && unshare(CLONE_NEWNET) != 0) return kSkipped;
  const Problem problem(problem_of(
      3, 7, 3, kHidden, Layout::expert_major, [](int rank) { return uniform_ids(rank, 20, 3, 7); }, 5));
  Family family(3, [&](const std::shared_ptr<Store>& store, int rank) {
    require(if_nametoindex("lo") != 0 && if_nametoindex("eth0") == 0, "this is not a network of its own");
    Communicator comm = Communicator::from_store(store, rank, 3, "alone");  // the transport that it takes by itself
    Buffer buffer(comm, config_of(problem.p, {}));
    for (int i = 0; i < 4; ++i) expect_round(buffer, problem, i % 2 ? Mode::low_latency : Mode::throughput);
    require(!::testing::Test::HasFailure(), "a comparison failed");
    comm.barrier();
  });
  family.expect_success();
  return ::testing::Test::HasFailure();
}

// DeepEP#629: on one node, and died in the preflight of the network that it did not use; awsome-distributed-ai#1234: without a NIC
// 99.97% of the sums were wrong; DeepEP#163: a NIC that could not be mapped was a warning, and then an illegal access.
TEST(Issues, RanksOfOneMachineNeedNoNetwork) {
  if (kThreadSanitizer) GTEST_SKIP() << "ThreadSanitizer does not follow forked ranks";
  const pid_t child = fork();
  if (child == 0) _exit(job_without_network());
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  ASSERT_TRUE(WIFEXITED(status));
  if (WEXITSTATUS(status) == kSkipped) GTEST_SKIP() << "no network namespace can be had here";
  EXPECT_EQ(WEXITSTATUS(status), 0);
}

}  // namespace
}  // namespace turnout::testing
