// A fault among virtual ranks. A thread cannot be killed: it fails in the middle of a call and leaves, or comes to a halt until all others
// have given it up.
#pragma once
#include "engine/fault_case.h"

namespace turnout::testing {

/// What a rank that fails in the middle of things throws.
struct Death : std::runtime_error {
  using std::runtime_error::runtime_error;
};

/// A rank that has found the fault, or has found something wrong.
struct Counted {
  std::atomic<int>& count;
  ~Counted() { ++count; }
};

/// Throws: what went wrong.
inline void run_fault_of_threads(const FaultCase& c, FaultReport& report) {
  const auto e = expected_of(c.seed, c.limits), after = expected_of(c.seed + 2, limits_after(c));
  const Belongings before = belongings();
  std::atomic<int> num_caught{0};
  run_virtual_ranks(
      c.num_ranks,
      [&](Communicator& comm) {
        RankReport& mine = report.ranks[static_cast<size_t>(comm.rank())];
        Buffer buffer(comm, config_of(c, e->p));
        if (comm.rank() != c.victim) {
          const Counted counted{num_caught};
          expect_fault(c, mine, [&] { play_until_fault(buffer, c, *e, nullptr, mine); });
          return expect_fault(c, mine, [&] { play_round(buffer, *e, c.run, mine); });
        }
        FaultHook hook([&] {
          mine.died_us = now_us();
          if (c.kind == FaultKind::throws) throw Death("this rank dies");
          const auto until = std::chrono::steady_clock::now() + kPatience;
          while (num_caught < c.num_ranks - 1 && std::chrono::steady_clock::now() < until) std::this_thread::yield();
        });
        try {
          play_until_fault(buffer, c, *e, &hook, mine);
        } catch (const Death&) {
        } catch (const PeerTimeout&) {  // what the others have found, once this rank goes on
        } catch (const PeerFailed&) {
        }
      },
      options_of(e->p, c.run));
  expect_belongings(before);
  run_virtual_ranks(
      c.num_ranks - 1, [&](Communicator& comm) { play_on(std::move(comm), c, *after, report.ranks[static_cast<size_t>(comm.rank())]); },
      options_of(after->p, c.run));
  expect_belongings(before);
}

}  // namespace turnout::testing
