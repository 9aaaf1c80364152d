// A lock for a few instructions, such as taking a block off a list: half the atomic operations of a mutex, and nothing to call.
#pragma once
#include <sched.h>

#include <atomic>

namespace turnout::util {

/// For std::lock_guard. Who finds it taken looks again, and lets others run if its holder does not.
class SpinLock {
 public:
  void lock() {
    for (int looks = 0; taken_.exchange(true, std::memory_order_acquire);) {
      while (taken_.load(std::memory_order_relaxed)) {
        if (++looks % kLooksPerTurn == 0) sched_yield();
      }
    }
  }
  void unlock() { taken_.store(false, std::memory_order_release); }

 private:
  static constexpr int kLooksPerTurn = 64;
  std::atomic<bool> taken_{false};
};

}  // namespace turnout::util
