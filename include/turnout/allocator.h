// Allocator: where results that are not leases live.
#pragma once
#include <cstddef>

#include "turnout/visibility.h"

namespace turnout {
inline namespace v0 {

/// Memory for results that are not leases. The default keeps pages it has touched and hands them out again.
/// REQUIRES: calls may come from any thread. allocate() throws std::bad_alloc or TransportError, or
/// returns null; callers see TransportError, with the bytes. Where the size of a result is known
/// before anything is sent (combine, and dispatch with a capacity or a handle) that refuses the call on all ranks; later it
/// aborts the Buffer on all ranks, the others raising PeerFailed with the reason. On a GPU deallocate() is called once the GPU has done with
/// the memory, maybe in a later call or with the last result; if is_stream_ordered(), at once, but for four pieces of at most 16 MiB kept for later.
class TURNOUT_API Allocator {
 public:
  virtual ~Allocator();
  virtual void* allocate(size_t num_bytes) = 0;
  virtual void deallocate(void* data, size_t num_bytes) noexcept = 0;
  /// GPU: whether memory that the stream of its call may still use can be given back: it goes to nobody before that stream has done with it.
  virtual bool is_stream_ordered() const noexcept { return false; }
};

}  // namespace v0
}  // namespace turnout
