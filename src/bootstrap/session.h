// What both ends of a rendezvous connection prove and how they seal their messages afterwards; arithmetic only, no I/O.
#pragma once
#include <vector>

#include "bootstrap/message.h"

namespace turnout::bootstrap {

/// One connection. Both nonces, the rank, the number of ranks and the version enter the proofs and the keys, so a
/// recorded conversation proves nothing to anybody else, and a proof cannot be sent back to its maker.
class Session {
 public:
  enum class Side { client, server };
  Session(Side side, Bytes secret, Bytes client_nonce, Bytes server_nonce, uint32_t rank, uint32_t num_ranks);

  Digest my_proof() const { return proof_[side_ == Side::server]; }
  bool accepts(Bytes proof) const { return equal_constant_time(proof, proof_[side_ == Side::client]); }

  /// The frame with its MAC: keyed by session and direction, over the number of the message and the frame.
  std::vector<std::byte> seal(const Message& message);
  /// True if the frame is the next one of the peer; a repeated, reordered or changed frame is not.
  bool open(const Parsed& frame);

 private:
  const Side side_;
  Digest proof_[2];  ///< of the client, of the server
  Digest send_key_, receive_key_;
  uint64_t num_sent_ = 0, num_received_ = 0;
};

}  // namespace turnout::bootstrap
