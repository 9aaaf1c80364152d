// What a call with checksums keeps.
#pragma once
#include <vector>

#include "engine/cpu/call.h"

namespace turnout::engine {

struct Call::Sums {
  explicit Sums(size_t num_ranks) : peers(num_ranks) {}
  struct Peer {
    uint64_t sent = 0, got = 0;  ///< sums of total_of()
    int64_t num_sent = 0, num_got = 0;
    bool total_sent = false;
  };
  std::vector<Peer> peers;
  std::vector<RowSum> held;  ///< of rows that a dispatch lays out at its end
};

}  // namespace turnout::engine
