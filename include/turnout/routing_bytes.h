// The routing of a dispatch on a GPU as bytes in memory of the caller's: for compilers (XLA) that own all memory, copy arrays, and use the
// memory of those that nobody reads any more again, without telling. Which routing a call is of then needs no host to know.
#pragma once
#include <cstddef>
#include <cstdint>

#include "turnout/buffer.h"

namespace turnout {
inline namespace v0 {

/// What the host knows of a routing with a capacity: as the DispatchArgs that it came from say.
struct RoutingShape {
  int64_t num_tokens = 0;
  int num_topk = 0;
  bool has_weights = false;
  Layout layout = Layout::rank_major;
  int64_t capacity = 0;
  int expert_alignment = 1;
};

/// Bytes that such a routing takes. Throws: InvalidArgument for a Buffer on a CPU, or a capacity below 0.
TURNOUT_API size_t routing_bytes(const Buffer& buffer, const RoutingShape& shape);
/// Copies the routing of a dispatch of this Buffer to `to` in order of `stream`. Aligned to 128 bytes. Throws: InvalidArgument for an exact
/// size, whose routing the host has to know.
TURNOUT_API void store_routing(Buffer& buffer, const Handle& handle, void* to, Stream stream);
/// A Handle of those bytes, wherever they were copied meanwhile (to 128 bytes again). They must stay as they are until calls with the Handle
/// have happened. What cannot be seen here: whether all ranks take routings of one dispatch, and whether the owners of experts are those of then.
TURNOUT_API Handle load_routing(const Buffer& buffer, const RoutingShape& shape, const void* from);

}  // namespace v0
}  // namespace turnout
