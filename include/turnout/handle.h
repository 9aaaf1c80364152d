// Handle: the routing of a dispatch, in ordinary memory.
#pragma once
#include <cstdint>
#include <memory>

#include "turnout/types.h"

namespace turnout {
inline namespace v0 {

namespace internal {
struct Routing;
}

/// What combine() and a cached dispatch() need to know of an earlier dispatch. Copies share one immutable routing, so a
/// handle may be used any number of times, in any order, on any lane of the Buffer that made it, by all ranks alike.
/// A Handle may outlive its Buffer, but no call takes it then.
class TURNOUT_API Handle {
 public:
  Handle() = default;
  explicit operator bool() const { return routing_ != nullptr; }

  int64_t num_tokens() const;  ///< T: tokens this rank sent
  int num_topk() const;        ///< K
  int64_t num_rows() const;    ///< rows this rank received in the handle's layout (slab: sum of its counts)
  Layout layout() const;

  const std::shared_ptr<const internal::Routing>& routing() const { return routing_; }
  explicit Handle(std::shared_ptr<const internal::Routing> routing) : routing_(std::move(routing)) {}

 private:
  std::shared_ptr<const internal::Routing> routing_;
};

}  // namespace v0
}  // namespace turnout
