// The small closed sets of the API: element types, modes, layouts, wires.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "turnout/visibility.h"

namespace turnout {
inline namespace v0 {

/// Element types. Rows of a dispatch are bytes of any of these; combine() adds fp16, bf16, fp32 and fp64.
enum class DType : uint8_t { u8, i8, i32, i64, fp8_e4m3, fp8_e5m2, ue8m0, fp16, bf16, fp32, fp64 };

/// Bytes of one element.
constexpr size_t size_of(DType dtype) {
  switch (dtype) {
    case DType::i32:
    case DType::fp32: return 4;
    case DType::i64:
    case DType::fp64: return 8;
    case DType::fp16:
    case DType::bf16: return 2;
    default: return 1;
  }
}

/// True for the types that combine() can add.
constexpr bool is_summable(DType dtype) { return dtype == DType::fp16 || dtype == DType::bf16 || dtype == DType::fp32 || dtype == DType::fp64; }

/// How a call trades latency for bandwidth. `automatic` chooses by the bytes of the largest call the Buffer allows.
enum class Mode : uint8_t { automatic, throughput, low_latency };

/// How the rows of a dispatch are laid out where they arrive.
enum class Layout : uint8_t {
  rank_major,    ///< one row per (token, destination rank), by (source rank, token)
  expert_major,  ///< one row per (token, local expert), grouped by expert, in (source rank, token, k) order
  expert_slab,   ///< [local experts, capacity, hidden] with a count per expert
};

/// The form in which partial sums cross a link on the way back.
enum class Wire : uint8_t {
  payload,  ///< the dtype of the rows given to combine()
  fp32,     ///< partial sums in fp32
  fp8,      ///< e4m3 with one fp32 scale per block of 128
  rows,     ///< every expert's row crosses; the source adds them in k order with one rounding
};

/// Fused quantisation of x on its way.
enum class Quantize : uint8_t {
  none,
  fp8_e4m3,        ///< blocks of 128, fp32 scales
  fp8_e4m3_ue8m0,  ///< blocks of 128, scales rounded up to a power of two, one byte each
};

/// How the scales of fused quantisation lie.
enum class ScaleOrder : uint8_t {
  rows,     ///< those of a row side by side
  columns,  ///< those of one block of all rows side by side, as GEMMs read them; ue8m0 as int32, four blocks in each
};

/// Where a result lives: a block of the receive region (no copy) or memory of its own.
enum class ResultKind : uint8_t { automatic, lease, fresh };

/// What happens between the issue of a call and its wait().
enum class Receive : uint8_t {
  deferred,  ///< nothing of ours runs until wait()
  resident,  ///< a thread (stream) of ours receives meanwhile and advances arrival counters
};

/// What a failed peer does to a call.
enum class OnFailure : uint8_t { raise, mask };

enum class DeviceKind : uint8_t { cpu, cuda };

/// A processor that holds memory. CPU memory is {cpu, 0}.
struct Device {
  DeviceKind kind = DeviceKind::cpu;
  int index = 0;
  friend bool operator==(const Device&, const Device&) = default;
};

/// An opaque stream of the device (cudaStream_t on a GPU); on a CPU calls are in program order and it is null.
struct Stream {
  void* native = nullptr;
};

TURNOUT_API std::string_view name(DType dtype);
TURNOUT_API std::string_view name(Mode mode);
TURNOUT_API std::string_view name(Layout layout);
TURNOUT_API std::string_view name(Wire wire);
TURNOUT_API std::string_view name(Quantize quantize);
TURNOUT_API std::string_view name(DeviceKind kind);

}  // namespace v0
}  // namespace turnout
