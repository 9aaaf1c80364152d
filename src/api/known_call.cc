// A description is all that the checks read but addresses and ids. What has parts that are seldom there (side arrays, weights of a
// combine, a handle of a dispatch) is checked in full every time.
#include "api/known_call.h"

#include <algorithm>
#include <initializer_list>
#include <utility>

#include "api/arguments.h"

namespace turnout::api {

namespace {

bool is_like(const TensorView& a, const TensorView& b) {
  int64_t differ = a.ndim ^ b.ndim;  // without branches: nearly always all are the same
  for (size_t d = 0; d < a.shape.size(); ++d) differ |= (a.shape[d] ^ b.shape[d]) | (a.strides[d] ^ b.strides[d]);
  return differ == 0 && a.dtype == b.dtype && a.device == b.device;
}

TensorView without_data(TensorView view) {
  view.data = nullptr;
  return view;
}

/// Whether the data of a view whose description is good are, too, at a glance; what is not the full check tells.
bool is_good(const engine::Context& context, const TensorView& view) {
  if (view.shape[0] == 0 || (view.ndim > 1 && view.shape[1] == 0)) return true;  // nobody looks
  return view.data && (reinterpret_cast<uintptr_t>(view.data) & (size_of(view.dtype) - 1)) == 0 && !context.is_released(view.data);
}
bool is_good_if_given(const engine::Context& context, const TensorView& view) { return !view.defined() || is_good(context, view); }

/// The same of an output, which shares no memory with what is read.
bool is_good_output(const engine::Context& context, const TensorView& out, std::initializer_list<const TensorView*> inputs) {
  if (!out.defined()) return true;
  return is_good(context, out) && std::none_of(inputs.begin(), inputs.end(), [&](const TensorView* t) { return overlap(out, *t); });
}

}  // namespace

bool KnownDispatch::is_like(const DispatchArgs& args, const core::ExpertMap& experts) const {
  return is_there_ && !args.handle && args.side.empty() && api::is_like(args.x, x_) && api::is_like(args.topk_idx, topk_idx_) &&
         api::is_like(args.topk_weights, topk_weights_) && api::is_like(args.out, out_) && args.mode == mode_ && args.layout == layout_ &&
         args.capacity == capacity_ && args.expert_alignment == expert_alignment_ && args.quantize == quantize_ &&
         args.scale_order <= ScaleOrder::columns && (args.scale_order == ScaleOrder::rows || args.quantize != Quantize::none) &&
         !args.out_scales.defined() && args.result == result_ && args.num_sms == num_sms_ && args.on_failure == on_failure_ && args.lane == lane_ &&
         args.receive <= Receive::resident && !args.stream.native && facts_.facts.generation == generation_of(experts);
}

const engine::KnownFacts& KnownDispatch::check(const engine::Context& context, const DispatchArgs& args, const core::ExpertMap& experts) {
  if (is_like(args, experts) && is_good(context, args.x) && is_good(context, args.topk_idx) && is_good_if_given(context, args.topk_weights) &&
      is_good_output(context, args.out, {&args.x, &args.topk_idx, &args.topk_weights})) [[likely]] {
    return facts_;
  }
  is_there_ = false;
  check_dispatch(context, args);
  engine::CallFacts facts = facts_of(context, args);
  facts.generation = generation_of(args.handle ? *args.handle->routing()->experts : experts);
  facts_ = engine::KnownFacts::of(facts);
  x_ = without_data(args.x);
  topk_idx_ = without_data(args.topk_idx);
  topk_weights_ = without_data(args.topk_weights);
  out_ = without_data(args.out);
  mode_ = args.mode;
  layout_ = args.layout;
  capacity_ = args.capacity;
  expert_alignment_ = args.expert_alignment;
  quantize_ = args.quantize;
  result_ = args.result;
  num_sms_ = args.num_sms;
  on_failure_ = args.on_failure;
  lane_ = args.lane;
  is_there_ = !args.handle && args.side.empty() && !args.stream.native;
  return facts_;
}

bool KnownCombine::is_like(const engine::Context& context, const CombineArgs& args) const {
  if (!is_there_ || !args.handle || !*args.handle || args.weights.defined() || args.side.defined()) return false;
  const internal::Routing& r = *args.handle->routing();
  return r.buffer == context.serial && r.layout == layout_ && r.capacity == capacity_ && r.num_tokens == num_tokens_ && r.num_rows == num_rows_ &&
         r.alignment == alignment_ && r.num_topk == num_topk_ && r.num_local_experts() == num_local_ && r.has_weights == has_weights_ &&
         api::is_like(args.y, y_) && api::is_like(args.out, out_) && args.apply == apply_ && args.wire == wire_ && args.mode == mode_ &&
         args.on_failure == on_failure_ && args.num_sms == num_sms_ && args.lane == lane_ && !args.stream.native;
}

const engine::KnownFacts& KnownCombine::check(const engine::Context& context, const CombineArgs& args) {
  if (is_like(context, args) && is_good(context, args.y) && is_good_output(context, args.out, {&args.y})) [[likely]]
    return facts_;
  is_there_ = false;
  check_combine(context, args);
  facts_ = engine::KnownFacts::of(facts_of(context, args));
  const internal::Routing& r = *args.handle->routing();
  y_ = without_data(args.y);
  out_ = without_data(args.out);
  apply_ = args.apply;
  wire_ = args.wire;
  mode_ = args.mode;
  on_failure_ = args.on_failure;
  num_sms_ = args.num_sms;
  lane_ = args.lane;
  layout_ = r.layout;
  capacity_ = r.capacity;
  num_tokens_ = r.num_tokens;
  num_rows_ = r.num_rows;
  alignment_ = r.alignment;
  num_topk_ = r.num_topk;
  num_local_ = r.num_local_experts();
  has_weights_ = r.has_weights;
  is_there_ = !args.weights.defined() && !args.side.defined() && !args.stream.native;
  return facts_;
}

}  // namespace turnout::api
