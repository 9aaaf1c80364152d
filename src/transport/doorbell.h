// A word that every signal to a rank advances: its waiters spin on it, then sleep on it. Lies in shared memory, so the futex
// is not private.
#pragma once
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <climits>
#include <cstdint>
#include <ctime>

namespace turnout::transport {

inline void pause_cpu() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

struct alignas(128) Doorbell {
  std::atomic<uint32_t> rings{0};
  alignas(64) std::atomic<uint32_t> sleepers{0};

  uint32_t ticket() const { return rings.load(std::memory_order_acquire); }

  /// After a signal was stored. No system call while nobody sleeps.
  void ring() {
    // seq_cst here and in wait(): either the waiter sees the new count, or we see the sleeper.
    rings.fetch_add(1, std::memory_order_seq_cst);
    if (sleepers.load(std::memory_order_seq_cst) != 0) {
      syscall(SYS_futex, reinterpret_cast<uint32_t*>(&rings), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
    }
  }

  /// Returns when the count is no longer `ticket`, or after about a millisecond.
  void wait(uint32_t ticket, std::chrono::nanoseconds spin) {
    const auto until = std::chrono::steady_clock::now() + spin;
    do {
      for (int i = 0; i < 32; ++i) {
        if (rings.load(std::memory_order_acquire) != ticket) return;
        pause_cpu();
      }
    } while (std::chrono::steady_clock::now() < until);
    sleepers.fetch_add(1, std::memory_order_seq_cst);
    if (rings.load(std::memory_order_seq_cst) == ticket) {
      const timespec limit{0, 1'000'000};
      syscall(SYS_futex, reinterpret_cast<uint32_t*>(&rings), FUTEX_WAIT, ticket, &limit, nullptr, 0);
    }
    sleepers.fetch_sub(1, std::memory_order_relaxed);
  }
};
static_assert(std::atomic<uint32_t>::is_always_lock_free && std::atomic<uint64_t>::is_always_lock_free);

/// How long waits spin: TURNOUT_SPIN_US, else short where the ranks of this machine outnumber the cores that we may use.
std::chrono::nanoseconds spin_time(int ranks_on_machine);

}  // namespace turnout::transport
