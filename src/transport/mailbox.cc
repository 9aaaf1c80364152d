// No thread: a rank sends as far as the queues of the others let it, takes what has come meanwhile, and sleeps until there is more or one of
// the queues has room. Queues are short (10 messages, by default), and hundreds of ranks share a few cores: who looked again and again would
// keep those from running that everybody waits for, and who waited for one full queue alone would hold up all whose queues are not.
#include "transport/mailbox.h"

#include <poll.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstring>
#include <deque>

namespace turnout::transport {

namespace {

/// Without anything that comes or goes.
constexpr std::chrono::seconds kPatience{30};

sockaddr_un address_of(const std::string& name, socklen_t& length) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  const size_t size = std::min(name.size(), sizeof address.sun_path - 1);
  std::memcpy(address.sun_path + 1, name.data(), size);  // a leading zero: abstract, no file
  length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + size);
  return address;
}

std::string random_name() {
  unsigned char bits[16];
  if (getrandom(bits, sizeof bits, 0) != sizeof bits) fail("no random bits", errno);
  std::string name = "turnout-";
  for (unsigned char byte : bits) {
    name += "0123456789abcdef"[byte >> 4];
    name += "0123456789abcdef"[byte & 15];
  }
  return name;
}

enum class Sent { yes, queue_is_full, too_many_under_way };

Sent send(int socket, const std::string& to, int peer, int rank, int fd) {
  iovec part{&rank, sizeof rank};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof fd)] = {};
  socklen_t length = 0;
  sockaddr_un address = address_of(to, length);
  msghdr message{};
  message.msg_name = &address;
  message.msg_namelen = length;
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof control;
  cmsghdr* header = CMSG_FIRSTHDR(&message);
  header->cmsg_level = SOL_SOCKET;
  header->cmsg_type = SCM_RIGHTS;
  header->cmsg_len = CMSG_LEN(sizeof fd);
  std::memcpy(CMSG_DATA(header), &fd, sizeof fd);
  if (sendmsg(socket, &message, MSG_NOSIGNAL | MSG_DONTWAIT) >= 0) return Sent::yes;
  if (errno == EAGAIN || errno == EINTR) return Sent::queue_is_full;
  if (errno == ETOOMANYREFS) return Sent::too_many_under_way;  // descriptors of this user
  fail("cannot reach rank " + std::to_string(peer) + " (abstract unix sockets need a common network namespace)", errno);
}

/// Until `mailbox` has a message, or for a while; with `full` until that one's queue has room, too. poll() knows of room at the other end of a
/// connected socket; the mailbox itself cannot be one, since it would hear that end alone. Without a descriptor for another it is soon over.
void wait(int mailbox, const std::string* full) {
  Descriptor door;
  if (full) {
    socklen_t length = 0;
    const sockaddr_un address = address_of(*full, length);
    door = Descriptor(::socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0));
    if (door && connect(door.get(), reinterpret_cast<const sockaddr*>(&address), length) != 0) door = Descriptor();
  }
  pollfd waiting[] = {{mailbox, POLLIN, 0}, {door.get(), POLLOUT, 0}};
  poll(waiting, door ? 2 : 1, full && !door ? 10 : 100);
}

}  // namespace

void Mailbox::open() {
  name_ = random_name();
  socket_ = Descriptor(::socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  if (!socket_) fail("cannot make a socket", errno);
  const int on = 1;
  if (setsockopt(socket_.get(), SOL_SOCKET, SO_PASSCRED, &on, sizeof on) != 0) fail("cannot ask for credentials", errno);
  socklen_t length = 0;
  const sockaddr_un address = address_of(name_, length);
  if (bind(socket_.get(), reinterpret_cast<const sockaddr*>(&address), length) != 0) fail("cannot bind a socket", errno);
}

bool Mailbox::receive(std::vector<bool>& got, const Take& take) {
  int peer = -1;
  iovec part{&peer, sizeof peer};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(ucred)) + CMSG_SPACE(sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof control;
  const auto received = recvmsg(socket_.get(), &message, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
  if (received < 0) {
    if (errno == EAGAIN || errno == EINTR) return false;
    fail("cannot receive a descriptor", errno);
  }
  ucred sender{0, static_cast<uid_t>(-1), static_cast<gid_t>(-1)};
  // The padding of `control` holds a second descriptor, should a stranger send two: all that came are owned, so closed.
  std::vector<Descriptor> files;
  for (cmsghdr* header = CMSG_FIRSTHDR(&message); header; header = CMSG_NXTHDR(&message, header)) {
    if (header->cmsg_level != SOL_SOCKET) continue;
    if (header->cmsg_type == SCM_CREDENTIALS) std::memcpy(&sender, CMSG_DATA(header), sizeof sender);
    if (header->cmsg_type == SCM_RIGHTS) {
      const size_t num_files = (header->cmsg_len - CMSG_LEN(0)) / sizeof(int);
      for (size_t at = 0; at < num_files; ++at) {
        int fd = -1;
        std::memcpy(&fd, CMSG_DATA(header) + at * sizeof fd, sizeof fd);
        files.emplace_back(fd);
      }
    }
  }
  const bool known = received == sizeof peer && sender.uid == getuid() && peer >= 0 && peer < static_cast<int>(got.size());
  if (!known || files.size() > 1 || got[static_cast<size_t>(peer)]) return true;  // not from our group
  // The kernel drops a descriptor that it cannot number here.
  if (files.empty()) fail("cannot take the descriptor of rank " + std::to_string(peer), message.msg_flags & MSG_CTRUNC ? EMFILE : EPROTO);
  got[static_cast<size_t>(peer)] = true;
  take(peer, files.front(), sender.pid);
  return true;
}

void Mailbox::exchange(const std::vector<std::string>& names, int rank, const Descriptor& mine, const Take& take) {
  constexpr int kTries = 4;  // full queues in a row
  const size_t num_ranks = names.size();
  auto until = std::chrono::steady_clock::now() + kPatience;
  std::vector<bool> got(num_ranks);
  got[static_cast<size_t>(rank)] = true;
  std::deque<size_t> to;  // each begins with its right neighbour, so that no queue is everybody's first
  for (size_t i = 1; i < num_ranks; ++i) to.push_back((static_cast<size_t>(rank) + i) % num_ranks);
  while (true) {
    bool moved = false;
    Sent last = Sent::yes;
    for (int full = 0; !to.empty() && full < kTries; ++full) {
      if (full > 0) to.push_back(to.front()), to.pop_front();
      last = send(socket_.get(), names[to.front()], static_cast<int>(to.front()), rank, mine.get());
      if (last != Sent::yes) continue;
      to.pop_front();
      moved = true;
      full = -1;
    }
    while (receive(got, take)) moved = true;
    // Hundreds of processes on few cores take their time; as long as something comes or goes there is hope.
    const auto now = std::chrono::steady_clock::now();
    if (moved) until = now + kPatience;
    const auto missing = std::find(got.begin(), got.end(), false);
    if (to.empty() && missing == got.end()) return;
    if (now > until) {
      const auto peer = missing == got.end() ? to.front() : static_cast<size_t>(missing - got.begin());
      fail("no descriptor from or to rank " + std::to_string(peer) + " for " + std::to_string(kPatience.count()) + " s", ETIMEDOUT);
    }
    if (last == Sent::too_many_under_way) poll(nullptr, 0, 10);
    else wait(socket_.get(), last == Sent::queue_is_full ? &names[to.front()] : nullptr);
  }
}

}  // namespace turnout::transport
