// Somebody who is no rank and writes to a mailbox all the same.
#pragma once
#include <sys/socket.h>
#include <sys/un.h>

#include <cstddef>
#include <cstring>
#include <string>
#include <vector>

#include "ranks.h"
#include "transport/descriptor.h"

namespace turnout::transport::testing {

/// Names of sockets can be read by every user of the machine, so anyone can send: here `fds` on behalf of `rank`.
inline void send_as_stranger(const std::string& name, int rank, const std::vector<int>& fds) {
  const Descriptor sender(socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path + 1, name.data(), name.size());
  iovec part{&rank, sizeof rank};
  std::vector<char> control(CMSG_SPACE(fds.size() * sizeof(int)));
  msghdr message{};
  message.msg_name = &address;
  message.msg_namelen = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control.data();
  message.msg_controllen = control.size();
  cmsghdr* header = CMSG_FIRSTHDR(&message);
  header->cmsg_level = SOL_SOCKET;
  header->cmsg_type = SCM_RIGHTS;
  header->cmsg_len = CMSG_LEN(fds.size() * sizeof(int));
  std::memcpy(CMSG_DATA(header), fds.data(), fds.size() * sizeof(int));
  require(sendmsg(sender.get(), &message, 0) >= 0, "sendmsg");
}

}  // namespace turnout::transport::testing
