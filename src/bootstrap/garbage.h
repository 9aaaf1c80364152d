// What sub-groups leave in a store. The keys of a group's last step cannot be erased by a rank that has seen them: others may not have. So each rank
// that destroys its end of a group leaves word of that, and the group's rank 0, when it makes another group, looks for the words of all: where
// they are all there nobody reads the group's keys any more, and they are erased. Destroying a group asks the store for nothing, which may
// be gone by then, or stopped.
#pragma once
#include <cstdint>
#include <deque>
#include <mutex>
#include <string>

#include "turnout/bootstrap.h"

namespace turnout::bootstrap {

inline std::string step_key(const std::string& prefix, uint64_t number, int rank) {
  return prefix + "/" + std::to_string(number) + "/" + std::to_string(rank);
}

class Garbage {
 public:
  /// Key of the last word of a rank: a Value whose bytes are the number of its last step, given_up if that did not come about.
  static std::string word(const std::string& prefix, int rank) { return prefix + "/left/" + std::to_string(rank); }

  /// This rank, the group's rank 0, has left.
  void add(std::string prefix, int num_ranks) {
    std::lock_guard lock(mutex_);
    groups_.push_back({std::move(prefix), num_ranks});
  }
  /// Erases what is left of groups that all have left; looks at a few of them. Never throws: a store that fails says so at the next step.
  void sweep(Store& store) noexcept;

 private:
  struct Group {
    std::string prefix;
    int num_ranks = 0;
  };
  std::mutex mutex_;
  std::deque<Group> groups_;
};

}  // namespace turnout::bootstrap
