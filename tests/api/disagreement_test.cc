// Ranks that do not say the same: a table on all of them names the fact and every rank's value, and nothing is left behind.
#include <cstdint>

#include "api/small_job.h"

namespace turnout::testing {
namespace {

/// Rank 1 is configured otherwise.
void expect_config_table(const std::string& field, const std::string& value, const std::string& common,
                         const std::function<void(BufferConfig&)>& change) {
  run_virtual_ranks(3, [&](Communicator& comm) {
    BufferConfig config = small_config();
    if (comm.rank() == 1) change(config);
    const std::string message = message_of<InvalidArgument>([&] { Buffer buffer(comm, config); });
    expect_says(message, {"disagree", field + ":", "rank 0 = " + common, "rank 1 = " + value, "rank 2 = " + common});
    Buffer buffer(comm, small_config());
    expect_works(buffer);
  });
}

TEST(Disagreement, OfConfiguredFacts) {
  expect_config_table("num_experts", "7", "6", [](BufferConfig& c) { c.num_experts = 7; });
  expect_config_table("hidden", "9", "8", [](BufferConfig& c) { c.hidden = 9; });
  expect_config_table("dtype", "bf16", "fp32", [](BufferConfig& c) { c.dtype = DType::bf16; });
  expect_config_table("max_tokens_per_rank", "5", "4", [](BufferConfig& c) { c.max_tokens_per_rank = 5; });
  expect_config_table("max_topk", "3", "2", [](BufferConfig& c) { c.max_topk = 3; });
  expect_config_table("max_side_bytes", "4", "8", [](BufferConfig& c) { c.max_side_bytes = 4; });
  expect_config_table("num_lanes", "2", "1", [](BufferConfig& c) { c.num_lanes = 2; });
  expect_config_table("max_outstanding", "3", "2", [](BufferConfig& c) { c.max_outstanding = 3; });
  expect_config_table("receive_bytes", "8192", "0", [](BufferConfig& c) { c.receive_bytes = 8192; });
  expect_config_table("staging_bytes", "8192", "0", [](BufferConfig& c) { c.staging_bytes = 8192; });
  expect_config_table("expert_to_rank", "2 2 1 1 0 0", "default", [](BufferConfig& c) { c.expert_to_rank = {2, 2, 1, 1, 0, 0}; });
  expect_config_table("replica_of", "0 1 2 3 4 0", "default", [](BufferConfig& c) { c.replica_of = {0, 1, 2, 3, 4, 0}; });
}

TEST(Disagreement, LocalChoicesMayDiffer) {
  run_virtual_ranks(3, [](Communicator& comm) {
    BufferConfig config = small_config();
    config.num_threads = 1 + comm.rank();
    config.timeouts.timeout = std::chrono::seconds(20 + comm.rank());
    config.touch_pages = comm.rank() == 1;
    Buffer buffer(comm, config);
    expect_works(buffer);
  });
}

TEST(Disagreement, AConfigurationThatOneRankCannotHave) {
  const auto refused = [](const std::function<void(BufferConfig&)>& change, const std::vector<std::string>& words) {
    run_virtual_ranks(3, [&](Communicator& comm) {
      BufferConfig config = small_config();
      if (comm.rank() == 1) change(config);
      const std::string message = message_of<InvalidArgument>([&] { Buffer buffer(comm, config); });
      expect_says(message, comm.rank() == 1 ? words : std::vector<std::string>{"refused by rank 1"});
      Buffer buffer(comm, small_config());
      expect_works(buffer);
    });
  };
  refused([](BufferConfig& c) { c.num_experts = 0; }, {"num_experts is 0", "1 to 16777216"});
  refused([](BufferConfig& c) { c.hidden = 0; }, {"hidden is 0"});
  refused([](BufferConfig& c) { c.max_topk = 65; }, {"max_topk is 65", "1 to 64"});
  refused([](BufferConfig& c) { c.max_tokens_per_rank = -1; }, {"max_tokens_per_rank is -1"});
  refused([](BufferConfig& c) { c.max_tokens_per_rank = INT64_MAX / 2; }, {"max_tokens_per_rank is", "2^31"});
  refused([](BufferConfig& c) { c.num_lanes = 0; }, {"num_lanes is 0"});
  refused([](BufferConfig& c) { c.max_outstanding = 0; }, {"max_outstanding is 0"});
  refused([](BufferConfig& c) { c.num_threads = 0; }, {"num_threads is 0"});
  refused([](BufferConfig& c) { c.timeouts.timeout = std::chrono::milliseconds(0); }, {"timeouts.timeout"});
  refused([](BufferConfig& c) { c.expert_to_rank = {0, 1}; }, {"expert_to_rank", "2", "num_experts = 6"});
  refused([](BufferConfig& c) { c.expert_to_rank = {0, 1, 2, 3, 0, 0}; }, {"3"});
  refused([](BufferConfig& c) { c.replica_of = {0}; }, {"replica_of", "num_experts = 6"});
  refused([](BufferConfig& c) { c.replica_of = {0, 1, 2, 3, 4, 6}; }, {"replica_of[5] is 6", "0 to 5"});
  refused([](BufferConfig& c) { c.hidden = (1 << 24) + 1; }, {"hidden is 16777217", "1 to 16777216"});
  refused([](BufferConfig& c) { c.max_topk = 0; }, {"max_topk is 0"});
  refused([](BufferConfig& c) { c.max_side_bytes = SIZE_MAX; }, {"max_side_bytes is", "at most 16777216"});
  refused([](BufferConfig& c) { c.num_lanes = 65; }, {"num_lanes is 65", "1 to 64"});
  refused([](BufferConfig& c) { c.max_outstanding = 65; }, {"max_outstanding is 65", "1 to 64"});
  refused([](BufferConfig& c) { c.num_threads = 257; }, {"num_threads is 257", "1 to 256"});
  refused([](BufferConfig& c) { c.timeouts.busy_timeout = std::chrono::milliseconds(-1); }, {"timeouts.busy_timeout"});
  refused([](BufferConfig& c) { c.expert_to_rank = {0, 1, 2, 0, 1, -1}; }, {"-1"});
  refused([](BufferConfig& c) { c.receive_bytes = SIZE_MAX; }, {"receive_bytes is"});
  refused([](BufferConfig& c) { c.staging_bytes = SIZE_MAX / 2; }, {"staging_bytes is"});
  refused([](BufferConfig& c) { c.num_experts = INT32_MAX; }, {"num_experts is 2147483647", "1 to 16777216"});
}

TEST(Disagreement, RequiredBytesOfNoRanks) {
  for (int num_ranks : {0, -1}) expect_says(message_of<InvalidArgument>([&] { required_bytes(small_config(), num_ranks); }), {"num_ranks is"});
}

/// Rank 1 gives other arguments: a table on all ranks, and the Buffer goes on.
void expect_call_table(const std::string& fact, const std::string& common, const std::string& value, const std::function<void(Tokens&)>& all,
                       const std::function<void(Tokens&)>& change) {
  for (Mode mode : {Mode::throughput, Mode::low_latency}) {
    run_virtual_ranks(3, [&](Communicator& comm) {
      Buffer buffer(comm, small_config());
      Tokens tokens(comm.rank());
      tokens.args.mode = mode;
      if (all) all(tokens);
      if (comm.rank() == 1) change(tokens);
      const std::string message = message_of<InvalidArgument>([&] { settled(buffer, buffer.dispatch(tokens.args)); });
      expect_says(message, {"dispatch", "disagree", fact + ":", "rank 0 = " + common, "rank 1 = " + value, "rank 2 = " + common});
      expect_works(buffer);
      expect_works(buffer);
    });
  }
}

TEST(Disagreement, OfDispatchArguments) {
  expect_call_table("layout", "rank_major", "expert_major", nullptr, [](Tokens& t) { t.args.layout = Layout::expert_major; });
  expect_call_table(
      "layout", "expert_slab", "expert_major",
      [](Tokens& t) {
        t.args.layout = Layout::expert_slab;
        t.args.capacity = 4;
      },
      [](Tokens& t) { t.args.layout = Layout::expert_major; });
  expect_call_table("capacity", "exact", "7", nullptr, [](Tokens& t) { t.args.capacity = 7; });
  expect_call_table(
      "capacity", "8", "7", [](Tokens& t) { t.args.capacity = 8; }, [](Tokens& t) { t.args.capacity = 7; });
  expect_call_table("dtype of x", "fp32", "i32", nullptr, [](Tokens& t) { t.args.x.dtype = DType::i32; });
  expect_call_table("hidden of x", "8", "4", nullptr, [](Tokens& t) { t.args.x = dense(t.x.data(), DType::fp32, {3, 4}); });
  expect_call_table("top-k of topk_idx", "2", "1", nullptr, [](Tokens& t) {
    t.args.topk_idx = dense(t.ids.data(), DType::i64, {3, 1});
    t.args.topk_weights = dense(t.weights.data(), DType::fp32, {3, 1});
  });
  expect_call_table("topk_weights", "given", "none", nullptr, [](Tokens& t) { t.args.topk_weights = TensorView(); });
  expect_call_table("arrays in side", "0", "1", nullptr, [](Tokens& t) { t.args.side = {dense(t.side.data(), DType::fp32, {3, 1})}; });
  expect_call_table("quantize", "none", "fp8_e4m3", nullptr, [](Tokens& t) { t.args.quantize = Quantize::fp8_e4m3; });
  expect_call_table(
      "expert_alignment", "1", "8", [](Tokens& t) { t.args.layout = Layout::expert_major; }, [](Tokens& t) { t.args.expert_alignment = 8; });
}

TEST(Disagreement, OfModes) {
  run_virtual_ranks(3, [](Communicator& comm) {
    Buffer buffer(comm, small_config());
    Tokens tokens(comm.rank());
    tokens.args.mode = comm.rank() == 1 ? Mode::low_latency : Mode::throughput;
    const std::string message = message_of<InvalidArgument>([&] { settled(buffer, buffer.dispatch(tokens.args)); });
    expect_says(message, {"mode:", "rank 0 = throughput", "rank 1 = low_latency"});
    expect_works(buffer);
  });
}

/// After a good dispatch, what each rank does is compared.
void expect_table_after_dispatch(const std::vector<std::string>& words,
                                 const std::function<void(Buffer&, Tokens&, DispatchResult&, CombineArgs&)>& call) {
  run_virtual_ranks(3, [&](Communicator& comm) {
    Buffer buffer(comm, small_config());
    Tokens first(comm.rank()), tokens(comm.rank());
    first.args.layout = tokens.args.layout = Layout::expert_major;
    const DispatchResult earlier = buffer.dispatch(first.args);
    DispatchResult rows = buffer.dispatch(tokens.args);
    CombineArgs back;
    back.y = rows.x;
    back.stream = here().stream();
    back.handle = comm.rank() == 1 && words[0] == "handle:" ? &earlier.handle : &rows.handle;
    const std::string message = message_of<InvalidArgument>([&] {
      call(buffer, tokens, rows, back);
      settle(buffer);
    });
    expect_says(message, words);
    expect_works(buffer);
  });
}

TEST(Disagreement, OfHandles) {
  expect_table_after_dispatch({"handle:", "rank 0 = ", "rank 1 = "}, [](Buffer& b, Tokens&, DispatchResult&, CombineArgs& back) { b.combine(back); });
  expect_table_after_dispatch({"handle:", "rank 0 = ", "rank 1 = "}, [](Buffer& b, Tokens& t, DispatchResult&, CombineArgs& back) {
    t.args.topk_idx = t.args.topk_weights = TensorView();
    t.args.handle = back.handle;
    b.dispatch(t.args);
  });
}

TEST(Disagreement, OfCalls) {
  expect_table_after_dispatch({"call:", "rank 0 = combine", "rank 1 = dispatch"}, [](Buffer& b, Tokens& t, DispatchResult&, CombineArgs& back) {
    if (b.rank() == 1) b.dispatch(t.args);
    else b.combine(back);
  });
}

TEST(Disagreement, OfCombineArguments) {
  expect_table_after_dispatch({"wire:", "rank 0 = payload", "rank 1 = fp32"}, [](Buffer& b, Tokens&, DispatchResult&, CombineArgs& back) {
    if (b.rank() == 1) back.wire = Wire::fp32;
    b.combine(back);
  });
  expect_table_after_dispatch({"apply:", "rank 0 = none", "rank 1 = source"}, [](Buffer& b, Tokens&, DispatchResult&, CombineArgs& back) {
    if (b.rank() == 1) back.apply = CombineWeights::source;
    b.combine(back);
  });
  expect_table_after_dispatch({"dtype of y:", "rank 0 = fp32", "rank 1 = bf16"}, [](Buffer& b, Tokens&, DispatchResult&, CombineArgs& back) {
    if (b.rank() == 1) back.y.dtype = DType::bf16;
    b.combine(back);
  });
  const Shared<float> side(64);
  expect_table_after_dispatch({"\n  side:", "rank 0 = 0", "rank 1 = 1"}, [&](Buffer& b, Tokens&, DispatchResult&, CombineArgs& back) {
    if (b.rank() == 1) back.side = dense(side.data(), DType::fp32, {64});
    b.combine(back);
  });
}

}  // namespace
}  // namespace turnout::testing
