// Several groups may form under one name of one store, one after the other: again in one program, or by a job that was started anew beside a
// store that lives on. Each has keys of its own, so that none reads what an earlier one left, whether or not the store can erase.
//
// Every rank counts its tries in the store. Rank 0's number of tries is the number of the attempt; it answers each rank's latest try with
// it, and waits until the rank has taken the answer: a try that nobody takes the answer of is one that an earlier process left, and the rank
// will come with a newer one. So ranks may have tried differently often.
#pragma once
#include <chrono>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "turnout/bootstrap.h"

namespace turnout::bootstrap {

class Attempts {
 public:
  /// `prefix` of all keys of the name. The store must outlive it.
  Attempts(Store& store, std::string prefix, int rank, int num_ranks)
      : store_(store), prefix_(std::move(prefix)), rank_(rank), num_ranks_(num_ranks) {}

  struct Outcome {
    uint64_t attempt = 0;      ///< the same on all ranks, and on no other group of the name
    std::vector<int> missing;  ///< those who did not come
    bool ours = true;          ///< it was this rank's deadline that found out
    int other_count = 0;       ///< a number of ranks that some rank counts, other than ours
  };
  /// Collective. Rank 0 calls `begin` with the attempt before it waits for anybody. Throws what the store throws.
  Outcome agree(std::chrono::steady_clock::time_point deadline, const std::function<void(uint64_t)>& begin);

 private:
  using Clock = std::chrono::steady_clock;
  struct Peer;
  std::string key(const char* what, int rank, uint64_t number) const {
    return prefix_ + "/" + what + "/" + std::to_string(rank) + "/" + std::to_string(number);
  }
  bool has(const std::string& name) { return store_.get(name, std::chrono::milliseconds(1)).has_value(); }
  uint64_t num_tries(int rank);
  bool wait_for_try(int rank, uint64_t number, Clock::time_point deadline);
  Outcome lead(uint64_t attempt, Clock::time_point deadline);
  Outcome follow(uint64_t number, Clock::time_point deadline);
  Outcome miss_rank_zero(uint64_t number);
  void move(Peer& peer, uint64_t attempt, std::chrono::milliseconds slice, Outcome& outcome);
  void give_up(const std::vector<Peer>& peers, Outcome& outcome);
  void answer_everybody(const std::vector<Peer>& peers, const Outcome& outcome, Clock::time_point deadline);

  Store& store_;
  const std::string prefix_;
  const int rank_, num_ranks_;
};

}  // namespace turnout::bootstrap
