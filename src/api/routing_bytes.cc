// Routings as bytes: shapes are checked, what the host knows of a routing is made of them, and the engine does the rest.
#include "turnout/routing_bytes.h"

#include <string>

#include "api/buffer_impl.h"
#include "engine/cpu/block_cache.h"

namespace turnout {
inline namespace v0 {

namespace {

/// The same on all ranks, and of no dispatch: lanes and epochs are not negative.
constexpr int64_t kIdOfBytes = -1;

engine::DeviceEngine& device_of(const Buffer& buffer, const char* function) {
  engine::DeviceEngine* const device = buffer.impl()->device();
  if (!device) throw InvalidArgument(std::string(function) + ": this Buffer is on the CPU; the routing of a call is a Handle there");
  return *device;
}

engine::RoutingFacts facts_of(const RoutingShape& shape, const char* function) {
  if (shape.capacity < 0 || shape.num_tokens < 0 || shape.num_topk < 1 || shape.expert_alignment < 1) {
    throw InvalidArgument(std::string(function) + ": " + std::to_string(shape.num_tokens) + " tokens of " + std::to_string(shape.num_topk) +
                          " experts, capacity " + std::to_string(shape.capacity) + ", alignment " + std::to_string(shape.expert_alignment) +
                          " are no shape of a routing: give those of its dispatch, with a capacity");
  }
  engine::RoutingFacts facts;
  facts.layout = shape.layout;
  facts.capacity = shape.capacity;
  facts.num_tokens = shape.num_tokens;
  facts.alignment = shape.layout == Layout::expert_major ? shape.expert_alignment : 1;
  facts.num_topk = shape.num_topk;
  facts.has_weights = shape.has_weights;
  return facts;
}

}  // namespace

size_t routing_bytes(const Buffer& buffer, const RoutingShape& shape) {
  return device_of(buffer, "routing_bytes").routing_bytes(facts_of(shape, "routing_bytes"));
}

void store_routing(Buffer& buffer, const Handle& handle, void* to, Stream stream) {
  const engine::DeviceEngine& device = device_of(buffer, "store_routing");
  const internal::Routing* const routing = handle.routing().get();
  if (!routing || routing->buffer != buffer.impl()->context()->serial || !routing->device) {
    throw InvalidArgument("store_routing: the handle is empty, or of another Buffer");
  }
  const RoutingShape shape{routing->num_tokens, routing->num_topk, routing->has_weights, routing->layout, routing->capacity, routing->alignment};
  device.store_routing(*routing->device, facts_of(shape, "store_routing"), static_cast<std::byte*>(to), stream);
}

Handle load_routing(const Buffer& buffer, const RoutingShape& shape, const void* from) {
  const engine::DeviceEngine& device = device_of(buffer, "load_routing");
  const engine::RoutingFacts facts = facts_of(shape, "load_routing");
  const std::shared_ptr<engine::Context>& context = buffer.impl()->context();
  auto routing = std::allocate_shared<internal::Routing>(engine::CachedAllocator<internal::Routing>());
  routing->buffer = context->serial;
  routing->id = kIdOfBytes;
  routing->num_tokens = facts.num_tokens;
  routing->num_topk = facts.num_topk;
  routing->has_weights = facts.has_weights;
  routing->layout = facts.layout;
  routing->capacity = facts.capacity;
  routing->alignment = facts.alignment;
  {
    std::lock_guard lock(context->experts_mutex);
    routing->experts = context->experts;
  }
  routing->expert_counts.resize(static_cast<size_t>(routing->experts->num_local(context->rank)));
  routing->num_rows = routing->result_rows();
  routing->recv_begin.assign(2, 0);
  routing->recv_begin[1] = routing->num_rows;
  routing->device = device.routing_at(facts, static_cast<const std::byte*>(from));
  return Handle(std::move(routing));
}

}  // namespace v0
}  // namespace turnout
