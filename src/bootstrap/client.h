// A rank's end of the rendezvous: the handshake, and the Store over one connection.
#pragma once
#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "bootstrap/session.h"
#include "bootstrap/socket.h"
#include "turnout/bootstrap.h"

namespace turnout::bootstrap {

/// Frames over a non-blocking socket.
class Channel {
 public:
  explicit Channel(Fd fd) : fd_(std::move(fd)) {}
  /// False if the connection is gone or the deadline has passed (then it is useless: half a frame may be out).
  bool write(const std::vector<std::byte>& frame, Clock::time_point deadline);
  enum class Outcome { frame, late, gone, malformed };
  /// The next frame, valid until the next call.
  Outcome read(bool proven, Clock::time_point deadline, Parsed& frame);
  int fd() const { return fd_.get(); }

 private:
  Fd fd_;
  std::vector<std::byte> in_;
  size_t used_ = 0;  ///< of in_, by the frame handed out last
};

/// Proves the secret to rank 0 and has it proven. On success the session; else `error`, and whether trying again may help.
struct Handshake {
  std::optional<Session> session;
  std::string error;
  std::optional<Refusal> refusal;
};
Handshake shake_hands(Channel& channel, const std::string& secret, uint32_t rank, uint32_t num_ranks, Clock::time_point deadline);

/// The store at the other end. Requests of several threads share the connection; whoever waits reads for all.
class RemoteStore final : public Store {
 public:
  RemoteStore(Channel channel, Session session, int rank, std::string where);
  void set(const std::string& key, std::span<const std::byte> value) override;
  std::optional<std::vector<std::byte>> get(const std::string& key, std::chrono::milliseconds timeout) override;
  void erase(const std::string& key) override;

 private:
  bool send(const Message& message, Clock::time_point deadline);
  void read_one(std::unique_lock<std::mutex>& lock, Clock::time_point deadline);
  [[noreturn]] void fail(const std::string& why) const;

  const int rank_;
  const std::string where_;
  std::mutex send_mutex_;
  Session session_;  ///< sealing under send_mutex_, opening by the one reader
  Channel channel_;
  bool broken_ = false;  ///< nothing can be sent any more; under send_mutex_

  std::mutex mutex_;
  std::condition_variable progress_;
  bool reading_ = false;
  uint64_t next_id_ = 0;
  std::map<uint64_t, std::optional<std::vector<std::byte>>> answers_;
  std::string gone_;                                        ///< why there is no connection any more; empty: there is
  std::map<std::string, std::vector<std::byte>> farewell_;  ///< what rank 0 held when it closed
};

}  // namespace turnout::bootstrap
