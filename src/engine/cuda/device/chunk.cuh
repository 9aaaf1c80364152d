// Eight elements of a row per lane, 256 per warp: read, rounded to the form of a wire, written. The conversions are those of
// core/dtype.h and core/scale.h, so the bits are those of the CPU engine.
#pragma once
#include "core/dtype.h"
#include "core/scale.h"
#include "core/sum_tree.h"
#include "engine/cuda/device/rows.cuh"
#include "turnout/types.h"

namespace turnout::engine::cuda {

inline constexpr int kChunk = 8, kWarpChunk = 256;

template <class T>
struct Chunk {
  T v[kChunk];
};

namespace detail {

template <class U>
__device__ __forceinline__ U load_plain(const std::byte* p) {
  U v;
  auto* to = reinterpret_cast<unsigned char*>(&v);
  if (reinterpret_cast<uintptr_t>(p) % sizeof(U) == 0) return *reinterpret_cast<const volatile U*>(p);
  for (unsigned i = 0; i < sizeof(U); ++i) to[i] = reinterpret_cast<const volatile unsigned char*>(p)[i];
  return v;
}
template <class U>
__device__ __forceinline__ void store_plain(std::byte* p, U v) {
  if (reinterpret_cast<uintptr_t>(p) % sizeof(U) == 0) {
    *reinterpret_cast<U*>(p) = v;
    return;
  }
  const auto* from = reinterpret_cast<const std::byte*>(&v);
  for (unsigned i = 0; i < sizeof(U); ++i) p[i] = from[i];
}

}  // namespace detail

/// One element; fp64 only with T = double.
template <class T>
__device__ __forceinline__ T load_value(DType dtype, const std::byte* row, int64_t i) {
  switch (dtype) {
    case DType::fp64: return static_cast<T>(detail::load_plain<double>(row + i * 8));
    case DType::fp32: return static_cast<T>(detail::load_plain<float>(row + i * 4));
    case DType::bf16: return static_cast<T>(core::bf16_to_float(detail::load_plain<uint16_t>(row + i * 2)));
    case DType::fp8_e4m3: return static_cast<T>(core::fp8_e4m3_to_float(detail::load_plain<uint8_t>(row + i)));
    default: return static_cast<T>(core::fp16_to_float(detail::load_plain<uint16_t>(row + i * 2)));
  }
}
__device__ __forceinline__ void store_value(DType dtype, std::byte* row, int64_t i, float value) {
  switch (dtype) {
    case DType::fp64: detail::store_plain<double>(row + i * 8, core::canonical(static_cast<double>(value))); return;
    case DType::fp32: detail::store_plain<float>(row + i * 4, core::canonical(value)); return;
    case DType::bf16: detail::store_plain<uint16_t>(row + i * 2, core::float_to_bf16(value)); return;
    default: detail::store_plain<uint16_t>(row + i * 2, core::float_to_fp16(value)); return;
  }
}
__device__ __forceinline__ void store_value(DType dtype, std::byte* row, int64_t i, double value) {
  if (dtype == DType::fp64) detail::store_plain<double>(row + i * 8, core::canonical(value));
  else store_value(dtype, row, i, core::double_to_float(value));
}
template <class T>
__device__ __forceinline__ T round_value(DType dtype, T value) {
  switch (dtype) {
    case DType::fp64: return core::canonical(value);
    case DType::fp32: return static_cast<T>(core::canonical(static_cast<float>(value)));
    case DType::bf16: return static_cast<T>(core::bf16_to_float(core::float_to_bf16(core::canonical(static_cast<float>(value)))));
    default: return static_cast<T>(core::fp16_to_float(core::float_to_fp16(core::canonical(static_cast<float>(value)))));
  }
}

/// Eight elements of a two-byte type.
template <class T>
__device__ __forceinline__ Chunk<T> unpack_chunk(DType dtype, uint4 w) {
  Chunk<T> c;
  const uint32_t words[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
  for (int i = 0; i < kChunk; ++i) {
    const auto bits = static_cast<uint16_t>(words[i / 2] >> (i % 2 * 16));
    c.v[i] = static_cast<T>(dtype == DType::bf16 ? core::bf16_to_float(bits) : core::fp16_to_float(bits));
  }
  return c;
}
/// Elements [begin, begin + 8) of a row, as far as the row goes; the rest is 0. Two-byte types take one 16-byte load where they can.
template <class T>
__device__ __forceinline__ Chunk<T> load_chunk(DType dtype, const std::byte* row, int64_t begin, int64_t hidden) {
  Chunk<T> c;
  const bool half = dtype == DType::bf16 || dtype == DType::fp16;
  if (half && begin + kChunk <= hidden && reinterpret_cast<uintptr_t>(row + begin * 2) % 16 == 0) {
    return unpack_chunk<T>(dtype, load_stream(reinterpret_cast<const uint4*>(row + begin * 2)));
  }
#pragma unroll
  for (int i = 0; i < kChunk; ++i) c.v[i] = begin + i < hidden ? load_value<T>(dtype, row, begin + i) : T{0};
  return c;
}
template <class T>
__device__ __forceinline__ void store_chunk(DType dtype, std::byte* row, int64_t begin, int64_t hidden, const Chunk<T>& c) {
  const bool half = dtype == DType::bf16 || dtype == DType::fp16;
  if (half && begin + kChunk <= hidden && reinterpret_cast<uintptr_t>(row + begin * 2) % 16 == 0) {
    uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float lo = static_cast<float>(c.v[2 * i]), hi = static_cast<float>(c.v[2 * i + 1]);
      words[i] = dtype == DType::bf16 ? core::float_to_bf16(lo) | static_cast<uint32_t>(core::float_to_bf16(hi)) << 16
                                      : core::float_to_fp16(lo) | static_cast<uint32_t>(core::float_to_fp16(hi)) << 16;
    }
    store_stream(reinterpret_cast<uint4*>(row + begin * 2), uint4{words[0], words[1], words[2], words[3]});
    return;
  }
#pragma unroll
  for (int i = 0; i < kChunk; ++i) {
    if (begin + i < hidden) store_value(dtype, row, begin + i, c.v[i]);
  }
}

/// The scale of the 128 elements that this lane's 16 neighbours hold. The whole warp calls it; elements beyond the row are 0.
template <class T>
__device__ __forceinline__ float block_scale(const Chunk<T>& c) {
  uint32_t amax = 0;
#pragma unroll
  for (int i = 0; i < kChunk; ++i) {
    const uint32_t magnitude = core::bits_of(static_cast<float>(c.v[i])) & 0x7FFFFFFF;
    if (magnitude < 0x7F800000 && magnitude > amax) amax = magnitude;
  }
#pragma unroll
  for (int d = 1; d < 16; d *= 2) amax = max(amax, __shfl_xor_sync(kFull, amax, d));
  return core::scale_of(core::float_of(amax));
}
template <class T>
__device__ __forceinline__ uint8_t quantize_value(T value, float inverse) {
  return core::float_to_fp8_e4m3(static_cast<float>(value) * inverse);
}

/// A chunk as it is worth after crossing the wire. The whole warp calls it.
template <class T>
__device__ __forceinline__ void round_to_wire(core::WireForm form, Chunk<T>& c) {
  if (!form.block_scaled) {
#pragma unroll
    for (int i = 0; i < kChunk; ++i) c.v[i] = round_value(form.dtype, c.v[i]);
    return;
  }
  const float scale = block_scale(c), inverse = 1.0f / scale;
#pragma unroll
  for (int i = 0; i < kChunk; ++i) c.v[i] = static_cast<T>(core::dequantize(quantize_value(c.v[i], inverse), scale));
}
/// Writes a chunk in the form of the wire; scales lie behind the row's elements, at a multiple of 4. The whole warp calls it.
__device__ __forceinline__ int64_t wire_scales_at(int64_t hidden) { return (hidden + 3) / 4 * 4; }
template <class T>
__device__ __forceinline__ void store_wire(core::WireForm form, std::byte* row, int64_t begin, int64_t hidden, const Chunk<T>& c) {
  if (!form.block_scaled) {
    store_chunk(form.dtype, row, begin, hidden, c);
    return;
  }
  const float scale = block_scale(c), inverse = 1.0f / scale;
#pragma unroll
  for (int i = 0; i < kChunk; ++i) {
    if (begin + i < hidden) row[begin + i] = static_cast<std::byte>(quantize_value(c.v[i], inverse));
  }
  if (begin % core::kScaleBlock == 0 && begin < hidden) reinterpret_cast<float*>(row + wire_scales_at(hidden))[begin / core::kScaleBlock] = scale;
}
template <class T>
__device__ __forceinline__ Chunk<T> load_wire(core::WireForm form, const std::byte* row, int64_t begin, int64_t hidden) {
  if (!form.block_scaled) return load_chunk<T>(form.dtype, row, begin, hidden);
  Chunk<T> c;
  const float scale = begin < hidden ? reinterpret_cast<const volatile float*>(row + wire_scales_at(hidden))[begin / core::kScaleBlock] : 0.0f;
#pragma unroll
  for (int i = 0; i < kChunk; ++i) {
    c.v[i] = begin + i < hidden ? static_cast<T>(core::dequantize(detail::load_plain<uint8_t>(row + begin + i), scale)) : T{0};
  }
  return c;
}

/// A row of x quantised on its way: fp8 to `q`, scales (fp32, or ue8m0 bytes) to `scales`. The whole warp calls it.
__device__ inline void quantize_row(DType dtype, Quantize how, const std::byte* x, int64_t hidden, std::byte* q, std::byte* scales) {
  for (int64_t base = 0; base < hidden; base += kWarpChunk) {
    const int64_t begin = base + lane_id() * kChunk;
    const Chunk<float> c = load_chunk<float>(dtype, x, begin, hidden);
    float scale = block_scale(c);
    uint8_t exponent = 0;
    if (how == Quantize::fp8_e4m3_ue8m0) {
      exponent = core::float_to_ue8m0_up(scale);
      scale = core::ue8m0_to_float(exponent);
    }
    const float inverse = 1.0f / scale;
    uint8_t bytes[kChunk];
#pragma unroll
    for (int i = 0; i < kChunk; ++i) bytes[i] = quantize_value(c.v[i], inverse);
    if (begin + kChunk <= hidden && reinterpret_cast<uintptr_t>(q + begin) % 8 == 0) {
      uint2 w;
      w.x = bytes[0] | bytes[1] << 8 | bytes[2] << 16 | static_cast<uint32_t>(bytes[3]) << 24;
      w.y = bytes[4] | bytes[5] << 8 | bytes[6] << 16 | static_cast<uint32_t>(bytes[7]) << 24;
      *reinterpret_cast<uint2*>(q + begin) = w;
    } else {
#pragma unroll
      for (int i = 0; i < kChunk; ++i) {
        if (begin + i < hidden) q[begin + i] = static_cast<std::byte>(bytes[i]);
      }
    }
    if (begin % core::kScaleBlock == 0 && begin < hidden) {
      const int64_t block = begin / core::kScaleBlock;
      if (how == Quantize::fp8_e4m3) detail::store_plain<float>(scales + block * 4, scale);
      else scales[block] = static_cast<std::byte>(exponent);
    }
  }
}

}  // namespace turnout::engine::cuda
