// Sockets of the rendezvous: addresses of both families, listening, connecting, and who holds a port that is taken.
#pragma once
#include <netinet/in.h>
#include <sys/socket.h>

#include <chrono>
#include <cstddef>
#include <span>
#include <string>
#include <vector>

#include "util/standard_streams.h"

namespace turnout::bootstrap {

using Clock = std::chrono::steady_clock;

/// Owns a descriptor.
class Fd {
 public:
  Fd() = default;
  /// Owns `fd`, under a number above those of the standard streams.
  explicit Fd(int fd) : fd_(util::above_standard_streams(fd)) {}
  Fd(Fd&& other) noexcept : fd_(other.release()) {}
  Fd& operator=(Fd&& other) noexcept {
    reset(other.release());
    return *this;
  }
  ~Fd() { reset(); }
  int get() const { return fd_; }
  explicit operator bool() const { return fd_ >= 0; }
  int release() {
    const int fd = fd_;
    fd_ = -1;
    return fd;
  }
  void reset(int fd = -1);

 private:
  int fd_ = -1;
};

/// An IPv4 or IPv6 address with its port.
struct Address {
  sockaddr_storage storage{};
  socklen_t length = 0;
  sockaddr* get() { return reinterpret_cast<sockaddr*>(&storage); }
  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&storage); }
  int family() const { return storage.ss_family; }
  int port() const;
  void set_port(int port);
  bool is_loopback() const;
  bool is_any() const;
  bool same_host(const Address& other) const;
  std::string host() const;       ///< "10.0.0.1", "fe80::1%eth0"
  std::string to_string() const;  ///< "10.0.0.1:4711", "[::1]:4711"
};

/// All addresses of `host`. Empty with `error` filled if the name is unknown (it may become known: names of new pods do).
std::vector<Address> resolve(const std::string& host, int port, std::string& error);
Address loopback(int family, int port);
Address any(int family, int port);
/// True for "localhost" and literal loopback addresses; a host name that resolves to loopback is not one: elsewhere it does not.
bool is_loopback_name(const std::string& host);
/// True if one of the addresses is this machine's.
bool is_local(const std::vector<Address>& addresses);
/// Addresses of interface `name`, global ones first, IPv4 before IPv6. Throws: InvalidArgument listing the interfaces there are.
std::vector<Address> interface_addresses(const std::string& name, int port);

/// A non-blocking listening socket; IPv6 any also takes IPv4. Invalid with errno if the address cannot be had.
/// Throws: TransportError if the port is taken, naming who holds it as far as this user may know.
Fd listen_on(const Address& address);
/// `port`, or for 0 any loopback port, that nobody else is given while the descriptor is open, and that listen_on() may still take: for launchers.
Fd reserve_port(int& port);
/// A connected non-blocking socket; invalid with `error` filled if that failed or took longer than `deadline`.
Fd connect_to(const Address& address, Clock::time_point deadline, std::string& error);
/// Small messages leave without waiting for more, and a peer that is gone for hours is noticed.
void send_at_once(int fd);
/// The address a socket is bound to.
Address bound_address(int fd);
Address peer_address(int fd);

/// Waits for poll `events` on a descriptor; false at the deadline.
bool wait_for(int fd, short events, Clock::time_point deadline);
/// "process 1234 (python3)", or "another process" if this user may not know.
std::string holder_of(int port);

}  // namespace turnout::bootstrap
