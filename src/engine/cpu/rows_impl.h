// The row kernels, written once as loops that the compiler vectorises, and compiled once per instruction set. Everything
// here has internal linkage. Bits are the same everywhere because every operation is: integer arithmetic, or one IEEE
// multiply or add at a time (no contraction).
#include <bit>
#include <cstring>
#include <type_traits>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include "core/dtype.h"
#include "core/scale.h"
#include "engine/cpu/rows.h"

namespace turnout::engine {
namespace {

constexpr int64_t kTile = 1024;  ///< elements summed at a time: accumulators stay in the first-level cache

// ---- to fp32 -------------------------------------------------------------------------------------------------------

inline void load_bf16(const std::byte* src, int64_t n, float* out) {
  uint32_t* bits = reinterpret_cast<uint32_t*>(out);
  for (int64_t i = 0; i < n; ++i) {
    uint16_t half;
    std::memcpy(&half, src + 2 * i, sizeof half);
    const uint32_t wide = static_cast<uint32_t>(half) << 16;
    std::memcpy(bits + i, &wide, sizeof wide);
  }
}

inline void load_fp16(const std::byte* src, int64_t n, float* out) {
  int64_t i = 0;
#if defined(__F16C__)
  for (; i + 8 <= n; i += 8) _mm256_storeu_ps(out + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(src + 2 * i))));
#endif
  for (; i < n; ++i) {
    uint16_t half;
    std::memcpy(&half, src + 2 * i, sizeof half);
    out[i] = core::fp16_to_float(half);
  }
}

/// A choice by masks: with `?:` around float arithmetic the compiler branches, lest an unused addition raise a flag.
inline uint32_t choose(bool first, uint32_t a, uint32_t b) {
  const uint32_t mask = 0u - static_cast<uint32_t>(first);
  return (a & mask) | (b & ~mask);
}

/// core::fp8_e4m3_to_float without branches or tables. Codes below 2^-6 are multiples of 2^-9; no float denormal is touched.
inline float widen_e4m3(uint8_t code) {
  const uint32_t magnitude = code & 0x7F;
  const float small = static_cast<float>(static_cast<int32_t>(magnitude)) * 0x1p-9f;
  uint32_t b;
  std::memcpy(&b, &small, sizeof b);
  b = choose(magnitude < 8, b, (magnitude << 20) + (120u << 23));
  b = choose(magnitude == 0x7F, core::kNanFp32, b | static_cast<uint32_t>(code & 0x80) << 24);
  float value;
  std::memcpy(&value, &b, sizeof value);
  return value;
}

inline void load_fp8(const RowRef& row, int64_t first, int64_t n, float* out) {
  const auto* q = static_cast<const uint8_t*>(row.data) + first;
  for (int64_t begin = 0; begin < n; begin += core::kScaleBlock) {
    const int64_t end = begin + core::kScaleBlock < n ? begin + core::kScaleBlock : n;
    const float scale = row.scales[(first + begin) / core::kScaleBlock];
    for (int64_t i = begin; i < end; ++i) out[i] = widen_e4m3(q[i]) * scale;
  }
}

// ---- from fp32 -----------------------------------------------------------------------------------------------------

inline uint16_t round_bf16(uint32_t b) {
  const uint32_t rounded = (b + 0x7FFF + (b >> 16 & 1)) >> 16;
  return static_cast<uint16_t>((b & 0x7FFFFFFF) > 0x7F800000 ? uint32_t{core::kNanBf16} : rounded);
}

inline void store_bf16(const float* acc, int64_t n, std::byte* out) {
  auto* half = reinterpret_cast<uint16_t*>(out);
  for (int64_t i = 0; i < n; ++i) {
    uint32_t b;
    std::memcpy(&b, acc + i, sizeof b);
    const uint16_t h = round_bf16(b);
    std::memcpy(half + i, &h, sizeof h);
  }
}

