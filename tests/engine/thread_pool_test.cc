// A loop over several threads: every index once, the caller takes part, exceptions come out.
#include "engine/cpu/thread_pool.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <barrier>
#include <mutex>
#include <numeric>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace turnout::engine {
namespace {

TEST(ThreadPool, CoversEveryIndexOnceInPiecesOfAtMostTheGrain) {
  for (int num_threads : {1, 2, 3, 8}) {
    ThreadPool pool(num_threads);
    EXPECT_EQ(pool.num_threads(), num_threads);
    for (int64_t n : {0, 1, 2, 7, 64, 1000, 4097}) {
      for (int64_t grain : {0, 1, 3, 64, 5000}) {
        std::vector<std::atomic<int>> visits(static_cast<size_t>(n));
        std::atomic<int> misshapen{0};
        pool.parallel_for(n, grain, [&](int64_t begin, int64_t end) {
          if (begin >= end || begin < 0 || end > n) ++misshapen;
          if (num_threads > 1 && end - begin > std::max<int64_t>(grain, 1)) ++misshapen;
          for (int64_t i = begin; i < end; ++i) ++visits[static_cast<size_t>(i)];
        });
        ASSERT_EQ(misshapen, 0) << n << " by " << grain << " on " << num_threads;
        for (auto& count : visits) ASSERT_EQ(count, 1) << n << " by " << grain << " on " << num_threads;
      }
    }
  }
}

TEST(ThreadPool, OneThreadRunsWhereItStands) {
  ThreadPool pool(1);
  const auto here = std::this_thread::get_id();
  pool.parallel_for(10, 1, [&](int64_t, int64_t) { EXPECT_EQ(std::this_thread::get_id(), here); });
}

TEST(ThreadPool, AllThreadsAndTheCallerWorkAtOnce) {
  constexpr int kThreads = 4;
  ThreadPool pool(kThreads);
  for (int round = 0; round < 50; ++round) {
    std::barrier everybody(kThreads);  // no piece ends before each thread has one
    std::mutex mutex;
    std::set<std::thread::id> ids;
    pool.parallel_for(kThreads, 1, [&](int64_t, int64_t) {
      everybody.arrive_and_wait();
      std::lock_guard lock(mutex);
      ids.insert(std::this_thread::get_id());
    });
    ASSERT_EQ(ids.size(), static_cast<size_t>(kThreads));
    ASSERT_TRUE(ids.contains(std::this_thread::get_id()));
  }
}

TEST(ThreadPool, ManyShortLoopsInARow) {
  ThreadPool pool(3);
  int64_t sum = 0;
  for (int64_t round = 1; round <= 5000; ++round) {
    std::atomic<int64_t> loop_sum{0};
    pool.parallel_for(7, 1, [&](int64_t begin, int64_t) { loop_sum += begin + round; });
    sum += loop_sum;
  }
  EXPECT_EQ(sum, 5000 * 21 + 7 * (int64_t{5000} * 5001 / 2));
}

TEST(ThreadPool, AnExceptionReachesTheCallerAndThePoolStaysUsable) {
  for (int num_threads : {1, 2, 4}) {
    ThreadPool pool(num_threads);
    for (int64_t bad : {0, 5, 99}) {
      try {
        pool.parallel_for(100, 1, [&](int64_t begin, int64_t end) {
          if (begin <= bad && bad < end) throw std::runtime_error("row " + std::to_string(bad));
        });
        ADD_FAILURE() << "nothing was thrown";
      } catch (const std::runtime_error& e) {
        EXPECT_EQ(e.what(), "row " + std::to_string(bad));
      }
      std::atomic<int64_t> n{0};
      pool.parallel_for(100, 3, [&](int64_t begin, int64_t end) { n += end - begin; });
      EXPECT_EQ(n, 100);
    }
  }
}

TEST(ThreadPool, EndsWithoutEverHavingWorked) {
  for (int i = 0; i < 100; ++i) ThreadPool pool(4);
}

}  // namespace
}  // namespace turnout::engine
