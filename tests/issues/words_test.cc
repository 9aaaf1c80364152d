// What a fresh user read, in messages and in the headers, and found to be otherwise, or to be noise.
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <numeric>
#include <string>
#include <vector>

#include "api/small_job.h"

namespace turnout::testing {
namespace {

using namespace std::chrono_literals;

// Nodes are added by their lowest rank, whatever they are called.
TEST(Words, LabelsOfNodesDoNotOrderSums) {
  for (const std::vector<int>& labels : {std::vector<int>{2, 0, 1}, {0, 1, 2}, {7, -5, 6}}) {
    CommunicatorOptions options;
    options.node_of_rank = labels;
    run_virtual_ranks(
        3,
        [](Communicator& comm) {
          EXPECT_EQ(comm.num_nodes(), 3);
          EXPECT_EQ(comm.node(), comm.rank());
          BufferConfig config = small_config();
          config.max_topk = 3;
          Buffer buffer(comm, config);
          std::vector<float> x(8, 1.0f);
          std::vector<int64_t> ids = {4, 0, 2};  // one expert of each rank
          DispatchResult rows =
              buffer.dispatch({.x = TensorView::dense(x.data(), DType::fp32, {1, 8}), .topk_idx = TensorView::dense(ids.data(), DType::i64, {1, 3})});
          // (1e8 - 1e8) + 1 is 1; in any other order of ranks but 1, 0, 2 the 1 is lost.
          const std::array<float, 3> values = {1e8f, -1e8f, 1.0f};
          std::vector<float> y(static_cast<size_t>(rows.x.shape[0]) * 8, values[static_cast<size_t>(comm.rank())]);
          const CombineResult sum = buffer.combine({.y = TensorView::dense(y.data(), DType::fp32, {rows.x.shape[0], 8}), .handle = &rows.handle});
          EXPECT_EQ(sum.x.as<float>()[0], 1.0f);
        },
        options);
  }
}

// A result with a capacity has more rows than are real: so may what is brought back, and what lies beyond is not read.
TEST(Words, RowsOfACombineMayBeMore) {
  for (const Layout layout : {Layout::rank_major, Layout::expert_major, Layout::expert_slab}) {
    for (const Mode mode : {Mode::throughput, Mode::low_latency}) {
      run_virtual_ranks(2, [&](Communicator& comm) {
        Buffer buffer(comm, small_config());
        Tokens tokens(comm.rank());
        tokens.args.layout = layout;
        tokens.args.mode = mode;
        if (layout == Layout::expert_slab) tokens.args.capacity = 8;
        const DispatchResult rows = buffer.dispatch(tokens.args);
        const CombineResult plain = buffer.combine(back_of(rows));
        const int64_t width = tokens.H, num_rows = rows.x.ndim == 3 ? rows.x.shape[0] * rows.x.shape[1] : rows.x.shape[0];
        std::vector<float> more(static_cast<size_t>((num_rows + 5) * width), std::nanf(""));
        const int64_t of_group = rows.x.ndim == 3 ? rows.x.shape[1] : 1, stride = rows.x.strides[static_cast<size_t>(rows.x.ndim - 2)];
        for (int64_t row = 0; row < num_rows; ++row) {
          const int64_t at = row / of_group * rows.x.strides[0] + row % of_group * stride;
          std::copy_n(rows.x.as<float>() + at, width, more.data() + row * width);
        }
        CombineArgs back = back_of(rows);
        back.mode = mode;
        back.y = TensorView::dense(more.data(), DType::fp32, {num_rows + 5, width});
        const CombineResult sum = buffer.combine(back);
        for (int64_t at = 0; at < tokens.T * width; ++at) EXPECT_EQ(sum.x.as<float>()[at], plain.x.as<float>()[at]);
        back.y = TensorView::dense(more.data(), DType::fp32, {num_rows - 1, width});
        expect_says(message_of<InvalidArgument>([&] { buffer.combine(back); }), {"rows"});
      });
    }
  }
}

TEST(Words, OfTwoKindsOfCallsOnlyTheKindsAreCompared) {
  run_virtual_ranks(2, [](Communicator& comm) {
    Buffer buffer(comm, small_config());
    Tokens tokens(comm.rank());
    const DispatchResult rows = buffer.dispatch(tokens.args);
    const std::string message = message_of<InvalidArgument>([&] {
      if (comm.rank() == 0) buffer.dispatch(tokens.args);
      else buffer.combine(back_of(rows));
    });
    expect_says(message, {"call: rank 0 = dispatch, rank 1 = combine"});
    EXPECT_EQ(std::count(message.begin(), message.end(), '\n'), 1) << message;
    expect_works(buffer);
  });
}

TEST(Words, TypesOfArraysThatAreNotThereAreNotCompared) {
  run_virtual_ranks(2, [](Communicator& comm) {
    Buffer buffer(comm, small_config());
    Tokens tokens(comm.rank());
    const auto side = TensorView::dense(tokens.side.data(), DType::fp32, {3, 1});
    if (comm.rank() == 1) tokens.args.side = {side};
    const std::string message = message_of<InvalidArgument>([&] { buffer.dispatch(tokens.args); });
    expect_says(message, {"arrays in side: rank 0 = 0, rank 1 = 1"});
    EXPECT_EQ(message.find("types of side"), std::string::npos) << message;
    // Of one number, but of other types:
    Tokens others(comm.rank());
    others.args.side = {comm.rank() == 1 ? side : TensorView::dense(tokens.side.data(), DType::i32, {3, 1})};
    expect_says(message_of<InvalidArgument>([&] { buffer.dispatch(others.args); }), {"types of side: rank 0 = #"});
  });
}

TEST(Words, OfMapsTheFirstEntryThatDiffersIsNamed) {
  run_virtual_ranks(3, [](Communicator& comm) {
    BufferConfig config = small_config();
    config.num_experts = 3000;
    config.expert_to_rank.resize(3000);
    for (int expert = 0; expert < 3000; ++expert) config.expert_to_rank[static_cast<size_t>(expert)] = expert % 3;
    if (comm.rank() == 2) config.expert_to_rank[1717] = 0;
    const std::string message = message_of<InvalidArgument>([&] { Buffer buffer(comm, config); });
    expect_says(message, {"expert_to_rank: rank 0 = 0 1 2 0", "the first to differ is expert 1717: 1 on rank 0, 1 on rank 1, 0 on rank 2"});
    EXPECT_LT(message.size(), 600u) << message;

    config = small_config();
    if (comm.rank() == 1) config.expert_to_rank = {0, 0, 1, 2, 1, 2};
    if (comm.rank() == 1) config.replica_of = {0, 1, 2, 3, 4, 5};  // what it is, written out
    const std::string other = message_of<InvalidArgument>([&] { Buffer buffer(comm, config); });
    expect_says(other, {"expert_to_rank: rank 0 = default, rank 1 = 0 0 1 2 1 2, rank 2 = default",
                        "the first to differ is expert 3: 1 on rank 0, 2 on rank 1, 1 on rank 2"});
    EXPECT_EQ(other.find("replica_of"), std::string::npos) << other;
  });
}

TEST(Words, MapsOfACallAreToldByTheirHashes) {
  run_virtual_ranks(2, [](Communicator& comm) {
    Buffer buffer(comm, small_config());
    Tokens tokens(comm.rank());
    buffer.set_expert_to_rank(comm.rank() == 1 ? std::vector<int>{0, 0, 1, 1, 0, 1} : std::vector<int>{0, 1, 0, 1, 0, 1});
    const std::string message = message_of<InvalidArgument>([&] { buffer.dispatch(tokens.args); });
    expect_says(message, {"expert map: rank 0 = #", "rank 1 = #", "set_expert_to_rank was given different maps"});
    EXPECT_EQ(message.find("#00000000"), std::string::npos) << message;
  });
}

// The deadline that was set is the one that is named, whatever of it had passed before the last step.
TEST(Words, TheDeadlineIsTheOneThatWasSet) {
  LaunchInfo info;
  info.num_ranks = 2;
  info.root_address = "127.0.0.1";
  info.port = 20000 + getpid() % 10000;
  info.job = "words-" + std::to_string(getpid());
  const auto start = std::chrono::steady_clock::now();
  expect_says(message_of<PeerTimeout>([&] { tcp_store(info, 500ms); }), {"missing ranks [1]", "the deadline is 500 ms"});
  EXPECT_GE(std::chrono::steady_clock::now() - start, 490ms);
}

}  // namespace
}  // namespace turnout::testing
