// The contract of the CPU engine, unchanged, on GPUs: virtual ranks on one, and threads on several.
#include <deque>
#include <future>

#include "cuda/cuda_place.h"
#include "engine/contract.h"
#include "transport/cuda.h"

namespace turnout::testing {
namespace {

constexpr uint64_t kAhead = 4;  ///< problems

struct Case {
  int num_ranks, num_devices;
  Mode mode;
};

std::string case_name(const ::testing::TestParamInfo<Case>& info) {
  return std::to_string(info.param.num_ranks) + "_ranks_on_" + std::to_string(info.param.num_devices) + "_" + std::string(name(info.param.mode));
}

class CudaContract : public ::testing::TestWithParam<Case> {
 protected:
  void SetUp() override {
    // Every virtual rank has a stream that must not wait for another's.
    setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0);
    int devices = 0;
    if (cudaGetDeviceCount(&devices) != cudaSuccess || devices < GetParam().num_devices) {
      GTEST_SKIP() << "needs " << GetParam().num_devices << " GPUs, there are " << devices;
    }
    for (int device = 0; device < GetParam().num_devices; ++device) keep_memory(device);
  }
  RandomLimits limits() const {
    RandomLimits l;
    l.num_ranks = GetParam().num_ranks;
    return l;
  }
  RunChoices run() const {
    RunChoices r;
    r.mode = GetParam().mode;
    r.receive_bytes = size_t{64} << 20;
    r.timeout = std::chrono::seconds(10);
    const int devices = GetParam().num_devices;
    r.place = [devices](int rank) { return std::make_unique<CudaPlace>(rank % devices); };
    return r;
  }
  void check(uint64_t first, uint64_t last, const RandomLimits& l, const std::function<void(uint64_t, RunChoices&)>& change) {
    // The oracle, which has one thread for all ranks, takes as long as the GPU: it is asked ahead.
    std::deque<std::future<std::unique_ptr<const Expected>>> ahead;
    uint64_t asked = first;
    for (uint64_t seed = first; seed < last; ++seed) {
      for (; asked < last && asked < seed + kAhead; ++asked) ahead.push_back(std::async(std::launch::async, expected_of, asked, l));
      const std::unique_ptr<const Expected> e = ahead.front().get();
      ahead.pop_front();
      RunChoices r = run();
      r.scale_columns = seed % 2 == 1;
      change(seed, r);
      expect_matches_reference(seed, *e, r);
      if (HasFailure()) {
        ADD_FAILURE() << "seed " << seed;
        return;
      }
    }
  }
};

TEST_P(CudaContract, EqualsTheOracle) {
  check(1, 25, limits(), [](uint64_t, RunChoices&) {});
}

TEST_P(CudaContract, EqualsTheOracleWithCachedHandles) {
  check(100, 108, limits(), [](uint64_t, RunChoices& r) { r.repeats = 3; });
}

TEST_P(CudaContract, EqualsTheOracleWhenResultsAreFresh) {
  check(200, 208, limits(), [](uint64_t, RunChoices& r) { r.result = ResultKind::fresh; });
}

TEST_P(CudaContract, EqualsTheOracleWhenRanksWantResultsInDifferentPlaces) {
  RandomLimits l = limits();
  l.layouts = {Layout::rank_major};
  check(300, 308, l, [](uint64_t seed, RunChoices& r) {
    r.results_differ = true;
    r.async = seed % 2 == 0;
    r.repeats = 2;
  });
}

TEST_P(CudaContract, EqualsTheOracleWhenIssuedAndWaitedFor) {
  check(400, 412, limits(), [](uint64_t seed, RunChoices& r) {
    r.async = true;
    r.receive = seed % 2 ? Receive::deferred : Receive::resident;
    r.i32_ids = true;
  });
}

TEST_P(CudaContract, EqualsTheOracleWhenRowsLieInALease) {
  RandomLimits l = limits();
  l.layouts = {Layout::rank_major};
  l.quantize = false;
  check(500, 508, l, [](uint64_t seed, RunChoices& r) {
    r.y_in_lease = true;
    r.async = seed % 2 == 0;
    r.repeats = 2;
  });
}

TEST_P(CudaContract, EqualsTheOracleByBulkCopies) {
  RandomLimits l = limits();
  l.max_tokens = 150;
  l.max_hidden = 2500;
  l.dtypes = {DType::bf16, DType::bf16, DType::fp16, DType::u8};
  l.aligned = true;
  l.several_nodes = false;
  check(600, 640, l, [](uint64_t seed, RunChoices& r) {
    r.async = seed % 4 == 0;
    r.repeats = 2;
    r.receive_bytes = size_t{512} << 20;
    if (seed % 5 == 0) r.result = ResultKind::fresh;
  });
}

TEST_P(CudaContract, EqualsTheOracleWhereEveryRowCrosses) {
  RandomLimits l = limits();
  l.max_tokens = 60;
  l.max_hidden = 2500;
  l.max_topk = 20;
  l.max_experts = 40;
  l.layouts = {Layout::expert_major, Layout::expert_slab};
  l.wires = {Wire::rows};
  check(800, 816, l, [](uint64_t seed, RunChoices& r) {
    r.async = seed % 4 == 0;
    r.repeats = 3;
    if (seed % 2) r.receive_bytes = size_t{512} << 20;  // records of calls with a capacity have a place for good
  });
}

TEST_P(CudaContract, EqualsTheOracleWhereRowsAreQuantised) {
  RandomLimits l = limits();
  l.max_tokens = 150;
  l.max_hidden = 2500;
  l.dtypes = {DType::bf16, DType::fp16, DType::fp32};
  l.aligned = l.fused = true;
  check(700, 716, l, [](uint64_t seed, RunChoices& r) {
    r.async = seed % 4 == 0;
    r.receive = seed % 8 ? Receive::deferred : Receive::resident;
    r.repeats = 2;
    r.receive_bytes = size_t{512} << 20;
    if (seed % 5 == 0) r.result = ResultKind::fresh;
  });
}

std::vector<Case> cases() {
  std::vector<Case> all;
  for (Mode mode : {Mode::throughput, Mode::low_latency}) {
    for (int num_ranks : {1, 2, 3, 4, 5, 7, 8}) all.push_back({num_ranks, 1, mode});
    for (int num_ranks : {2, 5}) all.push_back({num_ranks, 2, mode});
  }
  return all;
}

INSTANTIATE_TEST_SUITE_P(Cuda, CudaContract, ::testing::ValuesIn(cases()), case_name);

}  // namespace
}  // namespace turnout::testing
