// Floating types of a row as bits, to and from fp32. Rounding is to nearest even; a NaN always becomes the canonical one of
// its type (positive, quiet, payload dropped), so that every processor gives the same bits.
#pragma once
#include <cstdint>

#include "core/host_device.h"

namespace turnout::core {

inline constexpr uint16_t kNanBf16 = 0x7FC0, kNanFp16 = 0x7E00;
inline constexpr uint8_t kNanE4m3 = 0x7F, kNanE5m2 = 0x7E, kNanUe8m0 = 0xFF;
inline constexpr uint32_t kNanFp32 = 0x7FC00000;
inline constexpr uint64_t kNanFp64 = 0x7FF8000000000000;

TURNOUT_HOST_DEVICE constexpr uint32_t bits_of(float x) { return __builtin_bit_cast(uint32_t, x); }
TURNOUT_HOST_DEVICE constexpr float float_of(uint32_t bits) { return __builtin_bit_cast(float, bits); }
TURNOUT_HOST_DEVICE constexpr bool is_nan(float x) { return (bits_of(x) & 0x7FFFFFFF) > 0x7F800000; }

TURNOUT_HOST_DEVICE constexpr float canonical(float x) { return is_nan(x) ? float_of(kNanFp32) : x; }
TURNOUT_HOST_DEVICE constexpr double canonical(double x) { return x != x ? __builtin_bit_cast(double, kNanFp64) : x; }

TURNOUT_HOST_DEVICE constexpr float bf16_to_float(uint16_t bits) { return canonical(float_of(static_cast<uint32_t>(bits) << 16)); }
TURNOUT_HOST_DEVICE constexpr uint16_t float_to_bf16(float x) {
  const uint32_t b = bits_of(x);
  if ((b & 0x7FFFFFFF) > 0x7F800000) return kNanBf16;
  return static_cast<uint16_t>((b + 0x7FFF + (b >> 16 & 1)) >> 16);
}

namespace detail {

/// A small float of `kExponent` and `kMantissa` bits with IEEE denormals, widened exactly.
template <int kExponent, int kMantissa>
TURNOUT_HOST_DEVICE constexpr float widen(uint32_t bits) {
  constexpr int kBias = (1 << (kExponent - 1)) - 1;
  const uint32_t sign = bits >> (kExponent + kMantissa) & 1;
  const uint32_t exponent = bits >> kMantissa & ((1u << kExponent) - 1);
  uint32_t mantissa = bits & ((1u << kMantissa) - 1);
  if (exponent == 0) {
    if (mantissa == 0) return float_of(sign << 31);
    int shift = 0;
    while (!(mantissa >> kMantissa & 1)) {
      mantissa <<= 1;
      ++shift;
    }
    mantissa &= (1u << kMantissa) - 1;
    return float_of(sign << 31 | static_cast<uint32_t>(127 - kBias + 1 - shift) << 23 | mantissa << (23 - kMantissa));
  }
  return float_of(sign << 31 | (exponent + static_cast<uint32_t>(127 - kBias)) << 23 | mantissa << (23 - kMantissa));
}

/// Magnitude of a finite float as a small float, rounded to nearest even; may exceed the largest code, which the caller caps.
template <int kExponent, int kMantissa>
TURNOUT_HOST_DEVICE constexpr uint32_t narrow(uint32_t magnitude) {
  constexpr int kBias = (1 << (kExponent - 1)) - 1;
  constexpr int kDrop = 23 - kMantissa;
  const int exponent = static_cast<int>(magnitude >> 23) - 127 + kBias;
  if (exponent >= 1) {
    const uint32_t rounded = magnitude + ((1u << (kDrop - 1)) - 1) + (magnitude >> kDrop & 1);
    return (rounded >> kDrop) - (static_cast<uint32_t>(127 - kBias) << kMantissa);
  }
  // Denormal: the mantissa with its leading one, shifted further.
  const int shift = kDrop + 1 - exponent;
  if (shift > 24 || magnitude >> 23 == 0) return 0;
  const uint32_t full = (magnitude & 0x7FFFFF) | 0x800000;
  const uint32_t kept = full >> shift, rest = full & ((1u << shift) - 1), half = 1u << (shift - 1);
  return kept + (rest > half || (rest == half && (kept & 1)));
}

}  // namespace detail

TURNOUT_HOST_DEVICE constexpr float fp16_to_float(uint16_t bits) {
  const uint32_t magnitude = bits & 0x7FFF;
  if (magnitude > 0x7C00) return float_of(kNanFp32);
  if (magnitude == 0x7C00) return float_of(static_cast<uint32_t>(bits & 0x8000) << 16 | 0x7F800000);
  return detail::widen<5, 10>(bits);
}
TURNOUT_HOST_DEVICE constexpr uint16_t float_to_fp16(float x) {
  const uint32_t b = bits_of(x), magnitude = b & 0x7FFFFFFF;
  if (magnitude > 0x7F800000) return kNanFp16;
  const uint32_t code = magnitude == 0x7F800000 ? 0x7C00 : detail::narrow<5, 10>(magnitude);
  return static_cast<uint16_t>(b >> 16 & 0x8000) | static_cast<uint16_t>(code > 0x7C00 ? 0x7C00 : code);
}

/// e4m3 (the "fn" form): no infinity, largest 448, NaN is all ones. Beyond 448, infinity included, it saturates.
TURNOUT_HOST_DEVICE constexpr float fp8_e4m3_to_float(uint8_t bits) {
  if ((bits & 0x7F) == 0x7F) return float_of(kNanFp32);
  return detail::widen<4, 3>(bits);
}
TURNOUT_HOST_DEVICE constexpr uint8_t float_to_fp8_e4m3(float x) {
  const uint32_t b = bits_of(x), magnitude = b & 0x7FFFFFFF;
  if (magnitude > 0x7F800000) return kNanE4m3;
  const uint32_t code = magnitude >= bits_of(448.0f) ? 0x7E : detail::narrow<4, 3>(magnitude);
  return static_cast<uint8_t>((b >> 24 & 0x80) | (code > 0x7E ? 0x7E : code));
}

/// e5m2: largest finite 57344; beyond it, infinity included, it saturates.
TURNOUT_HOST_DEVICE constexpr float fp8_e5m2_to_float(uint8_t bits) {
  const uint32_t magnitude = bits & 0x7F;
  if (magnitude > 0x7C) return float_of(kNanFp32);
  if (magnitude == 0x7C) return float_of(static_cast<uint32_t>(bits & 0x80) << 24 | 0x7F800000);
  return detail::widen<5, 2>(bits);
}
TURNOUT_HOST_DEVICE constexpr uint8_t float_to_fp8_e5m2(float x) {
  const uint32_t b = bits_of(x), magnitude = b & 0x7FFFFFFF;
  if (magnitude > 0x7F800000) return kNanE5m2;
  const uint32_t code = magnitude >= bits_of(57344.0f) ? 0x7B : detail::narrow<5, 2>(magnitude);
  return static_cast<uint8_t>((b >> 24 & 0x80) | (code > 0x7B ? 0x7B : code));
}

/// fp64 to narrower types, with one rounding.
TURNOUT_HOST_DEVICE constexpr float double_to_float(double x) { return canonical(static_cast<float>(x)); }

namespace detail {

/// Rounded to odd: toward zero, then with the last bit set if anything was lost. What is rounded to at most 22 bits after that
/// comes out as if it had been rounded once.
TURNOUT_HOST_DEVICE constexpr float to_odd(double x) {
  if (x != x) return float_of(kNanFp32);
  const float nearest = static_cast<float>(x);
  const double back = nearest;
  if (back == x) return nearest;
  const double magnitude = x < 0 ? -x : x, back_magnitude = back < 0 ? -back : back;
  return float_of((bits_of(nearest) - (back_magnitude > magnitude ? 1 : 0)) | 1);
}

}  // namespace detail

TURNOUT_HOST_DEVICE constexpr uint16_t double_to_bf16(double x) { return float_to_bf16(detail::to_odd(x)); }
TURNOUT_HOST_DEVICE constexpr uint16_t double_to_fp16(double x) { return float_to_fp16(detail::to_odd(x)); }

/// ue8m0: an exponent alone, 2^(code - 127); 255 is NaN.
TURNOUT_HOST_DEVICE constexpr float ue8m0_to_float(uint8_t code) {
  if (code == 255) return float_of(kNanFp32);
  return code == 0 ? float_of(0x00400000) : float_of(static_cast<uint32_t>(code) << 23);
}
/// The smallest power of two that is at least `x`. REQUIRES: 2^-126 <= x <= 2^127.
TURNOUT_HOST_DEVICE constexpr uint8_t float_to_ue8m0_up(float x) {
  const uint32_t b = bits_of(x);
  return static_cast<uint8_t>((b >> 23) + ((b & 0x7FFFFF) != 0));
}

static_assert(float_to_bf16(1.00390625f) == 0x3F80 && float_to_bf16(1.01171875f) == 0x3F82);  // ties to even
static_assert(float_to_fp8_e4m3(449.0f) == 0x7E && float_to_fp8_e4m3(-0.0f) == 0x80 && float_to_fp8_e4m3(0.0009765625f) == 0);
static_assert(float_to_fp16(65520.0f) == 0x7C00 && float_to_fp16(65519.0f) == 0x7BFF && fp16_to_float(1) == 0x1p-24f);

}  // namespace turnout::core
