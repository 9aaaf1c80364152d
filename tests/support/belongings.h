// What a process holds of the system: descriptors, threads, memory. All of it must be as before once everything of Turnout's is destroyed.
#pragma once
#include <malloc.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <stdexcept>
#include <string>
#include <thread>

namespace turnout::testing {

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
inline constexpr int kSlower = 5;
#else
inline constexpr int kSlower = 1;
#endif

struct Belongings {
  size_t descriptors = 0, threads = 0, memory_files = 0;
  bool operator==(const Belongings&) const = default;
  std::string words() const {
    return std::to_string(descriptors) + " descriptors, " + std::to_string(threads) + " threads, " + std::to_string(memory_files) +
           " mappings of memory files";
  }
};
inline Belongings belongings() {
  const auto entries = [](const char* folder) {
    size_t n = 0;
    for (const auto& entry : std::filesystem::directory_iterator(folder)) n += !entry.path().empty();
    return n;
  };
  Belongings b{entries("/proc/self/fd"), entries("/proc/self/task"), 0};
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) b.memory_files += line.find("/memfd:") != std::string::npos;
  return b;
}
/// A thread that has been joined may be listed for a moment more. Throws if something is kept.
inline void expect_belongings(const Belongings& before) {
  const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(2 * kSlower);
  Belongings now = belongings();
  while (now != before && std::chrono::steady_clock::now() < until) {
    std::this_thread::yield();
    now = belongings();
  }
  if (now != before) throw std::runtime_error("leaked: " + now.words() + " now, " + before.words() + " before the Communicator was made");
}

/// Memory of this process, without what is free in its heaps.
inline int64_t resident_kib() {
  malloc_trim(0);
  std::ifstream file("/proc/self/statm");
  int64_t total = 0, resident = 0;
  file >> total >> resident;
  return resident * (sysconf(_SC_PAGESIZE) / 1024);
}
/// Of its heaps, what is in use.
inline int64_t heap_kib() {
  const auto info = mallinfo2();
  return static_cast<int64_t>((info.uordblks + info.hblkhd) >> 10);
}

/// Looks at memory and descriptors again and again. Descriptors, threads, mappings and what is in use of the heap stay as they are; what is
/// resident settles, because heaps and the stacks that the system keeps for further threads grow to what the largest test needs.
class Flat {
 public:
  /// REQUIRES: nothing of Turnout's lives. Throws if something of it is left.
  void look() {
    if (num_looks_++ == 0) {
      first_ = belongings();
      first_heap_kib_ = heap_kib();
    }
    expect_belongings(first_);
    heap_kib_ = heap_kib();
    last_kib_ = resident_kib();
    if (num_looks_ <= kSettled) most_kib_ = std::max(most_kib_, last_kib_);
    if (kSlower > 1) return;  // sanitizers keep what is freed
    if (heap_grown_kib() > kMostHeapKib || grown_kib() > kMostKib) {
      throw std::runtime_error("memory has grown in " + std::to_string(num_looks_) + " sessions: by " + std::to_string(heap_grown_kib()) +
                               " KiB of the heap, by " + std::to_string(grown_kib()) + " KiB that are resident");
    }
  }
  int64_t heap_grown_kib() const { return heap_kib_ - first_heap_kib_; }
  /// Since it has settled.
  int64_t grown_kib() const { return num_looks_ > kSettled ? last_kib_ - most_kib_ : 0; }

 private:
  static constexpr int64_t kSettled = 100, kMostKib = 128 << 10, kMostHeapKib = 1024;
  int64_t num_looks_ = 0, first_heap_kib_ = 0, heap_kib_ = 0, most_kib_ = 0, last_kib_ = 0;
  Belongings first_;
};

}  // namespace turnout::testing
