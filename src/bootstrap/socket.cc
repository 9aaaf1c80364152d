// Thin wrappers; every wait has a deadline.
#include "bootstrap/socket.h"

#include <arpa/inet.h>
#include <dirent.h>
#include <fcntl.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <memory>
#include <set>
#include <sstream>

#include "turnout/error.h"

namespace turnout::bootstrap {

namespace {

std::string text_of(int error) { return std::strerror(error); }  // NOLINT(concurrency-mt-unsafe)

const sockaddr_in* v4(const Address& a) { return reinterpret_cast<const sockaddr_in*>(&a.storage); }
const sockaddr_in6* v6(const Address& a) { return reinterpret_cast<const sockaddr_in6*>(&a.storage); }

Address copy_of(const sockaddr* from, socklen_t length) {
  Address a;
  std::memcpy(&a.storage, from, length);
  a.length = length;
  return a;
}

void set_flag(int fd, int level, int option, int value = 1) { setsockopt(fd, level, option, &value, sizeof value); }

template <class Visit>
void for_each_interface(Visit visit) {
  ifaddrs* list = nullptr;
  if (getifaddrs(&list) != 0) return;
  const std::unique_ptr<ifaddrs, void (*)(ifaddrs*)> owner(list, freeifaddrs);
  for (const ifaddrs* i = list; i; i = i->ifa_next) {
    if (!i->ifa_addr) continue;
    const int family = i->ifa_addr->sa_family;
    if (family == AF_INET) visit(i->ifa_name, copy_of(i->ifa_addr, sizeof(sockaddr_in)));
    if (family == AF_INET6) visit(i->ifa_name, copy_of(i->ifa_addr, sizeof(sockaddr_in6)));
  }
}

}  // namespace

void Fd::reset(int fd) {
  if (fd_ >= 0) close(fd_);
  fd_ = util::above_standard_streams(fd);
}

int Address::port() const { return ntohs(family() == AF_INET6 ? v6(*this)->sin6_port : v4(*this)->sin_port); }

void Address::set_port(int port) {
  const in_port_t number = htons(static_cast<uint16_t>(port));
  if (family() == AF_INET6) {
    reinterpret_cast<sockaddr_in6*>(&storage)->sin6_port = number;
  } else {
    reinterpret_cast<sockaddr_in*>(&storage)->sin_port = number;
  }
}

bool Address::is_loopback() const {
  if (family() == AF_INET) return (ntohl(v4(*this)->sin_addr.s_addr) >> 24) == 127;
  const in6_addr& six = v6(*this)->sin6_addr;
  return IN6_IS_ADDR_LOOPBACK(&six) || (IN6_IS_ADDR_V4MAPPED(&six) && six.s6_addr[12] == 127);
}

bool Address::is_any() const {
  return family() == AF_INET ? v4(*this)->sin_addr.s_addr == 0 : static_cast<bool>(IN6_IS_ADDR_UNSPECIFIED(&v6(*this)->sin6_addr));
}

bool Address::same_host(const Address& other) const {
  if (family() != other.family()) return false;
  if (family() == AF_INET) return v4(*this)->sin_addr.s_addr == v4(other)->sin_addr.s_addr;
  return std::memcmp(&v6(*this)->sin6_addr, &v6(other)->sin6_addr, sizeof(in6_addr)) == 0;
}

std::string Address::host() const {
  char name[NI_MAXHOST] = "?";
  getnameinfo(get(), length, name, sizeof name, nullptr, 0, NI_NUMERICHOST);
  // A socket for both families knows "10.0.0.1" as "::ffff:10.0.0.1", which nobody has seen before.
  const bool mapped = family() == AF_INET6 && IN6_IS_ADDR_V4MAPPED(&v6(*this)->sin6_addr);
  return mapped ? std::string(name).substr(std::strlen("::ffff:")) : name;
}

std::string Address::to_string() const {
  std::string text = host();
  if (text.find(':') != std::string::npos) {
    text.insert(text.begin(), '[');
    text.push_back(']');
  }
  return text.append(":").append(std::to_string(port()));
}

std::vector<Address> resolve(const std::string& host, int port, std::string& error) {
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* list = nullptr;
  if (const int code = getaddrinfo(host.c_str(), nullptr, &hints, &list); code != 0) {
    error = host + ": " + (code == EAI_SYSTEM ? text_of(errno) : gai_strerror(code));
    return {};
  }
  const std::unique_ptr<addrinfo, void (*)(addrinfo*)> owner(list, freeaddrinfo);
  std::vector<Address> addresses;
  for (const addrinfo* i = list; i; i = i->ai_next) {
    if (i->ai_family != AF_INET && i->ai_family != AF_INET6) continue;
    addresses.push_back(copy_of(i->ai_addr, i->ai_addrlen));
    addresses.back().set_port(port);
  }
  if (addresses.empty()) error = host + ": no IPv4 or IPv6 address";
  return addresses;
}

Address any(int family, int port) {
  Address a;
  a.storage.ss_family = static_cast<sa_family_t>(family);
  a.length = family == AF_INET6 ? sizeof(sockaddr_in6) : sizeof(sockaddr_in);
  a.set_port(port);
  return a;
}

Address loopback(int family, int port) {
  Address a = any(family, port);
  if (family == AF_INET6) {
    reinterpret_cast<sockaddr_in6*>(&a.storage)->sin6_addr = in6addr_loopback;
  } else {
    reinterpret_cast<sockaddr_in*>(&a.storage)->sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  }
  return a;
}

bool is_loopback_name(const std::string& host) {
  if (host == "localhost") return true;
  Address a = any(AF_INET, 0);
  if (inet_pton(AF_INET, host.c_str(), &reinterpret_cast<sockaddr_in*>(&a.storage)->sin_addr) == 1) return a.is_loopback();
  a = any(AF_INET6, 0);
  if (inet_pton(AF_INET6, host.c_str(), &reinterpret_cast<sockaddr_in6*>(&a.storage)->sin6_addr) == 1) return a.is_loopback();
  return false;
}

bool is_local(const std::vector<Address>& addresses) {
  if (std::any_of(addresses.begin(), addresses.end(), [](const Address& a) { return a.is_loopback(); })) return true;
  bool found = false;
  for_each_interface([&](const char*, const Address& mine) {
    found = found || std::any_of(addresses.begin(), addresses.end(), [&](const Address& a) { return a.same_host(mine); });
  });
  return found;
}

std::vector<Address> interface_addresses(const std::string& name, int port) {
  std::vector<Address> addresses;
  std::set<std::string> names;
  for_each_interface([&](const char* interface, Address address) {
    names.insert(interface);
    if (name != interface) return;
    address.set_port(port);
    addresses.push_back(address);
  });
  if (addresses.empty()) {
    std::string known;
    for (const std::string& n : names) known += (known.empty() ? "" : ", ") + n;
    throw InvalidArgument("TURNOUT_INTERFACE is '" + name + "', which has no address here; interfaces with addresses: " + known);
  }
  auto order = [](const Address& a) {
    const bool link_local = a.family() == AF_INET6 && IN6_IS_ADDR_LINKLOCAL(&v6(a)->sin6_addr);
    return link_local ? 2 : a.family() == AF_INET6 ? 1 : 0;
  };
  std::stable_sort(addresses.begin(), addresses.end(), [&](const Address& a, const Address& b) { return order(a) < order(b); });
  return addresses;
}

Fd listen_on(const Address& address) {
  Fd fd(socket(address.family(), SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!fd) return {};
  // A port reserved by `turnout launch` (bound, not listening) and connections of an earlier job are no obstacle then.
  set_flag(fd.get(), SOL_SOCKET, SO_REUSEADDR);
  if (address.family() == AF_INET6) set_flag(fd.get(), IPPROTO_IPV6, IPV6_V6ONLY, address.is_any() ? 0 : 1);
  if (bind(fd.get(), address.get(), address.length) == 0 && listen(fd.get(), SOMAXCONN) == 0) return fd;
  if (errno == EADDRINUSE) {
    throw TransportError("port " + std::to_string(address.port()) + " of the rendezvous is held by " + holder_of(address.port()) +
                         ": set TURNOUT_PORT to a free one, the same on all ranks");
  }
  if (errno == EACCES) {
    throw TransportError("port " + std::to_string(address.port()) +
                         " of the rendezvous may not be opened by this user: set TURNOUT_PORT to 1024 or more");
  }
  return {};
}

void send_at_once(int fd) {
  set_flag(fd, IPPROTO_TCP, TCP_NODELAY);
  set_flag(fd, SOL_SOCKET, SO_KEEPALIVE);
}

Fd reserve_port(int& port) {
  // Linux lets two sockets with SO_REUSEADDR bind one port as long as neither listens yet; asked for any port it offers neither.
  Fd fd(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  Address address = loopback(AF_INET, port);
  if (fd) set_flag(fd.get(), SOL_SOCKET, SO_REUSEADDR);
  if (!fd || bind(fd.get(), address.get(), address.length) != 0) {
    if (fd && port != 0 && errno == EADDRINUSE) {
      throw TransportError("port " + std::to_string(port) + " of the rendezvous is held by " + holder_of(port) + ": set TURNOUT_PORT to a free one");
    }
    throw TransportError((port ? "port " + std::to_string(port) + " of the rendezvous cannot be had" : "no free port on 127.0.0.1") + ": " +
                         text_of(errno));
  }
  port = bound_address(fd.get()).port();
  return fd;
}

Fd connect_to(const Address& address, Clock::time_point deadline, std::string& error) {
  Fd fd(socket(address.family(), SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  int code = fd ? 0 : errno;
  if (fd && connect(fd.get(), address.get(), address.length) != 0) {
    code = errno;
    if (code == EINPROGRESS) {
      code = ETIMEDOUT;
      socklen_t size = sizeof code;
      if (wait_for(fd.get(), POLLOUT, deadline)) getsockopt(fd.get(), SOL_SOCKET, SO_ERROR, &code, &size);
    }
  }
  if (code == 0) {
    // A socket that connects to a free port of its own range may meet itself.
    const Address mine = bound_address(fd.get());
    if (mine.port() == address.port() && mine.same_host(address)) code = ECONNREFUSED;
  }
  if (code != 0) {
    error = address.to_string() + ": " + text_of(code);
    return {};
  }
  send_at_once(fd.get());
  return fd;
}

Address bound_address(int fd) {
  Address a;
  a.length = sizeof a.storage;
  getsockname(fd, a.get(), &a.length);
  return a;
}

Address peer_address(int fd) {
  Address a;
  a.length = sizeof a.storage;
  getpeername(fd, a.get(), &a.length);
  return a;
}

bool wait_for(int fd, short events, Clock::time_point deadline) {
  for (;;) {
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now()).count();
    pollfd p{.fd = fd, .events = events, .revents = 0};
    const int n = poll(&p, 1, static_cast<int>(std::clamp<int64_t>(left, 0, 60'000)));
    if (n > 0) return true;
    if (n < 0 && errno != EINTR) return false;
    if (left <= 0) return false;
  }
}

std::string holder_of(int port) {
  std::set<std::string> sockets;  // "socket:[inode]"
  for (const char* table : {"/proc/net/tcp", "/proc/net/tcp6"}) {
    std::ifstream file(table);
    std::string line;
    std::getline(file, line);
    while (std::getline(file, line)) {
      std::istringstream fields(line);
      std::string number, local, remote, state, skip, inode;
      fields >> number >> local >> remote >> state;
      for (int i = 0; i < 6; ++i) fields >> (i < 5 ? skip : inode);
      constexpr const char* kListen = "0A";
      if (state == kListen && std::stoi(local.substr(local.rfind(':') + 1), nullptr, 16) == port) {
        std::string entry = "socket:[";
        sockets.insert(entry.append(inode).append("]"));
      }
    }
  }
  const std::unique_ptr<DIR, int (*)(DIR*)> processes(opendir("/proc"), closedir);
  while (const dirent* process = processes ? readdir(processes.get()) : nullptr) {  // NOLINT(concurrency-mt-unsafe): own stream
    const std::string folder = std::string("/proc/") + process->d_name;
    const std::unique_ptr<DIR, int (*)(DIR*)> files(isdigit(process->d_name[0]) ? opendir((folder + "/fd").c_str()) : nullptr, closedir);
    while (const dirent* file = files ? readdir(files.get()) : nullptr) {  // NOLINT(concurrency-mt-unsafe)
      char target[64] = {};
      if (readlink((folder + "/fd/" + file->d_name).c_str(), target, sizeof target - 1) <= 0 || !sockets.contains(target)) continue;
      std::string name;
      std::getline(std::ifstream(folder + "/comm"), name);
      return std::string("process ") + process->d_name + " (" + name + ")";
    }
  }
  return "another process";
}

}  // namespace turnout::bootstrap
