// Processes (or threads) of one machine and one user: sealed memory files, passed by descriptor.
#pragma once
#include <memory>

#include "transport/transport.h"
#include "turnout/bootstrap.h"

namespace turnout::transport {

/// Collective. Throws: TransportError (memory, descriptors, permission), PeerTimeout.
std::shared_ptr<Transport> make_shm(Bootstrap& bootstrap);

}  // namespace turnout::transport
