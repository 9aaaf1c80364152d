// Numbers at the edges of their types.
#include <limits>

#include "issues/job.h"

namespace turnout::testing {
namespace {

BufferConfig wide() {
  BufferConfig c;
  c.num_experts = 8;
  c.hidden = 7168;
  c.max_tokens_per_rank = 128;
  return c;
}

// Found here by c_api_fuzz: sizes wrapped around, so a Buffer of almost nothing was made, and no ranks were divided by.
TEST(Issues, SizesThatWrapAroundAreRefused) {
  constexpr size_t kMost = std::numeric_limits<size_t>::max();
  for (size_t bytes : {kMost, kMost / 2, kMost - 4095, size_t{1} << 47}) {
    BufferConfig c = wide();
    c.receive_bytes = bytes;
    expect_says(message_of<InvalidArgument>([&] { required_bytes(c, 2); }), {"receive_bytes is " + std::to_string(bytes), "2^46"});
    c = wide();
    c.staging_bytes = bytes;
    expect_says(message_of<InvalidArgument>([&] { required_bytes(c, 2); }), {"staging", "2^46"});
  }
  BufferConfig c = wide();
  c.num_lanes = c.max_outstanding = 64;
  c.hidden = 1 << 24;
  expect_says(message_of<InvalidArgument>([&] { required_bytes(c, 1 << 20); }), {"num_lanes x (max_outstanding + 1) x ranks", "2^46"});
  for (int ranks : {0, -1, std::numeric_limits<int>::min(), std::numeric_limits<int>::max()}) {
    expect_says(message_of<InvalidArgument>([&] { required_bytes(wide(), ranks); }), {"num_ranks is " + std::to_string(ranks)});
  }
}

// Found here: a timeout meant to last for ever was over at once, because nanoseconds wrap around. (DeepEP#424, DeepEP#678: it was
// 100 s for everybody.)
TEST(Issues, ATimeoutForEverIsRefusedInWords) {
  constexpr auto kForEver = std::chrono::milliseconds::max();
  for (auto member : {&Timeouts::timeout, &Timeouts::busy_timeout, &Timeouts::report_every}) {
    BufferConfig c = wide();
    c.timeouts.*member = kForEver;
    expect_says(message_of<InvalidArgument>([&] { c.validate(2); }), {"timeouts.", "a year"});
    c.timeouts.*member = std::chrono::hours(365 * 24);
    c.validate(2);
  }
  auto store = thread_store();
  expect_says(message_of<InvalidArgument>([&] { store_bootstrap(store, 0, 1, "world", kForEver); }), {"timeout", "a year"});
  LaunchInfo info;
  info.num_ranks = 2;
  expect_says(message_of<InvalidArgument>([&] { tcp_store(info, kForEver); }), {"timeout", "a year"});
  store->set("key", {});
  EXPECT_TRUE(store->get("key", kForEver));
}

// Found here by c_api_fuzz: the elements of a shape that wraps around looked few, and two negative extents looked like many.
TEST(Issues, ElementsOfAShapeNeverWrapAround) {
  constexpr int64_t kHuge = int64_t{1} << 62;
  EXPECT_EQ(TensorView::dense(nullptr, DType::u8, {kHuge, 4}).num_elements(), INT64_MAX);
  EXPECT_EQ(TensorView::dense(nullptr, DType::u8, {3, kHuge, 3}).num_elements(), INT64_MAX);
  EXPECT_EQ(TensorView::dense(nullptr, DType::u8, {kHuge, 0}).num_elements(), 0);
  EXPECT_EQ(TensorView::dense(nullptr, DType::u8, {-3, -4}).num_elements(), 0);
  EXPECT_EQ(TensorView().num_elements(), 0);
  run_virtual_ranks(1, [](Communicator& comm) {
    Buffer buffer(comm, small_config());
    Tokens tokens(0);
    tokens.args.layout = Layout::expert_major;
    const DispatchResult rows = buffer.dispatch(tokens.args);
    const std::pair<TensorView, const char*> none_of_them[] = {
        {TensorView::dense(tokens.x.data(), DType::fp32, {-3, -4}), "a dimension is negative"},
        {TensorView::dense(tokens.x.data(), DType::fp32, {kHuge, 4, 0}), "or more rows"},
    };
    for (const auto& [weights, words] : none_of_them) {
      CombineArgs back;
      back.y = rows.x;
      back.handle = &rows.handle;
      back.apply = CombineWeights::rows;
      back.weights = weights;
      expect_says(message_of<InvalidArgument>([&] { buffer.combine(back); }), {"weights", words});
    }
    Tokens none(0, 0);
    none.args.x = TensorView::dense(nullptr, DType::fp64, {0, kHuge / 2});  // 2^64 bytes a row
    expect_says(message_of<InvalidArgument>([&] { buffer.dispatch(none.args); }), {"x is fp64[0, ", "rows of 9223372036854775807 bytes"});
    Tokens aside(0, 0);
    aside.args.side = {TensorView::dense(nullptr, DType::u8, {0, 5}), TensorView::dense(nullptr, DType::fp32, {0, kHuge})};
    expect_says(message_of<InvalidArgument>([&] { buffer.dispatch(aside.args); }), {"side arrays have 9223372036854775807 bytes", "max_side_bytes"});
    Tokens wide(0);
    wide.args.topk_idx = TensorView::matrix(wide.ids.data(), DType::i64, 3, kHuge, 4);
    expect_says(message_of<InvalidArgument>([&] { buffer.dispatch(wide.args); }), {"topk_idx", std::to_string(kHuge)});
    expect_works(buffer);
  });
}

TEST(Issues, AYearIsLongEnoughToWait) {
  run_virtual_ranks(2, [](Communicator& comm) {
    BufferConfig c = small_config();
    c.timeouts.timeout = c.timeouts.busy_timeout = c.timeouts.report_every = std::chrono::hours(365 * 24);
    Buffer buffer(comm, c);
    for (int round = 0; round < 20; ++round) expect_works(buffer);
  });
}

}  // namespace
}  // namespace turnout::testing
