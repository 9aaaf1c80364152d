// Everything that is done to a row: copy, quantise, add. One table of functions per instruction set; all give the same bits.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "turnout/types.h"

namespace turnout::engine {

enum class Isa { plain, avx2, avx512 };
std::string_view name(Isa isa);

/// A row in the form it has in memory or on a link. `scales`: one fp32 per block of 128, only for block-scaled fp8.
struct RowRef {
  const void* data = nullptr;
  const float* scales = nullptr;
};

struct RowKernels {
  Isa isa;

  /// Copies a row that is read again soon.
  void (*copy_row)(void* dst, const void* src, size_t num_bytes);
  /// Copies a row into memory that this processor does not read again soon.
  void (*copy_row_streaming)(void* dst, const void* src, size_t num_bytes);

  /// Quantises bf16, fp16 or fp32 to e4m3 in blocks of 128 (core/scale.h). Exactly one of `scales` (fp32) and `ue8m0` is given.
  void (*quantize_row)(const void* x, DType in, int64_t hidden, uint8_t* q, float* scales, uint8_t* ue8m0);

  /// Adds `num_terms` rows of `in` left to right: acc = w0*t0, then acc = acc + (wi*ti), every step rounded, in fp32
  /// (float64 if `in_double`). The sum starts at its first term; no terms give zeros; one rounding to `out_dtype`; NaN is canonical.
  /// `weights` null: unweighted. `in` and `out_dtype`: fp16, bf16, fp32, fp64, or fp8_e4m3 with block scales.
  void (*sum_rows)(const RowRef* terms, const float* weights, int num_terms, DType in, int64_t hidden, void* out, float* out_scales, DType out_dtype,
                   bool in_double);
};

/// Asks for a row that another processor wrote, so that its lines travel at once and not one after the other. Rows that do
/// not fit the first-level cache are left to the hardware.
inline void prefetch_row(const void* row, size_t num_bytes) {
  constexpr size_t kLine = 64, kMost = size_t{20} << 10;
  if (num_bytes > kMost) return;
  for (size_t at = 0; at < num_bytes; at += kLine) __builtin_prefetch(static_cast<const std::byte*>(row) + at);
}

/// The best instruction set of this processor, or the one TURNOUT_CPU_ISA names.
Isa best_isa();
/// REQUIRES: this processor has `isa` (see best_isa()).
const RowKernels& row_kernels(Isa isa);

/// What stands where a result failed: NaN in floating types, 0 in integers.
void fill_failed(void* out, DType dtype, int64_t num_elements);

}  // namespace turnout::engine
