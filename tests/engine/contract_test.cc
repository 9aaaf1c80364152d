// Random problems through the CPU engine over each transport, against the oracle.
#include "engine/contract.h"

namespace turnout::testing {
namespace {

struct Case {
  int num_ranks;
  std::string transport;
  bool scheduled;
  Mode mode;
};

std::string case_name(const ::testing::TestParamInfo<Case>& info) {
  return info.param.transport + (info.param.scheduled ? "_scheduled_" : "_") + std::string(name(info.param.mode)) + "_" +
         std::to_string(info.param.num_ranks) + "_ranks";
}

class EngineContract : public ::testing::TestWithParam<Case> {
 protected:
  RandomLimits limits() const {
    RandomLimits l;
    l.num_ranks = GetParam().num_ranks;
    return l;
  }
  RunChoices run(uint64_t seed) const {
    RunChoices r;
    r.transport = GetParam().transport;
    r.mode = GetParam().mode;
    if (GetParam().scheduled) r.scheduler_seed = seed + 1;
    r.scale_columns = seed % 2 == 1;
    return r;
  }
};

TEST_P(EngineContract, EqualsTheOracle) {
  for (uint64_t seed = 1; seed <= 24; ++seed) {
    expect_matches_reference(seed, limits(), run(seed));
    if (HasFailure()) return;
  }
}

TEST_P(EngineContract, EqualsTheOracleWithCachedHandles) {
  for (uint64_t seed = 100; seed < 108; ++seed) {
    RunChoices r = run(seed);
    r.repeats = 3;
    expect_matches_reference(seed, limits(), r);
    if (HasFailure()) return;
  }
}

TEST_P(EngineContract, EqualsTheOracleWhenResultsAreFresh) {
  for (uint64_t seed = 200; seed < 208; ++seed) {
    RunChoices r = run(seed);
    r.result = ResultKind::fresh;
    expect_matches_reference(seed, limits(), r);
    if (HasFailure()) return;
  }
}

TEST_P(EngineContract, EqualsTheOracleBeyondTheReceiveRegionAndStaging) {
  for (uint64_t seed = 300; seed < 308; ++seed) {
    RunChoices r = run(seed);
    r.receive_bytes = 4096;
    r.staging_bytes = 1;
    expect_matches_reference(seed, limits(), r);
    if (HasFailure()) return;
  }
}

TEST_P(EngineContract, EqualsTheOracleWhereEveryRowCrosses) {
  RandomLimits l = limits();
  l.layouts = {Layout::expert_major, Layout::expert_slab};
  l.wires = {Wire::rows};
  for (uint64_t seed = 350; seed < 358; ++seed) {
    RunChoices r = run(seed);
    r.repeats = 2;
    expect_matches_reference(seed, l, r);
    if (HasFailure()) return;
  }
}

TEST_P(EngineContract, EqualsTheOracleWhenIssuedAndWaitedFor) {
  for (uint64_t seed = 400; seed < 408; ++seed) {
    RunChoices r = run(seed);
    r.async = true;
    r.receive = seed % 2 ? Receive::deferred : Receive::resident;
    r.num_threads = seed % 3 == 0 ? 3 : 1;
    r.i32_ids = true;
    expect_matches_reference(seed, limits(), r);
    if (HasFailure()) return;
  }
}

TEST_P(EngineContract, EqualsTheOracleWhenRowsAreReadInPlace) {
  RandomLimits l = limits();
  l.layouts = {Layout::rank_major};
  l.quantize = false;
  for (uint64_t seed = 500; seed < 516; ++seed) {
    RunChoices r = run(seed);
    r.y_in_lease = true;
    r.async = seed % 2 == 0;
    r.repeats = 2;
    expect_matches_reference(seed, l, r);
    if (HasFailure()) return;
  }
}

std::vector<Case> cases() {
  std::vector<Case> all;
  for (int num_ranks : {1, 2, 3, 4, 5, 7, 8}) {
    for (Mode mode : {Mode::throughput, Mode::low_latency}) {
      all.push_back({num_ranks, "inproc", false, mode});
      all.push_back({num_ranks, "inproc", true, mode});
      all.push_back({num_ranks, "shm", false, mode});
    }
  }
  return all;
}

INSTANTIATE_TEST_SUITE_P(Cpu, EngineContract, ::testing::ValuesIn(cases()), case_name);

}  // namespace
}  // namespace turnout::testing
