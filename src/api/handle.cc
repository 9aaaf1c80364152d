// Handle: a shared, immutable routing.
#include "turnout/handle.h"

#include "engine/routing.h"

namespace turnout {
inline namespace v0 {

int64_t Handle::num_tokens() const { return routing_ ? routing_->num_tokens : 0; }
int Handle::num_topk() const { return routing_ ? routing_->num_topk : 0; }
int64_t Handle::num_rows() const { return routing_ ? routing_->num_rows : 0; }
Layout Handle::layout() const { return routing_ ? routing_->layout : Layout::rank_major; }

}  // namespace v0
}  // namespace turnout
