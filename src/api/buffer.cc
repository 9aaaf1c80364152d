// Buffer: forwards to its body.
#include "turnout/buffer.h"

#include <string>

#include "api/buffer_impl.h"
#include "api/layout.h"

namespace turnout {
inline namespace v0 {

namespace {

internal::BufferImpl& body(const std::shared_ptr<internal::BufferImpl>& impl, const char* call) {
  if (!impl) [[unlikely]]
    throw InvalidArgument(std::string(call) + ": this Buffer was moved from");
  return *impl;
}

}  // namespace

Buffer::Buffer(Communicator& communicator, const BufferConfig& config, Allocator* allocator)
    : impl_(std::make_shared<internal::BufferImpl>(communicator.impl(), config, allocator)) {}
Buffer::Buffer(Buffer&&) noexcept = default;
Buffer& Buffer::operator=(Buffer&&) noexcept = default;
Buffer::~Buffer() = default;

PendingDispatch Buffer::dispatch_async(const DispatchArgs& args) {
  auto pending = body(impl_, "dispatch_async").start(args);
  if (args.receive == Receive::resident && !impl_->device()) impl_->receive_meanwhile(pending);
  return PendingDispatch(std::move(pending));
}

DispatchResult Buffer::dispatch(const DispatchArgs& args) {
  internal::PendingImpl pending(&body(impl_, "dispatch"), args.lane);
  impl_->start(args, &pending);
  pending.waited = true;
  return impl_->finish_dispatch(pending);
}

PendingCombine Buffer::combine_async(const CombineArgs& args) { return PendingCombine(body(impl_, "combine_async").start(args)); }

CombineResult Buffer::combine(const CombineArgs& args) {
  internal::PendingImpl pending(&body(impl_, "combine"), args.lane);
  impl_->start(args, &pending);
  pending.waited = true;
  return impl_->finish_combine(pending);
}

void Buffer::set_expert_to_rank(const std::vector<int>& expert_to_rank) { body(impl_, "set_expert_to_rank").set_expert_to_rank(expert_to_rank); }
void Buffer::check() { body(impl_, "check").check(); }
void Buffer::synchronize() { body(impl_, "synchronize").synchronize(); }
void Buffer::recover() { body(impl_, "recover").recover(); }
const uint64_t* Buffer::status_word() const {
  if (body(impl_, "status_word").device()) return impl_->device()->status_word();
  return impl_->context()->status_word();
}
void Buffer::suspend() { body(impl_, "suspend").suspend(); }
void Buffer::resume() { body(impl_, "resume").resume(); }
void Buffer::close() {
  if (impl_) impl_->close();
}

const BufferConfig& Buffer::config() const { return body(impl_, "config").context()->config; }
int Buffer::rank() const { return body(impl_, "rank").context()->rank; }
int Buffer::num_ranks() const { return body(impl_, "num_ranks").context()->num_ranks; }
int Buffer::num_local_experts() const { return body(impl_, "num_local_experts").context()->num_local_experts(); }
uint64_t Buffer::num_fresh_results() const { return body(impl_, "num_fresh_results").context()->fresh_results.load(std::memory_order_relaxed); }
size_t Buffer::num_bytes() const {
  return body(impl_, "num_bytes").device() ? impl_->device()->num_bytes() : api::arena_bytes(impl_->context()->layout);
}

}  // namespace v0
}  // namespace turnout
