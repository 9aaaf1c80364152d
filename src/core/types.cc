// Names of the closed sets, for messages, tables and JSON.
#include "turnout/types.h"

namespace turnout {
inline namespace v0 {

std::string_view name(DType dtype) {
  switch (dtype) {
    case DType::u8: return "u8";
    case DType::i8: return "i8";
    case DType::i32: return "i32";
    case DType::i64: return "i64";
    case DType::fp8_e4m3: return "fp8_e4m3";
    case DType::fp8_e5m2: return "fp8_e5m2";
    case DType::ue8m0: return "ue8m0";
    case DType::fp16: return "fp16";
    case DType::bf16: return "bf16";
    case DType::fp32: return "fp32";
    case DType::fp64: return "fp64";
  }
  return "?";
}

std::string_view name(Mode mode) {
  switch (mode) {
    case Mode::automatic: return "auto";
    case Mode::throughput: return "throughput";
    case Mode::low_latency: return "low_latency";
  }
  return "?";
}

std::string_view name(Layout layout) {
  switch (layout) {
    case Layout::rank_major: return "rank_major";
    case Layout::expert_major: return "expert_major";
    case Layout::expert_slab: return "expert_slab";
  }
  return "?";
}

std::string_view name(Wire wire) {
  switch (wire) {
    case Wire::payload: return "payload";
    case Wire::fp32: return "fp32";
    case Wire::fp8: return "fp8";
    case Wire::rows: return "rows";
  }
  return "?";
}

std::string_view name(Quantize quantize) {
  switch (quantize) {
    case Quantize::none: return "none";
    case Quantize::fp8_e4m3: return "fp8_e4m3";
    case Quantize::fp8_e4m3_ue8m0: return "fp8_e4m3_ue8m0";
  }
  return "?";
}

std::string_view name(DeviceKind kind) { return kind == DeviceKind::cpu ? "cpu" : "cuda"; }

}  // namespace v0
}  // namespace turnout
