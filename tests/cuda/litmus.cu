// Stores of one GPU as another sees them. A warp of the writer stores a value, the same in all its bits that count, to a few lines of
// 128 bytes, eight threads a line in one instruction; a warp of the reader loads the lines in the same way. What one access may show in part is
// torn: words of 16 bytes if a thread sees two values in one load, lines if threads of one load see different values.
#include <cuda_runtime.h>

#include <chrono>
#include <stdexcept>
#include <string>
#include <thread>

#include "cuda/litmus.h"
#include "engine/cuda/device/ptx.cuh"

namespace turnout::testing {

namespace {

using namespace engine::cuda;

constexpr int kWarps = 4, kBlocks = 8;         // each warp has four lines of its own
constexpr int kWords = kBlocks * kWarps * 32;  // of 16 bytes

void check(cudaError_t result, const char* what) {
  if (result != cudaSuccess) throw std::runtime_error(std::string("litmus: ") + what + ": " + cudaGetErrorString(result));
}

__device__ __forceinline__ uint4 load_volatile(const uint4* p) {
  uint4 v;
  asm volatile("ld.volatile.global.v4.u32 {%0,%1,%2,%3},[%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory");
  return v;
}
__device__ __forceinline__ void store_volatile(uint4* p, uint4 v) {
  asm volatile("st.volatile.global.v4.u32 [%0],{%1,%2,%3,%4};" ::"l"(p), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
__device__ __forceinline__ void store_half(void* p, uint32_t v) {
  asm volatile("st.volatile.global.v2.u32 [%0],{%1,%2};" ::"l"(p), "r"(v), "r"(v) : "memory");
}

template <Access kAccess>
__global__ void write_kernel(uint4* words, const volatile uint32_t* stop) {
  __shared__ alignas(128) uint4 staged[kWarps * 32];
  const int warp = static_cast<int>(threadIdx.x / 32), lane = static_cast<int>(threadIdx.x % 32);
  uint4* at = words + (static_cast<int>(blockIdx.x) * kWarps + warp) * 32 + lane;
  for (uint32_t i = 1;; ++i) {
    if (i % 256 == 0 && *stop) break;
    const uint4 v{i, i, i, i};
    if (kAccess == Access::word) store_word(at, v);
    if (kAccess == Access::stream) store_stream(at, v);
    if (kAccess == Access::vector) store_volatile(at, v);
    if (kAccess == Access::two_halves) {
      store_half(at, i);
      __nanosleep(20);
      store_half(reinterpret_cast<uint2*>(at) + 1, i);
    }
#ifdef TURNOUT_HAS_BULK
    if (kAccess == Access::bulk) {
      staged[threadIdx.x] = v;
      fence_shared_to_bulk();
      __syncwarp();
      if (lane == 0) {
        bulk_store(at, &staged[warp * 32], 512);
        bulk_commit();
        bulk_wait_read<0>();
      }
      __syncwarp();
    }
#else
    (void)staged;
#endif
  }
  __threadfence_system();
}

template <Access kAccess>
__global__ void read_kernel(const uint4* words, const volatile uint32_t* stop, Litmus* result) {
  const int warp = static_cast<int>(threadIdx.x / 32), lane = static_cast<int>(threadIdx.x % 32);
  const uint4* at = words + (static_cast<int>(blockIdx.x) * kWarps + warp) * 32 + lane;
  Litmus mine;
  uint32_t last = 0;
  for (uint32_t i = 1;; ++i) {
    if (i % 256 == 0 && __any_sync(0xffffffffu, *stop != 0)) break;
    const uint4 v = kAccess == Access::vector ? load_volatile(at) : kAccess == Access::stream ? load_stream(at) : load_word(at);
    ++mine.reads;
    mine.changes += v.x != last;
    last = v.x;
    mine.torn_words += v.x != v.y || v.x != v.z || v.x != v.w;
    // The line: eight lanes.
    const int first = lane / 8 * 8;
    const uint32_t flag = __shfl_sync(0xffffffffu, v.w, first + 7), head = __shfl_sync(0xffffffffu, v.x, first);
    const unsigned differs = __ballot_sync(0xffffffffu, v.x != head || v.w != head), behind = __ballot_sync(0xffffffffu, v.x < flag || v.w < flag);
    if (lane == first) {
      mine.torn_lines += (differs >> first & 0xffu) != 0;
      mine.lines_behind_flag += (behind >> first & 0xffu) != 0;
    }
  }
  const auto add = [](uint64_t* to, uint64_t n) { atomicAdd(reinterpret_cast<unsigned long long*>(to), static_cast<unsigned long long>(n)); };
  add(&result->reads, mine.reads);
  add(&result->changes, mine.changes);
  add(&result->torn_words, mine.torn_words);
  add(&result->torn_lines, mine.torn_lines);
  add(&result->lines_behind_flag, mine.lines_behind_flag);
}

template <Access kAccess>
Litmus run(int writer, int reader, int ms) {
  int unused = 0;
  uint4* words = nullptr;
  Litmus* result = nullptr;
  uint32_t* stop = nullptr;
  cudaStream_t writing = nullptr, reading = nullptr;
  cudaFuncAttributes loaded;
  check(cudaHostAlloc(reinterpret_cast<void**>(&stop), 4, cudaHostAllocMapped | cudaHostAllocPortable), "cudaHostAlloc");
  *stop = 0;
  check(cudaSetDevice(reader), "cudaSetDevice");
  check(cudaMalloc(reinterpret_cast<void**>(&words), kWords * sizeof(uint4)), "cudaMalloc");
  check(cudaMalloc(reinterpret_cast<void**>(&result), sizeof(Litmus)), "cudaMalloc");
  check(cudaMemset(words, 0, kWords * sizeof(uint4)), "cudaMemset");
  check(cudaMemset(result, 0, sizeof(Litmus)), "cudaMemset");
  check(cudaFuncGetAttributes(&loaded, read_kernel<kAccess>), "loading the reader");
  check(cudaStreamCreateWithFlags(&reading, cudaStreamNonBlocking), "cudaStreamCreate");
  check(cudaDeviceSynchronize(), "setting up");
  check(cudaSetDevice(writer), "cudaSetDevice");
  if (writer != reader) {
    check(cudaDeviceCanAccessPeer(&unused, writer, reader), "cudaDeviceCanAccessPeer");
    if (!unused) throw std::runtime_error("litmus: GPU " + std::to_string(writer) + " cannot reach GPU " + std::to_string(reader));
    const cudaError_t e = cudaDeviceEnablePeerAccess(reader, 0);
    if (e != cudaErrorPeerAccessAlreadyEnabled) check(e, "cudaDeviceEnablePeerAccess");
    (void)cudaGetLastError();
  }
  check(cudaFuncGetAttributes(&loaded, write_kernel<kAccess>), "loading the writer");
  check(cudaStreamCreateWithFlags(&writing, cudaStreamNonBlocking), "cudaStreamCreate");
  write_kernel<kAccess><<<kBlocks, kWarps * 32, 0, writing>>>(words, stop);
  check(cudaGetLastError(), "the writer");
  check(cudaSetDevice(reader), "cudaSetDevice");
  read_kernel<kAccess><<<kBlocks, kWarps * 32, 0, reading>>>(words, stop, result);
  check(cudaGetLastError(), "the reader");
  std::this_thread::sleep_for(std::chrono::milliseconds(ms));  // how long to look
  *static_cast<volatile uint32_t*>(stop) = 1;
  check(cudaStreamSynchronize(reading), "the reader");
  check(cudaStreamSynchronize(writing), "the writer");
  Litmus found;
  check(cudaMemcpy(&found, result, sizeof found, cudaMemcpyDeviceToHost), "cudaMemcpy");
  check(cudaStreamDestroy(reading), "cudaStreamDestroy");
  check(cudaStreamDestroy(writing), "cudaStreamDestroy");
  check(cudaFree(words), "cudaFree");
  check(cudaFree(result), "cudaFree");
  check(cudaFreeHost(stop), "cudaFreeHost");
  return found;
}

}  // namespace

const char* name(Access access) {
  switch (access) {
    case Access::word: return "word";
    case Access::stream: return "stream";
    case Access::vector: return "vector";
    case Access::bulk: return "bulk";
    case Access::two_halves: return "two_halves";
  }
  return "?";
}

Litmus run_litmus(Access access, int writer, int reader, int ms) {
  switch (access) {
    case Access::word: return run<Access::word>(writer, reader, ms);
    case Access::stream: return run<Access::stream>(writer, reader, ms);
    case Access::vector: return run<Access::vector>(writer, reader, ms);
    case Access::bulk: return run<Access::bulk>(writer, reader, ms);
    default: return run<Access::two_halves>(writer, reader, ms);
  }
}

}  // namespace turnout::testing
