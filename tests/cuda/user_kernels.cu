// Kernels of a user's program.
#include <stdexcept>
#include <string>

#include "cuda/user_kernels.h"

namespace turnout::testing {

namespace {

constexpr int kWholeThreads = 256;

void check(cudaError_t result, const char* what) {
  if (result != cudaSuccess) throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(result));
}

__device__ __forceinline__ uint64_t now_ns() {
  uint64_t t = 0;
  asm volatile("mov.u64 %0,%globaltimer;" : "=l"(t));
  return t;
}
__device__ __forceinline__ int64_t thread_index() { return blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x; }
__device__ __forceinline__ int64_t num_threads() { return static_cast<int64_t>(gridDim.x) * blockDim.x; }

__global__ void spin_kernel(uint64_t ns) {
  const uint64_t start = now_ns();
  while (now_ns() - start < ns) {
  }
}

__global__ void copy_kernel(uint32_t* to, const uint32_t* from, int64_t n) {
  for (int64_t i = thread_index(); i < n; i += num_threads()) to[i] = from[i];
}

__global__ void produce_kernel(uint32_t* to, const uint32_t* from, int64_t n, uint64_t late) {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
  const uint64_t start = now_ns();
  while (now_ns() - start < late) {
  }
  for (int64_t i = thread_index(); i < n; i += num_threads()) to[i] = from[i];
}
__global__ void consume_kernel(uint32_t* to, const uint32_t* from, int64_t n) {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
  for (int64_t i = thread_index(); i < n; i += num_threads()) to[i] = from[i];
}

__global__ void mark_kernel(uint32_t* flag, uint32_t value) {
  *static_cast<volatile uint32_t*>(flag) = value;
  __threadfence_system();
}

/// All shared memory of a multiprocessor: no other block fits beside this one.
__global__ void occupy_kernel(uint32_t* started, const uint32_t* stop, uint64_t most) {
  const uint64_t start = now_ns();
  if (threadIdx.x != 0) return;  // the block stays, and one thread asks: the host's words lie across PCIe, which others need
  atomicAdd_system(started, 1u);
  while (*static_cast<const volatile uint32_t*>(stop) == 0 && now_ns() - start < most) __nanosleep(20'000);
}

__global__ void meet_kernel(uint32_t* counter, uint32_t* met, uint64_t most) {
  if (threadIdx.x != 0) return;
  const uint64_t start = now_ns();
  atomicAdd(counter, 1u);
  bool all = false;
  while (!all && now_ns() - start < most) all = *static_cast<volatile uint32_t*>(counter) >= gridDim.x;
  if (!all) *static_cast<volatile uint32_t*>(met) = 2;
  else if (blockIdx.x == 0) *static_cast<volatile uint32_t*>(met) = 1;
  __threadfence_system();
}

/// Exponents of bf16 stay away from those of infinities and NaN.
__device__ __forceinline__ uint32_t word_of(int64_t row, int64_t word) {
  uint64_t z = static_cast<uint64_t>(row) * 0x9e3779b97f4a7c15ull + static_cast<uint64_t>(word) * 0xbf58476d1ce4e5b9ull;
  z ^= z >> 29;
  z *= 0x94d049bb133111ebull;
  return static_cast<uint32_t>(z >> 32) & 0xbfffbfffu;
}

__global__ void fill_kernel(uint32_t* rows, int64_t num_rows, int64_t num_words, int64_t stride) {
  for (int64_t row = blockIdx.x; row < num_rows; row += gridDim.x) {
    for (int64_t i = threadIdx.x; i < num_words; i += blockDim.x) rows[row * stride + i] = word_of(row, i);
  }
}

__global__ void count_kernel(const uint32_t* rows, int64_t num_rows, int64_t num_words, int64_t stride, int64_t first, int64_t step,
                             unsigned long long* wrong) {
  unsigned long long mine = 0;
  for (int64_t row = blockIdx.x; row < num_rows; row += gridDim.x) {
    for (int64_t i = threadIdx.x; i < num_words; i += blockDim.x) mine += rows[row * stride + i] != word_of(row * step + first, i);
  }
  if (mine) atomicAdd(wrong, mine);
}

uint64_t count_of(std::chrono::nanoseconds time) { return static_cast<uint64_t>(time.count()); }

int whole_bytes() {
  int device = 0, bytes = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
  check(cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device), "cudaDeviceGetAttribute");
  return bytes;
}

}  // namespace

