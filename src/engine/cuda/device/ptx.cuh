// The instructions that CUDA C++ has no name for: accesses at system scope, whole 16-byte words, bulk copies.
#pragma once
#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "core/dtype.h"

namespace turnout::engine::cuda {

__device__ __forceinline__ uint64_t load_relaxed(const uint64_t* p) {
  uint64_t v;
  asm volatile("ld.relaxed.sys.global.u64 %0,[%1];" : "=l"(v) : "l"(p) : "memory");
  return v;
}
__device__ __forceinline__ uint64_t load_acquire(const uint64_t* p) {
  uint64_t v;
  asm volatile("ld.acquire.sys.global.u64 %0,[%1];" : "=l"(v) : "l"(p) : "memory");
  return v;
}
__device__ __forceinline__ void store_relaxed(uint64_t* p, uint64_t v) {
  asm volatile("st.relaxed.sys.global.u64 [%0],%1;" ::"l"(p), "l"(v) : "memory");
}
__device__ __forceinline__ void store_release(uint64_t* p, uint64_t v) {
  asm volatile("st.release.sys.global.u64 [%0],%1;" ::"l"(p), "l"(v) : "memory");
}
/// Signals between blocks of this GPU.
__device__ __forceinline__ uint32_t load_acquire_gpu(const uint32_t* p) {
  uint32_t v;
  asm volatile("ld.acquire.gpu.global.u32 %0,[%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
__device__ __forceinline__ void store_release_gpu(uint32_t* p, uint32_t v) {
  asm volatile("st.release.gpu.global.u32 [%0],%1;" ::"l"(p), "r"(v) : "memory");
}
__device__ __forceinline__ void fence_system() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }
__device__ __forceinline__ uint64_t clock_ns() {
  uint64_t t;
  asm volatile("mov.u64 %0,%globaltimer;" : "=l"(t));
  return t;
}

/// Four bytes to shared memory while the thread goes on; copies_done(), then the block must synchronise before others read them.
__device__ __forceinline__ void copy_async(int32_t* shared, const int32_t* global) {
  asm volatile("cp.async.ca.shared.global [%0],[%1],4;" ::"r"(static_cast<uint32_t>(__cvta_generic_to_shared(shared))), "l"(global) : "memory");
}
__device__ __forceinline__ void copies_done() { asm volatile("cp.async.wait_all;" ::: "memory"); }

/// A 16-byte word that carries twelve bytes and the epoch. On sm_90 and newer one access of type b128 is single-copy atomic by
/// the memory model, so a word that shows the epoch shows its payload too: neither fence nor signal.
/// On sm_80 the vector access is one transaction of an aligned 16-byte word; tests/cuda has the litmus test that this rests on.
__device__ __forceinline__ void store_word(uint4* p, uint4 v) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "{.reg .b64 lo,hi; .reg .b128 q; mov.b64 lo,{%1,%2}; mov.b64 hi,{%3,%4}; mov.b128 q,{lo,hi};"
      " st.relaxed.sys.global.b128 [%0],q;}" ::"l"(p),
      "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
      : "memory");
#else
  asm volatile("st.volatile.global.v4.u32 [%0],{%1,%2,%3,%4};" ::"l"(p), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
#endif
}
/// ptxas loads what somebody uses only, in two accesses where that lies apart (CUDA 13.0: the first 32 bits and the epoch), and then an epoch may
/// come with what was there before it. So the epoch depends on the rest, in a way that no compiler can see through: shifted by 32 bits
/// that is 0, and the grids of these kernels have one row.
__device__ __forceinline__ uint4 load_word(const uint4* p) {
  uint4 v;
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "{.reg .b64 lo,hi; .reg .b128 q; ld.relaxed.sys.global.b128 q,[%4]; mov.b128 {lo,hi},q;"
      " mov.b64 {%0,%1},lo; mov.b64 {%2,%3},hi;}"
      : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
      : "l"(p)
      : "memory");
#else
  asm volatile("ld.volatile.global.v4.u32 {%0,%1,%2,%3},[%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory");
#endif
  uint32_t rest;
  asm("{.reg .b32 n; mov.u32 n,%%nctaid.y; add.u32 n,n,31; shr.u32 %0,%1,n;}" : "=r"(rest) : "r"(v.x | v.y | v.z));
  v.w |= rest;
  return v;
}

/// Two floats as e4m3, the first in the low byte: the bits of core::float_to_fp8_e4m3 (tests/cuda goes over all floats).
__device__ __forceinline__ uint32_t to_e4m3(float low, float high) {
#if __CUDA_ARCH__ >= 890
  uint16_t v;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0,%2,%1;" : "=h"(v) : "f"(low), "f"(high));
  return v;
#else
  return static_cast<uint32_t>(core::float_to_fp8_e4m3(low)) | static_cast<uint32_t>(core::float_to_fp8_e4m3(high)) << 8;
#endif
}

