// How the one kernel of a low-latency call keeps the rule that blocks wait only for blocks that have started or for remote
// senders: work is given out by block index, which needs no atomic; before a block waits it looks whether all others have
// started, and sends what those owe that have not. A row sent twice is the same words twice.
#pragma once
#include "engine/cuda/device/header.cuh"
#include "engine/cuda/device/rows.cuh"

namespace turnout::engine::cuda::low_latency {

__device__ __forceinline__ int thread() { return static_cast<int>(threadIdx.x); }
__device__ __forceinline__ int num_threads() { return static_cast<int>(blockDim.x); }
__device__ __forceinline__ int block() { return static_cast<int>(blockIdx.x); }
__device__ __forceinline__ int num_blocks() { return static_cast<int>(gridDim.x); }

/// Block 0 tells the others what this rank does and checks what they say; rows are for the rest, if there is a rest.
__device__ __forceinline__ int num_workers() { return num_blocks() > 1 ? num_blocks() - 1 : 1; }
__device__ __forceinline__ int worker_of(int block_index) { return num_blocks() > 1 ? block_index - 1 : 0; }

__device__ __forceinline__ void mark_started(const Common& c, uint32_t epoch) {
  if (thread() == 0) *reinterpret_cast<volatile uint32_t*>(&c.lane_control->started[block()]) = epoch;
}

/// Calls `send(b)` for this block and then for those that have not started; the whole block calls it. One loop, so that the code
/// of sending is there once.
template <class Send>
__device__ __forceinline__ void send_for_all(const Common& c, uint32_t epoch, Send send) {
  __shared__ uint32_t missing[kMaxChannels / 32];
  const auto some_missing = [&] {
    bool all = true;
    for (int b = thread(); b < num_blocks(); b += num_threads()) {
      all = all && *reinterpret_cast<const volatile uint32_t*>(&c.lane_control->started[b]) == epoch;
    }
    return __syncthreads_or(!all);
  };
  int next = 0;
  for (int b = block();;) {
    send(b);
    if (b == block()) {
      if (!some_missing()) return;
      // They start within microseconds, unless others hold the GPU.
      const uint64_t begin = clock_ns();
      while (!__syncthreads_or(clock_ns() - begin > 20'000)) {
        if (!some_missing()) return;
      }
      for (int i = thread(); i < kMaxChannels / 32; i += num_threads()) missing[i] = 0;
      __syncthreads();
      for (int i = thread(); i < num_blocks(); i += num_threads()) {
        if (*reinterpret_cast<const volatile uint32_t*>(&c.lane_control->started[i]) != epoch) atomicOr(&missing[i / 32], 1u << i % 32);
      }
      __syncthreads();
    }
    while (next < num_blocks() && !(missing[next / 32] >> next % 32 & 1)) ++next;
    if (next == num_blocks()) break;
    b = next++;
  }
  __syncthreads();
}

__device__ __forceinline__ const uint4* header_words(const Common& c, Call call, int source) {
  return reinterpret_cast<const uint4*>(c.team.base[c.team.rank] + c.arena.header_at(c.lane, call.copy, source));
}

/// Whether `source` takes part with the same facts as this rank; a block that says no does nothing more. Block 0 makes the record.
__device__ __forceinline__ bool agrees(const Common& c, Call call, int source) {
  uint4 mine, theirs;
  if (!wait_word(c, Phase::counts, c.team.rank, call.epoch, false, header_words(c, call, c.team.rank), &mine)) return false;
  if (!wait_word(c, Phase::counts, source, call.epoch, false, header_words(c, call, source), &theirs)) return false;
  static_assert(HeaderInts::kHash == 0 && HeaderInts::kRefused == 2, "the first word of a header says it all");
  return theirs.x == mine.x && theirs.y == mine.y && theirs.z == 0;
}

}  // namespace turnout::engine::cuda::low_latency
