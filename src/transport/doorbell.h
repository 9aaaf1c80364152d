// A word on which the waiters of a rank sleep; signals advance it while somebody is about to. Lies in shared memory, so the
// futex is not private.
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

struct alignas(128) Doorbell {
  std::atomic<uint32_t> rings{0};
  alignas(64) std::atomic<uint32_t> sleepers{0};

  /// From here on signals ring; the ticket tells sleep() whether one did meanwhile.
  uint32_t arm() {
    sleepers.fetch_add(1, std::memory_order_seq_cst);
    return rings.load(std::memory_order_seq_cst);
  }
  void disarm() { sleepers.fetch_sub(1, std::memory_order_relaxed); }

  /// After a signal was stored. Writes nothing while nobody is armed: a word that every signal of every rank wrote would move
  /// between processors at each of them. No fence either: idler.h says why none is needed.
  void ring() {
    if (sleepers.load(std::memory_order_relaxed) == 0) return;
    rings.fetch_add(1, std::memory_order_seq_cst);
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&rings), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
  }

  /// Returns when the count is no longer `ticket`, or after about a millisecond.
  void sleep(uint32_t ticket) {
    const timespec limit{0, 1'000'000};
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&rings), FUTEX_WAIT, ticket, &limit, nullptr, 0);
  }
};
static_assert(std::atomic<uint32_t>::is_always_lock_free && std::atomic<uint64_t>::is_always_lock_free);

/// How long waits spin: TURNOUT_SPIN_US, else short where the ranks of this machine outnumber the cores that we may use.
std::chrono::nanoseconds spin_time(int ranks_on_machine);

}  // namespace turnout::transport
