// The default Allocator: warm reuse, the cap, alignment, threads.
#include "engine/cpu/page_pool.h"

#include <gtest/gtest.h>
#include <sys/mman.h>

#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>

namespace turnout::engine {
namespace {

constexpr size_t kMiB = size_t{1} << 20;

/// How many pages of [data, data + bytes) are in memory.
size_t resident_pages(void* data, size_t bytes) {
  std::vector<unsigned char> pages((bytes + 4095) / 4096);
  EXPECT_EQ(mincore(data, bytes, pages.data()), 0);
  size_t n = 0;
  for (unsigned char page : pages) n += page & 1;
  return n;
}

TEST(PagePool, HandsTheSameWarmBlockOutAgain) {
  PagePool pool;
  for (size_t bytes : {size_t{1}, size_t{100}, size_t{4096}, size_t{5000}, kMiB, 3 * kMiB + 7, 64 * kMiB}) {
    void* first = pool.allocate(bytes);
    const size_t made = pool.num_mapped();
    pool.deallocate(first, bytes);
    EXPECT_EQ(pool.allocate(bytes), first) << bytes;
    EXPECT_EQ(pool.num_mapped(), made);
    pool.deallocate(first, bytes);
  }
}

TEST(PagePool, BlocksAreTouchedWhenTheyAreMade) {
  PagePool pool;
  for (size_t bytes : {size_t{8192}, kMiB, 9 * kMiB}) {
    void* block = pool.allocate(bytes);
    EXPECT_EQ(resident_pages(block, bytes), (bytes + 4095) / 4096) << bytes;
    pool.deallocate(block, bytes);
    EXPECT_EQ(resident_pages(block, bytes), (bytes + 4095) / 4096) << "kept warm";
  }
}

TEST(PagePool, LargeBlocksBeginAtHugePages) {
  PagePool pool;
  for (size_t bytes : {2 * kMiB, 2 * kMiB + 1, 5 * kMiB, 100 * kMiB}) {
    void* block = pool.allocate(bytes);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(block) % (2 * kMiB), 0u) << bytes;
    pool.deallocate(block, bytes);
  }
}

TEST(PagePool, NearlyEqualSizesShareBlocks) {
  PagePool pool;
  void* block = pool.allocate(60'000'000);
  pool.deallocate(block, 60'000'000);
  EXPECT_EQ(pool.allocate(59'000'000), block);
  pool.deallocate(block, 59'000'000);
  EXPECT_EQ(pool.num_mapped(), 1u);
}

TEST(PagePool, EveryByteOfEverySizeIsUsable) {
  PagePool pool;
  std::vector<std::pair<unsigned char*, size_t>> blocks;
  for (size_t bytes = 1; bytes < 40 * kMiB; bytes = bytes * 3 / 2 + 1) {
    auto* block = static_cast<unsigned char*>(pool.allocate(bytes));
    std::memset(block, static_cast<int>(blocks.size() + 1), bytes);
    blocks.emplace_back(block, bytes);
  }
  for (size_t i = 0; i < blocks.size(); ++i) {  // none lies in another
    const auto [block, bytes] = blocks[i];
    EXPECT_EQ(block[0], i + 1);
    EXPECT_EQ(block[bytes - 1], i + 1);
    pool.deallocate(block, bytes);
  }
}

TEST(PagePool, KeepsNoMoreThanItsCap) {
  PagePool pool(8 * kMiB);
  std::vector<void*> blocks;
  for (int i = 0; i < 5; ++i) blocks.push_back(pool.allocate(4 * kMiB));
  EXPECT_EQ(pool.bytes_kept(), 0u);
  for (void* block : blocks) {
    pool.deallocate(block, 4 * kMiB);
    EXPECT_LE(pool.bytes_kept(), 8 * kMiB);
  }
  EXPECT_EQ(pool.bytes_kept(), 8 * kMiB);
  for (int i = 0; i < 3; ++i) blocks[static_cast<size_t>(i)] = pool.allocate(4 * kMiB);
  EXPECT_EQ(pool.num_mapped(), 6u);  // two were kept, the third is new
  for (int i = 0; i < 3; ++i) pool.deallocate(blocks[static_cast<size_t>(i)], 4 * kMiB);
}

TEST(PagePool, NothingIsKeptWithACapOfZero) {
  PagePool pool(0);
  for (int i = 0; i < 3; ++i) pool.deallocate(pool.allocate(4096), 4096);
  EXPECT_EQ(pool.bytes_kept(), 0u);
  EXPECT_EQ(pool.num_mapped(), 3u);
}

TEST(PagePool, NullMayBeGivenBack) {
  PagePool pool;
  pool.deallocate(nullptr, 4096);
  EXPECT_EQ(pool.bytes_kept(), 0u);
}

TEST(PagePool, ThreadsDoNotShareABlock) {
  PagePool pool(16 * kMiB);
  std::vector<std::thread> threads;
  std::vector<int> wrong(4, 0);
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&pool, &wrong, t] {
      for (size_t i = 0; i < 3000; ++i) {
        const size_t bytes = 4096 * (1 + i % 7);
        auto* block = static_cast<unsigned char*>(pool.allocate(bytes));
        std::memset(block, t + 1, bytes);
        wrong[static_cast<size_t>(t)] += block[0] != t + 1 || block[bytes - 1] != t + 1;
        pool.deallocate(block, bytes);
      }
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(wrong, std::vector<int>(4, 0));
  EXPECT_LE(pool.num_mapped(), 4u * 7u);
}

}  // namespace
}  // namespace turnout::engine
