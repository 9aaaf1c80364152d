// Row kernels in plain C++: what the others must equal bit for bit.
#include <algorithm>
#include <cstring>

#include "core/dtype.h"
#include "core/scale.h"
#include "engine/cpu/rows_tables.h"

namespace turnout::engine {
namespace {

void copy_row(void* dst, const void* src, size_t num_bytes) {
  if (num_bytes) std::memcpy(dst, src, num_bytes);
}

template <class T>
T read(const void* row, int64_t i) {
  T value;
  std::memcpy(&value, static_cast<const std::byte*>(row) + i * static_cast<int64_t>(sizeof value), sizeof value);
  return value;
}

template <class T>
void write(void* row, int64_t i, T value) {
  std::memcpy(static_cast<std::byte*>(row) + i * static_cast<int64_t>(sizeof value), &value, sizeof value);
}

/// Element `i` of a row, exactly (fp8: multiplied by its scale). Real is double for fp64 rows, else float.
template <DType kIn, class Real>
Real load(const RowRef& row, int64_t i, float scale) {
  if constexpr (kIn == DType::fp64) return read<double>(row.data, i);
  else if constexpr (kIn == DType::fp32) return read<float>(row.data, i);
  else if constexpr (kIn == DType::bf16) return core::bf16_to_float(read<uint16_t>(row.data, i));
  else if constexpr (kIn == DType::fp16) return core::fp16_to_float(read<uint16_t>(row.data, i));
  else return core::dequantize(read<uint8_t>(row.data, i), scale);
}

/// Sums of columns [begin, begin + n), one block.
template <DType kIn, class Real>
void sum_block(const RowRef* terms, const float* weights, int num_terms, int64_t begin, int64_t n, Real* sums) {
  for (int t = 0; t < num_terms; ++t) {
    const Real weight = weights ? static_cast<Real>(weights[t]) : Real{1};
    const float scale = kIn == DType::fp8_e4m3 ? read<float>(terms[t].scales, begin / kBlock) : 1.0f;
    for (int64_t i = 0; i < n; ++i) {
      const Real value = load<kIn, Real>(terms[t], begin + i, scale);
      const Real term = weights ? value * weight : value;
      sums[i] = t == 0 ? term : sums[i] + term;
    }
  }
}

void quantize_block(const float* values, int64_t n, uint8_t* q, float* scale, uint8_t* ue8m0) {
  const float inverse = write_block_scale(core::finite_amax(values, n), scale, ue8m0);
  for (int64_t i = 0; i < n; ++i) q[i] = core::float_to_fp8_e4m3(values[i] * inverse);
}

void store_block(const float* sums, int64_t begin, int64_t n, void* out, float* out_scales, DType dtype) {
  if (dtype == DType::fp8_e4m3) return quantize_block(sums, n, static_cast<uint8_t*>(out) + begin, out_scales + begin / kBlock, nullptr);
  for (int64_t i = 0; i < n; ++i) {
    switch (dtype) {
      case DType::bf16: write(out, begin + i, core::float_to_bf16(sums[i])); break;
      case DType::fp16: write(out, begin + i, core::float_to_fp16(sums[i])); break;
      case DType::fp32: write(out, begin + i, core::canonical(sums[i])); break;
      default: write(out, begin + i, core::canonical(static_cast<double>(sums[i]))); break;
    }
  }
}

void store_block(const double* sums, int64_t begin, int64_t n, void* out, float* out_scales, DType dtype) {
  if (dtype == DType::fp8_e4m3) {  // the rule of scales is made for fp32
    float values[kBlock];
    for (int64_t i = 0; i < n; ++i) values[i] = core::double_to_float(sums[i]);
    return store_block(values, begin, n, out, out_scales, dtype);
  }
  for (int64_t i = 0; i < n; ++i) {
    switch (dtype) {
      case DType::bf16: write(out, begin + i, core::double_to_bf16(sums[i])); break;
      case DType::fp16: write(out, begin + i, core::double_to_fp16(sums[i])); break;
      case DType::fp32: write(out, begin + i, core::double_to_float(sums[i])); break;
      default: write(out, begin + i, core::canonical(sums[i])); break;
    }
  }
}

template <DType kIn, class Real>
void sum(const RowRef* terms, const float* weights, int num_terms, int64_t hidden, void* out, float* out_scales, DType out_dtype) {
  for (int64_t begin = 0; begin < hidden; begin += kBlock) {
    const int64_t n = std::min(kBlock, hidden - begin);
    Real sums[kBlock] = {};
    sum_block<kIn, Real>(terms, weights, num_terms, begin, n, sums);
    store_block(sums, begin, n, out, out_scales, out_dtype);
  }
}

void sum_rows(const RowRef* terms, const float* weights, int num_terms, DType in, int64_t hidden, void* out, float* out_scales, DType out_dtype) {
  switch (in) {
    case DType::fp64: return sum<DType::fp64, double>(terms, weights, num_terms, hidden, out, out_scales, out_dtype);
    case DType::fp32: return sum<DType::fp32, float>(terms, weights, num_terms, hidden, out, out_scales, out_dtype);
    case DType::bf16: return sum<DType::bf16, float>(terms, weights, num_terms, hidden, out, out_scales, out_dtype);
    case DType::fp16: return sum<DType::fp16, float>(terms, weights, num_terms, hidden, out, out_scales, out_dtype);
    default: return sum<DType::fp8_e4m3, float>(terms, weights, num_terms, hidden, out, out_scales, out_dtype);
  }
}

template <DType kIn>
void quantize(const void* x, int64_t hidden, uint8_t* q, float* scales, uint8_t* ue8m0) {
  for (int64_t begin = 0; begin < hidden; begin += kBlock) {
    const int64_t n = std::min(kBlock, hidden - begin), block = begin / kBlock;
    float values[kBlock];
    for (int64_t i = 0; i < n; ++i) values[i] = load<kIn, float>(RowRef{x, nullptr}, begin + i, 1.0f);
    quantize_block(values, n, q + begin, scales ? scales + block : nullptr, ue8m0 ? ue8m0 + block : nullptr);
  }
}

void quantize_row(const void* x, DType in, int64_t hidden, uint8_t* q, float* scales, uint8_t* ue8m0) {
  switch (in) {
    case DType::bf16: return quantize<DType::bf16>(x, hidden, q, scales, ue8m0);
    case DType::fp16: return quantize<DType::fp16>(x, hidden, q, scales, ue8m0);
    default: return quantize<DType::fp32>(x, hidden, q, scales, ue8m0);
  }
}

}  // namespace

const RowKernels& plain_rows() {
  static constexpr RowKernels kKernels{Isa::plain, copy_row, copy_row, quantize_row, sum_rows};
  return kKernels;
}

}  // namespace turnout::engine
