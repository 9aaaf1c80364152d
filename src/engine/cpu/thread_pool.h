// A few threads that split a loop over rows. With one thread nothing is started and the loop runs where it stands.
#pragma once
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#include "util/process.h"

namespace turnout::engine {

class ThreadPool {
 public:
  /// `num_threads` counts the caller of parallel_for.
  explicit ThreadPool(int num_threads);
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;
  ~ThreadPool();

  int num_threads() const { return static_cast<int>(workers_.size()) + 1; }

  /// Calls body(begin, end) over pieces of about `grain` that cover [0, n); returns when all are done. The first exception
  /// is rethrown. REQUIRES: one caller at a time.
  void parallel_for(int64_t n, int64_t grain, const std::function<void(int64_t, int64_t)>& body);

 private:
  struct Loop {
    int64_t n = 0, grain = 1;
    const std::function<void(int64_t, int64_t)>* body = nullptr;
  };
  void work();
  void run(const Loop& loop);

  const util::Process process_;
  std::vector<std::thread> workers_;
  std::mutex mutex_;
  std::condition_variable wake_, finished_;
  Loop loop_;
  uint64_t generation_ = 0;
  int num_busy_ = 0;
  bool stopping_ = false;
  std::atomic<int64_t> next_{0};
  std::atomic<uint64_t> posted_{0};  ///< generation_, readable without the mutex: workers spin on it briefly
  std::exception_ptr failure_;
};

}  // namespace turnout::engine
