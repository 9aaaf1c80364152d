#include <atomic>

#include "engine/cuda/throughput/bulk.h"

namespace turnout::engine::cuda {
namespace {

#ifdef TURNOUT_NO_SM90
bool ask() { return false; }
#else
__global__ void probe_kernel() {}

bool ask() {
  cudaFuncAttributes code{};
  int device = 0, major = 0;
  const bool known = cudaFuncGetAttributes(&code, probe_kernel) == cudaSuccess && cudaGetDevice(&device) == cudaSuccess &&
                     cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess;
  // Code made from PTX is as new as its PTX.
  return known && major >= 9 && code.ptxVersion >= 90 && code.binaryVersion >= 90;
}
#endif

}  // namespace

bool has_bulk() {
  constexpr int kMost = 64;
  static std::atomic<signed char> known[kMost];  // 0: not asked yet
  int device = 0;
  if (cudaGetDevice(&device) != cudaSuccess || device >= kMost) return false;
  signed char has = known[device].load(std::memory_order_relaxed);
  if (has == 0) {
    has = ask() ? 1 : -1;
    known[device].store(has, std::memory_order_relaxed);
  }
  return has > 0;
}

}  // namespace turnout::engine::cuda
