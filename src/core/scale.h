// Block scaling: one scale per 128 elements of a row; a last block that is shorter is a block.
//   scale = max(amax, 1e-4) / 448, for ue8m0 rounded up to a power of two;  q = e4m3(x * (1 / scale)), 1 / scale rounded once.
// amax is taken over the finite elements: an infinity saturates to 448 and a NaN stays NaN, each in its own element only.
#pragma once
#include <cstdint>

#include "core/dtype.h"

namespace turnout::core {

inline constexpr int64_t kScaleBlock = 128;
inline constexpr float kLeastAmax = 1e-4f, kLargestE4m3 = 448.0f;

/// The largest magnitude among the finite ones of `n` values, 0 if there is none.
TURNOUT_HOST_DEVICE constexpr float finite_amax(const float* values, int64_t n) {
  uint32_t amax = 0;
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t magnitude = bits_of(values[i]) & 0x7FFFFFFF;
    if (magnitude < 0x7F800000 && magnitude > amax) amax = magnitude;
  }
  return float_of(amax);
}

TURNOUT_HOST_DEVICE constexpr float scale_of(float amax) { return (amax > kLeastAmax ? amax : kLeastAmax) / kLargestE4m3; }

/// Quantises one block. The scale goes to `scale`, and as an exponent to `ue8m0` if that is given (then `scale` is the power of two).
TURNOUT_HOST_DEVICE constexpr void quantize_block(const float* values, int64_t n, uint8_t* q, float* scale, uint8_t* ue8m0) {
  float s = scale_of(finite_amax(values, n));
  if (ue8m0) {
    *ue8m0 = float_to_ue8m0_up(s);
    s = ue8m0_to_float(*ue8m0);
  }
  *scale = s;
  const float inverse = 1.0f / s;
  for (int64_t i = 0; i < n; ++i) q[i] = float_to_fp8_e4m3(values[i] * inverse);
}

/// Scales by columns are words of 32 bits, an fp32 or four ue8m0 (those beyond the last are 0): words of a row whose scales are `scale_bytes`.
TURNOUT_HOST_DEVICE constexpr int64_t scale_words(int64_t scale_bytes) { return (scale_bytes + 3) / 4; }
/// Words from one column to the next, of `rows` rows: a group of a slab has them as they are; else columns begin at multiples of 16 bytes,
/// which bulk copies of tensors ask for.
TURNOUT_HOST_DEVICE constexpr int64_t scale_column(int64_t rows, bool is_slab) { return is_slab ? rows : (rows + 3) / 4 * 4; }

TURNOUT_HOST_DEVICE constexpr float dequantize(uint8_t q, float scale) { return fp8_e4m3_to_float(q) * scale; }

}  // namespace turnout::core
