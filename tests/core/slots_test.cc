// Where rows go, what is admitted, and where regions lie.
#include "core/slots.h"

#include <gtest/gtest.h>

#include <numeric>
#include <vector>

#include "core/buffer_layout.h"

namespace turnout::core {
namespace {

constexpr int64_t kHuge = int64_t{3} << 31;  // what 32 bits would cut off

TEST(Slots, RankMajorSlotsArePrefixSums) {
  std::vector<int64_t> begins(4);
  exclusive_prefix(std::vector<int64_t>{3, 0, kHuge}, begins);
  EXPECT_EQ(begins, (std::vector<int64_t>{0, 3, 3, 3 + kHuge}));
}

TEST(Slots, NoSourcesHaveATotalOfZero) {
  std::vector<int64_t> begins(1, 7);
  exclusive_prefix({}, begins);
  EXPECT_EQ(begins[0], 0);
}

TEST(Slots, GroupsStartAtMultiplesAndEmptyOnesTakeNothing) {
  std::vector<int64_t> offsets(5);
  group_offsets(std::vector<int64_t>{1, 0, 8, 9}, 8, offsets);
  EXPECT_EQ(offsets, (std::vector<int64_t>{0, 8, 8, 16, 32}));
  group_offsets(std::vector<int64_t>{1, 0, kHuge, 9}, 1, offsets);
  EXPECT_EQ(offsets, (std::vector<int64_t>{0, 1, 1, 1 + kHuge, 10 + kHuge}));
}

TEST(Slots, SlabRowsAreFlat) {
  EXPECT_EQ(slab_row(2, 3, 10), 23);
  EXPECT_EQ(slab_row(3, 1, kHuge), 3 * kHuge + 1);
}

TEST(Admission, RankMajorFillsSourceAfterSource) {
  EXPECT_EQ(admitted_rows(0, 4, kExact), 4);
  EXPECT_EQ(admitted_rows(0, 4, 4), 4);
  EXPECT_EQ(admitted_rows(2, 4, 5), 3);
  EXPECT_EQ(admitted_rows(5, 4, 5), 0);
  EXPECT_EQ(admitted_rows(9, 4, 5), 0);
  EXPECT_EQ(admitted_rows(0, 4, 0), 0);
  EXPECT_EQ(admitted_rows(kHuge, 4, kHuge + 1), 1);
}

TEST(Admission, PaddingCountsAndTheFirstThatDoesNotFitEndsIt) {
  PaddedAdmission admission{.capacity = 4, .alignment = 2};
  EXPECT_TRUE(admission.admit(0));   // opens expert 0
  EXPECT_TRUE(admission.admit(0));   // opens expert 1
  EXPECT_TRUE(admission.admit(1));   // into the padding of expert 0
  EXPECT_FALSE(admission.admit(2));  // would open a second pair
  EXPECT_FALSE(admission.admit(1));  // the padding of expert 1 is free, but it is over
  EXPECT_EQ(admission.padded_rows, 4);
}

TEST(Admission, OfNothingAndOfEverything) {
  PaddedAdmission none{.capacity = 0, .alignment = 1};
  EXPECT_FALSE(none.admit(0));
  EXPECT_EQ(none.padded_rows, 0);
  PaddedAdmission all{.capacity = kExact, .alignment = 16, .padded_rows = kHuge};
  EXPECT_TRUE(all.admit(0));
  EXPECT_EQ(all.padded_rows, kHuge + 16);
}

TEST(Admission, SlabHasItsOwnCapacityPerExpert) {
  EXPECT_TRUE(admits_slab(0, 1));
  EXPECT_FALSE(admits_slab(1, 1));
  EXPECT_FALSE(admits_slab(0, 0));
}

TEST(RegionCursor, GivesAlignedRegionsInOrderAndTheTotal) {
  RegionCursor at;
  EXPECT_EQ(at.take(1), 0u);
  EXPECT_EQ(at.take(200), 128u);
  EXPECT_EQ(at.take(0), 384u);
  EXPECT_EQ(at.take(5, 1), 384u);
  EXPECT_EQ(at.take(1, 4096), 4096u);
  EXPECT_EQ(at.num_bytes, 4097u);
}

TEST(RegionCursor, CountsBeyondFourGigabytes) {
  RegionCursor at;
  at.take(size_t{5} << 30);
  EXPECT_EQ(at.take(1), size_t{5} << 30);
  EXPECT_EQ(at.num_bytes, (size_t{5} << 30) + 1);
}

TEST(BufferLayout, RegionsDoNotOverlapAndEndAtTheTotal) {
  for (int ranks : {1, 2, 3, 8, 64}) {
    const BufferShape shape{
        .num_ranks = ranks, .num_lanes = 2, .depth = 3, .header_bytes = 1000, .least_staging_bytes = 15000, .receive_bytes = 12345};
    const BufferLayout b = BufferLayout::of(shape);
    std::vector<std::pair<size_t, size_t>> regions;
    for (int source = 0; source < ranks; ++source) regions.emplace_back(b.note_at(source), BufferLayout::kNoteBytes);
    for (auto at : {&BufferLayout::header_at, &BufferLayout::ring_at}) {
      for (int lane = 0; lane < 2; ++lane) {
        for (int copy = 0; copy < 3; ++copy) {
          for (int source = 0; source < ranks; ++source) {
            regions.emplace_back((b.*at)(lane, copy, source), at == &BufferLayout::ring_at ? b.ring_bytes : b.header_bytes);
          }
        }
      }
    }
    regions.emplace_back(b.receive, b.receive_bytes);
    size_t end = 0;
    for (auto [at, bytes] : regions) {
      EXPECT_GE(at, end);
      end = at + bytes;
    }
    EXPECT_LE(end, b.num_bytes);
    EXPECT_GE(b.receive_bytes, shape.receive_bytes);
    EXPECT_GE(b.ring_bytes, shape.least_staging_bytes);
  }
}

TEST(BufferLayout, NoTwoSignalsShareANumberAndNoTwoWritersALine) {
  const BufferLayout b = BufferLayout::of({.num_ranks = 3, .num_lanes = 2, .depth = 2, .header_bytes = 8, .least_staging_bytes = 64});
  std::vector<int> uses(static_cast<size_t>(b.num_signals()), 0);
  std::vector<int> writer(uses.size() / 8 + 1, -1);
  for (int source = 0; source < 3; ++source) {
    ++uses.at(static_cast<size_t>(b.abort_signal(source)));
    ++uses.at(static_cast<size_t>(b.closed_signal(source)));
    for (int lane = 0; lane < 2; ++lane) {
      for (int copy = 0; copy < 2; ++copy) {
        for (int which = 0; which < BufferLayout::kNumSignals; ++which) {
          const auto at = static_cast<size_t>(b.signal(lane, copy, source, static_cast<BufferLayout::Signal>(which)));
          ++uses.at(at);
          EXPECT_TRUE(writer.at(at / 8) == -1 || writer.at(at / 8) == source) << "signal " << at;
          writer.at(at / 8) = source;
        }
      }
    }
  }
  for (int count : uses) EXPECT_LE(count, 1);
  EXPECT_EQ(std::accumulate(uses.begin(), uses.end(), 0), 2 * 3 + 3 * 2 * 2 * BufferLayout::kNumSignals);
}

}  // namespace
}  // namespace turnout::core
