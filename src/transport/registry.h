// Transports by name: how one is chosen, and why another cannot be had.
#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "transport/transport.h"
#include "turnout/bootstrap.h"

namespace turnout::transport {

struct TransportRequest {
  Bootstrap& bootstrap;
  std::string name = "auto";    ///< "auto", "inproc", "shm"
  uint64_t scheduler_seed = 0;  ///< inproc: non-zero delays and reorders
};

/// What each rank says of itself, so that all choose alike.
struct RankPlace {
  std::string boot_id;  ///< of the running kernel
  int64_t pid = 0, uid = 0;
  uint64_t pid_namespace = 0, net_namespace = 0;  ///< 0: unknown
};

/// Names of all transports that this library knows.
std::vector<std::string> transport_names();
/// Empty if ranks at these places can use transport `name`; else the reason why not.
std::string unavailable_reason(const std::string& name, const std::vector<RankPlace>& places);

/// Collective. "auto" takes inproc if all ranks are threads of one process, else shm if they share a machine.
/// Throws: TransportError with the reason if the named one, or any, cannot be had; InvalidArgument for an unknown name.
std::shared_ptr<Transport> make_transport(const TransportRequest& request);

}  // namespace turnout::transport
