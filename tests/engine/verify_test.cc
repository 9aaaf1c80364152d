// TURNOUT_VERIFY=1: whatever happens between a sender and a receiver is told, or makes no difference.
#include "engine/cpu/verify.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <mutex>

#include "api/communicator_impl.h"
#include "api/layout.h"
#include "api/small_job.h"
#include "engine/broken_link.h"
#include "engine/contract.h"
#include "engine/cpu/header.h"

namespace turnout::testing {
namespace {

using core::BufferLayout;
using engine::is_poison;

// Before the first look at the environment. TURNOUT_TEST_NO_VERIFY shows that the tests fail without checksums.
[[maybe_unused]] const int switched_on = setenv("TURNOUT_VERIFY", std::getenv("TURNOUT_TEST_NO_VERIFY") ? "0" : "1", 1);

/// What ranks were told, in order of rank: empty where all was right.
using Told = std::vector<std::string>;

Told run_broken(const Expected& e, RunChoices run, const std::shared_ptr<Fault>& fault) {
  Told told(e.p.dispatch.ranks.size());
  run_virtual_ranks(
      static_cast<int>(told.size()),
      [&](Communicator& comm) {
        comm.impl()->transport = std::make_shared<BrokenTransport>(comm.impl()->transport, fault);
        try {
          play_rank(comm, e, run);
        } catch (const Error& error) {
          told[static_cast<size_t>(comm.rank())] = error.what();
        }
      },
      options_of(e.p, run));
  return told;
}

bool anybody(const Told& told, const std::string& words) {
  return std::any_of(told.begin(), told.end(), [&](const std::string& t) { return t.find(words) != std::string::npos; });
}

/// Faults of one kind at random places of random problems. Returns how many were told by a checksum.
int break_at_random(Fault::Kind kind, uint64_t first_seed, int num_problems, int per_problem, bool in_lease, std::chrono::milliseconds timeout) {
  int found = 0;
  Random random(first_seed);
  const char* const more = std::getenv("TURNOUT_TEST_ROUNDS");  // for a longer look
  num_problems *= more ? std::atoi(more) : 1;
  for (uint64_t seed = first_seed; seed < first_seed + static_cast<uint64_t>(num_problems); ++seed) {
    RandomLimits limits;
    limits.num_ranks = static_cast<int>(2 + seed % 2);
    limits.max_tokens = 12;
    if (in_lease) limits.layouts = {Layout::rank_major};
    const auto expected = expected_of(seed, limits);
    RunChoices run;
    run.mode = seed / 2 % 2 ? Mode::low_latency : Mode::throughput;
    run.y_in_lease = in_lease;
    run.timeout = timeout;
    auto calm = std::make_shared<Fault>();
    calm->puts = true;
    calm->source = static_cast<int>(seed % static_cast<uint64_t>(limits.num_ranks));
    for (const std::string& text : run_broken(*expected, run, calm)) EXPECT_EQ(text, "") << "seed " << seed;
    const int64_t operations = kind == Fault::Kind::bit_of_signal ? calm->num_signals : calm->num_puts;
    for (int n = 0; n < per_problem; ++n) {
      auto fault = std::make_shared<Fault>();
      fault->kind = kind;
      fault->puts = true;
      fault->source = calm->source;
      fault->at = random.below(std::max<int64_t>(operations, 1));
      fault->bit = random.bits() >> 1;
      SCOPED_TRACE("seed " + std::to_string(seed) + " operation " + std::to_string(fault->at) + " bit " + std::to_string(fault->bit));
      found += anybody(run_broken(*expected, run, fault), "TURNOUT_VERIFY: rank ");  // results are compared there
      if (::testing::Test::HasFailure()) return found;
    }
  }
  return found;
}

TEST(Verify, AFlippedBitOfAnyMessageIsTold) { EXPECT_GT(break_at_random(Fault::Kind::bit_in_put, 1, 24, 12, false, std::chrono::seconds(2)), 150); }
TEST(Verify, ALostMessageIsTold) { EXPECT_GT(break_at_random(Fault::Kind::lost_put, 101, 16, 8, false, std::chrono::seconds(2)), 60); }
TEST(Verify, AFlippedBitOfASignalGivesNoWrongData) {
  break_at_random(Fault::Kind::bit_of_signal, 201, 16, 12, false, std::chrono::milliseconds(150));
}

// In memory, where ranks store into each other's arenas and read each other's rows: one place of each kind.

constexpr int kRanks = 3;

struct Place3 {
  const char* name;
  Layout layout;
  Mode mode;
  bool in_lease;
  BufferLayout::Signal before;  ///< rank 0 flips a bit before it raises this for rank 1
  int call;                     ///< of the Buffer: 1 dispatch, 2 combine
  bool own_arena;               ///< rank 0's, which rank 1 reads; else rank 1's
  std::function<size_t(const BufferLayout&, int copy)> offset;
  const char* words;
};

std::vector<Place3> places() {
  const auto header = [](size_t at) { return [at](const BufferLayout& b, int copy) { return b.header_at(0, copy, 0) + at; }; };
  const auto in_ring = [](size_t at) { return [at](const BufferLayout& b, int copy) { return b.ring_at(0, copy, 0) + at; }; };
  const auto row = [](size_t at) { return [at](const BufferLayout& b, int) { return b.receive + at; }; };
  const auto seal = [](size_t at) { return [at](const BufferLayout& b, int copy) { return b.seal_at(0, copy, 0) + at; }; };
  using enum Layout;
  using enum Mode;
  constexpr auto kHeader = BufferLayout::kHeader, kRows = BufferLayout::kRows, kProduced = BufferLayout::kProduced;
  const size_t facts = engine::facts_at(engine::header_bytes(kRanks, 6));
  return {
      {"fingerprint", rank_major, throughput, false, kHeader, 1, false, header(3), "region header"},
      {"offer", rank_major, throughput, false, kHeader, 1, false, header(offsetof(engine::Header, offer_offset) + 1), "region header"},
      {"table of rows", rank_major, throughput, false, kHeader, 1, false, header(sizeof(engine::Header) + 4), "region header"},
      {"counts", expert_major, throughput, false, kHeader, 1, false, header(sizeof(engine::Header) + 4 * kRanks), "region header"},
      {"facts", rank_major, throughput, false, kHeader, 1, false, header(facts + 8), "region header"},
      {"sum of the header", rank_major, throughput, false, kHeader, 1, false, seal(2), "region header"},
      {"row in place", rank_major, throughput, false, kRows, 1, false, row(5), "region receive block, row 0, data"},
      {"row in the ring", expert_major, throughput, false, kProduced, 1, false, in_ring(64 + 3), "region staging ring, row 0, data"},
      {"expert in the ring", expert_slab, throughput, false, kProduced, 1, false, in_ring(1), "region staging ring, row 0, experts and weights"},
      {"weight in the ring", expert_major, low_latency, false, kProduced, 1, false, in_ring(8 + 1), "row 0, experts and weights"},
      {"total", expert_major, throughput, false, kProduced, 1, false, seal(offsetof(engine::Seal, total)), "region staging ring, the total"},
      {"token of a partial sum", expert_major, throughput, false, kProduced, 2, false, in_ring(0), "row 0, its token, term and weight"},
      {"partial sum", expert_major, throughput, false, kProduced, 2, false, in_ring(64 + 9), "region staging ring, row 0, data"},
      {"row read in place", rank_major, throughput, true, kHeader, 2, true, nullptr, "region rows read in place, row 0, data"},
  };
}

/// Rows of 8 fp32 from every rank to every rank.
void play_small(Communicator& comm, const Place3& place, const BufferLayout*& layout_there, std::mutex& mutex) {
  BufferConfig config = small_config();
  Tokens tokens(comm.rank(), 4);
  for (int64_t t = 0; t < tokens.T; ++t)
    tokens.ids[static_cast<size_t>(t * tokens.K)] = t % 3 * 2, tokens.ids[static_cast<size_t>(t * tokens.K + 1)] = (t + 1) % 3 * 2;
  {
    std::lock_guard lock(mutex);
    static BufferLayout layout;
    layout = api::arena_of(config, kRanks);
    layout_there = &layout;
  }
  Buffer buffer(comm, config);
  tokens.args.layout = place.layout;
  tokens.args.mode = place.mode;
  if (place.layout == Layout::expert_slab) tokens.args.capacity = 12;
  const DispatchResult rows = buffer.dispatch(tokens.args);
  std::vector<float> copy;
  CombineArgs back = back_of(rows);
  back.mode = place.mode;
  if (!place.in_lease) {  // as it comes from a GEMM
    const int64_t n = rows.x.num_elements() / 8;
    for (int64_t i = 0; i < n; ++i) {
      const auto* row = reinterpret_cast<const float*>(result_row(rows.x, i));
      copy.insert(copy.end(), row, row + 8);
    }
    back.y.data = copy.data();
    back.y.strides = rows.x.ndim == 3 ? decltype(back.y.strides){8 * rows.x.shape[1], 8, 1} : decltype(back.y.strides){8, 1};
  }
  const CombineResult sum = buffer.combine(back);
  for (int64_t t = 0; t < tokens.T; ++t) {
    for (int64_t h = 0; h < 8; ++h) ASSERT_EQ(reinterpret_cast<const float*>(sum.x.row(t))[h], Tokens::value(comm.rank(), t) * 2) << "token " << t;
  }
}

TEST(Verify, EachRegionIsNamed) {
  for (const Place3& place : places()) {
    SCOPED_TRACE(place.name);
    for (const bool broken : {false, true}) {
      const BufferLayout* layout = nullptr;
      std::mutex mutex;
      auto fault = std::make_shared<Fault>();
      if (broken) fault->kind = Fault::Kind::bit_in_memory;
      fault->change = [&](transport::Window& window, int peer, int signal) {
        const int copy = place.call % layout->depth;
        if (peer != 1 || signal != layout->signal(0, copy, 0, place.before)) return false;
        std::byte* const arena = window.peer_ptr(place.own_arena ? 0 : 1);
        size_t offset = 0;
        if (place.offset) {
          offset = place.offset(*layout, copy);
        } else {  // rank 1's first row, where its header says that it lies
          engine::Header header;
          std::memcpy(&header, window.peer_ptr(1) + layout->header_at(0, copy, 0), sizeof header);
          offset = static_cast<size_t>(header.pull_offset + header.pull_first * header.pull_stride);
        }
        arena[offset] ^= std::byte{4};
        return true;
      };
      Told told(kRanks);
      run_virtual_ranks(kRanks, [&](Communicator& comm) {
        comm.impl()->transport = std::make_shared<BrokenTransport>(comm.impl()->transport, fault);
        try {
          play_small(comm, place, layout, mutex);
        } catch (const TransportError& error) {
          EXPECT_EQ(comm.rank(), 1) << error.what();
          told[static_cast<size_t>(comm.rank())] = error.what();
        } catch (const PeerFailed& error) {
          EXPECT_EQ(error.record().rank, 1);
          told[static_cast<size_t>(comm.rank())] = error.what();
        }
      });
      if (!broken) {
        EXPECT_FALSE(anybody(told, "rank"));
        continue;
      }
      EXPECT_TRUE(fault->done);
      const std::string call = std::string(place.call == 1 ? "dispatch" : "combine") + " (lane 0, epoch " + std::to_string(place.call) + ")";
      expect_says(told[1], {"TURNOUT_VERIFY: rank 1 got other bytes than rank 0 sent in " + call, place.words});
      for (const size_t other : {0u, 2u}) {  // whoever still waits hears of it in the same words
        if (!told[other].empty()) expect_says(told[other], {"TURNOUT_VERIFY: rank 1 got other bytes than rank 0 sent in " + call, place.words});
      }
    }
  }
}

TEST(Verify, AWriteThatWouldMissItsRegionIsRefused) {
  const BufferLayout b = api::arena_of(small_config(), 2);
  using engine::outside;
  using engine::Region;
  EXPECT_EQ(outside(b, Region::block, b.receive, b.receive_bytes), "");
  EXPECT_EQ(outside(b, Region::ring, b.ring_at(0, 1, 1), b.ring_bytes), "");
  EXPECT_EQ(outside(b, Region::header, b.header_at(0, 1, 1), b.header_bytes), "");
  expect_says(outside(b, Region::block, b.receive - 1, 1), {"1 bytes at " + std::to_string(b.receive - 1), "receive block region"});
  EXPECT_NE(outside(b, Region::block, b.receive + b.receive_bytes, 1), "");
  EXPECT_NE(outside(b, Region::block, b.receive + 8, SIZE_MAX - 4), "") << "wraps around";
  EXPECT_NE(outside(b, Region::ring, b.receive - 4, 8), "");
  EXPECT_NE(outside(b, Region::header, b.status, 8), "");
}

TEST(Verify, ReleasedMemoryIsPoison) {
  for (const ResultKind kind : {ResultKind::lease, ResultKind::fresh}) {
    run_on_transports(2, [&](Communicator& comm) {
      Buffer buffer(comm, small_config());
      Tokens tokens(comm.rank());
      tokens.args.result = kind;
      DispatchResult rows = buffer.dispatch(tokens.args);
      ASSERT_GT(rows.x.shape[0], 0);
      const void* data = rows.x.data;
      const size_t bytes = static_cast<size_t>(rows.x.shape[0]) * 8 * sizeof(float);
      EXPECT_FALSE(is_poison(data, bytes));
      rows.release();
      EXPECT_TRUE(is_poison(data, bytes)) << (kind == ResultKind::lease ? "lease" : "fresh");
    });
  }
}

struct Remembering final : Allocator {
  void* allocate(size_t num_bytes) override { return std::calloc(1, num_bytes); }
  void deallocate(void* data, size_t num_bytes) noexcept override {
    if (!is_poison(data, num_bytes)) ++not_poisoned;
    std::free(data);
  }
  std::atomic<int> not_poisoned{0};
};

/// All that a combine adds lies in results with room to spare: were a row read that nobody wrote, the sum would not be a number.
TEST(Verify, PoisonNeverReachesAResult) {
  for (const Layout layout : {Layout::rank_major, Layout::expert_major, Layout::expert_slab}) {
    for (const Wire wire : {Wire::payload, Wire::fp32, Wire::rows}) {
      if (wire == Wire::rows && layout == Layout::rank_major) continue;
      for (const ResultKind kind : {ResultKind::lease, ResultKind::fresh}) {
        Remembering allocator;
        run_virtual_ranks(kRanks, [&](Communicator& comm) {
          Buffer buffer(comm, small_config(), &allocator);
          for (int round = 0; round < 3; ++round) {
            Tokens tokens(comm.rank(), round == 1 ? comm.rank() : 4);
            tokens.args.layout = layout;
            tokens.args.result = kind;
            tokens.args.capacity = layout == Layout::expert_slab ? 12 : 40;
            if (layout == Layout::expert_major) tokens.args.expert_alignment = 4;
            const DispatchResult rows = buffer.dispatch(tokens.args);
            CombineArgs back = back_of(rows);
            back.wire = wire;
            const CombineResult sum = buffer.combine(back);
            for (int64_t i = 0; i < sum.x.num_elements(); ++i) ASSERT_TRUE(std::isfinite(static_cast<const float*>(sum.x.data)[i])) << i;
          }
        });
        EXPECT_EQ(allocator.not_poisoned, 0);
      }
    }
  }
}

TEST(Verify, ChecksumsCostMemoryAndAreToldApart) {
  BufferConfig config = small_config();
  const BufferLayout on = api::arena_of(config, 2);
  EXPECT_TRUE(on.verified);
  EXPECT_GT(on.pull_sums, on.row_sums);
  EXPECT_EQ(required_bytes(config, 2), api::arena_bytes(on));
}

}  // namespace
}  // namespace turnout::testing
