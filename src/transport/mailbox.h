// How a descriptor reaches all ranks of a machine: each rank has a datagram socket of a random abstract name, which only the
// bootstrap tells and which vanishes with the process; each sends its descriptor to all others.
#pragma once
#include <functional>
#include <string>
#include <vector>

#include "transport/descriptor.h"

namespace turnout::transport {

class Mailbox {
 public:
  void open();
  const std::string& name() const { return name_; }

  using Take = std::function<void(int peer, const Descriptor& file, int pid)>;
  /// Sends `mine` to every other name and takes one descriptor from each other rank; no order. Only processes of this user
  /// are heard; the kernel vouches for user and pid. Throws: TransportError.
  void exchange(const std::vector<std::string>& names, int rank, const Descriptor& mine, const Take& take);

 private:
  /// Takes one message if there is one. `got` says from whom one has come.
  bool receive(std::vector<bool>& got, const Take& take);

  std::string name_;
  Descriptor socket_;
};

}  // namespace turnout::transport