/// Two floats rounded, the first in the low half. NaN comes out as 0x7fff, which is not the canonical one.
__device__ __forceinline__ uint32_t to_bf16(float low, float high) {
  uint32_t v;
  asm("cvt.rn.bf16x2.f32 %0,%2,%1;" : "=r"(v) : "f"(low), "f"(high));
  return v;
}
__device__ __forceinline__ uint32_t to_fp16(float low, float high) {
  uint32_t v;
  asm("cvt.rn.f16x2.f32 %0,%2,%1;" : "=r"(v) : "f"(low), "f"(high));
  return v;
}

__device__ __forceinline__ float from_fp16(uint32_t bits) {
  float v;
  asm("cvt.f32.f16 %0,%1;" : "=f"(v) : "h"(static_cast<uint16_t>(bits)));
  return v;
}

/// Plain 16-byte accesses that do not stay in L1: rows are read and written once.
__device__ __forceinline__ uint4 load_stream(const uint4* p) {
  uint4 v;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0,%1,%2,%3},[%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory");
  return v;
}
/// The same, or zeros: no branch, so that loads of several rows stay together.
__device__ __forceinline__ uint4 load_stream_if(bool wanted, const uint4* p) {
  uint4 v;
  asm volatile(
      "{.reg .pred q; setp.ne.u32 q,%5,0; mov.u32 %0,0; mov.u32 %1,0; mov.u32 %2,0; mov.u32 %3,0;"
      " @q ld.global.L1::no_allocate.v4.u32 {%0,%1,%2,%3},[%4];}"
      : "=&r"(v.x), "=&r"(v.y), "=&r"(v.z), "=&r"(v.w)
      : "l"(p), "r"(static_cast<uint32_t>(wanted))
      : "memory");
  return v;
}
__device__ __forceinline__ void store_stream(uint4* p, uint4 v) {
  asm volatile("st.global.L1::no_allocate.v4.u32 [%0],{%1,%2,%3,%4};" ::"l"(p), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}

/// Of `threads` threads of a block, which are whole warps; no other barrier of the kernel has the number.
__device__ __forceinline__ void sync_some(int number, int threads) { asm volatile("bar.sync %0,%1;" ::"r"(number), "r"(threads) : "memory"); }
/// Of a thread that the others wait for and that waits for nobody.
__device__ __forceinline__ void arrive_some(int number, int threads) { asm volatile("bar.arrive %0,%1;" ::"r"(number), "r"(threads) : "memory"); }

/// Kernels of one call follow each other closely (launch.h): the next may start once every block has said so; wait_for_previous
/// returns when the kernel before has ended and what it wrote can be read.
__device__ __forceinline__ void let_next_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
__device__ __forceinline__ void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

#if !defined(TURNOUT_NO_SM90) && (!defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900)
#define TURNOUT_HAS_BULK 1
/// Bulk copies between global and shared memory: TMA without a tensor map. Sizes and addresses are multiples of 16 bytes.
__device__ __forceinline__ uint32_t shared_address(const void* p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }
__device__ __forceinline__ void barrier_init(uint64_t* b, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0],%1;" ::"r"(shared_address(b)), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void barrier_arrive(uint64_t* b) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _,[%0];" ::"r"(shared_address(b)) : "memory");
}
__device__ __forceinline__ void barrier_expect(uint64_t* b, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _,[%0],%1;" ::"r"(shared_address(b)), "r"(bytes) : "memory");
}
__device__ __forceinline__ bool barrier_try(uint64_t* b, uint32_t parity) {
  uint32_t done;
  asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p,[%1],%2; selp.u32 %0,1,0,p;}"
               : "=r"(done)
               : "r"(shared_address(b)), "r"(parity)
               : "memory");
  return done != 0;
}
/// The same without any wait.
__device__ __forceinline__ bool barrier_test(uint64_t* b, uint32_t parity) {
  uint32_t done;
  asm volatile("{.reg .pred p; mbarrier.test_wait.parity.shared::cta.b64 p,[%1],%2; selp.u32 %0,1,0,p;}"
               : "=r"(done)
               : "r"(shared_address(b)), "r"(parity)
               : "memory");
  return done != 0;
}
/// For copies of this GPU's own making only, which always complete: never for what a peer must do.
__device__ __forceinline__ void barrier_wait(uint64_t* b, uint32_t parity) {
  while (!barrier_try(b, parity)) {
  }
}
__device__ __forceinline__ void bulk_load(void* shared, const void* global, uint32_t bytes, uint64_t* b) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0],[%1],%2,[%3];" ::"r"(shared_address(shared)), "l"(global),
               "r"(bytes), "r"(shared_address(b))
               : "memory");
}
__device__ __forceinline__ void bulk_store(void* global, const void* shared, uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0],[%1],%2;" ::"l"(global), "r"(shared_address(shared)), "r"(bytes) : "memory");
}
/// The same for lines that nobody reads soon: they leave L2 first, and what has been staged there stays.
__device__ __forceinline__ uint64_t evict_first_policy() {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0,1.0;" : "=l"(policy));
  return policy;
}
/// load_stream_if of such lines.
__device__ __forceinline__ uint4 load_once_if(bool wanted, const uint4* p, uint64_t policy) {
  uint4 v;
  asm volatile(
      "{.reg .pred q; setp.ne.u32 q,%5,0; mov.u32 %0,0; mov.u32 %1,0; mov.u32 %2,0; mov.u32 %3,0;"
      " @q ld.global.L1::no_allocate.L2::cache_hint.v4.u32 {%0,%1,%2,%3},[%4],%6;}"
      : "=&r"(v.x), "=&r"(v.y), "=&r"(v.z), "=&r"(v.w)
      : "l"(p), "r"(static_cast<uint32_t>(wanted)), "l"(policy)
      : "memory");
  return v;
}
__device__ __forceinline__ void bulk_store(void* global, const void* shared, uint32_t bytes, uint64_t policy) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group.L2::cache_hint [%0],[%1],%2,%3;" ::"l"(global), "r"(shared_address(shared)), "r"(bytes),
               "l"(policy)
               : "memory");
}
__device__ __forceinline__ void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
/// Until at most N groups of this thread have yet to read their source (bulk_wait: to complete).
template <int N>
__device__ __forceinline__ void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(N) : "memory");
}
template <int N>
__device__ __forceinline__ void bulk_wait() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(N) : "memory");
}
/// Shared memory written by ordinary stores is read by bulk copies afterwards.
__device__ __forceinline__ void fence_shared_to_bulk() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
/// Global memory written by others, seen by an ordinary load, is read by bulk copies afterwards.
__device__ __forceinline__ void fence_global_to_bulk() { asm volatile("fence.proxy.async.global;" ::: "memory"); }
#endif