inline void store_fp16(const float* acc, int64_t n, std::byte* out) {
  int64_t i = 0;
#if defined(__F16C__)
  const __m128i nan = _mm_set1_epi16(static_cast<int16_t>(core::kNanFp16)), most = _mm_set1_epi16(0x7C00), magnitude = _mm_set1_epi16(0x7FFF);
  for (; i + 8 <= n; i += 8) {
    const __m128i h = _mm256_cvtps_ph(_mm256_loadu_ps(acc + i), _MM_FROUND_TO_NEAREST_INT);
    const __m128i is_nan = _mm_cmpgt_epi16(_mm_and_si128(h, magnitude), most);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + 2 * i), _mm_blendv_epi8(h, nan, is_nan));
  }
#endif
  for (; i < n; ++i) {
    const uint16_t h = core::float_to_fp16(acc[i]);
    std::memcpy(out + 2 * i, &h, sizeof h);
  }
}

inline void store_fp32(const float* acc, int64_t n, std::byte* out) {
  for (int64_t i = 0; i < n; ++i) {
    uint32_t b;
    std::memcpy(&b, acc + i, sizeof b);
    b = (b & 0x7FFFFFFF) > 0x7F800000 ? core::kNanFp32 : b;
    std::memcpy(out + 4 * i, &b, sizeof b);
  }
}

/// core::float_to_fp8_e4m3 without branches. Below 2^-6 codes are multiples of 2^-9, to which adding 2^14 rounds.
inline uint32_t round_e4m3(float x) {
  uint32_t b;
  std::memcpy(&b, &x, sizeof b);
  const uint32_t magnitude = b & 0x7FFFFFFF;
  const uint32_t capped = magnitude < 0x43E00000 ? magnitude : 0x43E00000;  // 448
  const uint32_t normal = ((capped + 0x7FFFF + (capped >> 20 & 1)) >> 20) - (120u << 3);
  const uint32_t below = capped < 0x3C800000 ? capped : 0x3C800000;
  float small;
  std::memcpy(&small, &below, sizeof small);
  small += 16384.0f;
  uint32_t denormal;
  std::memcpy(&denormal, &small, sizeof denormal);
  const uint32_t code = choose(capped < 0x3C800000, denormal - 0x46800000, normal) | (b >> 24 & 0x80);
  return choose(magnitude > 0x7F800000, core::kNanE4m3, code);
}

/// One block by the rule of core/scale.h.
inline float quantize_block_fast(const float* values, int64_t n, uint8_t* q, uint8_t* ue8m0) {
  uint32_t amax = 0;
  for (int64_t i = 0; i < n; ++i) {
    uint32_t b;
    std::memcpy(&b, values + i, sizeof b);
    b &= 0x7FFFFFFF;
    b = choose(b < 0x7F800000, b, 0);
    amax = b > amax ? b : amax;
  }
  float scale = core::scale_of(core::float_of(amax));
  if (ue8m0) {
    *ue8m0 = core::float_to_ue8m0_up(scale);
    scale = core::ue8m0_to_float(*ue8m0);
  }
  const float inverse = 1.0f / scale;
  // Whole blocks have a length that the compiler knows; words first and bytes after, so that each loop has one width.
  alignas(64) uint32_t codes[core::kScaleBlock];
  if (n == core::kScaleBlock) {
    for (int64_t i = 0; i < core::kScaleBlock; ++i) codes[i] = round_e4m3(values[i] * inverse);
    for (int64_t i = 0; i < core::kScaleBlock; ++i) q[i] = static_cast<uint8_t>(codes[i]);
  } else {
    for (int64_t i = 0; i < n; ++i) q[i] = static_cast<uint8_t>(round_e4m3(values[i] * inverse));
  }
  return scale;
}

// ---- rows ----------------------------------------------------------------------------------------------------------

