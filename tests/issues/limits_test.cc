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
