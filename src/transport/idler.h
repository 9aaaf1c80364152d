// How a wait passes the time between two polls: it spins, then arms the doorbell and polls on for a moment, then sleeps.
#pragma once
#include <chrono>
#include <cstdint>

#include "transport/transport.h"

namespace turnout::transport {

inline void pause_cpu() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

class Idler {
 public:
  Idler(Window& window, std::chrono::nanoseconds spin) : window_(window), spin_(spin) {}
  Idler(const Idler&) = delete;
  Idler& operator=(const Idler&) = delete;
  ~Idler() { reset(); }

  /// After a poll that found nothing; poll again when it returns: a pause while young, a sleep of up to a millisecond later.
  /// True about every microsecond, and after every sleep: time to look at what is not polled.
  bool step() {
    if (armed_) return sleep();
    if (++polls_ % kPollsPerLook != 0) {
      pause_cpu();
      return false;
    }
    const auto now = Clock::now();
    if (polls_ == kPollsPerLook) until_ = now + spin_;
    if (now >= until_) {
      ticket_ = window_.arm();
      armed_ = true;
      settled_ = now + kSettle;
    }
    return true;
  }
  /// Something moved: the wait is young again.
  void reset() {
    if (armed_) window_.disarm();
    armed_ = false;
    polls_ = 0;
  }

 private:
  using Clock = std::chrono::steady_clock;
  static constexpr uint32_t kPollsPerLook = 16;
  /// A signaller looks for sleepers right after its store, without a fence in between. Polls go on for longer than a store
  /// takes to become visible, so either they see the signal or the signaller sees that somebody is armed.
  static constexpr std::chrono::microseconds kSettle{2};

  bool sleep() {
    if (Clock::now() < settled_) {
      pause_cpu();
      return false;
    }
    window_.sleep(ticket_);
    window_.disarm();
    armed_ = false;
    polls_ = kPollsPerLook;  // not young: the spin is over
    return true;
  }

  Window& window_;
  const std::chrono::nanoseconds spin_;
  bool armed_ = false;
  uint32_t ticket_ = 0, polls_ = 0;
  Clock::time_point until_{}, settled_{};
};

}  // namespace turnout::transport
