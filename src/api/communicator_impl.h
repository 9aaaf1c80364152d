// What a Communicator owns; Buffers share it.
#pragma once
#include <memory>
#include <mutex>

#include "core/topology.h"
#include "transport/transport.h"
#include "turnout/communicator.h"
#include "util/process.h"

namespace turnout {
inline namespace v0 {
namespace internal {

class CommunicatorImpl {
 public:
  ~CommunicatorImpl() {
    if (process.is_this()) return;
    util::leave_to_parent(bootstrap);
    util::leave_to_parent(transport);
  }

  const util::Process process{};
  std::unique_ptr<Bootstrap> bootstrap;
  std::shared_ptr<transport::Transport> transport;
  core::Topology topology;
  CommunicatorOptions options;
  std::mutex mutex;  ///< one collective step of the bootstrap at a time
};

}  // namespace internal
}  // namespace v0
}  // namespace turnout
