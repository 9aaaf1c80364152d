// Work handed out by tickets, in runs that shrink towards the end: blocks do not get equal shares of a link, so equal shares of the
// rows would leave all waiting for the slowest. Who does an item changes from call to call; what is done does not.
#pragma once
#include <climits>

#include "engine/cuda/device/rows.cuh"

namespace turnout::engine::cuda {

/// Kept by lane 0 of a warp. The next run is asked for before it is needed: under load an atomic takes 2 us.
class Tickets {
 public:
  __device__ Tickets() {}
  /// Of `total` items, for `workers` that take runs of `most` or fewer, and of `least` or more while there are some.
  __device__ Tickets(uint32_t* counter, int total, int workers, int most, int least = 1)
      : counter_(counter), total_(total), shares_(4 * workers), most_(most), least_(least) {
    if (lane_id() != 0) return;
    ask();
    next_run();
  }
  /// The next item, -1 after the last. The whole warp calls it.
  __device__ int take() {
    int item = -1;
    if (lane_id() == 0 && current_ < total_) {
      item = current_++;
      if (current_ == end_) next_run();
    }
    return __shfl_sync(kFull, item, 0);
  }

  /// The item that take() would give, INT_MAX after the last. The whole warp calls it.
  __device__ int peek() const { return __shfl_sync(kFull, current_ < total_ ? current_ : INT_MAX, 0); }

 private:
  __device__ void ask() {
    next_size_ = max(least_, min(most_, (total_ - current_) / shares_));
    next_ = static_cast<int>(atomicAdd(counter_, static_cast<uint32_t>(next_size_)));
  }
  /// Nothing looks at what the atomic gives until the run is needed: no thread waits for it before.
  __device__ void next_run() {
    current_ = next_;
    end_ = min(next_ + next_size_, total_);
    if (current_ < total_) ask();
  }
  uint32_t* counter_ = nullptr;
  int total_ = 0, shares_ = 1, most_ = 1, least_ = 1, current_ = 0, end_ = 0, next_ = 0, next_size_ = 0;
};

/// The same one by one, where the last items are to be spread well: no worker holds more than the one that it has asked for.
class OneTicket {
 public:
  __device__ OneTicket() {}
  __device__ OneTicket(uint32_t* counter, int total) : counter_(counter), total_(total) { ask(); }
  /// The next take() waits for what comes.
  __device__ void ask() {
    if (lane_id() == 0) next_ = static_cast<int>(atomicAdd(counter_, 1u));
  }
  /// What has been asked for, -1 after the last. The whole warp calls it.
  __device__ int take() const {
    const int item = __shfl_sync(kFull, next_, 0);
    return item < total_ ? item : -1;
  }

 private:
  uint32_t* counter_ = nullptr;
  int total_ = 0, next_ = 0;
};

}  // namespace turnout::engine::cuda
