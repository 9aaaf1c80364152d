// Calls at the wrong time: other and closed Buffers, released results, second waits, full lanes, results without room, and a
// rank that never comes. Each names what is wrong, and the Buffer (or a new one) works afterwards.
#include <chrono>
#include <optional>

#include "api/small_job.h"

namespace turnout::testing {
namespace {

TEST(BadCalls, HandleOfAnotherBuffer) {
  run_virtual_ranks(2, [](Communicator& comm) {
    Buffer one(comm, small_config()), other(comm, small_config());
    Tokens tokens(comm.rank());
    const DispatchResult rows = other.dispatch(tokens.args);
    expect_says(message_of<InvalidArgument>([&] { one.combine(back_of(rows)); }), {"combine", "handle was made by another Buffer"});
    Tokens again(comm.rank());
    again.args.topk_idx = again.args.topk_weights = TensorView();
    again.args.handle = &rows.handle;
    expect_says(message_of<InvalidArgument>([&] { one.dispatch(again.args); }), {"dispatch", "handle was made by another Buffer"});
    expect_works(one);
    expect_works(other);
  });
}

TEST(BadCalls, HandleOfAClosedBuffer) {
  run_virtual_ranks(2, [](Communicator& comm) {
    Tokens tokens(comm.rank());
    std::optional<Buffer> first(std::in_place, comm, small_config());
    const DispatchResult rows = first->dispatch(tokens.args);
    first.reset();
    Buffer buffer(comm, small_config());
    expect_says(message_of<InvalidArgument>([&] { buffer.combine(back_of(rows)); }), {"handle", "closed"});
    expect_works(buffer);
  });
}

TEST(BadCalls, HandleAndIdsTogether) {
  run_virtual_ranks(2, [](Communicator& comm) {
    Buffer buffer(comm, small_config());
    Tokens tokens(comm.rank());
    const DispatchResult rows = buffer.dispatch(tokens.args);
    tokens.args.handle = &rows.handle;
    expect_says(message_of<InvalidArgument>([&] { buffer.dispatch(tokens.args); }), {"topk_idx", "in the handle already"});
    Tokens fewer(comm.rank(), 2);
    fewer.args.topk_idx = fewer.args.topk_weights = TensorView();
    fewer.args.handle = &rows.handle;
    expect_says(message_of<InvalidArgument>([&] { buffer.dispatch(fewer.args); }), {"x has 2 tokens", "handle has 3"});
    expect_works(buffer);
  });
}

/// Who waits for a rank whose Buffer is closed, or no longer there, waits in vain, and is told soon.
TEST(BadCalls, ARankThatHasClosed) {
  enum class End { closed, destroyed, left };
  for (const End end : {End::closed, End::destroyed, End::left}) {
    run_on_transports(3, [&](Communicator& comm) {
      std::optional<Buffer> buffer(std::in_place, comm, small_config());
      expect_works(*buffer);
      Tokens tokens(comm.rank());
      if (comm.rank() == 1) {
        if (end == End::destroyed) buffer.reset();
        else buffer->close();
        if (end == End::left) return;  // at once: that it has closed is what matters to its peers
      } else {
        const auto start = std::chrono::steady_clock::now();
        try {
          buffer->dispatch(tokens.args);
          ADD_FAILURE() << "nothing was thrown";
        } catch (const PeerFailed& e) {
          expect_says(e.what(), {"rank 1", "epoch 3", "header", "peer is closed"});
          EXPECT_EQ(e.record().peers, std::vector<int>{1});
          EXPECT_EQ(e.record().peer_state, "closed");
        }
        EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(10));
      }
      if (end != End::left) comm.barrier();
    });
  }
}

TEST(BadCalls, WeightsThatTheDispatchDidNotHave) {
  run_virtual_ranks(2, [](Communicator& comm) {
    Buffer buffer(comm, small_config());
    Tokens tokens(comm.rank());
    tokens.args.topk_weights = TensorView();
    tokens.args.layout = Layout::expert_major;
    const DispatchResult rows = buffer.dispatch(tokens.args);
    CombineArgs back = back_of(rows);
    back.apply = CombineWeights::source;
    expect_says(message_of<InvalidArgument>([&] { buffer.combine(back); }), {"weights=source", "no topk_weights"});
    expect_works(buffer);
  });
}

TEST(BadCalls, AMapOfExpertsThatCannotBe) {
  run_virtual_ranks(2, [](Communicator& comm) {
    Buffer buffer(comm, small_config());
    expect_says(message_of<InvalidArgument>([&] { buffer.set_expert_to_rank({0, 1}); }), {"set_expert_to_rank", "2 entries", "6 experts"});
    for (int rank : {-1, 2}) {
      expect_says(message_of<InvalidArgument>([&] { buffer.set_expert_to_rank({0, 0, 0, 1, 1, rank}); }), {std::to_string(rank)});
    }
    expect_works(buffer);
  });
}

TEST(BadCalls, SecondWait) {
  run_virtual_ranks(2, [](Communicator& comm) {
    Buffer buffer(comm, small_config());
    Tokens tokens(comm.rank());
    PendingDispatch pending = buffer.dispatch_async(tokens.args);
    const DispatchResult rows = pending.wait();
    expect_says(message_of<InvalidArgument>([&] { pending.wait(); }), {"wait", "already"});
    PendingCombine back = buffer.combine_async(back_of(rows));
    back.wait();
    expect_says(message_of<InvalidArgument>([&] { back.wait(); }), {"wait", "already"});
    PendingCombine moved = std::move(back);
    expect_says(message_of<InvalidArgument>([&] { back.wait(); }), {"wait"});
    expect_works(buffer);
  });
}

TEST(BadCalls, ReleasedView) {
  for (ResultKind kind : {ResultKind::lease, ResultKind::fresh}) {
    run_virtual_ranks(3, [&](Communicator& comm) {
      Buffer buffer(comm, small_config());
      Tokens tokens(comm.rank());
      tokens.args.result = kind;
      DispatchResult rows = buffer.dispatch(tokens.args);
      ASSERT_EQ(rows.is_lease, kind == ResultKind::lease);
      CombineArgs back = back_of(rows);
      if (comm.rank() == 1) {
        rows.release();
        rows.release();
        EXPECT_FALSE(rows.x.defined());
      }
      const std::string message = message_of<InvalidArgument>([&] { settled(buffer, buffer.combine(back)); });
      if (comm.rank() == 1) expect_says(message, {"combine: y is", "released"});
      else expect_says(message, {"refused by rank 1"});
      expect_works(buffer);
    });
  }
}

/// Every argument that may be a view of a result, given after the result was released.
TEST(BadCalls, ReleasedViewsAsOtherArguments) {
  run_virtual_ranks(2, [](Communicator& comm) {
    Buffer buffer(comm, small_config());
    Tokens tokens(comm.rank());
    tokens.args.capacity = 6;  // enough rows for the views below
    DispatchResult rows = buffer.dispatch(tokens.args);
    CombineResult sum = buffer.combine(back_of(rows));
    const Handle handle = rows.handle;
    const float* of_lease = rows.x.as<float>();
    const float* of_sum = sum.x.as<float>();
    rows.release();
    sum.release();
    const auto expect_refused = [&](const std::string& what, const std::function<void(DispatchArgs&)>& change) {
      Tokens again(comm.rank());
      change(again.args);
      expect_says(message_of<InvalidArgument>([&] { buffer.dispatch(again.args); }), {"dispatch: " + what + " is", "released"});
    };
    for (const float* data : {of_lease, of_sum}) {
      expect_refused("x", [&](DispatchArgs& a) { a.x.data = const_cast<float*>(data); });
      expect_refused("side[0]", [&](DispatchArgs& a) { a.side = {dense(data, DType::fp32, {3, 1})}; });
      expect_refused("out", [&](DispatchArgs& a) { a.out = dense(data, DType::fp32, {9, 8}); });
      expect_refused("topk_idx", [&](DispatchArgs& a) { a.topk_idx = dense(data, DType::i32, {3, 2}); });
      expect_refused("topk_weights", [&](DispatchArgs& a) { a.topk_weights = dense(data, DType::fp32, {3, 2}); });
      std::vector<float> y(48);
      CombineArgs back;
      back.stream = here().stream();
      back.handle = &handle;
      back.y = dense(y.data(), DType::fp32, {6, 8});
      back.out = dense(data, DType::fp32, {3, 8});
      expect_says(message_of<InvalidArgument>([&] { buffer.combine(back); }), {"combine: out is", "released"});
      back.out = TensorView();
      back.side = dense(data, DType::fp32, {6, 2});
      expect_says(message_of<InvalidArgument>([&] { buffer.combine(back); }), {"combine: side is", "released"});
      back.side = TensorView();
      back.apply = CombineWeights::rows;
      back.weights = dense(data, DType::fp32, {6});
      expect_says(message_of<InvalidArgument>([&] { buffer.combine(back); }), {"combine: weights is", "released"});
    }
    expect_works(buffer);
  });
}

TEST(BadCalls, AfterClose) {
  run_virtual_ranks(2, [](Communicator& comm) {
    Buffer buffer(comm, small_config());
    Tokens tokens(comm.rank());
    const DispatchResult rows = buffer.dispatch(tokens.args);
    PendingDispatch pending = buffer.dispatch_async(tokens.args);
    comm.barrier();
    buffer.close();
    buffer.close();
    EXPECT_EQ(read<float>(rows.x)[0], Tokens::value(0, comm.rank() == 0 ? 0 : 1));  // a result outlives close()
    const std::vector<std::function<void()>> calls = {[&] { buffer.dispatch(tokens.args); },
                                                      [&] { buffer.dispatch_async(tokens.args); },
                                                      [&] { buffer.combine(back_of(rows)); },
                                                      [&] { buffer.combine_async(back_of(rows)); },
                                                      [&] {
                                                        buffer.set_expert_to_rank({0, 0, 0, 1, 1, 1});
                                                      },
                                                      [&] { buffer.check(); },
                                                      [&] { buffer.synchronize(); },
                                                      [&] { buffer.recover(); },
                                                      [&] { pending.wait(); }};
    for (const auto& call : calls) expect_says(message_of<InvalidArgument>(call), {"closed"});
    Buffer next(comm, small_config());
    expect_works(next);
  });
}

TEST(BadCalls, TooManyOutstanding) {
  run_virtual_ranks(2, [](Communicator& comm) {
    Buffer buffer(comm, small_config());
    Tokens tokens(comm.rank());
    PendingDispatch one = buffer.dispatch_async(tokens.args), two = buffer.dispatch_async(tokens.args);
    for (int i = 0; i < 3; ++i) {
      expect_says(message_of<InvalidArgument>([&] { buffer.dispatch(tokens.args); }), {"2 calls in flight", "at most 2", "max_outstanding"});
    }
    const DispatchResult rows = two.wait();
    one.wait();
    buffer.combine(back_of(rows));
    expect_works(buffer);
  });
}

TEST(BadCalls, LeaseWithoutRoom) {
  if (!on_host()) GTEST_SKIP() << "on a device rows pass through the receive region in any case: see cuda/bad_input_test.cc";
  run_virtual_ranks(2, [](Communicator& comm) {
    BufferConfig config = small_config();
    config.receive_bytes = 4096;
    Buffer buffer(comm, config);
    Tokens tokens(comm.rank());
    DispatchResult holds = buffer.dispatch(tokens.args);
    ASSERT_TRUE(holds.is_lease);
    for (Layout layout : {Layout::rank_major, Layout::expert_major}) {
      Tokens more(comm.rank());
      more.args.layout = layout;
      more.args.result = ResultKind::lease;
      expect_says(message_of<InvalidArgument>([&] { buffer.dispatch(more.args); }),
                  {"result=lease", "needs", "4096", "receive_bytes", "result=auto"});
    }
    expect_works(buffer);  // auto takes other memory
    holds.release();
    tokens.args.result = ResultKind::lease;
    EXPECT_TRUE(buffer.dispatch(tokens.args).is_lease);
  });
}

/// All tokens go to expert 0 of rank 0: 6 rows in every layout. Those past the capacity are dropped, and their sources know.
TEST(BadCalls, Capacities) {
  for (Layout layout : {Layout::rank_major, Layout::expert_major, Layout::expert_slab}) {
    for (Mode mode : {Mode::throughput, Mode::low_latency}) {
      for (int64_t capacity : {0, 1, 6, 5, 7}) {
        run_virtual_ranks(2, [&](Communicator& comm) {
          SCOPED_TRACE(std::string(name(layout)) + " " + std::to_string(capacity));
          Buffer buffer(comm, small_config());
          Tokens tokens(comm.rank());
          for (size_t t = 0; t < 3; ++t) {
            tokens.ids[2 * t] = 0;
            tokens.ids[2 * t + 1] = -1;
          }
          tokens.args.layout = layout;
          tokens.args.mode = mode;
          tokens.args.capacity = capacity;
          const DispatchResult rows = buffer.dispatch(tokens.args);
          const int64_t expected = comm.rank() == 0 ? std::min<int64_t>(6, capacity) : 0;
          EXPECT_EQ(*read<int64_t>(rows.num_rows), expected);
          EXPECT_EQ(*read<int64_t>(rows.num_dropped), comm.rank() == 0 ? 6 - expected : 0);
          EXPECT_EQ(rows.x.shape[layout == Layout::expert_slab ? 1 : 0], capacity);
          if (on_host()) {  // a device does not tell
            EXPECT_EQ(rows.handle.num_rows(), expected);
          }
          const CombineResult sum = buffer.combine(back_of(rows));
          for (int64_t t = 0; t < 3; ++t) {
            const bool lost = 3 * comm.rank() + t >= capacity;
            EXPECT_EQ(read<int32_t>(sum.num_lost)[t], lost);
            EXPECT_EQ(read_row(sum.x, t)[7], lost ? 0.0f : Tokens::value(comm.rank(), t));
          }
          expect_works(buffer);
        });
      }
    }
  }
}

/// Rank 2 does not come: the others give up within the deadline, all stay aborted, recover() brings them back.
TEST(BadCalls, ARankThatNeverCalls) {
  run_on_transports(3, [](Communicator& comm) {
    BufferConfig config = small_config();
    config.timeouts.timeout = config.timeouts.busy_timeout = std::chrono::milliseconds(300);
    Buffer buffer(comm, config);
    Tokens tokens(comm.rank());
    using Clock = std::chrono::steady_clock;
    if (comm.rank() != 2) {
      const auto start = Clock::now();
      expect_says(message_of<PeerTimeout>([&] { buffer.dispatch(tokens.args); }), {"rank 2", "dispatch", "lane 0", "epoch 1", "header", "recover()"});
      EXPECT_GE(Clock::now() - start, std::chrono::milliseconds(100));
      EXPECT_LT(Clock::now() - start, std::chrono::seconds(5));
    }
    comm.barrier();
    // Sticky: nobody waits any more, rank 2 neither.
    const auto start = Clock::now();
    expect_says(message_of<PeerTimeout>([&] { buffer.dispatch(tokens.args); }), {"rank 2", "recover()"});
    expect_says(message_of<PeerTimeout>([&] { buffer.check(); }), {"rank 2"});
    EXPECT_NE(*buffer.status_word(), 0u);
    EXPECT_LT(Clock::now() - start, std::chrono::milliseconds(250));
    buffer.recover();
    EXPECT_EQ(*buffer.status_word(), 0u);
    buffer.check();
    for (int i = 0; i < 4; ++i) expect_works(buffer);
  });
}

/// The record of the rank that gave up is the record of all, then and later.
TEST(BadCalls, TheRecordOfAWait) {
  run_virtual_ranks(3, [](Communicator& comm) {
    BufferConfig config = small_config();
    config.num_lanes = 2;
    if (comm.rank() == 0) config.timeouts.timeout = config.timeouts.busy_timeout = std::chrono::milliseconds(200);
    Buffer buffer(comm, config);
    expect_works(buffer, 1);
    const auto expect_record = [](const std::function<void()>& call) {
      try {
        call();
        ADD_FAILURE() << "nothing was thrown";
      } catch (const PeerTimeout& e) {
        expect_says(e.what(), {"rank 0 waited for rank 1 in dispatch (lane 1, epoch 3), phase header: expected 3", "recover()"});
        EXPECT_EQ(e.record().rank, 0);
        EXPECT_EQ(e.record().peers, std::vector<int>{1});
        EXPECT_EQ(e.record().lane, 1);
        EXPECT_EQ(e.record().call, "dispatch");
        EXPECT_EQ(e.record().epoch, 3u);
        EXPECT_EQ(e.record().phase, "header");
        EXPECT_EQ(e.record().expected, 3u);
        EXPECT_LT(e.record().seen, 3u);
        EXPECT_EQ(e.record().peer_state, "busy");
      }
    };
    Tokens tokens(comm.rank());
    tokens.args.lane = 1;
    if (comm.rank() != 1) expect_record([&] { buffer.dispatch(tokens.args); });
    comm.barrier();
    expect_record([&] { buffer.check(); });
    expect_record([&] { buffer.synchronize(); });
    expect_record([&] { expect_works(buffer, 0); });
    buffer.recover();
    expect_works(buffer, 1);
  });
}

/// One thread of each rank issues on two lanes, or two Buffers, in another order: issuing waits for the other, and says so.
TEST(BadCalls, CallsIssuedInAnotherOrder) {
  for (bool lanes : {true, false}) {
    run_virtual_ranks(2, [&](Communicator& comm) {
      BufferConfig config = small_config();
      config.num_lanes = lanes ? 2 : 1;
      config.timeouts.timeout = config.timeouts.busy_timeout = std::chrono::milliseconds(300);
      Buffer one(comm, config), other(comm, config);
      Tokens tokens(comm.rank());
      tokens.args.lane = lanes ? comm.rank() : 0;
      Buffer& first = lanes || comm.rank() == 0 ? one : other;
      expect_says(message_of<PeerTimeout>([&] { first.dispatch_async(tokens.args); }),
                  {"phase header", on_host() ? "same order on all ranks" : "recover()"});
      comm.barrier();
      one.recover();
      other.recover();
      expect_works(one);
      expect_works(other);
    });
  }
}

TEST(BadCalls, PendingCallsAreLostInRecover) {
  run_virtual_ranks(2, [](Communicator& comm) {
    BufferConfig config = small_config();
    config.timeouts.timeout = config.timeouts.busy_timeout = std::chrono::milliseconds(200);
    Buffer buffer(comm, config);
    Tokens tokens(comm.rank());
    PendingDispatch pending = buffer.dispatch_async(tokens.args);
    if (comm.rank() == 0) message_of<PeerTimeout>([&] { buffer.dispatch(tokens.args); });
    comm.barrier();
    buffer.recover();
    expect_says(message_of<InvalidArgument>([&] { pending.wait(); }), {"recover()"});
    expect_works(buffer);
  });
}

}  // namespace
}  // namespace turnout::testing
