// The choice of a transport: what is refused says why.
#include "transport/registry.h"

#include "ranks.h"

namespace turnout::transport::testing {

namespace {

std::vector<RankPlace> two(const RankPlace& second) { return {{"kernel", 100, 1000, 1, 1}, second}; }

std::string refusal(const std::string& name, uint64_t seed = 0) {
  std::string text;
  run_ranks(1, [&](Bootstrap& bootstrap) {
    try {
      make_transport({bootstrap, name, seed});
    } catch (const Error& error) {
      text = error.what();
    }
  });
  return text;
}

}  // namespace

TEST(Registry, ThreadsOfOneProcessCanUseAll) {
  for (const std::string& name : transport_names()) EXPECT_EQ(unavailable_reason(name, two({"kernel", 100, 1000, 1, 1})), "");
}

TEST(Registry, EveryObstacleHasItsReason) {
  EXPECT_NE(unavailable_reason("shm", two({"other kernel", 100, 1000, 1, 1})).find("different kernels"), std::string::npos);
  EXPECT_NE(unavailable_reason("inproc", two({"kernel", 101, 1000, 1, 1})).find("another process"), std::string::npos);
  // Process 100 of another container is not this process.
  EXPECT_NE(unavailable_reason("inproc", two({"kernel", 100, 1000, 2, 1})).find("another process"), std::string::npos);
  EXPECT_EQ(unavailable_reason("shm", two({"kernel", 100, 1000, 2, 1})), "");
  EXPECT_NE(unavailable_reason("shm", two({"kernel", 101, 1001, 1, 1})).find("uid 1001"), std::string::npos);
  EXPECT_NE(unavailable_reason("shm", two({"kernel", 101, 1000, 1, 2})).find("network namespace"), std::string::npos);
}

TEST(Registry, AutoTakesInprocForThreads) {
  run_ranks(3, [](Bootstrap& bootstrap) { require(make_transport({bootstrap, "auto", 0})->name() == "inproc", "auto is inproc here"); });
  run_ranks(3, [](Bootstrap& bootstrap) { require(make_transport({bootstrap, "shm", 0})->name() == "shm", "shm when asked"); });
}

TEST(Registry, BadRequestsAreNamed) {
  EXPECT_NE(refusal("pigeon").find("there are auto, inproc, shm"), std::string::npos);
  EXPECT_NE(refusal("shm", 3).find("scheduler_seed"), std::string::npos);
}

TEST(Registry, RanksThatDisagreeAllLearnIt) {
  run_ranks(3, [](Bootstrap& bootstrap) {
    try {
      make_transport({bootstrap, bootstrap.rank() == 2 ? "shm" : "inproc", 0});
      require(false, "ranks that disagree get a transport");
    } catch (const InvalidArgument& error) {
      require(std::string(error.what()).find("rank 2 for 'shm'") != std::string::npos, error.what());
    }
  });
}

}  // namespace turnout::transport::testing
