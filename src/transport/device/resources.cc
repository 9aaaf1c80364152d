// The process keeps its streams: each new one may be given the queue of any that lives, however many have gone.
#include "transport/device/resources.h"

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>
#include <map>
#include <mutex>
#include <vector>

#include "transport/device/driver.h"
#include "turnout/error.h"

namespace turnout::transport::device {

namespace {

cudaStream_t make_stream(int priority) {
  cudaStream_t stream = nullptr;
  check(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, priority), "making a stream");
  return stream;
}

/// Never destroyed: streams are given back by what lives until the process ends.
struct Streams {
  std::mutex mutex;
  std::map<int, cudaStream_t> side;
  std::map<int, std::vector<cudaStream_t>> spare;
};
Streams& streams() {
  static auto* const all = new Streams;  // NOLINT(cppcoreguidelines-owning-memory)
  return *all;
}

void set(cudaMemPool_t pool, cudaMemPoolAttr attribute, uint64_t value) {
  check(cudaMemPoolSetAttribute(pool, attribute, &value), "setting up a pool of memory");
}
void set_flag(cudaMemPool_t pool, cudaMemPoolAttr attribute, int value) {
  check(cudaMemPoolSetAttribute(pool, attribute, &value), "setting up a pool of memory");
}

}  // namespace

cudaStream_t side_stream(int device) {
  Streams& all = streams();
  const std::lock_guard lock(all.mutex);
  const auto found = all.side.find(device);
  if (found != all.side.end()) return found->second;
  const CurrentDevice current(device);
  int least = 0, greatest = 0;
  check(cudaDeviceGetStreamPriorityRange(&least, &greatest), "asking for the priorities of streams");
  return all.side[device] = make_stream(greatest);
}

std::unique_lock<std::recursive_mutex> hold_side_streams() {
  static auto* const mutex = new std::recursive_mutex;  // NOLINT(cppcoreguidelines-owning-memory): as Streams
  return std::unique_lock(*mutex);
}

std::shared_ptr<CUstream_st> borrow_stream(int device) {
  Streams& all = streams();
  cudaStream_t stream = nullptr;
  {
    const std::lock_guard lock(all.mutex);
    std::vector<cudaStream_t>& spare = all.spare[device];
    if (!spare.empty()) {
      stream = spare.back();
      spare.pop_back();
    }
  }
  if (!stream) {
    const CurrentDevice current(device);
    stream = make_stream(0);
  }
  return {stream, [device](cudaStream_t s) {
            if (cudaStreamQuery(s) != cudaSuccess) {  // whoever came next would wait for what is still under way
              (void)cudaGetLastError();
              (void)cudaStreamDestroy(s);
              return;
            }
            Streams& kept = streams();
            const std::lock_guard lock(kept.mutex);
            kept.spare[device].push_back(s);
          }};
}

std::shared_ptr<void> borrow_pinned(size_t num_bytes) {
  struct Kept {
    std::mutex mutex;
    std::multimap<size_t, void*> spare;
  };
  static auto* const kept = new Kept;  // NOLINT(cppcoreguidelines-owning-memory)
  const size_t size = std::bit_ceil(std::max<size_t>(num_bytes, 4096));
  void* data = nullptr;
  {
    const std::lock_guard lock(kept->mutex);
    if (const auto found = kept->spare.find(size); found != kept->spare.end()) {
      data = found->second;
      kept->spare.erase(found);
    }
  }
  if (!data) check(cudaHostAlloc(&data, size, cudaHostAllocMapped | cudaHostAllocPortable), "allocating pinned memory");
  std::memset(data, 0, size);
  return {data, [size](void* p) {
            const std::lock_guard lock(kept->mutex);
            kept->spare.emplace(size, p);
          }};
}

MemoryPool::MemoryPool(int device) : device_(device) {
  const auto held = hold_side_streams();
  const CurrentDevice current(device);
  cudaMemPoolProps props{};
  props.allocType = cudaMemAllocationTypePinned;
  props.location.type = cudaMemLocationTypeDevice;
  props.location.id = device;
  check(cudaMemPoolCreate(&pool_, &props), "making a pool of memory");
  try {
    set_flag(pool_, cudaMemPoolReuseAllowInternalDependencies, 0);
    set(pool_, cudaMemPoolAttrReleaseThreshold, UINT64_MAX);
    // So that the first calls need not ask the driver while others wait for them.
    const cudaStream_t stream = side_stream(device);
    free(allocate(1, stream, "making a pool of memory"), stream);
    check(cudaStreamSynchronize(stream), "making a pool of memory");
  } catch (...) {
    (void)cudaMemPoolDestroy(pool_);
    throw;
  }
}

MemoryPool::~MemoryPool() {
  const auto held = hold_side_streams();
  (void)cudaMemPoolDestroy(pool_);
}

std::byte* MemoryPool::allocate(size_t num_bytes, cudaStream_t stream, std::string_view what) {
  const auto held = hold_side_streams();
  const CurrentDevice current(device_);
  void* data = nullptr;
  check(cudaMallocFromPoolAsync(&data, num_bytes, pool_, stream), what);
  return static_cast<std::byte*>(data);
}

void MemoryPool::free(std::byte* data, cudaStream_t stream) noexcept {
  try {
    const auto held = hold_side_streams();
    const CurrentDevice current(device_);
    (void)cudaFreeAsync(data, stream);
  } catch (const TransportError&) {
    // The context is gone, and the memory with it.
  }
}

}  // namespace turnout::transport::device
