// A rank that is late.
#include "cuda/job.h"

namespace turnout::bench {

namespace {
__global__ void delay_kernel(uint64_t ns) {
  uint64_t start = 0, now = 0;
  asm volatile("mov.u64 %0,%globaltimer;" : "=l"(start));
  do asm volatile("mov.u64 %0,%globaltimer;" : "=l"(now));
  while (now - start < ns);
}
}  // namespace

void delay(double us, cudaStream_t stream) {
  delay_kernel<<<1, 1, 0, stream>>>(static_cast<uint64_t>(us * 1000));
  cuda_ok(cudaGetLastError(), "delay kernel");
}

}  // namespace turnout::bench
