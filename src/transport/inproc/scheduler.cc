// Every operation draws how many later ones may overtake it.
#include "transport/inproc/scheduler.h"

#include <algorithm>

#include "util/probe.h"

namespace turnout::transport {

namespace {
constexpr uint64_t kMostOvertakers = 32;
/// A source that issues nothing for so long is taken to wait: what it issued lands, one operation a call, in order of turns.
constexpr std::chrono::microseconds kSilence{50};
}  // namespace

Scheduler::Scheduler(uint64_t seed, int num_ranks) : num_ranks_(num_ranks) {
  for (int pair = 0; pair < num_ranks * num_ranks; ++pair) {
    routes_.push_back(std::make_unique<Route>());
    std::seed_seq words{static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32), static_cast<uint32_t>(pair)};
    routes_.back()->random.seed(words);
  }
}

uint64_t Scheduler::draw_turn(Route& r) {
  r.issued = util::probe::now();
  const uint64_t number = ++r.num_issued;
  return r.random() % 2 ? number : number + 1 + r.random() % kMostOvertakers;
}

void Scheduler::put(int source, int destination, size_t offset, const void* src, size_t num_bytes) {
  Route& r = route(source, destination);
  std::lock_guard lock(r.mutex);
  const auto* bytes = static_cast<const std::byte*>(src);
  for (size_t at = 0; at < num_bytes;) {
    // Whole, or torn at any byte.
    const size_t left = num_bytes - at;
    const size_t piece = r.random() % 2 ? left : 1 + r.random() % left;
    const uint64_t turn = draw_turn(r);
    r.last_put = std::max(r.last_put, turn);
    r.under_way.emplace(std::pair(turn, r.num_issued), Operation{false, offset + at, 0, std::vector<std::byte>(bytes + at, bytes + at + piece)});
    at += piece;
  }
}

void Scheduler::signal(int source, int destination, int index, uint64_t value) {
  Route& r = route(source, destination);
  std::lock_guard lock(r.mutex);
  // Not before any earlier put, nor before an earlier value of the same signal; equal turns keep the order of issue.
  uint64_t& last = r.last_of_signal[static_cast<size_t>(index)];
  const uint64_t turn = last = std::max({draw_turn(r), r.last_put, last});
  r.under_way.emplace(std::pair(turn, r.num_issued), Operation{true, static_cast<size_t>(index), value, {}});
}

void Scheduler::leave(int source) {
  for (int destination = 0; destination < num_ranks_; ++destination) {
    Route& r = route(source, destination);
    std::lock_guard lock(r.mutex);
    r.left = true;
  }
}

bool Scheduler::deliver(int destination, const Land& land, const Raise& raise) {
  bool more = false;
  const auto now = util::probe::now();
  for (int source = 0; source < num_ranks_; ++source) {
    Route& r = route(source, destination);
    std::lock_guard lock(r.mutex);
    bool flushed = now - r.issued < kSilence;
    while (!r.under_way.empty()) {
      const auto next = r.under_way.begin();
      if (next->first.first > r.num_issued && !r.left) {
        if (flushed) break;
        flushed = true;
      }
      const Operation& op = next->second;
      if (op.is_signal) raise(source, static_cast<int>(op.offset), op.value);
      else land(op.offset, op.bytes.data(), op.bytes.size());
      r.under_way.erase(next);
    }
    more |= !r.under_way.empty();
  }
  return more;
}

}  // namespace turnout::transport
