// What one rank cannot do, all ranks learn at once: too little room for a result, a lane that is not there, memory that its
// allocator does not have. No rank waits for a deadline (30 s here), and the ranks stay together.
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <new>
#include <optional>
#include <utility>

#include "api/buffer_impl.h"
#include "api/small_job.h"

namespace turnout::testing {
namespace {

using Clock = std::chrono::steady_clock;
constexpr int kRanks = 3, kWrong = 1;
constexpr Layout kLayouts[] = {Layout::rank_major, Layout::expert_major, Layout::expert_slab};

/// Fails if a rank has waited for a deadline.
class AtOnce {
 public:
  AtOnce() = default;
  AtOnce(const AtOnce&) = delete;
  AtOnce& operator=(const AtOnce&) = delete;
  ~AtOnce() { EXPECT_LT(Clock::now() - start_, std::chrono::seconds(15)); }

 private:
  Clock::time_point start_ = Clock::now();
};

struct RoomCase {
  Mode mode;
  Layout layout;
  bool cached, capacity;
  bool known() const { return cached || capacity; }
};

std::vector<RoomCase> room_cases() {
  std::vector<RoomCase> cases;
  for (Mode mode : {Mode::throughput, Mode::low_latency}) {
    for (Layout layout : kLayouts) {
      for (bool cached : {false, true}) {
        for (bool capacity : {false, true}) {
          if (capacity || layout != Layout::expert_slab) cases.push_back({mode, layout, cached, capacity});
        }
      }
    }
  }
  return cases;
}

/// Runs `spoil` on rank 1's arguments, with or without a handle or a capacity, and expects that all ranks raise.
void expect_no_room(const BufferConfig& config, const std::function<void(Buffer&)>& prepare, const std::function<void(Tokens&)>& all,
                    const std::function<void(Tokens&)>& spoil, const std::vector<std::string>& words) {
  for (const RoomCase& c : room_cases()) {
    run_virtual_ranks(kRanks, [&](Communicator& comm) {
      SCOPED_TRACE(std::string(name(c.layout)) + " " + std::string(name(c.mode)) + (c.cached ? " cached" : "") + (c.capacity ? " capacity" : ""));
      AtOnce at_once;
      Buffer buffer(comm, config);
      Tokens tokens(comm.rank());
      tokens.args.mode = c.mode;
      tokens.args.layout = c.layout;
      if (c.capacity) tokens.args.capacity = 9;
      Handle handle;
      if (c.cached) {
        handle = buffer.dispatch(tokens.args).handle;
        tokens.args.handle = &handle;
        tokens.args.topk_idx = tokens.args.topk_weights = TensorView();
      }
      prepare(buffer);
      if (all) all(tokens);
      if (comm.rank() == kWrong) spoil(tokens);
      const std::string message = message_of<InvalidArgument>([&] { settled(buffer, buffer.dispatch(tokens.args)); });
      if (comm.rank() == kWrong) expect_says(message, words);
      else if (c.known() || !on_host()) expect_says(message, {"dispatch", "refused by rank 1"});
      else expect_says(message, {"dispatch", "rank 1 has no room"});
      for (int i = 0; i < 3; ++i) expect_works(buffer);
    });
  }
}

TEST(Refusals, AnOutThatIsTooSmallOnOneRank) {
  std::vector<Shared<float>> outs(kRanks, Shared<float>(18 * 8, -1.0f));
  expect_no_room(
      small_config(), [](Buffer&) {},
      [&](Tokens& t) {
        t.args.out = dense(outs[static_cast<size_t>(t.x[0]) / 8].data(), DType::fp32, {18, 8});
      },
      [&](Tokens& t) { t.args.out.shape[0] = 1; }, {"out has room for 1 rows", "the result has", "nothing was delivered"});
  for (const auto& out : outs) {
    for (float value : out) ASSERT_EQ(value, -1.0f) << "rows were written";
  }
}

/// One block of 4096 bytes, which rank 1 has in use.
TEST(Refusals, ALeaseWithoutRoomOnOneRank) {
  if (!on_host()) GTEST_SKIP() << "on a device rows pass through the receive region in any case";
  BufferConfig config = small_config();
  config.receive_bytes = 4096;
  std::vector<DispatchResult> held(kRanks);
  expect_no_room(
      config,
      [&](Buffer& buffer) {
        Tokens tokens(buffer.rank());
        tokens.args.result = ResultKind::lease;
        held[static_cast<size_t>(buffer.rank())] = buffer.dispatch(tokens.args);
        if (buffer.rank() != kWrong) held[static_cast<size_t>(buffer.rank())].release();
      },
      [](Tokens& t) { t.args.result = ResultKind::lease; }, [](Tokens&) {}, {"result=lease", "needs", "4096", "receive_bytes", "result=auto"});
}

TEST(Refusals, AllWhoHaveNoRoomAreNamed) {
  run_virtual_ranks(4, [](Communicator& comm) {
    AtOnce at_once;
    Buffer buffer(comm, small_config());
    Shared<float> out(64);
    Tokens tokens(comm.rank());
    tokens.args.out = dense(out.data(), DType::fp32, {comm.rank() == 1 || comm.rank() == 3 ? 0 : 8, 8});
    const std::string message = message_of<InvalidArgument>([&] { settled(buffer, buffer.dispatch_async(tokens.args)); });
    expect_says(message, {comm.rank() % 2 ? "out has room for 0 rows" : on_host() ? "rank 1, 3 has no room" : "refused by rank"});
    expect_works(buffer);
  });
}

/// Rows are on their way in rings that hold four of them when rank 1 finds that it has no room.
TEST(Refusals, NoRoomForRowsThatHaveLeft) {
  run_virtual_ranks(kRanks, [](Communicator& comm) {
    AtOnce at_once;
    BufferConfig config = small_config();
    config.max_tokens_per_rank = 200;
    config.staging_bytes = 1;
    Buffer buffer(comm, config);
    Shared<float> out(8 * 1200);
    Tokens tokens(comm.rank(), 200);
    tokens.args.mode = Mode::low_latency;
    tokens.args.layout = Layout::expert_major;
    tokens.args.out = dense(out.data(), DType::fp32, {comm.rank() == kWrong ? 3 : 1200, 8});
    for (int i = 0; i < 5; ++i) {
      const std::string message = message_of<InvalidArgument>([&] { settled(buffer, buffer.dispatch(tokens.args)); });
      expect_says(message, {comm.rank() == kWrong ? "out has room for 3 rows" : on_host() ? "rank 1 has no room" : "refused by rank 1"});
    }
    expect_works(buffer);
    tokens.args.out.shape[0] = 1200;
    EXPECT_EQ(*read<int64_t>(buffer.dispatch(tokens.args).num_rows), buffer.dispatch(tokens.args).handle.num_rows());
  });
}

TEST(Refusals, AnOutThatIsJustLargeEnough) {
  for (Layout layout : {Layout::rank_major, Layout::expert_major}) {
    run_virtual_ranks(kRanks, [&](Communicator& comm) {
      Buffer buffer(comm, small_config());
      Tokens tokens(comm.rank());
      tokens.args.layout = layout;
      const int64_t rows = *read<int64_t>(buffer.dispatch(tokens.args).num_rows);
      Shared<float> out(static_cast<size_t>(rows) * 8);
      tokens.args.out = dense(out.data(), DType::fp32, {rows, 8});
      const DispatchResult result = buffer.dispatch(tokens.args);
      EXPECT_EQ(result.x.data, out.data());
      buffer.combine(back_of(result));
    });
  }
}

/// A failed combine leaves no number in `out` that could pass for a sum.
TEST(Refusals, RowsOfARefusedCombineAreNaN) {
  run_virtual_ranks(kRanks, [](Communicator& comm) {
    Buffer buffer(comm, small_config());
    Tokens tokens(comm.rank());
    const DispatchResult rows = buffer.dispatch(tokens.args);
    Shared<float> out(24, 1.0f);
    CombineArgs back = back_of(rows);
    back.out = dense(out.data(), DType::fp32, {3, 8});
    if (comm.rank() == kWrong) back.wire = Wire::rows;
    message_of<InvalidArgument>([&] { settled(buffer, buffer.combine(back)); });
    if (comm.rank() == kWrong) return;
    for (float value : out) EXPECT_TRUE(std::isnan(value));
  });
}

TEST(Refusals, ALaneThatIsNotThereOnOneRank) {
  for (int lane : {-1, 1, 7}) {
    run_virtual_ranks(kRanks, [&](Communicator& comm) {
      AtOnce at_once;
      Buffer buffer(comm, small_config());
      Tokens tokens(comm.rank());
      if (comm.rank() == kWrong) tokens.args.lane = lane;
      const std::string text = "lane is " + std::to_string(lane);
      const std::string message = message_of<InvalidArgument>([&] { buffer.dispatch(tokens.args); });
      expect_says(message, comm.rank() == kWrong ? std::vector<std::string>{text, "0 to 0"} : std::vector<std::string>{"refused by rank 1"});
      tokens.args.lane = 0;
      const DispatchResult rows = buffer.dispatch(tokens.args);
      CombineArgs back = back_of(rows);
      if (comm.rank() == kWrong) back.lane = lane;
      expect_says(message_of<InvalidArgument>([&] { settled(buffer, buffer.combine(back)); }), {comm.rank() == kWrong ? text : "refused by rank 1"});
      expect_works(buffer);
    });
  }
}

TEST(Refusals, ALaneThatIsNotThereOnAllRanks) {
  run_virtual_ranks(2, [](Communicator& comm) {
    Buffer buffer(comm, small_config());
    Tokens tokens(comm.rank());
    for (int lane : {-1, 1}) {
      tokens.args.lane = lane;
      expect_says(message_of<InvalidArgument>([&] { buffer.dispatch(tokens.args); }), {"lane is " + std::to_string(lane), "0 to 0"});
      CombineArgs back;
      back.stream = here().stream();
      back.lane = lane;
      expect_says(message_of<InvalidArgument>([&] { buffer.combine(back); }), {"lane is " + std::to_string(lane), "0 to 0"});
    }
    expect_works(buffer);
  });
}

/// Who refuses at its door goes on at once, call after call; the others come when they come, and hear of each.
TEST(Refusals, ManyInARow) {
  constexpr int kCalls = 9;  // more than there are copies of anything
  for (Mode mode : {Mode::throughput, Mode::low_latency}) {
    run_virtual_ranks(kRanks, [&](Communicator& comm) {
      AtOnce at_once;
      Buffer buffer(comm, small_config());
      expect_works(buffer);
      Tokens tokens(comm.rank());
      tokens.args.mode = mode;
      tokens.args.capacity = 9;
      if (comm.rank() == kWrong) tokens.args.capacity = -1;
      for (int i = 0; i < kCalls; ++i) {
        const std::string message = message_of<InvalidArgument>([&] { settled(buffer, buffer.dispatch(tokens.args)); });
        expect_says(message, {comm.rank() == kWrong ? "capacity is -1" : "refused by rank 1"});
      }
      for (int i = 0; i < 3; ++i) expect_works(buffer);
    });
  }
}

/// With several lanes nobody can tell which one was meant: all stop.
TEST(Refusals, ALaneThatIsNotThereAmongSeveral) {
  run_on_transports(kRanks, [](Communicator& comm) {
    AtOnce at_once;
    BufferConfig config = small_config();
    config.num_lanes = 2;
    Buffer buffer(comm, config);
    Tokens tokens(comm.rank());
    tokens.args.lane = comm.rank() == kWrong ? 2 : 1;
    const std::vector<std::string> words = {"dispatch: lane is 2", "0 to 1", "recover()"};
    expect_says(message_of<InvalidArgument>([&] { buffer.dispatch(tokens.args); }), words);
    expect_says(message_of<InvalidArgument>([&] { expect_works(buffer); }), words);
    if (comm.rank() != kWrong) expect_says(message_of<InvalidArgument>([&] { buffer.check(); }), {"rank 1 aborted"});
    buffer.recover();
    for (int lane : {0, 1}) expect_works(buffer, lane);
  });
}

/// An allocator that fails when told to, in one of two ways.
class Failing : public Allocator {
 public:
  enum class How { works, throws, returns_null };
  void* allocate(size_t num_bytes) override {
    if (how == How::throws) throw TransportError("no memory in this test");
    return how == How::works ? surroundings().allocate(num_bytes) : nullptr;
  }
  void deallocate(void* data, size_t) noexcept override { surroundings().deallocate(data); }
  How how = How::works;
};

/// What rank 1's allocator does not give before anything is sent is refused: all raise, and the next call works.
TEST(Refusals, AnAllocatorThatFailsBeforeTheCall) {
  for (Failing::How how : {Failing::How::throws, Failing::How::returns_null}) {
    run_virtual_ranks(kRanks, [&](Communicator& comm) {
      AtOnce at_once;
      Failing allocator;
      Buffer buffer(comm, small_config(), &allocator);
      Tokens tokens(comm.rank());
      const DispatchResult rows = buffer.dispatch(tokens.args);
      std::vector<std::function<void()>> calls = {[&] { buffer.combine(back_of(rows)); }};
      std::vector<std::unique_ptr<Tokens>> made;
      for (Layout layout : kLayouts) {
        made.push_back(std::make_unique<Tokens>(comm.rank()));
        DispatchArgs& args = made.back()->args;
        args.layout = layout;
        args.capacity = 9;
        args.result = ResultKind::fresh;
        calls.push_back([&] { buffer.dispatch(args); });
      }
      for (const auto& call : calls) {
        if (comm.rank() != kWrong) {
          expect_says(message_of<InvalidArgument>([&] {
                        call();
                        settle(buffer);
                      }),
                      {"refused by rank 1"});
          continue;
        }
        allocator.how = how;
        if (how == Failing::How::throws) expect_says(message_of<TransportError>(call), {"no memory in this test"});
        else expect_says(message_of<TransportError>(call), {"no memory for ", "bytes"});
        allocator.how = Failing::How::works;
      }
      expect_works(buffer);
    });
  }
}

/// With size=exact memory is asked for in the middle of the call: then the Buffer stops, all know why, and recover() ends it.
TEST(Refusals, AnAllocatorThatFailsInTheMiddleOfACall) {
  if (!on_host()) GTEST_SKIP() << "on a device that is refused, as before the call";
  for (auto [layout, kind] : {std::pair(Layout::rank_major, ResultKind::automatic), std::pair(Layout::expert_major, ResultKind::fresh)}) {
    for (Failing::How how : {Failing::How::throws, Failing::How::returns_null}) {
      run_virtual_ranks(kRanks, [&](Communicator& comm) {
        AtOnce at_once;
        Failing allocator;
        BufferConfig config = small_config();
        config.num_lanes = 2;
        Buffer buffer(comm, config, &allocator);
        expect_works(buffer, 1);
        Tokens tokens(comm.rank());
        tokens.args.layout = layout;
        tokens.args.result = comm.rank() == kWrong ? ResultKind::fresh : kind;
        tokens.args.lane = 1;
        tokens.args.mode = Mode::throughput;
        // Every rank needs rows of rank 1, so none can end the call without it.
        for (size_t t = 0; t < 3; ++t) {
          tokens.ids[2 * t] = static_cast<int64_t>(2 * t);
          tokens.ids[2 * t + 1] = -1;
        }
        if (comm.rank() == kWrong) allocator.how = how;
        const auto expect_record = [](const PeerFailed& e) {
          expect_says(e.what(), {"rank 1 failed in dispatch (lane 1, epoch 3)", "recover()"});
          const WaitRecord& r = e.record();
          EXPECT_EQ(r.rank, 1);
          EXPECT_EQ(r.peers, std::vector<int>{1});
          EXPECT_EQ(r.lane, 1);
          EXPECT_EQ(r.call, "dispatch");
          EXPECT_EQ(r.epoch, 3u);
          EXPECT_EQ(r.phase, "failed");
          EXPECT_EQ(r.peer_state, "failed");
        };
        try {
          buffer.dispatch(tokens.args);
          ADD_FAILURE() << "nothing was thrown";
        } catch (const PeerFailed& e) {
          EXPECT_NE(comm.rank(), kWrong);
          expect_record(e);
        } catch (const TransportError& e) {
          EXPECT_EQ(comm.rank(), kWrong);
          expect_says(e.what(), {how == Failing::How::throws ? "no memory in this test" : "no memory for "});
        }
        try {
          buffer.check();
          ADD_FAILURE() << "nothing was thrown";
        } catch (const PeerFailed& e) {
          expect_record(e);
        }
        allocator.how = Failing::How::works;
        // Peers may still write into blocks that were offered: nobody gets them before recover().
        const engine::BlockPool& pool = buffer.impl()->context()->pool;
        if (comm.rank() != kWrong && layout == Layout::rank_major) {
          EXPECT_LT(pool.bytes_free(), pool.num_bytes());
        }
        buffer.recover();
        EXPECT_EQ(pool.bytes_free(), pool.num_bytes());
        for (int i = 0; i < 3; ++i) expect_works(buffer, 1);
        EXPECT_EQ(buffer.dispatch(tokens.args).is_lease, tokens.args.result == ResultKind::automatic);
      });
    }
  }
}

}  // namespace
}  // namespace turnout::testing
