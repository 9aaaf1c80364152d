// What every transport must do. A transport joins with
//   INSTANTIATE_TEST_SUITE_P(Mine, TransportContract, subjects({{"mine", make_mine}}), subject_name);
#pragma once
#include <algorithm>
#include <atomic>
#include <tuple>

#include "ranks.h"

namespace turnout::transport::testing {

class TransportContract : public ::testing::TestWithParam<std::tuple<Subject, int>> {
 protected:
  int num_ranks() const { return std::get<1>(GetParam()); }
  void run(const std::function<void(Bootstrap&, std::shared_ptr<Transport>)>& body) {
    run_ranks(num_ranks(), [&](Bootstrap& bootstrap) { body(bootstrap, std::get<0>(GetParam()).make(bootstrap)); });
  }
};

inline auto subjects(std::vector<Subject> list) {
  return ::testing::Combine(::testing::ValuesIn(std::move(list)), ::testing::Values(1, 2, 3, 4, 5, 7, 8));
}
inline std::string subject_name(const ::testing::TestParamInfo<std::tuple<Subject, int>>& info) {
  return std::string(std::get<0>(info.param).name) + "_" + std::to_string(std::get<1>(info.param)) + "ranks";
}

TEST_P(TransportContract, ASignalComesAfterEarlierPuts) {
  run([&](Bootstrap&, auto transport) {
    const auto window = transport->open("slots", static_cast<size_t>(num_ranks()) * kSlot, 2 * num_ranks());
    exchange_rounds(*window, transport->rank(), num_ranks(), 60);
  });
}

TEST_P(TransportContract, StoresThroughPeerPointersAreSeen) {
  run([&](Bootstrap& bootstrap, auto transport) {
    const int rank = transport->rank();
    const auto window = transport->open("stores", static_cast<size_t>(num_ranks()) * sizeof(uint64_t), num_ranks());
    require(window->peer_ptr(rank) == window->local(), "peer_ptr of this rank is local()");
    for (uint64_t round = 1; round <= 20; ++round) {
      for (int peer = 0; peer < num_ranks(); ++peer) {
        const uint64_t value = round * 1000 + static_cast<uint64_t>(rank);
        const size_t at = static_cast<size_t>(rank) * sizeof value;
        if (std::byte* there = window->peer_ptr(peer)) std::memcpy(there + at, &value, sizeof value);
        else window->put(peer, at, &value, sizeof value);
        window->signal(peer, rank, round);
      }
      for (int peer = 0; peer < num_ranks(); ++peer) {
        wait_signal(*window, peer, round);
        uint64_t found = 0;
        std::memcpy(&found, window->local() + static_cast<size_t>(peer) * sizeof found, sizeof found);
        require(found == round * 1000 + static_cast<uint64_t>(peer), "a store of rank " + std::to_string(peer) + " is not seen");
      }
      bootstrap.barrier("next");
    }
  });
}

TEST_P(TransportContract, ASignalWakesASleeper) {
  run([&](Bootstrap&, auto transport) {
    const auto window = transport->open("sleep", 64, 1);
    const int rank = transport->rank();
    if (rank > 1) return;
    const int partner = num_ranks() == 1 ? 0 : 1 - rank;
    std::vector<Clock::duration> times;
    for (uint64_t turn = 1; turn <= 300; ++turn) {
      const auto start = Clock::now();
      if (rank == 0) window->signal(partner, 0, turn);
      wait_signal(*window, 0, turn, 0ns);
      if (rank == 1) window->signal(partner, 0, turn);
      times.push_back(Clock::now() - start);
    }
    // Were nobody woken, each of the two would sleep its whole millisecond.
    const auto best = *std::min_element(times.begin(), times.end());
    require(best < 1ms, "a sleeper is not woken: " + std::to_string(best.count()) + " ns there and back");
  });
}

TEST_P(TransportContract, SleepNeverOverlooksASignalAndAlwaysEnds) {
  run([&](Bootstrap&, auto transport) {
    const auto window = transport->open("sleep once", 64, 1);
    const int rank = transport->rank();
    Clock::duration best = 1h;
    for (uint64_t turn = 1; turn <= 20; ++turn) {
      const uint32_t ticket = window->arm();
      window->signal(rank, 0, turn);
      const auto start = Clock::now();
      window->sleep(ticket);
      best = std::min(best, Clock::now() - start);
      window->disarm();
    }
    require(best < 500us, "a thread sleeps although a signal rose after it was armed: " + std::to_string(best.count()) + " ns");
    const auto start = Clock::now();
    window->sleep(window->arm());
    window->disarm();
    require(Clock::now() - start < 5s, "a sleep without any signal does not end");
  });
}

TEST_P(TransportContract, AnIdlerSpinsThenSleeps) {
  run([&](Bootstrap&, auto transport) {
    const auto window = transport->open("idler", 64, 1);
    Idler young(*window, 1h), old(*window, 0ns);
    int steps = 0;
    auto start = Clock::now();
    while (Clock::now() - start < 5ms && ++steps < 1000) young.step();
    require(steps > 20, "an idler sleeps before its spin is over: " + std::to_string(steps) + " steps in 5 ms");
    steps = 0;
    start = Clock::now();
    while (Clock::now() - start < 100ms) ++steps, old.step();
    require(steps < 50'000, "an idler spins on after its spin is over: " + std::to_string(steps) + " steps in 100 ms");
  });
}

TEST_P(TransportContract, ThreadsSignalAtOnce) {
  constexpr int kThreads = 3;
  constexpr uint64_t kLast = 300;
  run([&](Bootstrap&, auto transport) {
    const int rank = transport->rank();
    const auto window = transport->open("threads", static_cast<size_t>(num_ranks() * kThreads) * 8, num_ranks() * kThreads);
    std::vector<std::jthread> writers;
    for (int thread = 0; thread < kThreads; ++thread) {
      writers.emplace_back([&, thread] {
        const int index = rank * kThreads + thread;
        for (uint64_t value = 1; value <= kLast; ++value) {
          for (int peer = 0; peer < num_ranks(); ++peer) {
            if (value == kLast) window->put(peer, static_cast<size_t>(index) * 8, &value, 8);
            window->signal(peer, index, value);
          }
        }
      });
    }
    const auto watch = [&] {
      std::vector<uint64_t> seen(static_cast<size_t>(num_ranks() * kThreads));
      Idler idler(*window, 2us);
      for (size_t done = 0; done < seen.size();) {
        window->progress();
        done = 0;
        for (size_t i = 0; i < seen.size(); ++i) {
          const uint64_t now = window->read(static_cast<int>(i));
          if (now < seen[i]) return false;
          seen[i] = now;
          done += now == kLast ? 1 : 0;
        }
        if (done < seen.size()) idler.step();
      }
      for (size_t i = 0; i < seen.size(); ++i) {
        if (std::memcmp(window->local() + i * 8, &kLast, 8) != 0) return false;
      }
      return true;
    };
    bool second_saw = false;
    std::jthread second([&] { second_saw = watch(); });
    const bool first_saw = watch();
    second.join();
    require(first_saw && second_saw, "a signal shrank, or came before its put");
  });
}

TEST_P(TransportContract, WindowsDoNotMix) {
  run([&](Bootstrap&, auto transport) {
    const int rank = transport->rank();
    std::vector<std::unique_ptr<Window>> windows;
    for (size_t i = 0; i < 4; ++i)
      windows.push_back(transport->open("same label", static_cast<size_t>(num_ranks()) * kSlot + i * 4099, 2 * num_ranks() + static_cast<int>(i)));
    for (size_t i = 0; i < 4; ++i) {
      require(windows[i]->num_bytes() == static_cast<size_t>(num_ranks()) * kSlot + i * 4099, "num_bytes");
      require(windows[i]->num_signals() == 2 * num_ranks() + static_cast<int>(i), "num_signals");
      exchange_rounds(*windows[i], rank, num_ranks(), 3 + i);
    }
    for (size_t i = 0; i < 4; ++i) require(windows[i]->read(rank) == 3 + i, "a window has the signals of another");
    windows.erase(windows.begin() + rank % 4);  // in a different order on each rank
    for (auto& window : windows) require(window->read(rank) >= 3, "closing one window harms another");
  });
}

TEST_P(TransportContract, NothingIsASize) {
  run([&](Bootstrap& bootstrap, auto transport) {
    const auto empty = transport->open("empty", 0, 0);
    require(empty->num_bytes() == 0 && empty->num_signals() == 0, "an empty window is empty");
    const auto window = transport->open(std::string(300, 'x'), 1, 1);
    for (int peer = 0; peer < num_ranks(); ++peer) {
      empty->put(peer, 0, nullptr, 0);
      window->put(peer, 1, nullptr, 0);
    }
    bootstrap.barrier("put");
    window->progress();
    require(window->local()[0] == std::byte{0}, "a put of nothing writes");
  });
}

TEST_P(TransportContract, AWindowBeginsAsZero) {
  run([&](Bootstrap& bootstrap, auto transport) {
    constexpr size_t kBytes = 300'001;
    for (int life = 0; life < 3; ++life) {
      const auto window = transport->open("zero", kBytes, 40);
      require(reinterpret_cast<uintptr_t>(window->local()) % 4096 == 0, "a window begins at a page");
      require(std::all_of(window->local(), window->local() + kBytes, [](std::byte b) { return b == std::byte{0}; }), "memory is not zero");
      for (int index = 0; index < 40; ++index) require(window->read(index) == 0, "signals are not zero");
      bootstrap.barrier("looked");
      std::memset(window->local(), 0xff, kBytes);
      for (int index = 0; index < 40; ++index) window->signal(transport->rank(), index, 9);
    }
  });
}

TEST_P(TransportContract, PeersGoOnWhenARankLeaves) {
  run([&](Bootstrap& bootstrap, auto transport) {
    const int rank = transport->rank();
    auto window = transport->open("leave", static_cast<size_t>(num_ranks()) * kSlot, 2 * num_ranks());
    exchange_rounds(*window, rank, num_ranks(), 3);
    for (int peer = 0; peer < num_ranks(); ++peer) require(transport->peer_state(peer) == PeerState::alive, "a peer that is here is not alive");
    bootstrap.barrier("looked");
    if (rank % 2 == 0 && num_ranks() > 1) {
      // Either may go first.
      if (rank % 4 == 0) window.reset();
      transport.reset();
      return;
    }
    const auto bytes = message(rank, 9, 1000);
    for (uint64_t round = 4; round < 500; ++round) {
      for (int peer = 0; peer < num_ranks(); ++peer) {
        window->put(peer, static_cast<size_t>(rank) * kSlot, bytes.data(), bytes.size());
        window->signal(peer, rank, round);
      }
    }
    for (int peer = 0; peer < num_ranks() && num_ranks() > 1; peer += 2) {
      wait_until([&] { return transport->peer_state(peer) == PeerState::gone; }, "a rank that left is gone", 1s);
    }
    wait_signal(*window, rank, 499);
    require_message(window->local() + static_cast<size_t>(rank) * kSlot, rank, 9, bytes.size());
  });
}

TEST_P(TransportContract, NoDescriptorIsLost) {
  const size_t before = num_descriptors();
  for (int cycle = 0; cycle < 50; ++cycle) {
    run([&](Bootstrap&, auto transport) { transport->open("cycle", 10'000, 4); });
  }
  EXPECT_EQ(num_descriptors(), before);
}

TEST_P(TransportContract, AWindowMayExceedFourGiB) {
  run([&](Bootstrap&, auto transport) {
    constexpr size_t kFar = (size_t{5} << 30) + 12'345;
    const int rank = transport->rank();
    const auto window = transport->open("large", size_t{6} << 30, num_ranks());
    const int next = (rank + 1) % num_ranks(), before = (rank + num_ranks() - 1) % num_ranks();
    const auto bytes = message(rank, 1, 777);
    window->put(next, kFar, bytes.data(), bytes.size());
    window->signal(next, rank, 1);
    wait_signal(*window, before, 1);
    require_message(window->local() + kFar, before, 1, bytes.size());
    require(window->local()[kFar & 0xffff'ffff] == std::byte{0}, "an offset was cut to 32 bits");
  });
}

TEST_P(TransportContract, WhatCannotBeHadIsRefusedOnAllRanks) {
  run([&](Bootstrap&, auto transport) {
    for (const size_t num_bytes : {size_t{1} << 60, ~size_t{0}}) {
      // One rank asks for less, and still learns that the others cannot.
      const bool modest = transport->rank() == 1;
      try {
        transport->open("huge", modest ? 4096 : num_bytes, 1);
        require(false, "a window of " + std::to_string(num_bytes) + " bytes opens");
      } catch (const TransportError& error) {
        require(std::string(error.what()).find("smaller") != std::string::npos, std::string("no advice in: ") + error.what());
        if (modest) require(std::string(error.what()).find("rank 0") != std::string::npos, std::string("no rank in: ") + error.what());
      }
    }
    const auto window = transport->open("afterwards", static_cast<size_t>(num_ranks()) * kSlot, 2 * num_ranks());
    exchange_rounds(*window, transport->rank(), num_ranks(), 2);
  });
}

TEST_P(TransportContract, RanksMustAskForTheSame) {
  if (num_ranks() == 1) return;
  run([&](Bootstrap&, auto transport) {
    try {
      transport->open("differ", transport->rank() == 1 ? 8192 : 4096, 1);
      require(false, "windows of different sizes open");
    } catch (const InvalidArgument& error) {
      require(std::string(error.what()).find("8192") != std::string::npos, std::string("the size is missing in: ") + error.what());
    }
  });
}

TEST_P(TransportContract, HeartsBeat) {
  run([&](Bootstrap& bootstrap, auto transport) {
    for (int peer = 0; peer < num_ranks(); ++peer) {
      const uint64_t now = transport->heartbeat(peer);
      wait_until([&] { return transport->heartbeat(peer) > now; }, "the heart of rank " + std::to_string(peer) + " beats", 5s);
    }
    bootstrap.barrier("seen");
    require(transport->spin() >= 0ns, "spin");
    require(transport->num_ranks() == num_ranks() && transport->rank() == bootstrap.rank(), "rank of ranks");
  });
}

}  // namespace turnout::transport::testing