inline void load_tile(const RowRef& row, DType in, int64_t first, int64_t n, float* out) {
  const auto* data = static_cast<const std::byte*>(row.data);
  switch (in) {
    case DType::bf16: return load_bf16(data + 2 * first, n, out);
    case DType::fp16: return load_fp16(data + 2 * first, n, out);
    case DType::fp8_e4m3: return load_fp8(row, first, n, out);
    default: std::memcpy(out, data + 4 * first, static_cast<size_t>(n) * 4);
  }
}

inline void store_tile(const float* acc, int64_t first, int64_t n, std::byte* out, float* out_scales, DType out_dtype) {
  switch (out_dtype) {
    case DType::bf16: return store_bf16(acc, n, out + 2 * first);
    case DType::fp16: return store_fp16(acc, n, out + 2 * first);
    case DType::fp32: return store_fp32(acc, n, out + 4 * first);
    case DType::fp64:
      for (int64_t i = 0; i < n; ++i) {
        const double wide = core::canonical(static_cast<double>(acc[i]));
        std::memcpy(out + 8 * (first + i), &wide, sizeof wide);
      }
      return;
    default:
      for (int64_t begin = 0; begin < n; begin += core::kScaleBlock) {
        const int64_t left = n - begin < core::kScaleBlock ? n - begin : core::kScaleBlock;
        out_scales[(first + begin) / core::kScaleBlock] =
            quantize_block_fast(acc + begin, left, reinterpret_cast<uint8_t*>(out) + first + begin, nullptr);
      }
  }
}

inline void add_tile(float* acc, const float* term, int64_t n) {
  for (int64_t i = 0; i < n; ++i) acc[i] = acc[i] + term[i];
}
inline void add_weighted_tile(float* acc, const float* term, float w, int64_t n) {
  for (int64_t i = 0; i < n; ++i) acc[i] = acc[i] + w * term[i];
}
inline void scale_tile(float* acc, float w, int64_t n) {
  for (int64_t i = 0; i < n; ++i) acc[i] = w * acc[i];
}

/// The code of one bf16 if it is none of a NaN, else the canonical one.
inline uint16_t canonical_bf16(uint16_t h) { return (h & 0x7FFF) > 0x7F80 ? core::kNanBf16 : h; }

/// One plain bf16 row: every value as it is.
void copy_bf16(const void* row, int64_t n, void* out) {
  const auto* x = static_cast<const std::byte*>(row);
  auto* z = static_cast<std::byte*>(out);
  for (int64_t i = 0; i < n; ++i) {
    uint16_t h;
    std::memcpy(&h, x + 2 * i, sizeof h);
    h = canonical_bf16(h);
    std::memcpy(z + 2 * i, &h, sizeof h);
  }
}

// A register of words, and what two bf16 in each of them are.
#if defined(__AVX512BW__)
constexpr int64_t kRegisterBytes = 64;
#elif defined(__AVX2__)
constexpr int64_t kRegisterBytes = 32;
#else
constexpr int64_t kRegisterBytes = 16;
#endif
using Words [[gnu::vector_size(kRegisterBytes)]] = uint32_t;
using Halves [[gnu::vector_size(kRegisterBytes)]] = uint16_t;
using Floats [[gnu::vector_size(kRegisterBytes)]] = float;

