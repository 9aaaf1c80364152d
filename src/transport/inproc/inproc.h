// Virtual ranks: threads of one process share one mapping, so that a thread sanitizer sees every race.
#pragma once
#include <memory>

#include "transport/transport.h"
#include "turnout/bootstrap.h"

namespace turnout::transport {

/// Collective. `scheduler_seed` non-zero: puts and signals are delayed, torn and reordered (scheduler.h).
std::shared_ptr<Transport> make_inproc(Bootstrap& bootstrap, uint64_t scheduler_seed);

}  // namespace turnout::transport
