// Ranks as threads, waits with a deadline, and what a transport brings to join the contract.
#pragma once
#include <gtest/gtest.h>

#include <chrono>
#include <cstring>
#include <exception>
#include <filesystem>
#include <functional>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "transport/idler.h"
#include "transport/transport.h"
#include "turnout/bootstrap.h"

namespace turnout::transport::testing {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

/// A transport joins the contract with its name and how it is made.
struct Subject {
  const char* name;
  std::function<std::shared_ptr<Transport>(Bootstrap&)> make;
};

/// Runs `body` on every rank; what any of them throws fails the test.
inline void run_ranks(int num_ranks, const std::function<void(Bootstrap&)>& body) {
  const auto store = thread_store();
  std::mutex mutex;
  std::vector<std::jthread> threads;
  for (int rank = 0; rank < num_ranks; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        const auto bootstrap = store_bootstrap(store, rank, num_ranks, "test", 30s);
        body(*bootstrap);
      } catch (const std::exception& error) {
        std::lock_guard lock(mutex);
        ADD_FAILURE() << "rank " << rank << ": " << error.what();
      }
    });
  }
}

/// For bodies that also run in child processes, where a failed EXPECT is not seen.
inline void require(bool holds, const std::string& what) {
  if (!holds) throw std::runtime_error(what);
}

inline void wait_until(const std::function<bool()>& holds, const std::string& what, std::chrono::milliseconds limit = 20s) {
  const auto until = Clock::now() + limit;
  while (!holds()) {
    require(Clock::now() < until, "waited too long until " + what);
    std::this_thread::yield();
  }
}

inline void wait_signal(Window& window, int index, uint64_t value, std::chrono::nanoseconds spin = 2us) {
  const auto until = Clock::now() + 20s;
  Idler idler(window, spin);
  while (true) {
    window.progress();
    if (window.read(index) >= value) return;
    require(Clock::now() < until, "signal " + std::to_string(index) + " is " + std::to_string(window.read(index)) + ", not " + std::to_string(value));
    idler.step();
  }
}

/// Byte `at` of what `source` sends in `round`.
inline std::byte pattern(int source, uint64_t round, size_t at) {
  return static_cast<std::byte>((static_cast<uint64_t>(source) * 131 + round * 31 + at * 7 + 1) & 0xff);
}
inline std::vector<std::byte> message(int source, uint64_t round, size_t num_bytes) {
  std::vector<std::byte> bytes(num_bytes);
  for (size_t at = 0; at < num_bytes; ++at) bytes[at] = pattern(source, round, at);
  return bytes;
}
inline void require_message(const std::byte* found, int source, uint64_t round, size_t num_bytes) {
  for (size_t at = 0; at < num_bytes; ++at) {
    if (found[at] != pattern(source, round, at)) {
      throw std::runtime_error("byte " + std::to_string(at) + " of " + std::to_string(num_bytes) + " from rank " + std::to_string(source) +
                               " in round " + std::to_string(round) + " is wrong");
    }
  }
}

/// Every rank sends to every rank, itself included, `num_rounds` times through slots of `kSlot` bytes: unaligned offsets,
/// sizes from zero up. Signals: [0, R) data, [R, 2R) consumed.
inline constexpr size_t kSlot = 4096;
inline void exchange_rounds(Window& window, int rank, int num_ranks, uint64_t num_rounds) {
  for (uint64_t round = 1; round <= num_rounds; ++round) {
    const size_t num_bytes = round * 37 % 3001;
    const auto offset = [&](int source) { return static_cast<size_t>(source) * kSlot + round % 67; };
    for (int peer = 0; peer < num_ranks; ++peer) {
      wait_signal(window, num_ranks + peer, round - 1);
      auto mine = message(rank, round, num_bytes);
      const size_t half = num_bytes / 3;
      window.put(peer, offset(rank), mine.data(), half);
      window.put(peer, offset(rank) + half, mine.data() + half, num_bytes - half);
      std::fill(mine.begin(), mine.end(), std::byte{0xee});  // the source may be reused
      window.signal(peer, rank, round);
    }
    for (int peer = 0; peer < num_ranks; ++peer) {
      wait_signal(window, peer, round);
      require_message(window.local() + offset(peer), peer, round, num_bytes);
      window.signal(peer, num_ranks + rank, round);
    }
  }
}

inline size_t num_descriptors() {
  size_t count = 0;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) count += entry.path().empty() ? 0 : 1;
  return count;
}

}  // namespace turnout::transport::testing
