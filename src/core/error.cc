// The one sentence that every expired wait is told in.
#include "turnout/error.h"

namespace turnout {
inline namespace v0 {

std::string WaitRecord::to_string() const {
  std::string text = "rank " + std::to_string(rank) + " waited for rank";
  if (peers.size() != 1) text += 's';
  for (size_t i = 0; i < peers.size(); ++i) text += (i == 0 ? " " : ", ") + std::to_string(peers[i]);
  text += " in " + call + " (lane " + std::to_string(lane) + ", epoch " + std::to_string(epoch) + "), phase " + phase + ": expected " +
          std::to_string(expected) + ", seen " + std::to_string(seen);
  if (!peer_state.empty()) text += "; peer is " + peer_state;
  return text;
}

}  // namespace v0
}  // namespace turnout
