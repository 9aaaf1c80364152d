// The limit of the link.
#include <algorithm>

#include "cuda/job.h"

namespace turnout::bench {

double link_GBps() {
  int devices = 0;
  cudaGetDeviceCount(&devices);
  if (devices < 2) return 0;
  int before = 0;
  cudaGetDevice(&before);
  constexpr size_t kBytes = size_t{256} << 20;
  void* memory[2][2] = {};
  cudaStream_t streams[2] = {};
  for (int d = 0; d < 2; ++d) {
    cuda_ok(cudaSetDevice(d), "cudaSetDevice");
    cudaDeviceEnablePeerAccess(1 - d, 0);
    (void)cudaGetLastError();
    for (void*& m : memory[d]) cuda_ok(cudaMalloc(&m, kBytes), "cudaMalloc");
    cuda_ok(cudaStreamCreate(&streams[d]), "cudaStreamCreate");
  }
  double best = 0;
  for (int round = 0; round < 4; ++round) {
    cudaEvent_t begin[2], end[2];
    for (int d = 0; d < 2; ++d) {
      cuda_ok(cudaSetDevice(d), "cudaSetDevice");
      cudaEventCreate(&begin[d]);
      cudaEventCreate(&end[d]);
      cudaEventRecord(begin[d], streams[d]);
      for (int i = 0; i < 4; ++i) cuda_ok(cudaMemcpyPeerAsync(memory[1 - d][1], 1 - d, memory[d][0], d, kBytes, streams[d]), "copy");
      cudaEventRecord(end[d], streams[d]);
    }
    float slowest = 0;
    for (int d = 0; d < 2; ++d) {
      cuda_ok(cudaSetDevice(d), "cudaSetDevice");
      cuda_ok(cudaStreamSynchronize(streams[d]), "copy");
      float ms = 0;
      cudaEventElapsedTime(&ms, begin[d], end[d]);
      slowest = std::max(slowest, ms);
      cudaEventDestroy(begin[d]);
      cudaEventDestroy(end[d]);
    }
    best = std::max(best, 4.0 * kBytes / (slowest * 1e6));
  }
  for (int d = 0; d < 2; ++d) {
    cudaSetDevice(d);
    for (void* m : memory[d]) cudaFree(m);
    cudaStreamDestroy(streams[d]);
  }
  cudaSetDevice(before);
  return best;
}

}  // namespace turnout::bench
