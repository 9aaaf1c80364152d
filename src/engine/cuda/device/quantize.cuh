// Rows of two-byte floats quantised to fp8 in blocks of 128 with the conversions of the hardware. The bits are those of core/scale.h.
#pragma once
#include "core/scale.h"
#include "engine/cuda/device/rows.cuh"
#include "turnout/types.h"

namespace turnout::engine::cuda {

#ifdef TURNOUT_HAS_BULK
namespace detail {

/// Largest magnitude among the finite ones of eight values, as the bits of the type without its sign.
template <bool kBf16>
__device__ __forceinline__ uint32_t finite_amax(const uint4& v) {
  constexpr uint32_t kInfinity = kBf16 ? 0x7F80 : 0x7C00;
  const uint32_t words[4] = {v.x & 0x7FFF7FFF, v.y & 0x7FFF7FFF, v.z & 0x7FFF7FFF, v.w & 0x7FFF7FFF};
  const uint32_t most = __vmaxu2(__vmaxu2(words[0], words[1]), __vmaxu2(words[2], words[3]));
  uint32_t amax = max(most & 0xFFFF, most >> 16);
  if (amax < kInfinity) return amax;
  amax = 0;
  for (const uint32_t w : words) {
    const uint32_t finite = w & __vcmpltu2(w, kInfinity << 16 | kInfinity);
    amax = max(amax, max(finite & 0xFFFF, finite >> 16));
  }
  return amax;
}
template <bool kBf16>
__device__ __forceinline__ float widen_half(uint32_t bits) {
  if (kBf16) return __uint_as_float(bits << 16);
  float f;
  asm("cvt.f32.f16 %0,%1;" : "=f"(f) : "h"(static_cast<uint16_t>(bits)));
  return f;
}
template <bool kBf16>
__device__ __forceinline__ uint32_t quantize_pair(uint32_t word, float inverse) {
  const float low = widen_half<kBf16>(word & 0xFFFF) * inverse, high = widen_half<kBf16>(word >> 16) * inverse;
  uint16_t q;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0,%1,%2;" : "=h"(q) : "f"(high), "f"(low));
  return q;
}

}  // namespace detail

/// 128 words of a row from word `w0` on, of which each lane has four: zeros behind the end. The whole warp calls it.
template <bool kBf16>
__device__ __forceinline__ void quantize_words(const uint4* v, int w0, int words, Quantize how, std::byte* q, std::byte* scales) {
  const int lane = lane_id();
  uint32_t amax[4];
#pragma unroll
  for (int j = 0; j < 4; ++j) amax[j] = detail::finite_amax<kBf16>(v[j]);
  // Four blocks at once over the 16 lanes that hold them: at each step a lane keeps half of what it has; in the end block lane % 4.
  const bool odd = lane & 1, second = lane & 2;
  const uint32_t a = max(odd ? amax[1] : amax[0], __shfl_xor_sync(kFull, odd ? amax[0] : amax[1], 1));
  const uint32_t b = max(odd ? amax[3] : amax[2], __shfl_xor_sync(kFull, odd ? amax[2] : amax[3], 1));
  uint32_t mine = max(second ? b : a, __shfl_xor_sync(kFull, second ? a : b, 2));
  mine = max(mine, __shfl_xor_sync(kFull, mine, 4));
  mine = max(mine, __shfl_xor_sync(kFull, mine, 8));
  float scale = core::scale_of(detail::widen_half<kBf16>(mine));
  uint8_t exponent = 0;
  if (how == Quantize::fp8_e4m3_ue8m0) {
    exponent = core::float_to_ue8m0_up(scale);
    scale = core::ue8m0_to_float(exponent);
  }
  const float inverse = 1.0f / scale;
  const int block = (w0 + lane % 4 * 32 + lane / 16 * 16) / 16;
  if (lane % 16 < 4 && block < (words + 15) / 16) {
    if (how == Quantize::fp8_e4m3) reinterpret_cast<float*>(scales)[block] = scale;
    else scales[block] = static_cast<std::byte>(exponent);
  }
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const float by = __shfl_sync(kFull, inverse, lane / 16 * 16 + j);
    const int w = w0 + j * 32 + lane;
    if (w >= words) continue;
    reinterpret_cast<uint2*>(q)[w] = uint2{detail::quantize_pair<kBf16>(v[j].x, by) | detail::quantize_pair<kBf16>(v[j].y, by) << 16,
                                           detail::quantize_pair<kBf16>(v[j].z, by) | detail::quantize_pair<kBf16>(v[j].w, by) << 16};
  }
}
#endif

}  // namespace turnout::engine::cuda
