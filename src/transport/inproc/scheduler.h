// The seeded scheduler: a network that is as unkind as the contract of Window allows.
//
// Puts are torn into pieces and land in any order; signals of different indices overtake each other; a signal lands only
// after every earlier put to the same destination, and values of one index only grow. Decisions come from one generator per
// (source, destination), so they do not depend on how other pairs are timed.
#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <vector>

namespace turnout::transport {

class Scheduler {
 public:
  Scheduler(uint64_t seed, int num_ranks);

  void put(int source, int destination, size_t offset, const void* src, size_t num_bytes);
  void signal(int source, int destination, int index, uint64_t value);

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
  struct Route {
    std::mutex mutex;
    std::mt19937_64 random;
    std::vector<Operation> under_way;  ///< in the order of issue
  };
  Route& route(int source, int destination) {
    return *routes_[static_cast<size_t>(source) * static_cast<size_t>(num_ranks_) + static_cast<size_t>(destination)];
  }
  const int num_ranks_;
  std::vector<std::unique_ptr<Route>> routes_;
};

}  // namespace turnout::transport
