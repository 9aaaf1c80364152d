// A unit of a row: the 24 channels that one thread of a low-latency combine adds, loaded, rounded and stored. With kFast rows are
// aligned to 16 bytes and a multiple of 8 channels wide; without it, anything goes, slowly.
#pragma once
#include "core/dtype.h"
#include "engine/cuda/device/ptx.cuh"
#include "engine/cuda/low_latency/format.h"

namespace turnout::engine::cuda::low_latency {

inline constexpr int kUnit = PartialFormat::kUnit, kUnitChunk = 8;

template <DType kType>
inline constexpr int kElement = kType == DType::fp32 ? 4 : 2;
/// 32-bit words of payload, and flagged words, of a unit.
template <DType kType>
inline constexpr int kPayload = kUnit* kElement<kType> / 4;
template <DType kType>
inline constexpr int kWords = kPayload<kType> / kWordPayload;

/// Any 16 bytes, as many as there are; slow.
__device__ __forceinline__ uint4 load_loose(const std::byte* p, int64_t n) {
  uint32_t w[4] = {};
#pragma unroll
  for (int j = 0; j < 4; ++j) {
#pragma unroll 1
    for (int i = 0; i < 4 && j * 4 + i < n; ++i)
      w[j] |= static_cast<uint32_t>(reinterpret_cast<const volatile unsigned char*>(p)[j * 4 + i]) << (i * 8);
  }
  return {w[0], w[1], w[2], w[3]};
}
__device__ __forceinline__ void store_loose(std::byte* p, uint4 v, int64_t n) {
  const uint32_t w[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int j = 0; j < 4; ++j) {
#pragma unroll 1
    for (int i = 0; i < 4 && j * 4 + i < n; ++i) p[j * 4 + i] = static_cast<std::byte>(w[j] >> (i * 8));
  }
}

/// Value i of a packed unit.
template <DType kType>
__device__ __forceinline__ float value_of(const uint32_t* packed, int i) {
  if constexpr (kType == DType::fp32) return __uint_as_float(packed[i]);
  else if constexpr (kType == DType::bf16) return __uint_as_float(i % 2 ? packed[i / 2] & 0xffff0000 : packed[i / 2] << 16);
  else return from_fp16(packed[i / 2] >> (i % 2 * 16) & 0xffff);
}

/// Where the three chunks of a unit are in a row, in bytes, and how many bytes of each there are.
struct Place {
  int32_t at[3], left[3];
};
template <DType kType>
__device__ __forceinline__ Place place_of(const AnyCombine auto& a, int unit, int units, bool active) {
  Place p;
#pragma unroll
  for (int j = 0; j < 3; ++j) {
    p.at[j] = (unit + j * units) * kUnitChunk * kElement<kType>;
    p.left[j] = active ? static_cast<int32_t>(a.hidden) * kElement<kType> - p.at[j] : 0;
  }
  return p;
}

/// A unit of a row of y, as it is in memory.
template <DType kType, bool kFast>
__device__ __forceinline__ void load_unit(bool wanted, const std::byte* y, const Place& place, uint32_t* packed) {
  constexpr int kLoads = kElement<kType> / 2;  // 16 bytes each, of a chunk
#pragma unroll
  for (int j = 0; j < 3; ++j) {
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const std::byte* p = y + place.at[j] + i * 16;
      uint4 v{};
      if constexpr (kFast) {
        v = load_stream_if(wanted && place.left[j] > 0, reinterpret_cast<const uint4*>(p));
      } else {
        if (wanted && place.left[j] > i * 16) v = load_loose(p, place.left[j] - i * 16);
      }
      uint32_t* to = packed + (j * kLoads + i) * 4;
      to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
    }
  }
}

/// The same of a row in shared memory, which is aligned.
template <DType kType>
__device__ __forceinline__ void copy_unit(const std::byte* row, const Place& place, uint32_t* packed) {
  constexpr int kLoads = kElement<kType> / 2;
#pragma unroll
  for (int j = 0; j < 3; ++j) {
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const uint4 v = place.left[j] > 0 ? *reinterpret_cast<const uint4*>(row + place.at[j] + i * 16) : uint4{};
      uint32_t* to = packed + (j * kLoads + i) * 4;
      to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
    }
  }
}

/// Rounds values to the type of the wire and of the result; NaN is canonical.
template <DType kType, int kNum>
__device__ __forceinline__ void round_values(const float* sum, uint32_t* out) {
  if constexpr (kType == DType::fp32) {
#pragma unroll
    for (int i = 0; i < kNum; ++i) out[i] = core::bits_of(core::canonical(sum[i]));
  } else {
    uint32_t nan = 0;
#pragma unroll
    for (int i = 0; i < kNum / 2; ++i) {
      out[i] = kType == DType::bf16 ? to_bf16(sum[2 * i], sum[2 * i + 1]) : to_fp16(sum[2 * i], sum[2 * i + 1]);
      nan |= (out[i] & 0x7fff7fff) + 0x00010001;  // the instruction's NaN is all ones, and nothing else is
    }
    if (nan & 0x80008000) {
      constexpr uint32_t kNan = kType == DType::bf16 ? core::kNanBf16 : core::kNanFp16;
#pragma unroll
      for (int i = 0; i < kNum / 2; ++i) {
        if ((out[i] & 0x7fff) == 0x7fff) out[i] = (out[i] & 0xffff0000) | kNan;
        if ((out[i] >> 16 & 0x7fff) == 0x7fff) out[i] = (out[i] & 0xffff) | kNan << 16;
      }
    }
  }
}
template <DType kType>
__device__ __forceinline__ void round_unit(const float* sum, uint32_t* out) {
  round_values<kType, kUnit>(sum, out);
}
template <DType kType, bool kFast>
__device__ __forceinline__ void store_unit(std::byte* out, const Place& place, const uint32_t* p) {
  constexpr int kStores = kElement<kType> / 2;
#pragma unroll
  for (int j = 0; j < 3; ++j) {
#pragma unroll
    for (int i = 0; i < kStores; ++i) {
      const int32_t left = place.left[j] - i * 16;
      std::byte* to = out + place.at[j] + i * 16;
      const uint32_t* q = p + (j * kStores + i) * 4;
      const uint4 v{q[0], q[1], q[2], q[3]};
      if (left <= 0) continue;
      if constexpr (kFast) store_stream(reinterpret_cast<uint4*>(to), v);
      else store_loose(to, v, left);
    }
  }
}

}  // namespace turnout::engine::cuda::low_latency
