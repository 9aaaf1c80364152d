// The four errors, by who can act: the caller, the operator, or whoever looks after a peer.
#pragma once
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "turnout/visibility.h"

namespace turnout {
inline namespace v0 {

/// Base of everything Turnout throws.
class TURNOUT_API Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// The caller can fix it: an argument, a configuration, or ranks that disagree about one.
class TURNOUT_API InvalidArgument : public Error {
 public:
  using Error::Error;
};

/// The operator can fix it: no memory, no permission, no common network, a missing capability.
class TURNOUT_API TransportError : public Error {
 public:
  using Error::Error;
};

/// What a wait was waiting for when it gave up, the same on all ranks. Phase "failed": `rank` itself could not go on with the call.
struct TURNOUT_API WaitRecord {
  int rank = -1;           ///< who waited, and found out
  std::vector<int> peers;  ///< for whom
  int lane = 0;
  std::string call;        ///< "dispatch", "combine", "bootstrap"
  uint64_t epoch = 0;      ///< number of the call on its lane
  std::string phase;       ///< "header", "rows", "space", "consumed", "verdict", "failed", or the step of the bootstrap
  uint64_t expected = 0;   ///< value waited for
  uint64_t seen = 0;       ///< value seen last
  std::string peer_state;  ///< "alive", "busy", "silent", "gone", "closed" (its Buffer), "failed"
  std::string to_string() const;
};

/// A peer did not arrive, or did not finish, in time.
class TURNOUT_API PeerTimeout : public Error {
 public:
  PeerTimeout(const std::string& what, WaitRecord record) : Error(what), record_(std::move(record)) {}
  const WaitRecord& record() const { return record_; }

 private:
  WaitRecord record_;
};

/// A peer's process is gone or cannot be reached any more.
class TURNOUT_API PeerFailed : public Error {
 public:
  PeerFailed(const std::string& what, WaitRecord record) : Error(what), record_(std::move(record)) {}
  const WaitRecord& record() const { return record_; }

 private:
  WaitRecord record_;
};

}  // namespace v0
}  // namespace turnout
