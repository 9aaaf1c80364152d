// The key-value store that rank 0 serves: one thread, one poll loop, nothing in it blocks.
#pragma once
#include <atomic>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "bootstrap/session.h"
#include "bootstrap/socket.h"
#include "util/process.h"

namespace turnout::bootstrap {

struct ServerOptions {
  std::string secret;
  int num_ranks = 0;
  /// A connection that has not proven the secret after this long is closed.
  std::chrono::milliseconds stranger_time = std::chrono::seconds(5);
  /// Called on the server's thread once every rank has joined; the listening sockets are closed then.
  std::function<void()> on_all_joined;
};

class Server {
 public:
  Server(std::vector<Fd> listeners, ServerOptions options);
  /// Hands every rank what the store still holds and closes. Waits for nobody's program: at most a second for the network.
  ~Server();
  Server(const Server&) = delete;
  Server& operator=(const Server&) = delete;

  /// Who was refused and why, a line each; for the message of a rendezvous that did not come about.
  std::string refusals() const;
  /// What a rank that knows the secret says of the job and rank 0 does not; empty if there is nothing.
  std::string contradiction() const;

 private:
  struct Connection {
    Fd fd;
    Address peer;
    Clock::time_point deadline;  ///< until proven
    enum class State { hello, proof, member, closing } state = State::hello;
    std::optional<Session> session;
    uint32_t rank = 0, num_ranks = 0;
    std::vector<std::byte> in, out;
    size_t num_written = 0;
    bool dead = false;
  };
  struct Waiting {
    Connection* from;
    uint64_t id;
    Clock::time_point deadline;
  };

  void loop();
  int poll_timeout_ms(Clock::time_point now) const;
  void accept_from(const Fd& listener);
  void read_from(Connection& c);
  void handle_input(Connection& c);
  void handle(Connection& c, const Parsed& frame);
  void challenge(Connection& c, const Message& hello);
  void admit(Connection& c, const Message& proof);
  void store(std::string_view key, Bytes value);
  void refuse(Connection& c, Refusal refusal, const std::string& text);
  void drop(Connection& c, const std::string& why);
  void send(Connection& c, std::vector<std::byte> frame);
  void flush(Connection& c);
  void expire(Clock::time_point now);
  void bury_dead();
  void say_farewell();
  void note(const Connection& c, const std::string& why);

  std::vector<Fd> listeners_;
  const ServerOptions options_;
  Fd wake_;
  std::list<Connection> connections_;
  std::map<std::string, std::vector<std::byte>, std::less<>> values_;
  std::multimap<std::string, Waiting, std::less<>> waiting_;
  std::set<uint32_t> joined_;
  Clock::time_point accept_again_{};
  mutable std::mutex notes_mutex_;
  std::string contradiction_;
  std::map<std::string, std::set<std::string>> notes_;  ///< reasons by address, without port
  std::atomic<bool> stop_ = false;
  const util::Process process_;
  std::thread thread_;
};

}  // namespace turnout::bootstrap