/// Whether this code has bulk copies, and their ends where it has not: nothing.
#ifdef TURNOUT_HAS_BULK
inline constexpr bool kHasBulk = true;
__device__ __forceinline__ void bulk_can_read() { fence_shared_to_bulk(); }
__device__ __forceinline__ void bulk_put(void* global, const void* shared, uint32_t bytes) { bulk_store(global, shared, bytes); }
__device__ __forceinline__ void bulk_close() { bulk_commit(); }
template <int N>
__device__ __forceinline__ void bulk_have_read() {
  bulk_wait_read<N>();
}
__device__ __forceinline__ void bulk_finish() { bulk_wait<0>(); }
/// A row into shared memory, and the wait for it: a barrier is for one arrival and used once.
__device__ __forceinline__ void fetch_init(uint64_t* b) { barrier_init(b, 1); }
__device__ __forceinline__ void fetch_row(void* shared, const void* global, uint32_t bytes, uint64_t* b) {
  barrier_expect(b, bytes);
  bulk_load(shared, global, bytes, b);
}
__device__ __forceinline__ void wait_for_fetched(uint64_t* b) { barrier_wait(b, 0); }
/// Several rows for one barrier: first how many bytes they are.
__device__ __forceinline__ void fetch_expect(uint64_t* b, uint32_t bytes) { barrier_expect(b, bytes); }
__device__ __forceinline__ void fetch_one(void* shared, const void* global, uint32_t bytes, uint64_t* b) { bulk_load(shared, global, bytes, b); }
#else
inline constexpr bool kHasBulk = false;
__device__ __forceinline__ void bulk_can_read() {}
__device__ __forceinline__ void bulk_put(void*, const void*, uint32_t) {}
__device__ __forceinline__ void bulk_close() {}
template <int N>
__device__ __forceinline__ void bulk_have_read() {}
__device__ __forceinline__ void bulk_finish() {}
__device__ __forceinline__ void fetch_init(uint64_t*) {}
__device__ __forceinline__ void fetch_row(void*, const void*, uint32_t, uint64_t*) {}
__device__ __forceinline__ void wait_for_fetched(uint64_t*) {}
__device__ __forceinline__ void fetch_expect(uint64_t*, uint32_t) {}
__device__ __forceinline__ void fetch_one(void*, const void*, uint32_t, uint64_t*) {}
#endif

}  // namespace turnout::engine::cuda
