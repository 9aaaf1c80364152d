// What was let in at the door and should not have been: shapes that only had enough elements, outputs on top of inputs, values that no
// enumeration has, strides that wrap around. Found by a user who tried to break it.
#include <gtest/gtest.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "api/small_job.h"

namespace turnout::testing {
namespace {

/// Two ranks; rank 1 alone changes its call. It is told `words`, the other that rank 1 refused, and the Buffer goes on.
void expect_dispatch_refused(const std::vector<std::string>& words, const std::function<void(Tokens&)>& change, const DispatchArgs& common = {}) {
  for (Mode mode : {Mode::throughput, Mode::low_latency}) {
    run_virtual_ranks(2, [&](Communicator& comm) {
      Buffer buffer(comm, small_config());
      for (int again = 0; again < 2; ++again) {  // after a good call like it, too
        Tokens tokens(comm.rank());
        tokens.args.mode = mode;
        tokens.args.layout = common.layout;
        tokens.args.capacity = common.capacity;
        if (comm.rank() == 1) change(tokens);
        const std::string message = message_of<InvalidArgument>([&] { buffer.dispatch(tokens.args); });
        if (comm.rank() == 1) expect_says(message, words);
        else expect_says(message, {"refused", "1"});
        expect_works(buffer);
      }
    });
  }
}

void expect_combine_refused(Layout layout, const std::vector<std::string>& words,
                            const std::function<void(Tokens&, DispatchResult&, CombineArgs&)>& change) {
  run_virtual_ranks(2, [&](Communicator& comm) {
    Buffer buffer(comm, small_config());
    for (int again = 0; again < 2; ++again) {
      Tokens tokens(comm.rank());
      tokens.args.layout = layout;
      if (layout == Layout::expert_slab) tokens.args.capacity = 5;
      DispatchResult rows = buffer.dispatch(tokens.args);
      CombineArgs back = back_of(rows);
      if (comm.rank() == 1) change(tokens, rows, back);
      const std::string message = message_of<InvalidArgument>([&] { buffer.combine(back); });
      if (comm.rank() == 1) expect_says(message, words);
      else expect_says(message, {"refused", "1"});
      expect_works(buffer);
    }
  });
}

TEST(Door, NumbersOfACombineHaveTheShapeOfItsRows) {
  std::vector<float> many(4096, 1.0f);
  const auto with_weights = [&](std::initializer_list<int64_t> shape) {
    return [&, view = TensorView::dense(many.data(), DType::fp32, shape)](Tokens&, DispatchResult&, CombineArgs& back) {
      back.apply = CombineWeights::rows;
      back.weights = view;
    };
  };
  const auto with_side = [&](std::initializer_list<int64_t> shape) {
    return [&, view = TensorView::dense(many.data(), DType::fp32, shape)](Tokens&, DispatchResult&, CombineArgs& back) { back.side = view; };
  };
  // A slab of 3 local experts and capacity 5.
  for (const auto& shape : {std::vector<int64_t>{3, 7}, {5, 3}, {2, 8}, {3, 5, 1}}) {
    const TensorView view = shape.size() == 3 ? TensorView::dense(many.data(), DType::fp32, {shape[0], shape[1], shape[2]})
                                              : TensorView::dense(many.data(), DType::fp32, {shape[0], shape[1]});
    expect_combine_refused(Layout::expert_slab, {"weights", "[3, 5]"}, [&](Tokens&, DispatchResult&, CombineArgs& back) {
      back.apply = CombineWeights::rows;
      back.weights = view;
    });
    expect_combine_refused(Layout::expert_slab, {"side", "[3, 5]"}, [&](Tokens&, DispatchResult&, CombineArgs& back) { back.side = view; });
  }
  expect_combine_refused(Layout::expert_major, {"weights", "row of y"}, with_weights({2, 64}));
  expect_combine_refused(Layout::expert_major, {"weights", "row of y"}, with_weights({64, 1}));
  expect_combine_refused(Layout::rank_major, {"side", ", 2]"}, with_side({64, 3}));
  expect_combine_refused(Layout::rank_major, {"side", ", 2]"}, with_side({256}));
}

TEST(Door, NumbersInTheirShapesAreTaken) {
  run_virtual_ranks(2, [](Communicator& comm) {
    Buffer buffer(comm, small_config());
    std::vector<float> many(4096, 2.0f);
    for (const bool flat : {false, true}) {
      Tokens tokens(comm.rank());
      tokens.args.layout = Layout::expert_slab;
      tokens.args.capacity = 6;
      const DispatchResult rows = buffer.dispatch(tokens.args);
      CombineArgs back = back_of(rows);
      back.apply = CombineWeights::rows;
      back.weights = flat ? TensorView::dense(many.data(), DType::fp32, {18}) : TensorView::dense(many.data(), DType::fp32, {3, 6});
      back.side = back.weights;
      const CombineResult sum = buffer.combine(back);
      for (int64_t t = 0; t < tokens.T; ++t) {
        EXPECT_EQ(sum.x.as<float>()[t * tokens.H], 4 * Tokens::value(comm.rank(), t));  // two experts, each weighted by 2
        EXPECT_EQ(sum.side.as<float>()[t * tokens.K], 2);
      }
    }
  });
}

TEST(Door, AnOutputLiesOnNoInput) {
  const std::vector<std::string> words = {"out", "share memory"};
  const DispatchArgs capacity{.capacity = 2};
  expect_dispatch_refused(
      {"out", "x", "share memory"}, [](Tokens& t) { t.args.out = t.args.x; }, capacity);
  expect_dispatch_refused(
      {"out", "topk_weights", "share memory"}, [](Tokens& t) { t.args.out = TensorView::matrix(t.args.topk_weights.data, DType::fp32, 2, 8, 8); },
      capacity);
  for (Layout layout : {Layout::rank_major, Layout::expert_major}) {
    expect_combine_refused(layout, words, [](Tokens& t, DispatchResult& rows, CombineArgs& back) {  // in the lease
      back.out = TensorView::matrix(rows.x.data, DType::fp32, t.T, t.H, rows.x.strides[0]);
    });
  }
  std::vector<float> mine(1024);
  expect_combine_refused(Layout::rank_major, words, [&](Tokens& t, DispatchResult& rows, CombineArgs& back) {
    back.y = TensorView::dense(mine.data(), DType::fp32, {rows.x.shape[0], t.H});
    back.out = TensorView::dense(mine.data() + 8, DType::fp32, {t.T, t.H});  // one row further
  });
}

TEST(Door, ColumnsBesideEachOtherAreApart) {
  run_virtual_ranks(2, [](Communicator& comm) {
    Buffer buffer(comm, small_config());
    Tokens tokens(comm.rank());
    for (int again = 0; again < 2; ++again) {
      std::vector<float> both(64 * 16, -1.0f);
      const DispatchResult rows = buffer.dispatch(tokens.args);
      CombineArgs back = back_of(rows);
      for (int64_t r = 0; r < rows.x.shape[0]; ++r) {
        for (int64_t h = 0; h < 8; ++h) both[static_cast<size_t>(r * 16 + h)] = rows.x.as<float>()[r * rows.x.strides[0] + h];
      }
      back.y = TensorView::matrix(both.data(), DType::fp32, rows.x.shape[0], 8, 16);
      back.out = TensorView::matrix(both.data() + 8, DType::fp32, tokens.T, 8, 16);
      buffer.combine(back);
      for (int64_t t = 0; t < tokens.T; ++t) {
        EXPECT_EQ(both[static_cast<size_t>(t * 16 + 8)], Tokens::value(comm.rank(), t) * static_cast<float>(num_destinations(tokens, t, 6, 2)));
      }
    }
  });
}

template <class Enum>
Enum nonsense() {
  return static_cast<Enum>(9);
}

TEST(Door, ValuesThatNoEnumerationHas) {
  expect_dispatch_refused({"mode is 9", "0 to 2"}, [](Tokens& t) { t.args.mode = nonsense<Mode>(); });
  expect_dispatch_refused({"layout is 9"}, [](Tokens& t) { t.args.layout = nonsense<Layout>(); });
  expect_dispatch_refused({"quantize is 9"}, [](Tokens& t) { t.args.quantize = nonsense<Quantize>(); });
  expect_dispatch_refused({"result is 9"}, [](Tokens& t) { t.args.result = nonsense<ResultKind>(); });
  expect_dispatch_refused({"receive is 9"}, [](Tokens& t) { t.args.receive = nonsense<Receive>(); });
  expect_dispatch_refused({"on_failure is 9"}, [](Tokens& t) { t.args.on_failure = nonsense<OnFailure>(); });
  expect_dispatch_refused({"x", "dtype is 99"}, [](Tokens& t) { t.args.x.dtype = static_cast<DType>(99); });
  expect_combine_refused(Layout::rank_major, {"wire is 9"}, [](Tokens&, DispatchResult&, CombineArgs& b) { b.wire = nonsense<Wire>(); });
  expect_combine_refused(Layout::rank_major, {"mode is 9"}, [](Tokens&, DispatchResult&, CombineArgs& b) { b.mode = nonsense<Mode>(); });
  expect_combine_refused(Layout::rank_major, {"apply is 9"}, [](Tokens&, DispatchResult&, CombineArgs& b) { b.apply = nonsense<CombineWeights>(); });
  BufferConfig config = small_config();
  config.dtype = static_cast<DType>(99);
  expect_says(message_of<InvalidArgument>([&] { required_bytes(config, 2); }), {"dtype is 99"});
}

TEST(Door, StridesThatWrapAround) {
  for (const int64_t stride :
       {(int64_t{1} << 62) - 1, std::numeric_limits<int64_t>::max(), std::numeric_limits<int64_t>::max() / 8, int64_t{1} << 45}) {
    expect_dispatch_refused({"x is", "further than memory"}, [&](Tokens& t) { t.args.x.strides[0] = stride; });
  }
}

TEST(Door, AnOutputOfASlabHasItsShape) {
  std::vector<float> room(4096);
  for (const auto& shape : {std::vector<int64_t>{2, 3, 8}, {4, 2, 8}}) {
    expect_dispatch_refused({"out is", "[3, 2, 8]"},
                            [&](Tokens& t) {
                              t.args.out = TensorView::dense(room.data(), DType::fp32, {shape[0], shape[1], shape[2]});
                            },
                            {.layout = Layout::expert_slab, .capacity = 2});
  }
}

TEST(Door, WhatWasMovedFromSaysSo) {
  run_virtual_ranks(2, [](Communicator& comm) {
    Buffer buffer(comm, small_config());
    Buffer taken(std::move(buffer));
    Tokens tokens(comm.rank());
    const CombineArgs back;
    for (const std::function<void()>& call : std::vector<std::function<void()>>{
             [&] { buffer.dispatch(tokens.args); }, [&] { buffer.dispatch_async(tokens.args); }, [&] { buffer.combine(back); },
             [&] { buffer.combine_async(back); }, [&] { buffer.rank(); }, [&] { buffer.num_ranks(); }, [&] { buffer.config(); },
             [&] { buffer.check(); }, [&] { buffer.synchronize(); }, [&] { buffer.recover(); }, [&] { buffer.num_bytes(); },
             [&] { buffer.status_word(); }, [&] { buffer.suspend(); }, [&] { buffer.resume(); }, [&] { buffer.num_local_experts(); },
             [&] { buffer.num_fresh_results(); }, [&] { buffer.set_expert_to_rank({0}); }}) {
      expect_says(message_of<InvalidArgument>(call), {"moved from"});
    }
    buffer.close();
    expect_works(taken);
    Communicator other = comm.sub_group(std::vector<int>{0, 1}, "other");
    Communicator moved(std::move(other));
    for (const std::function<void()>& call :
         std::vector<std::function<void()>>{[&] { other.rank(); }, [&] { other.barrier(); }, [&] { other.all_gather({}); },
                                            [&] { other.sub_group(std::vector<int>{0}); }, [&] { other.transport(); }, [&] { other.num_nodes(); }}) {
      expect_says(message_of<InvalidArgument>(call), {"moved from"});
    }
    moved.barrier();
  });
}

TEST(Door, ADeviceIsToldApart) {
  expect_dispatch_refused({"x is on cpu:3", "the CPU"}, [](Tokens& t) { t.args.x.device = {DeviceKind::cpu, 3}; });
}

// The default map, written out, was another one.
TEST(Door, TheDefaultMapWrittenOutIsTheSame) {
  run_virtual_ranks(2, [](Communicator& comm) {
    BufferConfig config = small_config();
    if (comm.rank() == 1) config.expert_to_rank = {0, 0, 0, 1, 1, 1};
    Buffer buffer(comm, config);
    expect_works(buffer);
  });
}

// Steps of two constructors used to mix, and none of the four ended. Which goes with which is the caller's to say.
TEST(Door, TwoThreadsOfARankMakeBuffers) {
  CommunicatorOptions options;
  options.timeout = std::chrono::seconds(10);
  const auto body = [](Communicator& comm) {
    std::unique_ptr<Buffer> other;
    std::thread second([&] { other = std::make_unique<Buffer>(comm, small_config()); });
    const Buffer buffer(comm, small_config());
    second.join();
    EXPECT_EQ(other->num_ranks() + buffer.num_ranks(), 4);
  };
  for (int again = 0; again < 20; ++again) run_virtual_ranks(2, body, options);
}

}  // namespace
}  // namespace turnout::testing
