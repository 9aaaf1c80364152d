// Wrong arguments of one rank: it is told which argument, what came and what would do; the other ranks are told who refused;
// and the Buffer goes on working on all of them.
#include <cstdint>
#include <limits>

#include "api/small_job.h"

namespace turnout::testing {
namespace {

constexpr int kRanks = 3, kWrong = 1;

/// What the others are told: who refused, and the argument, which the first of `words` begins with. Ids on a GPU are found wrong by a
/// kernel, and what does not fit may be found once the counts are known: then the refuser alone says what.
std::vector<std::string> words_of_others(const char* call, const std::vector<std::string>& words) {
  if (!on_host()) return {call, "refused by rank 1"};
  std::string first = words.front();
  if (first.starts_with(call)) first.erase(0, first.find(' ') + 1);
  return {call, "refused by rank 1, whose own error says why: ", first.substr(0, first.find_first_of(" ["))};
}

/// Rank 1 gives what `spoil` makes of good arguments, the others give good ones.
void expect_refused(const std::function<void(Tokens&)>& spoil, const std::vector<std::string>& words) {
  for (Mode mode : {Mode::throughput, Mode::low_latency}) {
    run_virtual_ranks(kRanks, [&](Communicator& comm) {
      Buffer buffer(comm, small_config());
      expect_works(buffer);
      Tokens tokens(comm.rank());
      tokens.args.mode = mode;
      if (comm.rank() == kWrong) spoil(tokens);
      const std::string message = message_of<InvalidArgument>([&] { settled(buffer, buffer.dispatch(tokens.args)); });
      expect_says(message, comm.rank() == kWrong ? words : words_of_others("dispatch", words));
      expect_works(buffer);
    });
  }
}

/// The same for a combine of what a good dispatch delivered.
void expect_combine_refused(Layout layout, const std::function<void(CombineArgs&, const DispatchResult&)>& spoil,
                            const std::vector<std::string>& words) {
  run_virtual_ranks(kRanks, [&](Communicator& comm) {
    Buffer buffer(comm, small_config());
    Tokens tokens(comm.rank());
    tokens.args.layout = layout;
    if (layout == Layout::expert_slab) tokens.args.capacity = 6;
    const DispatchResult rows = buffer.dispatch(tokens.args);
    CombineArgs back = back_of(rows);
    if (comm.rank() == kWrong) spoil(back, rows);
    const std::string message = message_of<InvalidArgument>([&] { settled(buffer, buffer.combine(back)); });
    expect_says(message, comm.rank() == kWrong ? words : words_of_others("combine", words));
    expect_works(buffer);
  });
}

TEST(BadInput, DtypeOfIds) {
  expect_refused([](Tokens& t) { t.args.topk_idx.dtype = DType::fp64; }, {"topk_idx", "fp64", "i32 or i64"});
}
TEST(BadInput, DtypeOfWeights) {
  expect_refused([](Tokens& t) { t.args.topk_weights.dtype = DType::i32; }, {"topk_weights", "i32", "fp32 or bf16"});
}
TEST(BadInput, DtypeToQuantize) {
  expect_refused(
      [](Tokens& t) {
        t.args.quantize = Quantize::fp8_e4m3;
        t.args.x.dtype = DType::i32;
      },
      {"x is", "i32", "quantize takes"});
}
TEST(BadInput, DtypeOfRowsToAdd) {
  expect_combine_refused(Layout::rank_major, [](CombineArgs& a, const DispatchResult&) { a.y.dtype = DType::i32; },
                         {"y is", "i32", "fp16, bf16, fp32 or fp64"});
}

TEST(BadInput, MissingArguments) {
  expect_refused([](Tokens& t) { t.args.x = TensorView(); }, {"x is missing"});
  expect_refused([](Tokens& t) { t.args.topk_idx = TensorView(); }, {"topk_idx is missing"});
  expect_combine_refused(Layout::rank_major, [](CombineArgs& a, const DispatchResult&) { a.y = TensorView(); }, {"y is missing"});
  expect_combine_refused(Layout::rank_major, [](CombineArgs& a, const DispatchResult&) { a.handle = nullptr; }, {"handle is empty"});
  static const Handle empty;
  expect_combine_refused(Layout::rank_major, [](CombineArgs& a, const DispatchResult&) { a.handle = &empty; }, {"handle is empty"});
}

TEST(BadInput, ShapeOfRows) {
  expect_refused([](Tokens& t) { t.args.x = dense(t.x.data(), DType::fp32, {24}); }, {"x is", "[24]", "2 dimensions"});
  expect_refused([](Tokens& t) { t.args.x.shape[1] = 9; }, {"x is", "rows of 36 bytes", "at most 32"});
  expect_refused([](Tokens& t) { t.args.x.shape[1] = 0; }, {"x is", "at least one element"});
  expect_refused([](Tokens& t) { t.args.x.shape[0] = -1; }, {"x is", "negative"});
}
TEST(BadInput, ShapeOfIds) {
  expect_refused([](Tokens& t) { t.args.topk_idx.shape[0] = 2; }, {"x has 3 tokens", "topk_idx has 2"});
  expect_refused([](Tokens& t) { t.args.topk_idx = dense(t.ids.data(), DType::i64, {3, 0}); }, {"topk_idx", "0 experts per token"});
}
TEST(BadInput, ShapeOfWeights) {
  expect_refused([](Tokens& t) { t.args.topk_weights = dense(t.weights.data(), DType::fp32, {3, 1}); }, {"topk_weights", "[3, 1]", "[3, 2]"});
}
TEST(BadInput, ShapeOfSide) {
  expect_refused([](Tokens& t) { t.args.side = {dense(t.side.data(), DType::fp32, {2, 1})}; }, {"side[0]", "2 rows", "x has 3"});
  expect_refused([](Tokens& t) { t.args.side = {dense(t.x.data(), DType::fp32, {3, 3})}; }, {"side[0]", "12 bytes", "at most 8", "max_side_bytes"});
}
TEST(BadInput, ShapeOfRowsToAdd) {
  expect_combine_refused(Layout::rank_major, [](CombineArgs& a, const DispatchResult&) { a.y.shape[0] -= 1; }, {"y has", "rows", "delivered"});
  expect_combine_refused(Layout::expert_slab, [](CombineArgs& a, const DispatchResult&) { a.y.shape[1] = 5; },
                         {"y is", "[2, 5, 8]", "[2, 6, hidden]"});
  expect_combine_refused(Layout::rank_major, [](CombineArgs& a, const DispatchResult&) { a.y.shape[1] = 9; },
                         {"y is", "rows of 36 bytes", "at most 32"});
}
TEST(BadInput, WeightsOfCombine) {
  static const float w[64] = {};
  expect_combine_refused(Layout::expert_major, [](CombineArgs& a, const DispatchResult&) { a.apply = CombineWeights::rows; },
                         {"apply=rows", "weights are missing"});
  expect_combine_refused(Layout::expert_major, [](CombineArgs& a, const DispatchResult&) { a.weights = dense(w, DType::fp32, {8}); },
                         {"weights are given but not applied"});
  expect_combine_refused(Layout::expert_major,
                         [](CombineArgs& a, const DispatchResult&) {
                           a.apply = CombineWeights::rows;
                           a.weights = dense(w, DType::fp32, {1});
                         },
                         {"weights is fp32[1]"});
  expect_combine_refused(Layout::expert_major,
                         [](CombineArgs& a, const DispatchResult&) {
                           a.apply = CombineWeights::rows;
                           a.weights = dense(w, DType::fp16, {64});
                         },
                         {"weights is", "fp16", "fp32 or bf16"});
  const auto late = [](CombineArgs& a, const DispatchResult&) {
    a.apply = CombineWeights::tokens;
    a.wire = Wire::rows;
  };
  expect_combine_refused(Layout::expert_slab, late, {"apply=tokens", "weights are missing"});
  expect_combine_refused(Layout::expert_slab,
                         [late](CombineArgs& a, const DispatchResult& r) {
                           late(a, r);
                           a.weights = dense(w, DType::fp32, {3, 2});
                           a.wire = Wire::fp32;
                         },
                         {"apply=tokens", "wire=fp32", "wire=rows"});
  expect_combine_refused(Layout::expert_slab,
                         [late](CombineArgs& a, const DispatchResult& r) {
                           late(a, r);
                           a.weights = dense(w, DType::fp32, {3, 1});
                         },
                         {"weights is fp32[3, 1]", "[3, 2]"});
  expect_combine_refused(Layout::rank_major, [](CombineArgs& a, const DispatchResult&) { a.apply = CombineWeights::source; },
                         {"weights=source", "rank_major"});
  expect_combine_refused(Layout::rank_major, [](CombineArgs& a, const DispatchResult&) { a.wire = Wire::rows; }, {"wire=rows", "rank_major"});
  expect_combine_refused(Layout::expert_major, [](CombineArgs& a, const DispatchResult&) { a.side = dense(w, DType::fp32, {1}); },
                         {"side is fp32[1]"});
  expect_combine_refused(Layout::expert_major, [](CombineArgs& a, const DispatchResult&) { a.side = dense(w, DType::fp64, {32}); },
                         {"side is", "fp64"});
}

TEST(BadInput, Strides) {
  expect_refused([](Tokens& t) { t.args.x.strides[1] = 2; }, {"x is", "last stride 1"});
  expect_refused([](Tokens& t) { t.args.x.strides[0] = -8; }, {"x is", "strides", "negative"});
  expect_refused([](Tokens& t) { t.args.topk_idx.strides[0] = 3; }, {"topk_idx is", "dense"});
  expect_refused([](Tokens& t) { t.args.topk_weights.strides[0] = 3; }, {"topk_weights is", "dense"});
  expect_combine_refused(Layout::rank_major, [](CombineArgs& a, const DispatchResult&) { a.y.strides[1] = 2; }, {"y is", "last stride 1"});
}

std::byte* odd(void* data) { return static_cast<std::byte*>(data) + 1; }

TEST(BadInput, Alignment) {
  expect_refused([](Tokens& t) { t.args.x.data = odd(t.args.x.data); }, {"x is not aligned", "4 bytes"});
  expect_refused([](Tokens& t) { t.args.topk_idx.data = odd(t.args.topk_idx.data); }, {"topk_idx is not aligned", "8 bytes"});
  expect_refused([](Tokens& t) { t.args.topk_weights.data = odd(t.args.topk_weights.data); }, {"topk_weights is not aligned", "4 bytes"});
  expect_refused([](Tokens& t) { t.args.side = {dense(odd(t.side.data()), DType::fp32, {3, 1})}; }, {"side[0] is not aligned"});
  static float w[64] = {};
  expect_combine_refused(Layout::rank_major, [](CombineArgs& a, const DispatchResult&) { a.y.data = odd(w); }, {"y is not aligned"});
  expect_combine_refused(Layout::expert_major,
                         [](CombineArgs& a, const DispatchResult&) {
                           a.apply = CombineWeights::rows;
                           a.weights = dense(odd(w), DType::fp32, {32});
                         },
                         {"weights is not aligned"});
  expect_combine_refused(Layout::expert_major, [](CombineArgs& a, const DispatchResult&) { a.side = dense(odd(w), DType::fp32, {32}); },
                         {"side is not aligned"});
}

TEST(BadInput, NullDataWithRows) {
  expect_refused([](Tokens& t) { t.args.x.data = nullptr; }, {"x is", "null data"});
  expect_refused([](Tokens& t) { t.args.topk_idx.data = nullptr; }, {"topk_idx is", "null data"});
  expect_refused([](Tokens& t) { t.args.topk_weights.data = nullptr; }, {"topk_weights is", "null data"});
  expect_refused([](Tokens& t) { t.args.side = {dense(nullptr, DType::fp32, {3, 1})}; }, {"side[0] is", "null data"});
  expect_combine_refused(Layout::rank_major, [](CombineArgs& a, const DispatchResult&) { a.y.data = nullptr; }, {"y is", "null data"});
  expect_combine_refused(Layout::expert_major,
                         [](CombineArgs& a, const DispatchResult&) {
                           a.apply = CombineWeights::rows;
                           a.weights = dense(nullptr, DType::fp32, {32});
                         },
                         {"weights", "null data"});
  expect_combine_refused(Layout::rank_major,
                         [](CombineArgs& a, const DispatchResult&) {
                           a.side = dense(nullptr, DType::fp32, {32, 2});
                         },
                         {"side", "null data"});
}

TEST(BadInput, Device) {
  if (!on_host()) GTEST_SKIP() << "tensors of the host are the wrong ones here";
  constexpr Device kCuda{DeviceKind::cuda, 0};
  static float w[64] = {};
  expect_refused([&](Tokens& t) { t.args.x.device = kCuda; }, {"x is on cuda", "CPU"});
  expect_refused([&](Tokens& t) { t.args.topk_idx.device = kCuda; }, {"topk_idx is on cuda"});
  expect_refused([&](Tokens& t) { t.args.topk_weights.device = kCuda; }, {"topk_weights is on cuda"});
  expect_refused([&](Tokens& t) { t.args.side = {dense(t.side.data(), DType::fp32, {3, 1}, kCuda)}; }, {"side[0] is on cuda"});
  expect_refused([&](Tokens& t) { t.args.out = dense(w, DType::fp32, {8, 8}, kCuda); }, {"out is on cuda"});
  const auto back = [](const std::string& what, const std::function<void(CombineArgs&)>& change) {
    expect_combine_refused(Layout::expert_major, [&](CombineArgs& a, const DispatchResult&) { change(a); }, {what + " is on cuda"});
  };
  back("y", [&](CombineArgs& a) { a.y.device = kCuda; });
  back("side", [&](CombineArgs& a) { a.side = dense(w, DType::fp32, {64}, kCuda); });
  back("out", [&](CombineArgs& a) { a.out = dense(w, DType::fp32, {3, 8}, kCuda); });
  back("weights", [&](CombineArgs& a) {
    a.apply = CombineWeights::rows;
    a.weights = dense(w, DType::fp32, {64}, kCuda);
  });
}

TEST(BadInput, StreamAndMultiprocessors) {
  if (on_host()) {  // on a GPU a stream that is none cannot be told from one
    static int anything = 0;
    expect_refused([](Tokens& t) { t.args.stream.native = &anything; }, {"dispatch: a stream is given", "on the CPU", "leave it null"});
    expect_combine_refused(Layout::rank_major, [](CombineArgs& a, const DispatchResult&) { a.stream.native = &anything; },
                           {"combine: a stream is given", "on the CPU"});
  }
  expect_refused([](Tokens& t) { t.args.num_sms = -1; }, {"dispatch: num_sms is -1"});
  expect_combine_refused(Layout::rank_major, [](CombineArgs& a, const DispatchResult&) { a.num_sms = INT32_MIN; },
                         {"combine: num_sms is -2147483648"});
}

/// Numbers whose products do not fit in 64 bits, and dimensions that a view does not have.
TEST(BadInput, ShapesBeyondAnyMemory) {
  constexpr int64_t kHuge = int64_t{1} << 62;
  static float w[64] = {};
  expect_refused(
      [](Tokens& t) {
        t.args.x.dtype = DType::fp64;
        t.args.x.shape[1] = kHuge;
      },
      {"x is", "4611686018427387904", "at most 32"});
  expect_refused([](Tokens& t) { t.args.x.shape = {kHuge, 8}; }, {"x has 4611686018427387904 tokens"});
  expect_refused([](Tokens& t) { t.args.topk_idx.shape = {kHuge, 4}; }, {"topk_idx has 4611686018427387904"});
  expect_refused([](Tokens& t) { t.args.topk_weights.shape = {kHuge, 4}; }, {"topk_weights is"});
  expect_refused([](Tokens& t) { t.args.side = {matrix(t.side.data(), DType::fp32, 3, kHuge, 1)}; }, {"side[0]", "at most 8"});
  expect_refused(
      [](Tokens& t) {
        t.args.side = {dense(t.side.data(), DType::fp32, {3, 1}), matrix(t.side.data(), DType::u8, 3, INT64_MAX, 1)};
      },
      {"side[1]", "at most 8"});
  for (int ndim : {-1, 4, 1 << 30}) {
    expect_refused([&](Tokens& t) { t.args.x.ndim = ndim; }, {"x is"});
    expect_refused([&](Tokens& t) { t.args.topk_idx.ndim = ndim; }, {"topk_idx is"});
  }
  const auto back = [](const std::function<void(CombineArgs&)>& change, const std::vector<std::string>& words) {
    expect_combine_refused(
        Layout::expert_major, [&](CombineArgs& a, const DispatchResult&) { change(a); }, words);
  };
  back([](CombineArgs& a) { a.y.ndim = 5; }, {"y is", "2 dimensions"});
  back([](CombineArgs& a) { a.y.shape[1] = kHuge; }, {"y is", "at most 32"});
  expect_combine_refused(Layout::expert_slab, [](CombineArgs& a, const DispatchResult&) { a.y.shape = {kHuge, 4, 8}; }, {"y is", "[2, 6, hidden]"});
  for (int64_t extent : {-kHuge, int64_t{-1}, int64_t{0}}) {
    back([&](CombineArgs& a) { a.side = dense(w, DType::fp32, {extent, 4}); }, {"side"});
    back(
        [&](CombineArgs& a) {
          a.apply = CombineWeights::rows;
          a.weights = dense(w, DType::fp32, {extent, 4});
        },
        {"weights"});
  }
  back(
      [&](CombineArgs& a) {
        a.side = dense(w, DType::fp32, {1, 1, 1});
        a.side.ndim = 9;
      },
      {"side has 9 dimensions"});
}

TEST(BadInput, ViewsOfFourDimensions) {
  expect_says(message_of<InvalidArgument>([] { dense(nullptr, DType::u8, {1, 1, 1, 1}); }), {"4 dimensions", "at most 3"});
}

TEST(BadInput, TooManySideArrays) {
  static const uint8_t bytes[3] = {};
  expect_refused([](Tokens& t) { t.args.side.assign(17, dense(bytes, DType::u8, {3, 0})); }, {"17 side arrays", "at most 16"});
}

TEST(BadInput, IdsOutOfRange) {
  constexpr int64_t kFar = int64_t{1} << 32;  // would be expert 1 in 32 bits
  for (int64_t id : {int64_t{6}, int64_t{6 + 7}, int64_t{-2}, int64_t{1} << 31, kFar + 1, std::numeric_limits<int64_t>::min(),
                     std::numeric_limits<int64_t>::max()}) {
    expect_refused([&](Tokens& t) { t.ids[3] = id; }, {"topk_idx[1][1] is " + std::to_string(id), "0 to 5", "-1 is none"});
  }
}
TEST(BadInput, NarrowIdsOutOfRange) {
  for (int32_t id : {6, 6 + 7, -2, std::numeric_limits<int32_t>::max(), std::numeric_limits<int32_t>::min()}) {
    Shared<int32_t> ids;
    expect_refused(
        [&](Tokens& t) {
          ids.assign(t.ids.begin(), t.ids.end());
          ids[0] = id;
          t.args.topk_idx = dense(ids.data(), DType::i32, {3, 2});
        },
        {"topk_idx[0][0] is " + std::to_string(id), "0 to 5"});
  }
}

TEST(BadInput, MoreTokensThanConfigured) {
  static const std::vector<float> x(64, 1.0f);
  static const std::vector<int64_t> ids(16, 0);
  expect_refused(
      [](Tokens& t) {
        t.args.x = dense(x.data(), DType::fp32, {5, 8});
        t.args.topk_idx = dense(ids.data(), DType::i64, {5, 2});
        t.args.topk_weights = TensorView();
      },
      {"x has 5 tokens", "at most 4", "max_tokens_per_rank"});
}
TEST(BadInput, TopkOverTheLimit) {
  static const std::vector<int64_t> ids(16, 0);
  expect_refused([](Tokens& t) { t.args.topk_idx = dense(ids.data(), DType::i64, {3, 3}); }, {"topk_idx has 3 experts", "1 to 2", "max_topk"});
}

TEST(BadInput, CapacityAndAlignment) {
  expect_refused([](Tokens& t) { t.args.capacity = -1; }, {"capacity is -1", "0 or more"});
  expect_refused([](Tokens& t) { t.args.capacity = int64_t{1} << 31; }, {"capacity is 2147483648", "2^31"});
  expect_refused([](Tokens& t) { t.args.layout = Layout::expert_slab; }, {"expert_slab", "needs a capacity"});
  expect_refused([](Tokens& t) { t.args.expert_alignment = 0; }, {"expert_alignment is 0"});
  expect_refused([](Tokens& t) { t.args.expert_alignment = (1 << 20) + 1; }, {"expert_alignment is 1048577", "1 to 1048576"});
}

TEST(BadInput, MaskIsNotInThisVersion) {
  expect_refused([](Tokens& t) { t.args.on_failure = OnFailure::mask; }, {"on_failure=mask", "use raise"});
  expect_combine_refused(Layout::rank_major, [](CombineArgs& a, const DispatchResult&) { a.on_failure = OnFailure::mask; }, {"on_failure=mask"});
}

TEST(BadInput, Out) {
  static std::vector<float> out(512);
  const auto give = [](TensorView view, std::vector<std::string> words) { expect_refused([=](Tokens& t) { t.args.out = view; }, words); };
  give(dense(out.data(), DType::bf16, {32, 8}), {"out is", "bf16", "fp32"});
  give(dense(out.data(), DType::fp32, {32, 7}), {"out is", "[32, 7]", "8 elements"});
  give(matrix(out.data(), DType::fp32, 32, 8, 4), {"out is", "rows overlap"});
  give(dense(nullptr, DType::fp32, {32, 8}), {"out is", "null data"});
  give(dense(out.data(), DType::fp32, {2, 16, 8}), {"out is", "2 dimensions"});
  expect_refused(
      [](Tokens& t) {
        t.args.layout = Layout::expert_slab;
        t.args.capacity = 6;
        t.args.out = dense(out.data(), DType::fp32, {2, 6, 8});
        t.args.out.strides[0] += 8;
      },
      {"out is", "dense"});
  expect_refused(
      [](Tokens& t) {
        t.args.out = dense(out.data(), DType::fp32, {32, 8});
        t.args.result = ResultKind::lease;
      },
      {"out", "result=lease"});
  const auto back = [](TensorView view, std::vector<std::string> words) {
    expect_combine_refused(
        Layout::rank_major, [=](CombineArgs& a, const DispatchResult&) { a.out = view; }, words);
  };
  back(dense(out.data(), DType::fp32, {4, 8}), {"out is", "[4, 8]", "3 tokens"});
  back(dense(out.data(), DType::fp64, {3, 8}), {"out is", "fp64", "fp32"});
  back(dense(out.data(), DType::fp32, {3, 9}), {"out is", "[3, 9]"});
  back(matrix(out.data(), DType::fp32, 3, 8, 0), {"out is", "rows overlap"});
}

}  // namespace
}  // namespace turnout::testing
