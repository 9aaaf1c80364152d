// Checks of dispatch() and combine(). Messages carry the numbers that clash.
#include "api/arguments.h"

#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <mutex>
#include <string>
#include <type_traits>

#include "core/math.h"
#include "core/scale.h"
#include "core/span.h"
#include "engine/cpu/row_format.h"

namespace turnout::api {

namespace {

std::string str(int64_t n) { return std::to_string(n); }
/// What an argument is called in a message. No string is made of it unless there is one.
struct Name {
  Name(const char* name) : text(name) {}
  Name(const std::string& name) : text(name.c_str()) {}
  const char* text;
  friend std::string operator+(const Name& name, const std::string& rest) { return name.text + rest; }
};
[[noreturn]] void refuse(const std::string& text) { throw InvalidArgument(text); }

constexpr int64_t kMost = std::numeric_limits<int64_t>::max();

/// Bytes of `n` elements, or the largest number: a width that wraps around must not look small.
int64_t bytes_of(int64_t n, DType dtype) {
  int64_t bytes = 0;
  return __builtin_mul_overflow(n, static_cast<int64_t>(size_of(dtype)), &bytes) ? kMost : bytes;
}

/// Sizes of elements are powers of two.
bool is_aligned(const TensorView& t) { return (reinterpret_cast<uintptr_t>(t.data) & (size_of(t.dtype) - 1)) == 0; }

void check_aligned(const Name& what, const TensorView& t) {
  if (!is_aligned(t)) {
    refuse(what + " is not aligned: its address is no multiple of " + str(static_cast<int64_t>(size_of(t.dtype))) + " bytes (" +
           std::string(name(t.dtype)) + ")");
  }
}

/// REQUIRES: 1 to 3 dimensions.
void check_extents(const Name& what, const TensorView& t) {
  for (int d = 0; d < t.ndim; ++d) {
    if (t.shape[static_cast<size_t>(d)] < 0) refuse(what + " is " + t.to_string() + ": a dimension is negative");
  }
}

void check_dense(const Name& what, const TensorView& t) {
  if (t.ndim == 2 && t.strides[1] == 1 && t.strides[0] == t.shape[1]) return;
  if (!t.is_dense() && t.num_elements() > 0) refuse(what + " is " + t.to_string() + ", but must be dense");
}

/// Values that C++ lets through and no name stands for.
template <class Enum>
void check_enum(const Name& what, Enum value, Enum last) {
  if (value > last) refuse(what + " is " + str(static_cast<int>(value)) + ", but must be 0 to " + str(static_cast<int>(last)));
}

void check_dtype(const Name& what, const TensorView& t) {
  if (t.dtype > DType::fp64) refuse(what + ": its dtype is " + str(static_cast<int>(t.dtype)) + ", which is none");
}

/// Numbers that are read one after the other: as many as `wanted` rows of `cols`, or more rows; `cols` = 0: a vector.
/// `slab`: a matrix of just [local experts, capacity] will do, too, as it comes in a result.
void check_numbers(const Name& what, const TensorView& t, std::initializer_list<DType> dtypes, int64_t wanted, int64_t cols,
                   const internal::Routing* slab = nullptr) {
  if (t.ndim > 3) refuse(what + " has " + str(t.ndim) + " dimensions, but must have 1 to 3");
  check_dtype(what, t);
  if (std::find(dtypes.begin(), dtypes.end(), t.dtype) == dtypes.end()) {
    std::string names;
    for (DType dtype : dtypes) names += (names.empty() ? "" : " or ") + std::string(name(dtype));
    refuse(what + " is " + t.to_string() + ", but must be " + names);
  }
  if (t.ndim >= 1 && t.ndim <= 3) check_extents(what, t);
  const bool as_slab = slab && t.ndim == 2 && t.shape[0] == slab->num_local_experts() && t.shape[1] == slab->capacity;
  const bool as_rows = t.ndim == (cols ? 2 : 1) && t.shape[0] >= wanted && (!cols || t.shape[1] == cols);
  if (!as_slab && !as_rows) {
    std::string text = what + " is " + t.to_string() + ", but must be [";
    text += str(wanted);
    if (cols) text += ", " + str(cols);
    text += "] (or more rows)";
    if (slab) text += " or [" + str(slab->num_local_experts()) + ", " + str(slab->capacity) + "]";
    refuse(text + (cols ? ", a number for each choice of a row" : ", a number for each row of y"));
  }
  check_dense(what, t);
  if (wanted > 0 && !t.data) refuse(what + " has null data");
  check_aligned(what, t);
}

/// What nearly every matrix is: to find out what is wrong with another one takes longer.
bool is_good_matrix(const TensorView& t) {
  return t.ndim == 2 && t.shape[0] > 0 && t.shape[1] > 0 && t.data && t.strides[1] == 1 && t.strides[0] >= 0 && t.dtype <= DType::fp64 &&
         is_aligned(t);
}

/// A matrix of rows: two dimensions, last stride 1, data unless there are no rows, aligned to its elements, on the CPU.
void check_matrix(const Name& what, const TensorView& t, int ndim = 2) {
  if (ndim == 2 && is_good_matrix(t)) [[likely]]
    return;
  if (!t.defined()) refuse(what + " is missing");
  if (t.ndim != ndim) refuse(what + " is " + t.to_string() + ", but must have " + str(ndim) + " dimensions");
  check_dtype(what, t);
  check_extents(what, t);
  if (t.num_elements() == 0) return;
  if (t.data == nullptr) refuse(what + " is " + t.to_string() + " with null data");
  const auto last = static_cast<size_t>(ndim - 1);
  if (t.shape[last] > 1 && t.strides[last] != 1) refuse(what + " is " + t.to_string() + ", but elements of a row must be adjacent (last stride 1)");
  for (size_t d = 0; d < last; ++d) {
    if (t.shape[d] > 1 && t.strides[d] < 0) refuse(what + " is " + t.to_string() + ": strides must not be negative");
  }
  check_aligned(what, t);
}

/// Once its extents are known to be good, so that they are told apart from strides.
void check_span(const Name& what, const TensorView& t) {
  constexpr size_t kMostSpan = size_t{1} << 47;  // no address is further from another: what is wraps around
  if (core::span_bytes(t) > kMostSpan) refuse(what + " is " + t.to_string() + ": it would reach further than memory does");
}

void check_shape(const Name& what, const TensorView& t, std::initializer_list<int64_t> shape) {
  size_t d = 0;
  bool same = t.ndim == static_cast<int>(shape.size());
  for (int64_t extent : shape) same = same && t.shape[d++] == extent;
  if (same) return;
  std::string wanted;
  for (int64_t extent : shape) wanted += (wanted.empty() ? "" : ", ") + str(extent);
  refuse(what + " is " + t.to_string() + ", but must be [" + wanted + "]");
}

/// Rows of an output must not overlap.
void check_output(const Name& what, const TensorView& t, DType dtype, int64_t cols) {
  check_matrix(what, t, t.ndim == 3 ? 3 : 2);
  if (t.dtype != dtype) refuse(what + " is " + t.to_string() + ", but the result is " + std::string(name(dtype)));
  const auto last = static_cast<size_t>(t.ndim - 1);
  if (t.shape[last] != cols) refuse(what + " is " + t.to_string() + ", but rows of the result have " + str(cols) + " elements");
  if (t.shape[last - 1] > 1 && t.strides[last - 1] < cols) refuse(what + " is " + t.to_string() + ": its rows overlap");
}

/// Whether all ids are -1 or below `num_experts`.
template <class Id>
bool are_experts(const Id* ids, int64_t n, int num_experts) {
  using Unsigned = std::make_unsigned_t<Id>;
  bool good = true;
  for (int64_t i = 0; i < n; ++i) good &= static_cast<Unsigned>(ids[i]) + 1 <= static_cast<Unsigned>(num_experts);
  return good;
}

void check_row_width(const Name& what, const TensorView& t, const BufferConfig& config) {
  const int64_t hidden = t.shape[static_cast<size_t>(t.ndim - 1)];
  if (hidden < 1) refuse(what + " is " + t.to_string() + ": rows must have at least one element");
  const int64_t bytes = bytes_of(hidden, t.dtype), most = static_cast<int64_t>(row_bytes(config));
  if (bytes > most) {
    refuse(what + " is " + t.to_string() + ": rows of " + str(bytes) + " bytes, but this Buffer was made for at most " + str(most) + " (hidden " +
           str(config.hidden) + " of " + std::string(name(config.dtype)) + ")");
  }
}

std::string text(Device device) { return device == Device{} ? "the CPU" : std::string(name(device.kind)) + ":" + str(device.index); }

[[noreturn, gnu::noinline]] void refuse_device(const BufferConfig& config, const Name& what, const TensorView& t) {
  refuse(what + " is on " + text(t.device) + ", but this Buffer is on " + text(config.device));
}

inline void check_device(const BufferConfig& config, const Name& what, const TensorView& t) {
  if (t.defined() && !(t.device == config.device)) refuse_device(config, what, t);
}

template <class Args>
void check_common(const Name& call, const BufferConfig& config, const Args& args) {
  if (!has_lane(config, args.lane)) refuse(call + ": " + lane_problem(config, args.lane));
  check_enum(call + ": mode", args.mode, Mode::low_latency);
  check_enum(call + ": on_failure", args.on_failure, OnFailure::mask);
  if (args.on_failure == OnFailure::mask) refuse(call + ": on_failure=mask is not in this version; use raise");
  // How many a GPU has its engine knows.
  if (args.num_sms < 0) refuse(call + ": num_sms is " + str(args.num_sms) + ", but must be 0 or more");
  if (args.stream.native && config.device.kind == DeviceKind::cpu) {
    refuse(call + ": a stream is given, but this Buffer is on the CPU, where calls are in program order: leave it null");
  }
}

/// A view of memory that a result gave back is no argument.
void check_alive(const engine::Context& context, const Name& what, const TensorView& t) {
  if (t.defined() && t.data && t.num_elements() > 0 && context.is_released(t.data)) refuse(what + " is a view of a result that was released");
}

/// An output in memory that is read while it is written: what comes of it depends on the moment.
void check_apart(const Name& what, const TensorView& out, const Name& input, const TensorView& t) {
  if (overlap(out, t)) refuse(what + " and " + input.text + " share memory: a result needs memory of its own");
}

/// What a handle fixes may be left at its default beside it, or be the same.
void check_same_as_handle(const DispatchArgs& args, const internal::Routing& r) {
  const auto differ = [](const char* what, const std::string& given, const std::string& has) {
    refuse(std::string("dispatch: ") + what + " is " + given + ", but the handle was made with " + has + ", which it keeps: leave " + what + " out");
  };
  if (args.layout != Layout::rank_major && args.layout != r.layout) differ("layout", std::string(name(args.layout)), std::string(name(r.layout)));
  if (args.capacity && *args.capacity != r.capacity) differ("capacity", str(*args.capacity), r.capacity < 0 ? "an exact size" : str(r.capacity));
  if (args.expert_alignment != 1 && r.layout == Layout::expert_major && args.expert_alignment != r.alignment) {
    differ("expert_alignment", str(args.expert_alignment), str(r.alignment));
  }
}

const internal::Routing& check_handle(const Name& call, const engine::Context& context, const Handle* handle) {
  if (!handle || !*handle) refuse(call + ": handle is empty; give the handle of a dispatch of this Buffer");
  if (handle->routing()->buffer != context.serial) refuse(call + ": handle was made by another Buffer (or one that is closed)");
  return *handle->routing();
}

/// What the result of a capacity takes is known before anything is sent: what no memory holds is refused, with the numbers.
/// In floating point, which does not wrap.
void check_memory(const engine::Context& context, const DispatchArgs& args) {
  if (context.config.device.kind != DeviceKind::cpu) return;  // a GPU's engine knows its memory
  static const double memory = static_cast<double>(sysconf(_SC_PHYS_PAGES)) * static_cast<double>(sysconf(_SC_PAGESIZE));
  double rows = static_cast<double>(*args.capacity);
  if (args.layout == Layout::expert_slab) rows *= context.num_local_experts();
  double row = args.layout == Layout::rank_major ? static_cast<double>(args.topk_idx.shape[1]) * 8 : 4;  // ids and weights
  if (!args.out.defined()) row += static_cast<double>(bytes_of(args.x.shape[1], args.x.dtype));
  for (const TensorView& side : args.side) {
    if (side.ndim == 2) row += static_cast<double>(bytes_of(side.shape[1], side.dtype));
  }
  if (rows * row <= memory) return;
  refuse("dispatch: capacity is " + str(*args.capacity) + ", so the result has " + str(std::llround(rows)) + " rows of " + str(std::llround(row)) +
         " bytes, " + str(std::llround(std::min(rows * row, 9e18))) + " in all, but this machine has " + str(std::llround(memory)) +
         " bytes of memory: give a smaller one");
}

void check_slab_out(const engine::Context& context, const DispatchArgs& args) {
  const internal::Routing* r = args.handle ? args.handle->routing().get() : nullptr;
  if ((r ? r->layout : args.layout) != Layout::expert_slab) refuse("dispatch: out is " + args.out.to_string() + ", but must have 2 dimensions");
  const int64_t local = r ? r->num_local_experts() : context.num_local_experts();
  check_shape("dispatch: out", args.out, {local, r ? r->capacity : args.capacity.value_or(0), args.x.shape[1]});
  check_dense("dispatch: out", args.out);
}

/// Of a slab: the shape and strides that the scales would have in memory of ours.
void check_out_scales(const engine::Context& context, const DispatchArgs& args) {
  const TensorView& out = args.out_scales;
  if (!out.defined()) return;
  const internal::Routing* r = args.handle ? args.handle->routing().get() : nullptr;
  if (args.scale_order != ScaleOrder::columns || (r ? r->layout : args.layout) != Layout::expert_slab)
    refuse("dispatch: out_scales is given, which takes layout=expert_slab and scale_order=columns: leave it out");
  const bool fp32 = args.quantize == Quantize::fp8_e4m3;
  const int64_t blocks = (args.x.shape[1] + 127) / 128, rows = r ? r->capacity : args.capacity.value_or(0);
  const int64_t local = r ? r->num_local_experts() : context.num_local_experts(), words = core::scale_words(fp32 ? 4 * blocks : blocks);
  check_shape("dispatch: out_scales", out, {local, rows, words});
  const DType dtype = fp32 ? DType::fp32 : DType::i32;
  if (out.dtype != dtype) refuse("dispatch: out_scales is " + out.to_string() + ", but must be " + std::string(name(dtype)));
  if (out.num_elements() == 0) return;
  const auto fits = [&](size_t d, int64_t stride) { return out.shape[d] <= 1 || out.strides[d] == stride; };
  if (!fits(0, words * rows) || !fits(1, 1) || !fits(2, rows))
    refuse("dispatch: out_scales is " + out.to_string() + " with strides [" + str(out.strides[0]) + ", " + str(out.strides[1]) + ", " +
           str(out.strides[2]) + "], but the scales of a block must be adjacent: [" + str(words * rows) + ", 1, " + str(rows) + "]");
  check_aligned("dispatch: out_scales", out);
  check_alive(context, "dispatch: out_scales", out);
  check_apart("dispatch: out_scales", out, "x", args.x);
  check_apart("dispatch: out_scales", out, "out", args.out);
}

void check_routing_args(const engine::Context& context, const DispatchArgs& args) {
  const BufferConfig& config = context.config;
  const int64_t tokens = args.x.shape[0];
  check_matrix("dispatch: topk_idx", args.topk_idx);
  if (args.topk_idx.dtype != DType::i32 && args.topk_idx.dtype != DType::i64)
    refuse("dispatch: topk_idx is " + args.topk_idx.to_string() + ", but must be i32 or i64");
  if (args.topk_idx.shape[0] != tokens) refuse("dispatch: x has " + str(tokens) + " tokens but topk_idx has " + str(args.topk_idx.shape[0]));
  const int64_t topk = args.topk_idx.shape[1];
  if (topk < 1 || topk > config.max_topk)
    refuse("dispatch: topk_idx has " + str(topk) + " experts per token, but this Buffer takes 1 to " + str(config.max_topk) + " (max_topk)");
  check_dense("dispatch: topk_idx", args.topk_idx);
  check_alive(context, "dispatch: topk_idx", args.topk_idx);
  if (config.device.kind == DeviceKind::cpu) check_ids(args.topk_idx, config.num_experts);  // a GPU's kernels look at theirs
  if (args.topk_weights.defined()) {
    check_matrix("dispatch: topk_weights", args.topk_weights);
    check_alive(context, "dispatch: topk_weights", args.topk_weights);
    if (args.topk_weights.dtype != DType::fp32 && args.topk_weights.dtype != DType::bf16) {
      refuse("dispatch: topk_weights is " + args.topk_weights.to_string() + ", but must be fp32 or bf16");
    }
    check_shape("dispatch: topk_weights", args.topk_weights, {tokens, topk});
    check_dense("dispatch: topk_weights", args.topk_weights);
  }
  if (args.capacity && *args.capacity < 0) refuse("dispatch: capacity is " + str(*args.capacity) + ", but must be 0 or more");
  if (args.capacity && *args.capacity > INT32_MAX) refuse("dispatch: capacity is " + str(*args.capacity) + ", but must be below 2^31");
  if (args.layout == Layout::expert_slab && !args.capacity) refuse("dispatch: layout expert_slab needs a capacity (rows per local expert)");
  if (args.capacity) check_memory(context, args);
  if (args.expert_alignment < 1 || args.expert_alignment > (1 << 20)) {
    refuse("dispatch: expert_alignment is " + str(args.expert_alignment) + ", but must be 1 to 1048576");
  }
}

/// `need`: rows of y.
void check_combine_weights(const engine::Context& context, const CombineArgs& args, const internal::Routing& r, int64_t need) {
  const bool late = args.apply == CombineWeights::tokens;
  if ((late || args.apply == CombineWeights::rows) != args.weights.defined()) {
    refuse(args.weights.defined() ? "combine: weights are given but not applied; set apply=rows, or apply=tokens for one per token and k"
                                  : "combine: apply=" + std::string(late ? "tokens" : "rows") + ", but weights are missing");
  }
  if (!args.weights.defined()) return;
  if (late) {
    if (args.wire != Wire::rows) {
      refuse("combine: apply=tokens with wire=" + std::string(name(args.wire)) +
             ", but the weights of a token are known on its rank alone: wire=rows brings the rows there");
    }
    check_numbers("combine: weights", args.weights, {DType::fp32, DType::bf16}, r.num_tokens, r.num_topk);
    if (r.num_tokens > 0) check_alive(context, "combine: weights", args.weights);
    return;
  }
  check_numbers("combine: weights", args.weights, {DType::fp32, DType::bf16}, need, 0, r.layout == Layout::expert_slab ? &r : nullptr);
  if (need > 0) check_alive(context, "combine: weights", args.weights);
}

}  // namespace

/// Columns of one matrix beside each other are apart, too.
bool overlap(const TensorView& a, const TensorView& b) {
  const size_t first_bytes = core::span_bytes(a), second_bytes = core::span_bytes(b);
  if (first_bytes == 0 || second_bytes == 0) return false;
  const auto first = reinterpret_cast<uintptr_t>(a.data), second = reinterpret_cast<uintptr_t>(b.data);
  if (first + first_bytes <= second || second + second_bytes <= first) return false;
  if (a.ndim != 2 || b.ndim != 2) return true;
  const int64_t stride = a.strides[0] * static_cast<int64_t>(size_of(a.dtype)),
                widths[] = {bytes_of(a.shape[1], a.dtype), bytes_of(b.shape[1], b.dtype)};
  if (stride <= 0 || stride != b.strides[0] * static_cast<int64_t>(size_of(b.dtype))) return true;
  const int64_t apart = second >= first ? static_cast<int64_t>((second - first) % static_cast<uintptr_t>(stride))
                                        : (stride - static_cast<int64_t>((first - second) % static_cast<uintptr_t>(stride))) % stride;
  return apart < widths[0] || apart + widths[1] > stride;
}

void check_ids(const TensorView& ids, int num_experts) {
  const int64_t n = ids.shape[0] * ids.shape[1];
  if (ids.dtype == DType::i64 ? are_experts(ids.as<const int64_t>(), n, num_experts) : are_experts(ids.as<const int32_t>(), n, num_experts)) return;
  for (int64_t i = 0; i < n; ++i) {
    const int64_t id = ids.dtype == DType::i64 ? ids.as<const int64_t>()[i] : ids.as<const int32_t>()[i];
    if (id >= -1 && id < num_experts) continue;
    refuse("dispatch: topk_idx[" + str(i / ids.shape[1]) + "][" + str(i % ids.shape[1]) + "] is " + str(id) + ", but experts are 0 to " +
           str(num_experts - 1) + ", and -1 is none");
  }
}

std::string lane_problem(const BufferConfig& config, int lane) {
  return "lane is " + str(lane) + ", but this Buffer has lanes 0 to " + str(config.num_lanes - 1);
}

size_t row_bytes(const BufferConfig& config) { return static_cast<size_t>(config.hidden) * size_of(config.dtype); }

void check_dispatch(const engine::Context& context, const DispatchArgs& args) {
  const BufferConfig& config = context.config;
  check_common("dispatch", config, args);
  check_enum("dispatch: layout", args.layout, Layout::expert_slab);
  check_enum("dispatch: quantize", args.quantize, Quantize::fp8_e4m3_ue8m0);
  check_enum("dispatch: scale_order", args.scale_order, ScaleOrder::columns);
  if (args.scale_order == ScaleOrder::columns && args.quantize == Quantize::none)
    refuse("dispatch: scale_order=columns, but nothing is quantised: give quantize, or leave scale_order out");
  check_enum("dispatch: result", args.result, ResultKind::fresh);
  check_enum("dispatch: receive", args.receive, Receive::resident);
  check_device(config, "dispatch: x", args.x);
  check_device(config, "dispatch: topk_idx", args.topk_idx);
  check_device(config, "dispatch: topk_weights", args.topk_weights);
  check_device(config, "dispatch: out", args.out);
  check_device(config, "dispatch: out_scales", args.out_scales);
  for (size_t s = 0; s < args.side.size(); ++s) {
    if (args.side[s].device == config.device) continue;
    check_device(config, "dispatch: side[" + str(static_cast<int64_t>(s)) + "]", args.side[s]);
  }
  check_matrix("dispatch: x", args.x);
  check_row_width("dispatch: x", args.x, config);
  check_alive(context, "dispatch: x", args.x);
  const int64_t tokens = args.x.shape[0];
  if (tokens > config.max_tokens_per_rank) {
    refuse("dispatch: x has " + str(tokens) + " tokens, but this Buffer takes at most " + str(config.max_tokens_per_rank) +
           " per call (max_tokens_per_rank); give fewer or make the Buffer for more");
  }
  if (args.handle) {
    const internal::Routing& r = check_handle("dispatch", context, args.handle);
    if (args.topk_idx.defined() || args.topk_weights.defined())
      refuse("dispatch: topk_idx and topk_weights are in the handle already; leave them out");
    if (tokens != r.num_tokens) refuse("dispatch: x has " + str(tokens) + " tokens but the handle has " + str(r.num_tokens));
    check_same_as_handle(args, r);
  } else {
    check_routing_args(context, args);
  }
  if (args.quantize != Quantize::none && args.x.dtype != DType::bf16 && args.x.dtype != DType::fp16 && args.x.dtype != DType::fp32) {
    refuse("dispatch: x is " + args.x.to_string() + ", but quantize takes bf16, fp16 or fp32");
  }
  if (args.side.size() > engine::kMaxSideArrays) refuse("dispatch: " + str(static_cast<int64_t>(args.side.size())) + " side arrays, at most 16");
  int64_t side_bytes = 0;
  for (size_t s = 0; s < args.side.size(); ++s) {
    const std::string what = "dispatch: side[" + str(static_cast<int64_t>(s)) + "]";
    check_matrix(what, args.side[s]);
    check_alive(context, what, args.side[s]);
    if (args.side[s].shape[0] != tokens) refuse(what + " has " + str(args.side[s].shape[0]) + " rows but x has " + str(tokens));
    const int64_t bytes = bytes_of(args.side[s].shape[1], args.side[s].dtype);
    side_bytes = bytes > kMost - side_bytes ? kMost : side_bytes + bytes;
    if (side_bytes > static_cast<int64_t>(config.max_side_bytes)) {
      refuse("dispatch: side arrays have " + str(side_bytes) + " bytes per row up to side[" + str(static_cast<int64_t>(s)) +
             "], but this Buffer was made for at most " + str(static_cast<int64_t>(config.max_side_bytes)) + " (max_side_bytes)");
    }
  }
  check_out_scales(context, args);
  check_span("dispatch: x", args.x);
  for (size_t s = 0; s < args.side.size(); ++s) check_span("dispatch: side[" + str(static_cast<int64_t>(s)) + "]", args.side[s]);
  check_alive(context, "dispatch: out", args.out);
  if (args.out.defined()) {
    if (args.result == ResultKind::lease) refuse("dispatch: out and result=lease exclude each other");
    const DType dtype = args.quantize == Quantize::none ? args.x.dtype : DType::fp8_e4m3;
    check_output("dispatch: out", args.out, dtype, args.x.shape[1]);
    if (args.out.ndim == 3) check_slab_out(context, args);
    check_span("dispatch: out", args.out);
    check_apart("dispatch: out", args.out, "x", args.x);
    check_apart("dispatch: out", args.out, "topk_idx", args.topk_idx);
    check_apart("dispatch: out", args.out, "topk_weights", args.topk_weights);
    for (size_t s = 0; s < args.side.size(); ++s) check_apart("dispatch: out", args.out, "side[" + str(static_cast<int64_t>(s)) + "]", args.side[s]);
  }
}

void check_combine(const engine::Context& context, const CombineArgs& args) {
  const BufferConfig& config = context.config;
  check_common("combine", config, args);
  check_enum("combine: apply", args.apply, CombineWeights::tokens);
  check_enum("combine: wire", args.wire, Wire::rows);
  check_device(config, "combine: y", args.y);
  check_device(config, "combine: weights", args.weights);
  check_device(config, "combine: side", args.side);
  check_device(config, "combine: out", args.out);
  const internal::Routing& r = check_handle("combine", context, args.handle);
  const bool slab = r.layout == Layout::expert_slab;
  check_matrix("combine: y", args.y, slab && args.y.ndim == 3 ? 3 : 2);
  if (!is_summable(args.y.dtype)) refuse("combine: y is " + args.y.to_string() + ", but must be fp16, bf16, fp32 or fp64");
  check_row_width("combine: y", args.y, config);
  const int64_t need = slab ? r.result_rows() : r.num_rows;
  if (slab && args.y.ndim == 3) {
    if (args.y.shape[0] != r.num_local_experts() || args.y.shape[1] != r.capacity) {
      refuse("combine: y is " + args.y.to_string() + ", but must be [" + str(r.num_local_experts()) + ", " + str(r.capacity) + ", hidden]");
    }
  }
  const int64_t have = args.y.ndim == 3 ? args.y.shape[0] * args.y.shape[1] : args.y.shape[0];
  if (have < need) refuse("combine: y has " + str(have) + " rows, but the handle's dispatch delivered " + str(need));
  check_span("combine: y", args.y);
  if (need > 0) check_alive(context, "combine: y", args.y);
  check_alive(context, "combine: out", args.out);
  if (args.wire == Wire::rows && r.layout == Layout::rank_major) {
    refuse("combine: wire=rows needs one row per expert, but the handle's layout is rank_major; use expert_major or expert_slab");
  }
  if (args.apply == CombineWeights::source) {
    if (!r.has_weights) refuse("combine: weights=source, but the dispatch was given no topk_weights");
    if (r.layout == Layout::rank_major) {
      refuse("combine: weights=source needs one row per expert, but the handle's layout is rank_major; weight the rows or use another layout");
    }
  }
  check_combine_weights(context, args, r, need);
  if (args.side.defined()) {
    if (need > 0) check_alive(context, "combine: side", args.side);
    if (r.layout == Layout::rank_major) check_numbers("combine: side", args.side, {DType::fp32}, r.num_recv(), r.num_topk);
    else check_numbers("combine: side", args.side, {DType::fp32}, need, 0, slab ? &r : nullptr);
  }
  if (args.out.defined()) {
    check_output("combine: out", args.out, args.y.dtype, args.y.shape[static_cast<size_t>(args.y.ndim - 1)]);
    if (args.out.ndim != 2 || args.out.shape[0] != r.num_tokens)
      refuse("combine: out is " + args.out.to_string() + ", but the handle has " + str(r.num_tokens) + " tokens");
    check_span("combine: out", args.out);
    check_apart("combine: out", args.out, "y", args.y);
    check_apart("combine: out", args.out, "weights", args.weights);
    check_apart("combine: out", args.out, "side", args.side);
  }
}

}  // namespace turnout::api
