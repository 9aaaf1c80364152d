// The rendezvous between hosts: ranks are processes in network namespaces, so that loopback, addresses, interfaces and cables
// are real. Needs root and the command `ip`; where they are missing the tests are skipped and say why.
#include <filesystem>
#include <memory>
#include <optional>

#include "bootstrap/hosts.h"
#include "bootstrap/tcp_support.h"

namespace turnout {
namespace {

using testing_ranks::Host;
using testing_ranks::Program;

constexpr int kPort = 4711;

/// Two hosts with two cables: `near` and `far` are the ends of the first, `side` and `far1` those of the second.
struct Pair {
  Host a, b;

  /// Why it cannot be had; empty if it can.
  static std::string make(std::unique_ptr<Pair>& pair) {
    if (geteuid() != 0) return "needs root, to make network namespaces";
    if (std::system("ip -Version >/dev/null 2>&1") != 0) return "needs the command ip (Debian package iproute2)";  // NOLINT(concurrency-mt-unsafe)
    try {
      pair = std::make_unique<Pair>();
    } catch (const std::runtime_error& e) {
      return e.what();
    }
    const Host& a = pair->a;
    const Host& b = pair->b;
    if (!a.shell("ip link set lo up") || !b.shell("ip link set lo up")) return "may not configure a network namespace";
    const std::string two_cables = "ip link add near type veth peer name far netns " + b.path() +
                                   " && ip link add side type veth peer name far1 netns " + b.path() +
                                   " && ip link set near up && ip link set side up";
    if (!a.shell(two_cables) || !b.shell("ip link set far up && ip link set far1 up")) return "cannot make a veth cable between namespaces";
    return "";
  }
  bool address(const std::string& of_a, const std::string& of_b, const char* at_a = "near", const char* at_b = "far") const {
    const std::string no_wait = of_a.find(':') != std::string::npos ? " nodad" : "";
    return a.shell("ip addr add " + of_a + " dev " + at_a + no_wait) && b.shell("ip addr add " + of_b + " dev " + at_b + no_wait);
  }
};

class Hosts : public testing::Test {
 protected:
  void SetUp() override {
    folder_ = testing::TempDir() + "turnout_hosts_XXXXXX";
    ASSERT_NE(mkdtemp(folder_.data()), nullptr);
    const std::string obstacle = Pair::make(pair_);
    if (!obstacle.empty()) GTEST_SKIP() << obstacle;
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  using Variables = std::vector<std::string>;
  Program rank(const Host& host, int rank, int num_ranks, const std::string& root, Variables more, std::vector<std::string> words = {}) const {
    more.insert(more.end(), {"TURNOUT_RANK=" + std::to_string(rank), "TURNOUT_NUM_RANKS=" + std::to_string(num_ranks), "TURNOUT_ROOT=" + root,
                             "TURNOUT_PORT=" + std::to_string(kPort), "XDG_RUNTIME_DIR=" + folder_});
    words.insert(words.begin(), TURNOUT_JOB_PROGRAM);
    return {host, std::move(words), std::move(more)};
  }
  /// Waits until rank 0 on host a listens at an address of its own.
  void expect_listening(const std::string& address) const {
    std::string error;
    const auto deadline = bootstrap::Clock::now() + std::chrono::seconds(20);
    while (!pair_->a.connects(address, kPort, error)) ASSERT_LT(bootstrap::Clock::now(), deadline) << error;
  }
  const Host& a() const { return pair_->a; }
  const Host& b() const { return pair_->b; }

  static inline const Variables kSecret{"TURNOUT_SECRET=the secret of this job"};
  static Variables with_secret(int timeout_ms) { return {kSecret.front(), "TURNOUT_BOOTSTRAP_TIMEOUT_MS=" + std::to_string(timeout_ms)}; }
  std::unique_ptr<Pair> pair_;
  std::string folder_;
};

/// Hosts that know one family only, so nothing can lean on the other.
struct Family {
  const char* name;
  const char *with_prefix_a, *with_prefix_b, *root, *other;
};
class HostsOfFamily : public Hosts, public testing::WithParamInterface<Family> {
 protected:
  void SetUp() override {
    Hosts::SetUp();
    if (!pair_ || IsSkipped()) return;
    if (!pair_->address(GetParam().with_prefix_a, GetParam().with_prefix_b)) GTEST_SKIP() << "no " << GetParam().name << " in this kernel";
  }
  const char* root() const { return GetParam().root; }
};
INSTANTIATE_TEST_SUITE_P(, HostsOfFamily,
                         testing::Values(Family{"IPv4", "10.77.0.1/24", "10.77.0.2/24", "10.77.0.1", "10.77.0.2"},
                                         Family{"IPv6", "fd77::1/64", "fd77::2/64", "fd77::1", "fd77::2"}),
                         [](const auto& test) { return test.param.name; });

TEST_P(HostsOfFamily, ShareASecretAndJoin) {
  std::vector<Program> ranks;
  for (int r = 0; r < 4; ++r) ranks.push_back(rank(r % 2 ? b() : a(), r, 4, root(), kSecret));
  for (int r = 0; r < 4; ++r) {
    const auto end = ranks[static_cast<size_t>(r)].end();
    EXPECT_EQ(end.status, 0) << end.text;
    EXPECT_HAS(end.text, "rank " + std::to_string(r) + " of 4");
  }
}

// DeepEP#316: hosts of one name were taken for one. These have one name and one kernel.
TEST_P(HostsOfFamily, WithoutASecretOnlyLoopbackIsBoundAndTheSecondHostIsToldWhatToExport) {
  Program zero = rank(a(), 0, 2, root(), {"TURNOUT_BOOTSTRAP_TIMEOUT_MS=3000"});
  expect_listening("127.0.0.1");
  std::string error;
  EXPECT_FALSE(b().connects(root(), kPort, error)) << "the port is open to other hosts without a secret";
  EXPECT_HAS(error, "refused");
  const auto one = rank(b(), 1, 2, root(), {"TURNOUT_BOOTSTRAP_TIMEOUT_MS=20000"}).end();
  EXPECT_EQ(one.status, 2);
  EXPECT_HAS(one.text, "rank 1 runs on another host than rank 0 (" + std::string(root()) + "), and there is no secret");
  EXPECT_HAS(one.text, "export TURNOUT_SECRET");
  const auto end = zero.end();
  EXPECT_EQ(end.status, 2);
  EXPECT_HAS(end.text, "join the rendezvous");
  EXPECT_HAS(end.text, "missing ranks [1]");
  EXPECT_HAS(end.text, "export TURNOUT_SECRET");
}

TEST_P(HostsOfFamily, AWrongSecretIsRefusedAndBothSidesSaySo) {
  Program zero = rank(a(), 0, 2, root(), with_secret(3000));
  const auto one = rank(b(), 1, 2, root(), {"TURNOUT_SECRET=the secret of another job"}).end();
  EXPECT_EQ(one.status, 2);
  EXPECT_HAS(one.text, "do not have the same secret");
  const auto end = zero.end();
  EXPECT_EQ(end.status, 2);
  EXPECT_HAS(end.text, "missing ranks [1]");
  EXPECT_HAS(end.text, "refused " + std::string(GetParam().other) + ": the secret is another one");
}

// DeepEP#411: 600 s in the first collective, and no word of what or who.
TEST_P(HostsOfFamily, ACutCableEndsTheNamedStepAtItsDeadlineWithTheMissingRanks) {
  std::vector<Program> ranks;
  for (int r = 0; r < 3; ++r) ranks.push_back(rank(r < 2 ? a() : b(), r, 3, root(), with_secret(1500), {"twice"}));
  for (auto& r : ranks) EXPECT_HAS(r.hear("met all\n"), "met all");
  ASSERT_TRUE(b().shell("ip link set far down"));
  const auto start = bootstrap::Clock::now();
  for (auto& r : ranks) r.say("\n");
  for (int r = 0; r < 3; ++r) {
    const auto end = ranks[static_cast<size_t>(r)].end();
    EXPECT_EQ(end.status, 2) << end.text;
    EXPECT_HAS(end.text, "second step (group 'world')");
    if (r < 2) {
      EXPECT_HAS(end.text, "missing ranks [2] of 3");
    } else {
      EXPECT_HAS(end.text, "the store of rank 0");
    }
  }
  EXPECT_LT(bootstrap::Clock::now() - start, std::chrono::seconds(15));
}

TEST_P(HostsOfFamily, ACableThatWasCutFromTheStartNamesRankZero) {
  ASSERT_TRUE(a().shell("ip link set near down"));
  const auto end = rank(b(), 1, 2, root(), with_secret(1000)).end();
  EXPECT_EQ(end.status, 2);
  EXPECT_HAS(end.text, "connect to rank 0 (" + std::string(root()) + " port 4711): missing ranks [0]");
}

TEST_F(Hosts, ACableThatIsBackInTimeIsNoError) {
  ASSERT_TRUE(pair_->address("10.77.0.1/24", "10.77.0.2/24"));
  std::vector<Program> ranks;
  for (int r = 0; r < 2; ++r) ranks.push_back(rank(r ? b() : a(), r, 2, "10.77.0.1", with_secret(20000), {"twice"}));
  for (auto& r : ranks) EXPECT_HAS(r.hear("met all\n"), "met all");
  ASSERT_TRUE(a().shell("ip link set near down"));
  for (auto& r : ranks) r.say("\n");
  ASSERT_TRUE(a().shell("ip link set near up"));
  for (auto& r : ranks) {
    const auto end = r.end();
    EXPECT_EQ(end.status, 0) << end.text;
  }
}

TEST_F(Hosts, TheChosenInterfaceAloneIsBound) {
  ASSERT_TRUE(pair_->address("10.77.0.1/24", "10.77.0.2/24"));
  ASSERT_TRUE(pair_->address("10.78.0.1/24", "10.78.0.2/24", "side", "far1"));
  Program zero = rank(a(), 0, 2, "10.77.0.1", {kSecret.front(), "TURNOUT_INTERFACE=near"});
  expect_listening("10.77.0.1");
  std::string error;
  EXPECT_FALSE(b().connects("10.78.0.1", kPort, error)) << "the other interface is open, too";
  EXPECT_FALSE(a().connects("127.0.0.1", kPort, error)) << "loopback is open, too";
  const auto one = rank(b(), 1, 2, "10.77.0.1", kSecret).end();
  EXPECT_EQ(one.status, 0) << one.text;
  EXPECT_EQ(zero.end().status, 0);

  const auto wrong = rank(a(), 0, 2, "10.77.0.1", {kSecret.front(), "TURNOUT_INTERFACE=ib0"}).end();
  EXPECT_EQ(wrong.status, 2);
  EXPECT_HAS(wrong.text, "TURNOUT_INTERFACE is 'ib0', which has no address here; interfaces with addresses: lo, near, side");
}

TEST_F(Hosts, AllAddressesOfTheChosenInterfaceAreBound) {
  ASSERT_TRUE(pair_->address("10.77.0.1/24", "10.77.0.2/24"));
  if (!pair_->address("fd77::1/64", "fd77::2/64")) GTEST_SKIP() << "no IPv6 in this kernel";
  for (const char* root : {"10.77.0.1", "fd77::1"}) {
    Program zero = rank(a(), 0, 2, root, {kSecret.front(), "TURNOUT_INTERFACE=near", "TURNOUT_BOOTSTRAP_TIMEOUT_MS=5000"});
    const auto one = rank(b(), 1, 2, root, with_secret(5000)).end();
    EXPECT_EQ(one.status, 0) << root << ": " << one.text;
    EXPECT_EQ(zero.end().status, 0) << root;
  }
}

TEST_F(Hosts, AnOpenInterfaceWithoutASecretIsRefused) {
  ASSERT_TRUE(pair_->address("10.77.0.1/24", "10.77.0.2/24"));
  const auto end = rank(a(), 0, 2, "10.77.0.1", {"TURNOUT_INTERFACE=near"}).end();
  EXPECT_EQ(end.status, 2);
  EXPECT_HAS(end.text, "TURNOUT_INTERFACE is near, which other hosts can reach, but there is no secret: export TURNOUT_SECRET");
}

}  // namespace
}  // namespace turnout
