// What the other files see of a Communicator of Python's.
#pragma once
#include <memory>
#include <mutex>
#include <vector>

#include "bindings/lifetime.h"
#include "turnout/buffer.h"

namespace turnout::python {

/// A Communicator, and the Buffers made from it: a virtual rank that fails closes them, so that nobody waits for it.
struct CommunicatorHolder {
  explicit CommunicatorHolder(Communicator communicator);
  void close_buffers();
  void add(const std::shared_ptr<Buffer>& buffer) { buffers.push_back(buffer); }

  HeldToExit<Communicator> communicator;
  std::vector<std::weak_ptr<Buffer>> buffers;
};

}  // namespace turnout::python