/// Two plain bf16 rows to one, the commonest sum. Sums of even and odd elements lie in registers of their own; their halves
/// are put together before they are rounded, so that one rounding does for two.
void add_two_bf16(const void* a, const void* b, int64_t n, void* out) {
  static_assert(std::endian::native == std::endian::little);
  constexpr int64_t kStep = kRegisterBytes / 2;
  const auto* x = static_cast<const std::byte*>(a);
  const auto* y = static_cast<const std::byte*>(b);
  auto* z = static_cast<std::byte*>(out);
  const uint32_t upper = 0xFFFF0000u;
  const uint16_t one = 1, half = 0x8000;
  Words has_nan{};
  int64_t i = 0;
  for (; i + kStep <= n; i += kStep) {
    Words wx, wy;
    std::memcpy(&wx, x + 2 * i, sizeof wx);
    std::memcpy(&wy, y + 2 * i, sizeof wy);
    const Floats even_sum = reinterpret_cast<Floats>(wx << 16) + reinterpret_cast<Floats>(wy << 16);
    const Floats odd_sum = reinterpret_cast<Floats>(wx & upper) + reinterpret_cast<Floats>(wy & upper);
    const Words even = reinterpret_cast<Words>(even_sum), odd = reinterpret_cast<Words>(odd_sum);
    const Halves high = reinterpret_cast<Halves>((odd & upper) | even >> 16), low = reinterpret_cast<Halves>(odd << 16 | (even & ~upper));
    const Halves up = reinterpret_cast<Halves>((low | (high & one)) > half);  // all ones where the rest is more than half, or half of an odd one
    const Halves rounded = high - up;
    const Floats either = even_sum + odd_sum;
    has_nan |= reinterpret_cast<Words>(either != either);
    std::memcpy(z + 2 * i, &rounded, sizeof rounded);
  }
  for (; i < n; ++i) {
    uint16_t hx, hy;
    std::memcpy(&hx, x + 2 * i, sizeof hx);
    std::memcpy(&hy, y + 2 * i, sizeof hy);
    const uint16_t h = round_bf16(core::bits_of(core::float_of(uint32_t{hx} << 16) + core::float_of(uint32_t{hy} << 16)));
    std::memcpy(z + 2 * i, &h, sizeof h);
  }
  uint32_t any = 0;
  for (size_t word = 0; word < kRegisterBytes / sizeof(uint32_t); ++word) any |= has_nan[word];
  if (any) copy_bf16(out, n, out);  // a NaN that was made is quiet, its lower half 0: rounding has left it one
}

/// Widens a tile to double: fp64 rows as they are, others by way of fp32.
inline void load_wide_tile(const RowRef& row, DType in, int64_t first, int64_t n, double* out) {
  if (in == DType::fp64) {
    std::memcpy(out, static_cast<const std::byte*>(row.data) + 8 * first, static_cast<size_t>(n) * 8);
    return;
  }
  alignas(64) float narrow[kTile];
  load_tile(row, in, first, n, narrow);
  for (int64_t i = 0; i < n; ++i) out[i] = static_cast<double>(narrow[i]);
}

void sum_rows_in_double(const RowRef* terms, const float* weights, int num_terms, DType in, int64_t hidden, std::byte* out, float* out_scales,
                        DType out_dtype) {
  alignas(64) double acc[kTile];
  alignas(64) double term[kTile];
  alignas(64) float narrow[kTile];
  for (int64_t first = 0; first < hidden; first += kTile) {
    const int64_t n = hidden - first < kTile ? hidden - first : kTile;
    for (int t = 0; t < num_terms; ++t) {
      load_wide_tile(terms[t], in, first, n, t == 0 ? acc : term);
      double* x = t == 0 ? acc : term;
      if (weights) {
        const double w = static_cast<double>(weights[t]);
        for (int64_t i = 0; i < n; ++i) x[i] = w * x[i];
      }
      if (t == 0) continue;
      for (int64_t i = 0; i < n; ++i) acc[i] = acc[i] + term[i];
    }
    if (out_dtype == DType::fp64) {
      for (int64_t i = 0; i < n; ++i) {
        const double x = core::canonical(acc[i]);
        std::memcpy(out + 8 * (first + i), &x, sizeof x);
      }
    } else {
      const bool to_half = out_dtype == DType::bf16 || out_dtype == DType::fp16;  // then fp32 is on the way: rounded to odd, it does no harm
      for (int64_t i = 0; i < n; ++i) narrow[i] = to_half ? core::detail::to_odd(acc[i]) : static_cast<float>(acc[i]);
      store_tile(narrow, first, n, out, out_scales, out_dtype);
    }
  }
}

