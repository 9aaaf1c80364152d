// Pieces are taken from a shared counter, so a slow thread takes fewer.
#include "engine/cpu/thread_pool.h"

#include <algorithm>
#include <chrono>
#include <string>
#include <system_error>

#include "util/log.h"

namespace turnout::engine {

ThreadPool::ThreadPool(int num_threads) {
  try {
    for (int i = 1; i < num_threads; ++i) workers_.emplace_back([this] { work(); });
  } catch (const std::system_error& e) {
    // How many there are is each rank's own affair, and results do not depend on it.
    util::log(util::LogLevel::warn, "num_threads is " + std::to_string(num_threads) + ", but the system gave " + std::to_string(this->num_threads()) +
                                        " (" + e.code().message() + "): calls use those");
  }
}

ThreadPool::~ThreadPool() {
  if (!process_.is_this()) {  // they run in the parent
    util::leave_to_parent(workers_);
    return;
  }
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
    posted_.fetch_add(1, std::memory_order_relaxed);
  }
  wake_.notify_all();
  for (auto& worker : workers_) worker.join();
}

void ThreadPool::parallel_for(int64_t n, int64_t grain, const std::function<void(int64_t, int64_t)>& body) {
  if (n <= 0) return;
  if (workers_.empty() || n <= grain) return body(0, n);
  const Loop loop{n, std::max<int64_t>(grain, 1), &body};
  {
    std::lock_guard lock(mutex_);
    loop_ = loop;
    next_.store(0, std::memory_order_relaxed);
    failure_ = nullptr;
    num_busy_ = static_cast<int>(workers_.size());
    ++generation_;
    posted_.store(generation_, std::memory_order_release);
  }
  wake_.notify_all();
  run(loop);
  std::unique_lock lock(mutex_);
  finished_.wait(lock, [&] { return num_busy_ == 0; });
  if (failure_) std::rethrow_exception(failure_);
}

void ThreadPool::run(const Loop& loop) {
  try {
    for (int64_t begin; (begin = next_.fetch_add(loop.grain, std::memory_order_relaxed)) < loop.n;) {
      (*loop.body)(begin, std::min(begin + loop.grain, loop.n));
    }
  } catch (...) {
    std::lock_guard lock(mutex_);
    if (!failure_) failure_ = std::current_exception();
    next_.store(loop.n, std::memory_order_relaxed);
  }
}

void ThreadPool::work() {
  uint64_t seen = 0;
  while (true) {
    // Loops of one call follow each other closely: a short spin saves a wake-up each.
    const auto until = std::chrono::steady_clock::now() + std::chrono::microseconds(50);
    while (posted_.load(std::memory_order_acquire) == seen && std::chrono::steady_clock::now() < until) std::this_thread::yield();
    Loop loop;
    {
      std::unique_lock lock(mutex_);
      wake_.wait(lock, [&] { return stopping_ || generation_ != seen; });
      if (stopping_) return;
      seen = generation_;
      loop = loop_;
    }
    run(loop);
    std::lock_guard lock(mutex_);
    if (--num_busy_ == 0) finished_.notify_one();
  }
}

}  // namespace turnout::engine
