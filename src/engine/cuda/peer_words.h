// What the host says of peers to kernels that wait for them, and what a wait that expired says of a peer in the terms of the public errors.
#pragma once
#include "engine/cuda/args.h"
#include "engine/pulse.h"

namespace turnout::engine::cuda {

/// `is_gone`: the process of the peer has ended. `quiet`: since its heart last beat.
inline uint32_t said_of(bool is_gone, bool has_closed, Pulse::Duration quiet, std::chrono::milliseconds timeout) {
  if (is_gone || has_closed) return (is_gone ? kGone : 0) | (has_closed ? kClosed : 0);
  return quiet > timeout ? kSilent : quiet > silent_after(timeout) ? kQuiet : 0;
}

/// WaitRecord::peer_state. A peer whose header and offer have come is inside the call.
inline const char* peer_state(const DeviceRecord& r) {
  const auto said = static_cast<uint32_t>(r.value);
  if (r.state == kLostPeer) return (said & kClosed) != 0 ? "closed" : "gone";
  if (said == kQuiet || said == kSilent) return "silent";
  const auto phase = static_cast<Phase>(r.phase);
  return phase == Phase::counts || phase == Phase::offer ? "busy" : "alive";
}

}  // namespace turnout::engine::cuda