void sum_rows(const RowRef* terms, const float* weights, int num_terms, DType in, int64_t hidden, void* out, float* out_scales, DType out_dtype,
              bool in_double) {
  auto* bytes = static_cast<std::byte*>(out);
  if (num_terms == 0) {
    std::memset(out, 0, static_cast<size_t>(hidden) * size_of(out_dtype));
    if (out_scales) {
      for (int64_t block = 0; block < (hidden + core::kScaleBlock - 1) / core::kScaleBlock; ++block) out_scales[block] = core::scale_of(0.0f);
    }
    return;
  }
  if (in_double || in == DType::fp64) return sum_rows_in_double(terms, weights, num_terms, in, hidden, bytes, out_scales, out_dtype);
  if (num_terms <= 2 && !weights && in == DType::bf16 && out_dtype == DType::bf16) {
    return num_terms == 1 ? copy_bf16(terms[0].data, hidden, out) : add_two_bf16(terms[0].data, terms[1].data, hidden, out);
  }
  alignas(64) float acc[kTile];
  alignas(64) float term[kTile];
  for (int64_t first = 0; first < hidden; first += kTile) {
    const int64_t n = hidden - first < kTile ? hidden - first : kTile;
    load_tile(terms[0], in, first, n, acc);
    if (weights) scale_tile(acc, weights[0], n);
    for (int t = 1; t < num_terms; ++t) {
      load_tile(terms[t], in, first, n, term);
      if (weights) add_weighted_tile(acc, term, weights[t], n);
      else add_tile(acc, term, n);
    }
    store_tile(acc, first, n, bytes, out_scales, out_dtype);
  }
}

void quantize_row(const void* x, DType in, int64_t hidden, uint8_t* q, float* scales, uint8_t* ue8m0) {
  alignas(64) float values[core::kScaleBlock];
  for (int64_t first = 0; first < hidden; first += core::kScaleBlock) {
    const int64_t n = hidden - first < core::kScaleBlock ? hidden - first : core::kScaleBlock;
    load_tile(RowRef{x, nullptr}, in, first, n, values);
    const int64_t block = first / core::kScaleBlock;
    const float scale = quantize_block_fast(values, n, q + first, ue8m0 ? ue8m0 + block : nullptr);
    if (scales) scales[block] = scale;
  }
}

void copy_row(void* dst, const void* src, size_t num_bytes) { std::memcpy(dst, src, num_bytes); }

#if defined(__AVX2__)
/// Stores that bypass the cache: the line is not read first. Fenced, so that a release store afterwards publishes them.
void copy_row_streaming(void* dst, const void* src, size_t num_bytes) {
  auto* out = static_cast<std::byte*>(dst);
  const auto* in = static_cast<const std::byte*>(src);
  if (num_bytes < 1024) {
    std::memcpy(dst, src, num_bytes);
    return;
  }
  const size_t head = (64 - reinterpret_cast<uintptr_t>(out) % 64) % 64;
  std::memcpy(out, in, head);
  size_t at = head;
  for (; at + 128 <= num_bytes; at += 128) {
    const __m256i a = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(in + at));
    const __m256i b = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(in + at + 32));
    const __m256i c = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(in + at + 64));
    const __m256i d = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(in + at + 96));
    _mm256_stream_si256(reinterpret_cast<__m256i*>(out + at), a);
    _mm256_stream_si256(reinterpret_cast<__m256i*>(out + at + 32), b);
    _mm256_stream_si256(reinterpret_cast<__m256i*>(out + at + 64), c);
    _mm256_stream_si256(reinterpret_cast<__m256i*>(out + at + 96), d);
  }
  std::memcpy(out + at, in + at, num_bytes - at);
  _mm_sfence();
}
#else
void copy_row_streaming(void* dst, const void* src, size_t num_bytes) { std::memcpy(dst, src, num_bytes); }
#endif

constexpr RowKernels table(Isa isa) { return {isa, copy_row, copy_row_streaming, quantize_row, sum_rows}; }

}  // namespace
}  // namespace turnout::engine
