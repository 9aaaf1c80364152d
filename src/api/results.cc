// Results and pending calls: views over memory that the last reference gives back.
#include <cstring>
#include <utility>

#include "api/buffer_impl.h"
#include "core/scale.h"
#include "engine/cpu/block_cache.h"

namespace turnout {
inline namespace v0 {

using internal::Memory;
using internal::Routing;

DispatchResult::DispatchResult() = default;
DispatchResult::DispatchResult(DispatchResult&&) noexcept = default;
DispatchResult& DispatchResult::operator=(DispatchResult&&) noexcept = default;
DispatchResult::~DispatchResult() = default;
void DispatchResult::release() {
  if (!memory_) return;
  x = x_scales = topk_idx = topk_weights = num_rows = expert_counts = expert_offsets = sorted_rows = num_dropped = arrived = TensorView();
  side.clear();
  is_lease = false;
  memory_.reset();
}

CombineResult::CombineResult() = default;
CombineResult::CombineResult(CombineResult&&) noexcept = default;
CombineResult& CombineResult::operator=(CombineResult&&) noexcept = default;
CombineResult::~CombineResult() = default;
void CombineResult::release() {
  x = side = num_lost = TensorView();
  memory_.reset();
}

namespace internal {

namespace {

/// A dense vector. In place: a view that is made elsewhere and copied costs more than the rest of a small result.
void set_vector(TensorView& view, const void* data, DType dtype, int64_t n) {
  view.data = const_cast<void*>(data);
  view.dtype = dtype;
  view.ndim = 1;
  view.shape[0] = n;
  view.strides[0] = 1;
}
void set_matrix(TensorView& view, const void* data, DType dtype, int64_t rows, int64_t cols) {
  view.data = const_cast<void*>(data);
  view.dtype = dtype;
  view.ndim = 2;
  view.shape[0] = rows;
  view.shape[1] = view.strides[0] = cols;
  view.strides[1] = 1;
}

/// The row arrays: matrices, or slabs of [local experts, capacity, width].
void set_rows(TensorView& view, const Routing& r, std::byte* data, DType dtype, int64_t width, int64_t stride_bytes) {
  const int64_t stride = stride_bytes / static_cast<int64_t>(size_of(dtype));
  set_matrix(view, data, dtype, r.result_rows(), width);
  view.strides[0] = stride;
  if (r.layout != Layout::expert_slab) return;
  view.ndim = 3;
  view.shape = {r.num_local_experts(), r.capacity, width};
  view.strides = {stride * r.capacity, stride, 1};
}

/// Zeroes what nothing came for in an array with a row for each row of the result.
void zero_tail(const TensorView& view, const Routing& r) {
  if (!view.defined()) return;
  const auto size = static_cast<int64_t>(size_of(view.dtype));
  const bool by_expert = r.layout == Layout::expert_slab;
  const size_t at = by_expert ? 1 : 0, next = at + 1;  // the dimension of rows, and that of their elements
  const bool has_width = static_cast<size_t>(view.ndim) > next;
  const int64_t stride = view.strides[at] * size, bytes = has_width ? view.shape[next] * size : size;
  for (int64_t group = 0; group < (by_expert ? view.shape[0] : 1); ++group) {
    auto* const rows = static_cast<std::byte*>(view.data) + (by_expert ? group * view.strides[0] * size : 0);
    const int64_t present = by_expert ? r.expert_counts[static_cast<size_t>(group)] : r.num_rows;
    if (stride == bytes && present < view.shape[at]) std::memset(rows + present * stride, 0, static_cast<size_t>((view.shape[at] - present) * bytes));
    else
      for (int64_t row = present; row < view.shape[at]; ++row) std::memset(rows + row * stride, 0, static_cast<size_t>(bytes));
  }
}

/// The same scales by columns, in memory of their own or `given`. `all`: also of rows that nothing came for.
void turn_scales(DispatchResult& result, Memory& memory, const Routing& r, void* given, bool all) {
  const TensorView rows = result.x_scales;
  const bool is_slab = r.layout == Layout::expert_slab;
  const auto last = static_cast<size_t>(rows.ndim - 1);
  const int64_t groups = is_slab ? rows.shape[0] : 1, num = rows.shape[last - 1];
  const int64_t bytes = rows.shape[last] * static_cast<int64_t>(size_of(rows.dtype)), words = core::scale_words(bytes);
  const int64_t column = core::scale_column(num, is_slab);
  if (!given) {
    memory.scale_columns.assign(static_cast<size_t>(groups * words * column), 0);
    given = memory.scale_columns.data();
  }
  for (int64_t group = 0; group < groups; ++group) {
    const int64_t present = all ? num : is_slab ? std::min<int64_t>(num, r.expert_counts[static_cast<size_t>(group)]) : std::min(num, r.num_rows);
    for (int64_t row = 0; row < present; ++row) {
      const std::byte* from = static_cast<const std::byte*>(rows.data) + (group * num + row) * bytes;
      for (int64_t word = 0; word < words; ++word) {
        uint32_t bits = 0;
        std::memcpy(&bits, from + 4 * word, static_cast<size_t>(std::min<int64_t>(4, bytes - 4 * word)));
        static_cast<uint32_t*>(given)[(group * words + word) * column + row] = bits;
      }
    }
  }
  result.x_scales = scale_columns(given, rows.dtype == DType::fp32, num, is_slab ? std::optional(groups) : std::nullopt, bytes, {});
}

/// Drives a call to its end and takes what it brought. `owner` keeps it for its arguments.
template <class AnyCall>
auto outcome_of(engine::Lane& lane, AnyCall& call, std::unique_lock<std::mutex> lock, std::shared_ptr<engine::Call>& owner) {
  if (!lock.owns_lock()) lock = std::unique_lock(lane.mutex);
  lane.drive(call, engine::Lane::Until::done);
  owner = lane.remove(&call);
  return call.take();
}

}  // namespace

TensorView scale_columns(void* data, bool fp32, int64_t rows, std::optional<int64_t> groups, int64_t scale_bytes, Device device) {
  const int64_t words = core::scale_words(scale_bytes), column = core::scale_column(rows, groups.has_value());
  TensorView view = TensorView::dense(data, fp32 ? DType::fp32 : DType::i32, {rows, words}, device);
  view.strides = {1, column, 0};
  if (groups) {
    view.ndim = 3;
    view.shape = {*groups, rows, words};
    view.strides = {words * column, 1, column};
  }
  return view;
}

DispatchResult BufferImpl::finish_dispatch_on_host(PendingImpl& pending) {
  engine::DispatchCall* const call = pending.dispatch;
  std::shared_ptr<engine::Call> owner;
  engine::DispatchOutcome outcome = outcome_of(lane(pending.lane), *call, std::move(pending.lock), owner);
  const DispatchArgs& args = call->args();
  const Routing& r = *outcome.routing;
  auto memory = std::allocate_shared<Memory>(engine::CachedAllocator<Memory>());
  memory->rows = std::move(outcome.memory);
  memory->routing = outcome.routing;
  memory->num_rows = r.num_rows;
  memory->num_dropped = r.num_dropped;
  memory->arrived.append(call->arrived(), static_cast<size_t>(context_->num_ranks));

  DispatchResult result;
  const bool quantised = args.quantize != Quantize::none;
  std::byte* base = memory->rows ? memory->rows->data() : nullptr;
  const auto at = [&](size_t offset) { return base ? base + offset : nullptr; };
  set_rows(result.x, r, outcome.x, quantised ? DType::fp8_e4m3 : args.x.dtype, args.x.shape[1], outcome.x_stride);
  if (quantised) {
    const bool fp32 = args.quantize == Quantize::fp8_e4m3;
    const int64_t blocks = (args.x.shape[1] + 127) / 128;
    set_rows(result.x_scales, r, at(outcome.block.scales), fp32 ? DType::fp32 : DType::ue8m0, blocks, blocks * (fp32 ? 4 : 1));
  }
  for (size_t s = 0; s < args.side.size(); ++s) {
    const TensorView& side = args.side[s];
    set_rows(result.side.emplace_back(), r, at(outcome.block.side[s]), side.dtype, side.shape[1],
             side.shape[1] * static_cast<int64_t>(size_of(side.dtype)));
  }
  if (args.zero_tail && r.capacity >= 0) {  // tails of weights are 0 anyway
    zero_tail(result.x, r);
    zero_tail(result.x_scales, r);
    for (const TensorView& side : result.side) zero_tail(side, r);
  }
  if (args.scale_order == ScaleOrder::columns) turn_scales(result, *memory, r, args.out_scales.data, args.zero_tail);
  const int64_t local = r.num_local_experts();
  set_vector(result.num_rows, &memory->num_rows, DType::i64, 1);
  set_vector(result.num_dropped, &memory->num_dropped, DType::i64, 1);
  set_vector(result.arrived, memory->arrived.data(), DType::i64, context_->num_ranks);
  set_vector(result.expert_counts, r.expert_counts.data(), DType::i32, local);
  set_vector(result.expert_offsets, r.expert_offsets.data(), DType::i64, local + 1);
  if (r.layout == Layout::rank_major) {
    set_matrix(result.topk_idx, r.recv_idx.data(), DType::i32, r.result_rows(), r.num_topk);
    if (r.has_weights) set_matrix(result.topk_weights, r.recv_weights.data(), DType::fp32, r.result_rows(), r.num_topk);
    set_vector(result.sorted_rows, r.sorted_rows.data(), DType::i32, static_cast<int64_t>(r.sorted_rows.size()));
  } else if (r.has_weights) {
    if (r.layout == Layout::expert_slab) set_matrix(result.topk_weights, r.row_weights.data(), DType::fp32, local, r.capacity);
    else set_vector(result.topk_weights, r.row_weights.data(), DType::fp32, r.result_rows());
  }
  result.is_lease = memory->rows && memory->rows->is_lease();
  result.handle = Handle(std::move(outcome.routing));
  result.memory_ = std::move(memory);
  return result;
}

CombineResult BufferImpl::finish_combine_on_host(PendingImpl& pending) {
  engine::CombineCall* const call = pending.combine;
  std::shared_ptr<engine::Call> owner;
  engine::CombineOutcome outcome = outcome_of(lane(pending.lane), *call, std::move(pending.lock), owner);
  const CombineArgs& args = call->args();
  const Routing& r = call->routing();
  auto memory = std::allocate_shared<Memory>(engine::CachedAllocator<Memory>());
  memory->rows = std::move(outcome.memory);
  memory->side = std::move(outcome.side);
  memory->num_lost = std::move(outcome.num_lost);
  CombineResult result;
  const int64_t hidden = args.y.shape[static_cast<size_t>(args.y.ndim - 1)];
  set_matrix(result.x, outcome.x, args.y.dtype, r.num_tokens, hidden);
  if (r.num_tokens > 0) result.x.strides[0] = outcome.x_stride / static_cast<int64_t>(size_of(args.y.dtype));
  if (args.side.defined()) result.side = TensorView::dense(memory->side.data(), DType::fp32, {r.num_tokens, r.num_topk});
  set_vector(result.num_lost, memory->num_lost.data(), DType::i32, r.num_tokens);
  result.memory_ = std::move(memory);
  return result;
}

void PendingImpl::stop_resident() {
  if (!resident.joinable()) return;
  if (!buffer->context()->process.is_this()) return util::leave_to_parent(resident);  // it runs in the parent
  stop.store(true, std::memory_order_release);
  resident.join();
}

PendingImpl::~PendingImpl() {
  stop_resident();
  if (!waited) buffer->drop(*this);
}

void BufferImpl::drop(PendingImpl& pending) noexcept {
  pending.waited = true;
  try {
    if (!context_->process.is_this() || context_->closed.load(std::memory_order_acquire)) return;
    if (pending.dispatch || pending.dispatch_args) finish_dispatch(pending);
    if (pending.combine || pending.combine_args) finish_combine(pending);
  } catch (...) {
    // Nobody asks for this call's result, and the Buffer keeps its abort for the next one.
  }
}

}  // namespace internal

template <class Result>
Pending<Result>::Pending(std::shared_ptr<internal::PendingImpl> impl) : impl_(std::move(impl)) {}
template <class Result>
Pending<Result>::Pending(Pending&&) noexcept = default;
template <class Result>
Pending<Result>& Pending<Result>::operator=(Pending&&) noexcept = default;
template <class Result>
Pending<Result>::~Pending() = default;

template <class Result>
Result Pending<Result>::wait() {
  if (!impl_ || impl_->waited) throw InvalidArgument("wait: this call was waited for already");
  impl_->buffer->require_open("wait");
  impl_->stop_resident();
  impl_->waited = true;
  if constexpr (std::is_same_v<Result, DispatchResult>) {
    return impl_->buffer->finish_dispatch(*impl_);
  } else {
    return impl_->buffer->finish_combine(*impl_);
  }
}

template <class Result>
TensorView Pending<Result>::arrived() const {
  if (impl_ && impl_->device) {
    int64_t* counters = impl_->device->arrived();
    return counters ? TensorView::dense(counters, DType::i64, {impl_->buffer->context()->num_ranks}, impl_->buffer->context()->config.device)
                    : TensorView();
  }
  if (!impl_ || !impl_->dispatch) return {};
  return TensorView::dense(impl_->dispatch->arrived(), DType::i64, {impl_->buffer->context()->num_ranks});
}

template class Pending<DispatchResult>;
template class Pending<CombineResult>;

}  // namespace v0
}  // namespace turnout
