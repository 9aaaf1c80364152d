// The seeded scheduler: a network that is as unkind as the contract of Window allows.
//
// Puts are torn into pieces and land in any order; signals of different indices overtake each other; a signal lands only
// after every earlier put to the same destination, and values of one index only grow. What happens to an operation is drawn
// when it is issued, from one generator per (source, destination): so it depends on the seed and on what that source issued
// before to that destination, and not on how threads are timed.
#pragma once
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <utility>
#include <vector>

namespace turnout::transport {

class Scheduler {
 public:
  Scheduler(uint64_t seed, int num_ranks);

  void put(int source, int destination, size_t offset, const void* src, size_t num_bytes);
  void signal(int source, int destination, int index, uint64_t value);

  /// `source` sends nothing more: what is under way from it lands at the next delivery.
  void leave(int source);

  using Land = std::function<void(size_t offset, const std::byte* data, size_t num_bytes)>;
  using Raise = std::function<void(int source, int index, uint64_t value)>;
  /// Lands some of what is under way to `destination`. True if more is left.
  bool deliver(int destination, const Land& land, const Raise& raise);

 private:
  struct Operation {
    bool is_signal = false;
    size_t offset = 0;  ///< or the signal's index
    uint64_t value = 0;
    std::vector<std::byte> bytes;
  };
  /// An operation lands once as many were issued on its route as its turn says, or once the source has fallen silent.
  struct Route {
    std::mutex mutex;
    std::mt19937_64 random;
    bool left = false;
    uint64_t num_issued = 0;
    uint64_t last_put = 0;                                         ///< latest turn of any put so far
    std::map<size_t, uint64_t> last_of_signal;                     ///< latest turn, by index
    std::chrono::steady_clock::time_point issued;                  ///< when the last operation was
    std::map<std::pair<uint64_t, uint64_t>, Operation> under_way;  ///< by (turn, number of issue): the order of landing
  };
  Route& route(int source, int destination) {
    return *routes_[static_cast<size_t>(source) * static_cast<size_t>(num_ranks_) + static_cast<size_t>(destination)];
  }
  static uint64_t draw_turn(Route& r);

  const int num_ranks_;
  std::vector<std::unique_ptr<Route>> routes_;
};

}  // namespace turnout::transport
