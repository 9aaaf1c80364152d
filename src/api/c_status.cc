// C: errors of a thread, and tensors.
#include "api/c_status.h"

#include <exception>
#include <new>

#include "turnout/buffer.h"

namespace turnout::api {

// The numbers of the C header are those of the C++ one.
template <class Enum>
constexpr bool same(int c, Enum cpp) {
  return c == static_cast<int>(cpp);
}
static_assert(same(TURNOUT_U8, DType::u8) && same(TURNOUT_I8, DType::i8) && same(TURNOUT_I32, DType::i32) && same(TURNOUT_I64, DType::i64));
static_assert(same(TURNOUT_FP8_E4M3, DType::fp8_e4m3) && same(TURNOUT_FP8_E5M2, DType::fp8_e5m2) && same(TURNOUT_UE8M0, DType::ue8m0));
static_assert(same(TURNOUT_FP16, DType::fp16) && same(TURNOUT_BF16, DType::bf16) && same(TURNOUT_FP32, DType::fp32) &&
              same(TURNOUT_FP64, DType::fp64));
static_assert(same(TURNOUT_THROUGHPUT, Mode::throughput) && same(TURNOUT_LOW_LATENCY, Mode::low_latency));
static_assert(same(TURNOUT_EXPERT_MAJOR, Layout::expert_major) && same(TURNOUT_EXPERT_SLAB, Layout::expert_slab));
static_assert(same(TURNOUT_WIRE_FP32, Wire::fp32) && same(TURNOUT_WIRE_FP8, Wire::fp8) && same(TURNOUT_WIRE_ROWS, Wire::rows));
static_assert(same(TURNOUT_QUANTIZE_FP8_E4M3, Quantize::fp8_e4m3) && same(TURNOUT_QUANTIZE_FP8_E4M3_UE8M0, Quantize::fp8_e4m3_ue8m0));
static_assert(same(TURNOUT_RESULT_LEASE, ResultKind::lease) && same(TURNOUT_RESULT_FRESH, ResultKind::fresh));
static_assert(same(TURNOUT_RESIDENT, Receive::resident) && same(TURNOUT_MASK, OnFailure::mask) && same(TURNOUT_CUDA, DeviceKind::cuda));
static_assert(same(TURNOUT_WEIGHTS_SOURCE, CombineWeights::source) && same(TURNOUT_WEIGHTS_ROWS, CombineWeights::rows) &&
              same(TURNOUT_WEIGHTS_TOKENS, CombineWeights::tokens));

namespace {

/// What a thread keeps of its last failure; `c_record` points into `failure`.
struct LastFailure {
  Failure failure;
  turnout_wait_record c_record{};
};

LastFailure& last() {
  static thread_local LastFailure of_this_thread;
  return of_this_thread;
}

Failure current_failure() {
  try {
    throw;
  } catch (const FailedElsewhere& e) {
    return e.failure;
  } catch (const InvalidArgument& e) {
    return {TURNOUT_INVALID_ARGUMENT, e.what(), false, {}};
  } catch (const TransportError& e) {
    return {TURNOUT_TRANSPORT_ERROR, e.what(), false, {}};
  } catch (const PeerTimeout& e) {
    return {TURNOUT_PEER_TIMEOUT, e.what(), true, e.record()};
  } catch (const PeerFailed& e) {
    return {TURNOUT_PEER_FAILED, e.what(), true, e.record()};
  } catch (const std::bad_alloc&) {
    return {TURNOUT_OTHER, "out of memory", false, {}};
  } catch (const std::exception& e) {
    return {TURNOUT_OTHER, e.what(), false, {}};
  } catch (...) {
    return {TURNOUT_OTHER, "an exception of unknown type", false, {}};
  }
}

}  // namespace

const Failure& last_failure() { return last().failure; }

turnout_status keep_current_exception() noexcept {
  LastFailure& keep = last();
  try {
    keep.failure = current_failure();
    const WaitRecord& r = keep.failure.record;
    keep.c_record = {r.rank,  r.peers.data(),  r.peers.size(), r.lane, r.call.c_str(),
                     r.epoch, r.phase.c_str(), r.expected,     r.seen, r.peer_state.c_str()};
  } catch (...) {
    // No memory even for the words: the status alone tells.
    keep.failure.status = TURNOUT_OTHER;
    keep.failure.has_record = false;
    keep.failure.text.clear();
  }
  return keep.failure.status;
}

TensorView to_view(const turnout_tensor& tensor, const std::string& what) {
  TensorView view;
  if (tensor.ndim < 0 || tensor.ndim > 3) throw InvalidArgument(what + ".ndim is " + std::to_string(tensor.ndim) + ", but must be 0 to 3");
  view.data = tensor.data;
  view.dtype = to_enum(tensor.dtype, DType::fp64, what + ".dtype");
  view.ndim = tensor.ndim;
  std::copy_n(tensor.shape, 3, view.shape.begin());
  std::copy_n(tensor.strides, 3, view.strides.begin());
  view.device = {to_enum(tensor.device_kind, DeviceKind::cuda, what + ".device_kind"), tensor.device_index};
  return view;
}

turnout_tensor from_view(const TensorView& view) {
  turnout_tensor tensor{};
  tensor.data = view.data;
  tensor.dtype = static_cast<int32_t>(view.dtype);
  tensor.ndim = view.ndim;
  std::copy_n(view.shape.begin(), 3, tensor.shape);
  std::copy_n(view.strides.begin(), 3, tensor.strides);
  tensor.device_kind = static_cast<int32_t>(view.device.kind);
  tensor.device_index = view.device.index;
  return tensor;
}

}  // namespace turnout::api

using namespace turnout;

extern "C" {

const char* turnout_last_error(void) { return api::last_failure().text.c_str(); }

const turnout_wait_record* turnout_last_wait_record(void) {
  const api::LastFailure& last = api::last();
  return last.failure.has_record ? &last.c_record : nullptr;
}

const char* turnout_status_name(turnout_status status) {
  switch (status) {
    case TURNOUT_OK: return "OK";
    case TURNOUT_INVALID_ARGUMENT: return "INVALID_ARGUMENT";
    case TURNOUT_TRANSPORT_ERROR: return "TRANSPORT_ERROR";
    case TURNOUT_PEER_TIMEOUT: return "PEER_TIMEOUT";
    case TURNOUT_PEER_FAILED: return "PEER_FAILED";
    case TURNOUT_OTHER: return "OTHER";
  }
  return "?";
}

const char* turnout_version(void) { return turnout::version().data(); }  // a literal, so it ends with a zero

turnout_tensor turnout_tensor_dense(const void* data, turnout_dtype dtype, int64_t rows, int64_t cols) {
  turnout_tensor tensor{};
  tensor.data = const_cast<void*>(data);
  tensor.dtype = static_cast<int32_t>(dtype);
  tensor.ndim = cols == 0 ? 1 : 2;
  tensor.shape[0] = rows;
  tensor.shape[1] = cols;
  tensor.strides[0] = cols == 0 ? 1 : cols;
  tensor.strides[1] = cols == 0 ? 0 : 1;
  return tensor;
}

}  // extern "C"
