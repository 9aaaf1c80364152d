// Each rank listens under 128 random bits that only the bootstrap tells; both ends check that the other is the same user.
#include "transport/shm/descriptor.h"

#include <fcntl.h>
#include <linux/memfd.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <string>
#include <thread>

namespace turnout::transport {

namespace {

[[noreturn]] void fail(const std::string& what, int error) {
  std::string text = "shm: " + what + ": " + std::strerror(error);
  if (error == EMFILE || error == ENFILE) text += "; raise the limit of open files (ulimit -n)";
  if (error == ENOMEM || error == ENOSPC) text += "; free memory, or make the Buffer smaller (receive_bytes, max_tokens_per_rank)";
  throw TransportError(text);
}

sockaddr_un address_of(const std::string& name, socklen_t& length) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path + 1, name.data(), name.size());  // a leading zero: abstract, no file
  length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
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

/// The peer of a connected socket, or -1 if it is another user's process.
int pid_of_same_user(int socket) {
  ucred credentials{};
  socklen_t length = sizeof credentials;
  if (getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &credentials, &length) != 0 || credentials.uid != geteuid()) return -1;
  return credentials.pid;
}

bool send_descriptor(int socket, int fd) {
  char byte = 0;
  iovec part{&byte, 1};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof control;
  cmsghdr* header = CMSG_FIRSTHDR(&message);
  header->cmsg_level = SOL_SOCKET;
  header->cmsg_type = SCM_RIGHTS;
  header->cmsg_len = CMSG_LEN(sizeof(int));
  std::memcpy(CMSG_DATA(header), &fd, sizeof fd);
  return sendmsg(socket, &message, MSG_NOSIGNAL) == 1;
}

Descriptor receive_descriptor(int socket, const std::string& from) {
  char byte = 0;
  iovec part{&byte, 1};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof control;
  const auto received = recvmsg(socket, &message, MSG_CMSG_CLOEXEC);
  const cmsghdr* header = received == 1 ? CMSG_FIRSTHDR(&message) : nullptr;
  if (!header || header->cmsg_type != SCM_RIGHTS) fail("no descriptor from " + from, received < 0 ? errno : EPROTO);
  int fd = -1;
  std::memcpy(&fd, CMSG_DATA(header), sizeof fd);
  return Descriptor(fd);
}

/// Gives the descriptor to every process of this user that connects, until told to stop.
class Giver {
 public:
  explicit Giver(int fd) : name_(random_name()), fd_(fd), listener_(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    if (!listener_) fail("no socket", errno);
    socklen_t length = 0;
    const sockaddr_un address = address_of(name_, length);
    if (bind(listener_.get(), reinterpret_cast<const sockaddr*>(&address), length) != 0) fail("cannot bind a socket", errno);
    if (listen(listener_.get(), 1024) != 0) fail("cannot listen", errno);
    thread_ = std::thread([this] { serve(); });
  }
  Giver(const Giver&) = delete;
  Giver& operator=(const Giver&) = delete;
  ~Giver() {
    stop_.store(true, std::memory_order_release);
    shutdown(listener_.get(), SHUT_RDWR);
    thread_.join();
  }
  const std::string& name() const { return name_; }

 private:
  void serve() {
    while (!stop_.load(std::memory_order_acquire)) {
      pollfd waiting{listener_.get(), POLLIN, 0};
      if (poll(&waiting, 1, 100) <= 0) continue;
      const Descriptor taker(accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC));
      if (taker && pid_of_same_user(taker.get()) >= 0) send_descriptor(taker.get(), fd_);
    }
  }
  const std::string name_;
  const int fd_;
  Descriptor listener_;
  std::atomic<bool> stop_{false};
  std::thread thread_;
};

}  // namespace

Descriptor::~Descriptor() {
  if (fd_ >= 0) close(fd_);
}

Mapping::Mapping(const Descriptor& file, size_t num_bytes) : num_bytes_(num_bytes) {
  data_ = mmap(nullptr, num_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file.get(), 0);
  if (data_ == MAP_FAILED) {
    data_ = nullptr;
    fail("cannot map " + std::to_string(num_bytes) + " bytes", errno);
  }
  madvise(data_, num_bytes, MADV_HUGEPAGE);
}

Mapping::~Mapping() {
  if (data_) munmap(data_, num_bytes_);
}

Descriptor make_memory_file(std::string_view label, size_t num_bytes) {
  Descriptor file(static_cast<int>(syscall(SYS_memfd_create, ("turnout-" + std::string(label)).c_str(), MFD_CLOEXEC | MFD_ALLOW_SEALING)));
  if (!file) fail("cannot make a memory file", errno);
  if (ftruncate(file.get(), static_cast<off_t>(num_bytes)) != 0) fail("cannot size a memory file to " + std::to_string(num_bytes) + " bytes", errno);
  if (fcntl(file.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) fail("cannot seal a memory file", errno);
  return file;
}

std::vector<PeerFile> exchange_descriptors(Bootstrap& bootstrap, std::string_view step, const Descriptor& mine) {
  const Giver giver(mine.get());
  const auto names = bootstrap.all_gather(step, std::as_bytes(std::span(giver.name().data(), giver.name().size())));
  std::vector<PeerFile> files(names.size());
  for (size_t peer = 0; peer < names.size(); ++peer) {
    const std::string from = "rank " + std::to_string(peer);
    const std::string name(reinterpret_cast<const char*>(names[peer].data()), names[peer].size());
    const Descriptor socket(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
    if (!socket) fail("no socket", errno);
    const timeval limit{10, 0};
    setsockopt(socket.get(), SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
    socklen_t length = 0;
    const sockaddr_un address = address_of(name, length);
    if (connect(socket.get(), reinterpret_cast<const sockaddr*>(&address), length) != 0) {
      fail("cannot reach " + from + " (abstract unix sockets need a common network namespace)", errno);
    }
    files[peer].pid = pid_of_same_user(socket.get());
    if (files[peer].pid < 0) throw TransportError("shm: " + from + " is a process of another user");
    files[peer].file = receive_descriptor(socket.get(), from);
  }
  bootstrap.barrier(std::string(step) + ": taken");
  return files;
}

}  // namespace turnout::transport
