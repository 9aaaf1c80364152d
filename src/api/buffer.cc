// Buffer: forwards to its body.
#include "turnout/buffer.h"

#include "api/buffer_impl.h"
#include "api/layout.h"

namespace turnout {
inline namespace v0 {

Buffer::Buffer(Communicator& communicator, const BufferConfig& config, Allocator* allocator)
    : impl_(std::make_shared<internal::BufferImpl>(communicator.impl(), config, allocator)) {}
Buffer::Buffer(Buffer&&) noexcept = default;
Buffer& Buffer::operator=(Buffer&&) noexcept = default;
Buffer::~Buffer() = default;

PendingDispatch Buffer::dispatch_async(const DispatchArgs& args) {
  auto pending = impl_->start(args);
  if (args.receive == Receive::resident && !impl_->device()) impl_->receive_meanwhile(pending);
  return PendingDispatch(std::move(pending));
}

DispatchResult Buffer::dispatch(const DispatchArgs& args) {
  internal::PendingImpl pending(impl_.get(), args.lane);
  impl_->start(args, &pending);
  pending.waited = true;
  return impl_->finish_dispatch(pending);
}

PendingCombine Buffer::combine_async(const CombineArgs& args) { return PendingCombine(impl_->start(args)); }

CombineResult Buffer::combine(const CombineArgs& args) {
  internal::PendingImpl pending(impl_.get(), args.lane);
  impl_->start(args, &pending);
  pending.waited = true;
  return impl_->finish_combine(pending);
}

void Buffer::set_expert_to_rank(const std::vector<int>& expert_to_rank) { impl_->set_expert_to_rank(expert_to_rank); }
void Buffer::check() { impl_->check(); }
void Buffer::synchronize() { impl_->synchronize(); }
void Buffer::recover() { impl_->recover(); }
const uint64_t* Buffer::status_word() const {
  if (impl_->device()) return impl_->device()->status_word();
  return impl_->context()->status_word();
}
void Buffer::suspend() { impl_->suspend(); }
void Buffer::resume() { impl_->resume(); }
void Buffer::close() { impl_->close(); }

const BufferConfig& Buffer::config() const { return impl_->context()->config; }
int Buffer::rank() const { return impl_->context()->rank; }
int Buffer::num_ranks() const { return impl_->context()->num_ranks; }
int Buffer::num_local_experts() const {
  const auto& context = *impl_->context();
  std::lock_guard lock(impl_->context()->experts_mutex);
  return context.experts->num_local(context.rank);
}
uint64_t Buffer::num_fresh_results() const { return impl_->context()->fresh_results.load(std::memory_order_relaxed); }
size_t Buffer::num_bytes() const { return impl_->device() ? impl_->device()->num_bytes() : api::arena_bytes(impl_->context()->layout); }

}  // namespace v0
}  // namespace turnout
