// What a device window must do, for ranks that are threads and ranks that are processes.
#pragma once
#include <cuda_runtime_api.h>

#include "cuda/kernels.h"
#include "transport/cuda.h"
#include "transport/inproc/inproc.h"
#include "transport/processes.h"
#include "transport/shm/shm.h"
#include "util/env.h"

namespace turnout::transport::testing {

using turnout::testing::nonzero_words;
using turnout::testing::store_words;
using turnout::testing::wrong_words;

constexpr size_t kWindow = size_t{3} << 20;  ///< no whole number of anybody's granules
constexpr size_t kPart = 64 << 10;           ///< of a window, for each rank that writes into it
constexpr size_t kPartWords = kPart / 8;

/// CUDA does not survive a fork: the answer comes from a child, so that the process that asks may fork later. -1: no GPU can be used.
inline int num_gpus() {
  static const int count = [] {
    const pid_t child = fork();
    if (child == 0) _exit(cuda_reason().empty() ? num_cuda_devices() : 255);
    int status = 0;
    if (waitpid(child, &status, 0) != child || !WIFEXITED(status)) return -1;
    return WEXITSTATUS(status) == 255 ? -1 : WEXITSTATUS(status);
  }();
  return count;
}

/// Why a test that wants `count` GPUs cannot run; empty if it can.
inline std::string lacking(int count) {
  if (num_gpus() < 0) return "no GPU can be used: " + cuda_reason();
  return num_gpus() < count ? "needs " + std::to_string(count) + " GPUs, and here is " + std::to_string(num_gpus()) : "";
}

inline bool by_ipc(const DeviceWindow& window) { return window.transport() == "cuda_p2p" && util::env().device_memory == "ipc"; }

inline uint64_t seed_of(int writer, int owner, uint64_t round) {
  return (round << 40) + (static_cast<uint64_t>(writer) << 32) + (static_cast<uint64_t>(owner) << 24) + 1;
}

/// Every rank's GPU writes into every window, and every rank's GPU finds it in its own; twice, so that stale values are seen.
inline void exchange_words(Bootstrap& bootstrap, DeviceWindow& window, int device) {
  const int rank = bootstrap.rank(), num_ranks = bootstrap.num_ranks();
  require(cudaSetDevice(device) == cudaSuccess, "cudaSetDevice");
  for (uint64_t round = 1; round <= 2; ++round) {
    for (int peer = 0; peer < num_ranks; ++peer) {
      store_words(window.peer(peer) + static_cast<size_t>(rank) * kPart, kPartWords, seed_of(rank, peer, round));
    }
    bootstrap.barrier("written");
    for (int peer = 0; peer < num_ranks; ++peer) {
      const uint64_t wrong = wrong_words(window.local() + static_cast<size_t>(peer) * kPart, kPartWords, seed_of(peer, rank, round));
      require(wrong == 0, "rank " + std::to_string(rank) + ": " + std::to_string(wrong) + " wrong words of rank " + std::to_string(peer));
      // And what this rank reads of a peer is what that peer has.
      require(wrong_words(window.peer(peer) + static_cast<size_t>(rank) * kPart, kPartWords, seed_of(rank, peer, round)) == 0, "reading a peer");
    }
    bootstrap.barrier("read");
  }
}

inline void require_zero(DeviceWindow& window, int device) {
  require(cudaSetDevice(device) == cudaSuccess, "cudaSetDevice");
  require(window.num_bytes() == kWindow, "size");
  const uint64_t nonzero = nonzero_words(window.local(), kWindow / 8);
  require(nonzero == 0, std::to_string(nonzero) + " words are not zero");
}

inline std::vector<std::byte*> addresses(Bootstrap& bootstrap, DeviceWindow& window) {
  std::vector<std::byte*> all;
  for (int peer = 0; peer < bootstrap.num_ranks(); ++peer) all.push_back(window.peer(peer));
  return all;
}

/// The contract of one window from opening to closing. `device_of(rank)` is the rank's GPU.
inline void use_window(Bootstrap& bootstrap, Transport& host, const std::string& name, const std::function<int(int)>& device_of) {
  const int rank = bootstrap.rank(), device = device_of(rank);
  const auto window = open_device_window(bootstrap, host, name, device, kWindow);
  require(window->transport() == name, "transport");
  require_zero(*window, device);
  require(window->peer(rank) == window->local(), "peer() of this rank is local()");
  for (int peer = 0; peer < bootstrap.num_ranks(); ++peer) {
    const DeviceLink near = device_of(peer) == device ? DeviceLink::same_device : DeviceLink::peer;
    const DeviceLink expected = peer == rank ? DeviceLink::self : name == "cuda_host" ? DeviceLink::host : near;
    require(window->link(peer) == expected, "link to rank " + std::to_string(peer));
  }
  bootstrap.barrier("looked");
  exchange_words(bootstrap, *window, device);
  if (by_ipc(*window)) {
    bool refused = false;
    try {
      window->suspend();
    } catch (const TransportError&) {
      refused = true;
    }
    return require(refused, "memory of cudaIpc was suspended");
  }
  const auto before = addresses(bootstrap, *window);
  for (int time = 0; time < 2; ++time) {
    window->suspend();
    window->resume();
    require(addresses(bootstrap, *window) == before, "addresses changed");
    require_zero(*window, device);
    bootstrap.barrier("looked");
    exchange_words(bootstrap, *window, device);
  }
}

inline size_t free_bytes(int device) {
  size_t free = 0, total = 0;
  require(cudaSetDevice(device) == cudaSuccess && cudaMemGetInfo(&free, &total) == cudaSuccess, "cudaMemGetInfo");
  return free;
}

}  // namespace turnout::transport::testing
