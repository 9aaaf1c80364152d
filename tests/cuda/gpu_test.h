// What tests on GPUs share: why one cannot run here, and the places of ranks.
#pragma once
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <functional>
#include <memory>
#include <string>

#include "cuda/cuda_place.h"
#include "transport/cuda.h"

namespace turnout::testing {

/// CUDA does not survive a fork: the answer comes from a child, so that the process that asks may fork later. -1: no GPU can be used.
inline int num_gpus() {
  static const int count = [] {
    const pid_t child = fork();
    if (child == 0) _exit(transport::cuda_reason().empty() ? transport::num_cuda_devices() : 255);
    int status = 0;
    if (waitpid(child, &status, 0) != child || !WIFEXITED(status)) return -1;
    return WEXITSTATUS(status) == 255 ? -1 : WEXITSTATUS(status);
  }();
  return count;
}

/// Why a test that wants `count` GPUs cannot run; empty if it can.
inline std::string lacking(int count) {
  if (num_gpus() < 0) return "no GPU can be used: " + transport::cuda_reason();
  return num_gpus() < count ? "needs " + std::to_string(count) + " GPUs, and here is " + std::to_string(num_gpus()) : "";
}

/// Ranks dealt to GPUs, rank r to GPU r % num_gpus.
struct Placement {
  int num_ranks = 2, num_gpus = 1;
  std::unique_ptr<CudaPlace> place_of(int rank) const { return std::make_unique<CudaPlace>(rank % num_gpus); }
};
inline std::string name(const Placement& p) { return std::to_string(p.num_ranks) + "_ranks_on_" + std::to_string(p.num_gpus); }

/// A test of ranks that are threads of this process.
class GpuTest : public ::testing::TestWithParam<Placement> {
 protected:
  void SetUp() override {
    if (const std::string reason = lacking(GetParam().num_gpus); !reason.empty()) GTEST_SKIP() << reason;
  }
  int num_ranks() const { return GetParam().num_ranks; }
};
inline std::string placement_name(const ::testing::TestParamInfo<Placement>& info) { return name(info.param); }

/// What a test saw: one line, for whoever reads the log of a machine that is gone.
template <class... Args>
void saw(const char* format, Args... args) {
  std::printf("[   SAW    ] ");
  std::printf(format, args...);  // NOLINT(cppcoreguidelines-pro-type-vararg)
  std::printf("\n");
  std::fflush(stdout);
}
inline void saw(const std::string& text) { saw("%s", text.c_str()); }

}  // namespace turnout::testing
