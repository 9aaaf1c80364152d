// The fingerprint of a call: what all ranks must have said alike.
#include "api/arguments.h"
#include "engine/cuda/sizes.h"

namespace turnout::api {

namespace {

constexpr int64_t kLibrary = 0 * 1'000'000 + 1 * 1'000 + 0;

Mode resolve(const engine::Context& context, Mode mode) {
  const BufferConfig& config = context.config;
  if (mode == Mode::automatic && config.device.kind == DeviceKind::cuda) {
    return engine::cuda::prefers_low_latency(config, context.num_ranks) ? Mode::low_latency : Mode::throughput;
  }
  // Calls of up to a megabyte are bound by latency: their rows fit in the staging rings of their peers.
  constexpr size_t kLatencyBound = size_t{1} << 20;
  if (mode != Mode::automatic) return mode;
  return static_cast<size_t>(config.max_tokens_per_rank) * row_bytes(config) <= kLatencyBound ? Mode::low_latency : Mode::throughput;
}

}  // namespace

engine::CallFacts facts_of(const engine::Context& context, const DispatchArgs& args) {
  engine::CallFacts f;
  const internal::Routing* r = args.handle && *args.handle ? args.handle->routing().get() : nullptr;
  f.library = kLibrary;
  f.kind = static_cast<int64_t>(engine::CallKind::dispatch);
  f.mode = static_cast<int64_t>(resolve(context, args.mode));
  f.layout = static_cast<int64_t>(r ? r->layout : args.layout);
  f.dtype = static_cast<int64_t>(args.x.dtype);
  f.hidden = args.x.shape[1];
  f.topk = r ? r->num_topk : args.topk_idx.shape[1];
  f.weights = r ? r->has_weights : args.topk_weights.defined();
  f.num_side = static_cast<int64_t>(args.side.size());
  uint64_t hash = 14695981039346656037ull, side_bytes = 0;  // of a call that is refused, too: any widths
  for (const TensorView& side : args.side) {
    side_bytes += static_cast<uint64_t>(side.shape[1]) * size_of(side.dtype);
    hash = (hash ^ (static_cast<uint64_t>(side.dtype) << 32 ^ static_cast<uint64_t>(side.shape[1]))) * 1099511628211ull;
  }
  f.side_bytes = static_cast<int64_t>(side_bytes);
  f.side_hash = static_cast<int64_t>(hash >> 1);
  f.capacity = r ? r->capacity : args.capacity.value_or(-1);
  f.alignment = r ? r->alignment : args.expert_alignment;
  f.quantize = static_cast<int64_t>(args.quantize);
  f.handle = r ? r->id : 0;
  f.on_failure = static_cast<int64_t>(args.on_failure);
  return f;
}

engine::CallFacts facts_of(const engine::Context& context, const CombineArgs& args) {
  engine::CallFacts f;
  const internal::Routing* r = args.handle && *args.handle ? args.handle->routing().get() : nullptr;
  f.library = kLibrary;
  f.kind = static_cast<int64_t>(engine::CallKind::combine);
  f.mode = static_cast<int64_t>(resolve(context, args.mode));
  f.layout = r ? static_cast<int64_t>(r->layout) : 0;
  f.dtype = static_cast<int64_t>(args.y.dtype);
  f.hidden = args.y.ndim > 0 && args.y.ndim <= 3 ? args.y.shape[static_cast<size_t>(args.y.ndim - 1)] : 0;
  f.topk = r ? r->num_topk : 0;
  f.weights = static_cast<int64_t>(args.apply);
  f.num_side = args.side.defined();
  f.capacity = r ? r->capacity : -1;
  f.alignment = r ? r->alignment : 1;
  f.wire = static_cast<int64_t>(args.wire);
  f.handle = r ? r->id : 0;
  f.on_failure = static_cast<int64_t>(args.on_failure);
  return f;
}

}  // namespace turnout::api
