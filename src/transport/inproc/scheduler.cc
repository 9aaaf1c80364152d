// Each round walks a route's operations in order and lands each permitted one with even odds.
#include "transport/inproc/scheduler.h"

#include <algorithm>

namespace turnout::transport {

Scheduler::Scheduler(uint64_t seed, int num_ranks) : num_ranks_(num_ranks) {
  for (int pair = 0; pair < num_ranks * num_ranks; ++pair) {
    routes_.push_back(std::make_unique<Route>());
    std::seed_seq words{static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32), static_cast<uint32_t>(pair)};
    routes_.back()->random.seed(words);
  }
}

void Scheduler::put(int source, int destination, size_t offset, const void* src, size_t num_bytes) {
  Route& r = route(source, destination);
  std::lock_guard lock(r.mutex);
  const auto* bytes = static_cast<const std::byte*>(src);
  for (size_t at = 0; at < num_bytes;) {
    // Whole, or torn at any byte.
    const size_t left = num_bytes - at;
    const size_t piece = r.random() % 2 ? left : 1 + r.random() % left;
    r.under_way.push_back({false, offset + at, 0, std::vector<std::byte>(bytes + at, bytes + at + piece)});
    at += piece;
  }
}

void Scheduler::signal(int source, int destination, int index, uint64_t value) {
  Route& r = route(source, destination);
  std::lock_guard lock(r.mutex);
  r.under_way.push_back({true, static_cast<size_t>(index), value, {}});
}

bool Scheduler::deliver(int destination, const Land& land, const Raise& raise) {
  bool more = false;
  for (int source = 0; source < num_ranks_; ++source) {
    Route& r = route(source, destination);
    std::lock_guard lock(r.mutex);
    bool puts_before = false;
    std::vector<Operation> left;
    for (Operation& op : r.under_way) {
      const bool held_back = op.is_signal && (puts_before || std::any_of(left.begin(), left.end(), [&](const Operation& earlier) {
                                                return earlier.is_signal && earlier.offset == op.offset;
                                              }));
      if (held_back || r.random() % 2) {
        puts_before |= !op.is_signal;
        left.push_back(std::move(op));
      } else if (op.is_signal) {
        raise(source, static_cast<int>(op.offset), op.value);
      } else {
        land(op.offset, op.bytes.data(), op.bytes.size());
      }
    }
    r.under_way = std::move(left);
    more |= !r.under_way.empty();
  }
  return more;
}

}  // namespace turnout::transport
