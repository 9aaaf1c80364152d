// One fault: who dies, how, and at which step of which calls, all of it from a seed. And what came of it on each rank.
#pragma once
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <map>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "engine/contract.h"
#include "support/belongings.h"
#include "util/probe.h"

namespace turnout::testing {

enum class FaultKind : uint8_t { kill, segfault, abort, exit, stop, throws, stalls };
/// Of processes first, then of threads.
inline constexpr FaultKind kFaultKinds[] = {FaultKind::kill, FaultKind::segfault, FaultKind::abort, FaultKind::exit,
                                            FaultKind::stop, FaultKind::throws,   FaultKind::stalls};
inline const char* name(FaultKind kind) {
  static constexpr const char* kNames[] = {"SIGKILL", "segfault", "abort", "exit", "SIGSTOP", "thread throws", "thread stalls"};
  return kNames[static_cast<size_t>(kind)];
}
inline bool is_of_processes(FaultKind kind) { return kind <= FaultKind::stop; }
/// Nobody is gone, so it takes the deadline to find out.
inline bool is_found_by_deadline(FaultKind kind) { return kind == FaultKind::stop || kind == FaultKind::stalls; }

inline constexpr std::chrono::milliseconds kDetection{1000 * kSlower};
/// Of waits where the fault is found by it; else long enough that nothing but the fault ends a wait.
inline constexpr std::chrono::milliseconds kShortDeadline{600 * kSlower}, kLongDeadline{20'000 * kSlower};
/// A case that takes longer hangs.
inline constexpr std::chrono::seconds kPatience{20 * kSlower};

struct FaultCase {
  uint64_t seed = 0;
  FaultKind kind = FaultKind::kill;
  int num_ranks = 2, victim = 0;
  int healthy_rounds = 2;  ///< before the round of the fault, in which staging is used again
  double where = 0;        ///< which of the steps of that round, 0 to 1
  RunChoices run;
  RandomLimits limits;

  std::string words() const {
    char text[256];
    std::snprintf(text, sizeof text, "%s of rank %d of %d at %.3f of round %d, %s %s, seed %llu", name(kind), victim, num_ranks, where,
                  healthy_rounds, std::string(turnout::name(run.mode)).c_str(), std::string(turnout::name(limits.layouts[0])).c_str(),
                  static_cast<unsigned long long>(seed));
    return text;
  }
};

/// Kinds, modes and layouts take turns; the rest is drawn.
inline FaultCase fault_case(uint64_t seed, int64_t number, const std::vector<FaultKind>& kinds) {
  Random random(seed * 0x9e3779b97f4a7c15ull + static_cast<uint64_t>(number));
  FaultCase c;
  c.seed = random.bits();
  c.kind = kinds[static_cast<size_t>(number) % kinds.size()];
  c.num_ranks = static_cast<int>(random.between(2, 8));
  c.victim = static_cast<int>(random.below(c.num_ranks));
  c.healthy_rounds = static_cast<int>(random.between(1, 4));
  c.where = random.unit();
  c.limits.num_ranks = c.num_ranks;
  c.limits.layouts = {static_cast<Layout>(number % 3)};
  c.limits.max_tokens = random.one_of(std::vector<int64_t>{4, 24, 64});
  c.run.transport = is_of_processes(c.kind) ? "shm" : "inproc";
  c.run.mode = number / 3 % 2 ? Mode::low_latency : Mode::throughput;
  c.run.async = random.chance(0.3);
  c.run.y_in_lease = random.chance(0.5);
  if (random.chance(0.5)) c.run.receive_bytes = random.one_of(std::vector<size_t>{4096, 65536});
  if (random.chance(0.5)) c.run.staging_bytes = 1;
  return c;
}

/// The deadlines of a case: waits that nothing else ends.
inline BufferConfig config_of(const FaultCase& c, const RandomProblem& p) {
  BufferConfig config = config_of(p, c.run);
  config.timeouts.timeout = config.timeouts.busy_timeout = is_found_by_deadline(c.kind) ? kShortDeadline : kLongDeadline;
  return config;
}

inline int64_t now_us() { return std::chrono::duration_cast<std::chrono::microseconds>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

/// What a rank leaves where the test finds it, whatever becomes of the rank.
struct RankReport {
  std::atomic<int64_t> began_us{0}, died_us{0}, caught_us{0};
  std::atomic<int64_t> calls{0}, bytes{0};
  std::atomic<int> finished{0};
  char words[1024] = {};
  void say(const std::string& text) { std::snprintf(words, sizeof words, "%s", text.c_str()); }
};
struct FaultReport {
  std::array<RankReport, 8> ranks;
};

/// A FaultReport that forked ranks share.
class SharedReport {
 public:
  SharedReport() : memory_(mmap(nullptr, sizeof(FaultReport), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0)) {
    if (memory_ == MAP_FAILED) throw std::runtime_error("no memory for a report");
    new (memory_) FaultReport;
  }
  SharedReport(const SharedReport&) = delete;
  SharedReport& operator=(const SharedReport&) = delete;
  ~SharedReport() { munmap(memory_, sizeof(FaultReport)); }
  FaultReport& operator*() const { return *static_cast<FaultReport*>(memory_); }
  FaultReport* operator->() const { return static_cast<FaultReport*>(memory_); }

 private:
  void* memory_;
};

/// Counts the steps of a rank in its calls, or ends it at one of them. A wait counts as one step.
class FaultHook final : public util::probe::Hook {
 public:
  explicit FaultHook(std::function<void()> die) : die_(std::move(die)) { util::probe::hook = this; }
  FaultHook(const FaultHook&) = delete;
  FaultHook& operator=(const FaultHook&) = delete;
  ~FaultHook() override { util::probe::hook = nullptr; }

  void at(util::probe::Step step) override {
    if (step == util::probe::Step::load) return;
    waits_ = false;
    count();
  }
  bool idle() override {
    if (!std::exchange(waits_, true)) count();
    return false;
  }
  /// Steps since the last time.
  int64_t take_count() { return std::exchange(num_steps_, 0); }
  void arm(int64_t step) { last_ = step; }
  void die_if_armed() {
    if (last_ > 0) last_ = 0, die_();
  }

 private:
  void count() {
    if (++num_steps_ == last_) die_if_armed();
  }
  const std::function<void()> die_;
  int64_t num_steps_ = 0, last_ = 0;
  bool waits_ = false;
};

/// One dispatch and one combine, compared.
inline void play_round(Buffer& buffer, const Expected& e, const RunChoices& run, RankReport& report) {
  const int rank = buffer.rank();
  const auto at = static_cast<size_t>(rank);
  Place host;
  RankArguments arguments(e.p, rank, run);
  const DispatchArgs& args = arguments.dispatch;
  const DispatchResult result = run.async ? buffer.dispatch_async(args).wait() : buffer.dispatch(args);
  expect_dispatch(result, e.received[at], e.p.dispatch, host);
  report.calls += 1;
  report.bytes += static_cast<int64_t>(e.received[at].x.size());
  CombineArgs back = combine_args(e.p, e.combine, e.received, rank, result.handle);
  back.mode = run.mode;
  if (run.y_in_lease) put_into_lease(result, back, e.p.dispatch.layout, host);
  const CombineResult sum = run.async ? buffer.combine_async(back).wait() : buffer.combine(back);
  expect_combine(sum, e.combined[at], e.p.dtype, e.p.hidden, e.p.with_side, host);
  report.calls += 1;
  report.bytes += static_cast<int64_t>(e.combined[at].x.size());
}

/// Plays until the fault ends a call. `hook` is the victim's, null on the others.
inline void play_until_fault(Buffer& buffer, const FaultCase& c, const Expected& e, FaultHook* hook, RankReport& report) {
  report.began_us = now_us();
  for (int round = 0;; ++round) {
    if (hook && round == c.healthy_rounds) {
      const auto steps = static_cast<double>(hook->take_count());
      hook->arm(1 + static_cast<int64_t>(c.where * steps));
    } else if (hook) {
      hook->take_count();
    }
    play_round(buffer, e, c.run, report);
    if (hook && round == c.healthy_rounds) hook->die_if_armed();  // the round had fewer steps than the one before
  }
}

/// Throws unless the error is what this fault must lead to on the others.
inline void check_record(const FaultCase& c, const WaitRecord& r, bool failed, const std::string& what) {
  const auto require = [&](bool holds, const std::string& wanted) {
    if (!holds) throw std::runtime_error("the error should " + wanted + ", but says: " + what);
  };
  const bool by_itself = r.phase == "failed" && r.rank == c.victim;
  // Where all live, who waits for a rank that itself waits for the one that stalls names the former.
  const bool named = c.kind == FaultKind::stalls ? !r.peers.empty() : r.peers == std::vector<int>{c.victim};
  require(by_itself || named, "name rank " + std::to_string(c.victim) + " alone");
  require(r.rank >= 0 && r.rank < c.num_ranks && !r.call.empty() && !r.phase.empty() && r.epoch > 0, "tell who waited in which call");
  require(failed != is_found_by_deadline(c.kind), is_found_by_deadline(c.kind) ? "be PeerTimeout" : "be PeerFailed");
  if (c.kind == FaultKind::stop) require(r.peer_state == "silent", "call the peer silent");
  else if (c.kind == FaultKind::stalls) require(r.peer_state == "alive" || r.peer_state == "busy", "call the peer alive or busy");
  else require(r.peer_state == "gone" || r.peer_state == "closed" || r.peer_state == "failed", "call the peer gone, closed or failed");
}

/// Runs `body`, which the fault ends; notes when, and checks the words.
inline void expect_fault(const FaultCase& c, RankReport& report, const std::function<void()>& body) {
  try {
    body();
  } catch (const PeerFailed& e) {
    int64_t unset = 0;
    report.caught_us.compare_exchange_strong(unset, now_us());
    return check_record(c, e.record(), true, e.what());
  } catch (const PeerTimeout& e) {
    int64_t unset = 0;
    report.caught_us.compare_exchange_strong(unset, now_us());
    return check_record(c, e.record(), false, e.what());
  }
  throw std::logic_error("the calls went on after the fault");
}

/// The group without its victim, anew: everything works.
inline void play_on(Communicator comm, const FaultCase& c, const Expected& e, RankReport& report) {
  BufferConfig config = config_of(e.p, c.run);
  config.timeouts.timeout = config.timeouts.busy_timeout = kLongDeadline;
  Buffer buffer(comm, config);
  play_round(buffer, e, c.run, report);
}
inline RandomLimits limits_after(const FaultCase& c) {
  RandomLimits limits = c.limits;
  limits.num_ranks = c.num_ranks - 1;
  return limits;
}

}  // namespace turnout::testing