void load_user_kernels() {
  cudaFuncAttributes unused;
  for (const void* kernel :
       {reinterpret_cast<const void*>(spin_kernel), reinterpret_cast<const void*>(copy_kernel), reinterpret_cast<const void*>(mark_kernel),
        reinterpret_cast<const void*>(occupy_kernel), reinterpret_cast<const void*>(meet_kernel), reinterpret_cast<const void*>(fill_kernel),
        reinterpret_cast<const void*>(count_kernel), reinterpret_cast<const void*>(produce_kernel), reinterpret_cast<const void*>(consume_kernel)}) {
    check(cudaFuncGetAttributes(&unused, kernel), "loading a test kernel");
  }
  check(cudaFuncSetAttribute(occupy_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, whole_bytes()), "cudaFuncSetAttribute");
  check(cudaFuncSetAttribute(meet_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, whole_bytes()), "cudaFuncSetAttribute");
}

void spin(cudaStream_t stream, std::chrono::nanoseconds time) {
  spin_kernel<<<1, 1, 0, stream>>>(count_of(time));
  check(cudaGetLastError(), "spin kernel");
}
void copy_words(cudaStream_t stream, void* to, const void* from, size_t num_bytes) {
  copy_kernel<<<64, 256, 0, stream>>>(static_cast<uint32_t*>(to), static_cast<const uint32_t*>(from), static_cast<int64_t>(num_bytes / 4));
  check(cudaGetLastError(), "copy kernel");
}
void produce_words(cudaStream_t stream, void* to, const void* from, size_t num_bytes, std::chrono::nanoseconds late) {
  produce_kernel<<<4, 256, 0, stream>>>(static_cast<uint32_t*>(to), static_cast<const uint32_t*>(from), static_cast<int64_t>(num_bytes / 4),
                                        count_of(late));
  check(cudaGetLastError(), "produce kernel");
}
void consume_words(cudaStream_t stream, void* to, const void* from, size_t num_bytes) {
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(4);
  config.blockDim = dim3(256);
  config.stream = stream;
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &attribute;
  config.numAttrs = 1;
  check(cudaLaunchKernelEx(&config, consume_kernel, static_cast<uint32_t*>(to), static_cast<const uint32_t*>(from),
                           static_cast<int64_t>(num_bytes / 4)),
        "consume kernel");
}
void mark(cudaStream_t stream, uint32_t* flag, uint32_t value) {
  mark_kernel<<<1, 1, 0, stream>>>(flag, value);
  check(cudaGetLastError(), "mark kernel");
}
void occupy(cudaStream_t stream, int num_sms, uint32_t* started, const uint32_t* stop, std::chrono::nanoseconds most) {
  const auto bytes = static_cast<size_t>(whole_bytes());
  occupy_kernel<<<num_sms, kWholeThreads, bytes, stream>>>(started, stop, count_of(most));
  check(cudaGetLastError(), "occupy kernel");
}
void meet(cudaStream_t stream, int num_sms, uint32_t* counter, uint32_t* met, std::chrono::nanoseconds most) {
  const auto bytes = static_cast<size_t>(whole_bytes());
  meet_kernel<<<num_sms, kWholeThreads, bytes, stream>>>(counter, met, count_of(most));
  check(cudaGetLastError(), "meet kernel");
}
void fill_rows(cudaStream_t stream, uint32_t* rows, int64_t num_rows, int64_t num_words, int64_t stride_words) {
  fill_kernel<<<1024, 256, 0, stream>>>(rows, num_rows, num_words, stride_words);
  check(cudaGetLastError(), "fill kernel");
}
void count_wrong_rows(cudaStream_t stream, const uint32_t* rows, int64_t num_rows, int64_t num_words, int64_t stride_words, int64_t first,
                      int64_t step, unsigned long long* wrong) {
  count_kernel<<<1024, 256, 0, stream>>>(rows, num_rows, num_words, stride_words, first, step, wrong);
  check(cudaGetLastError(), "count kernel");
}

}  // namespace turnout::testing
