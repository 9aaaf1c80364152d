// Row kernels of every instruction set that this processor has, bit for bit against element by element arithmetic.
#include "engine/cpu/rows.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "core/dtype.h"
#include "core/scale.h"
#include "engine/cpu/rows_isa.h"
#include "support/random_routing.h"

namespace turnout::engine {
namespace {

using testing::Random;
using Bytes = std::vector<std::byte>;

constexpr int64_t kHidden[] = {1, 2, 7, 64, 127, 128, 129, 1000, 1025, 2880, 7168};
constexpr DType kTypes[] = {DType::fp16, DType::bf16, DType::fp32, DType::fp64, DType::fp8_e4m3};
constexpr std::byte kGuard{0xA5};
constexpr size_t kGuardBytes = 64;

std::vector<Isa> isas() {
  std::vector<Isa> all;
  for (Isa isa : {Isa::plain, Isa::avx2, Isa::avx512}) {
    if (has_isa(isa)) all.push_back(isa);
  }
  return all;
}

size_t num_blocks(int64_t hidden) { return static_cast<size_t>((hidden + 127) / 128); }

template <class T>
T read(const std::byte* row, int64_t i) {
  T value;
  std::memcpy(&value, row + i * static_cast<int64_t>(sizeof value), sizeof value);
  return value;
}

template <class T>
void write(std::byte* row, int64_t i, T value) {
  std::memcpy(row + i * static_cast<int64_t>(sizeof value), &value, sizeof value);
}

/// A row that begins `offset` bytes after an aligned address.
struct Row {
  Bytes memory;
  size_t offset = 0;
  std::vector<float> scales;
  std::byte* data() { return memory.data() + offset; }
  RowRef ref() { return {data(), scales.empty() ? nullptr : scales.data()}; }
};

/// Any bits; or values of like size, so that sums round; or a few special ones: zeros, denormals, infinities, NaNs with payloads.
Row random_row(Random& random, DType dtype, int64_t hidden, size_t offset) {
  Row row;
  row.offset = offset;
  row.memory.resize(offset + static_cast<size_t>(hidden) * size_of(dtype));
  if (dtype == DType::fp8_e4m3) {
    for (size_t b = 0; b < num_blocks(hidden); ++b)
      row.scales.push_back(std::ldexp(1.0f + static_cast<float>(random.below(1000)) * 1e-3f, static_cast<int>(random.between(-20, 20))));
  }
  const bool tame = random.below(2) == 0;
  const uint64_t special[] = {
      0, ~uint64_t{0} << 63, 1, 0x7FF0000000000000, 0xFFF0000000000000, 0x7FF0000000000001, 0xFFF8123456789ABC, 0x000FFFFFFFFFFFFF};
  const uint32_t special32[] = {0, 0x80000000, 1, 0x807FFFFF, 0x7F800000, 0xFF800000, 0x7F800001, 0xFFC12345};
  const uint16_t special16[] = {0, 0x8000, 1, 0x7C00, 0xFC00, 0x7C01, 0x7F80, 0xFFC1};
  for (int64_t i = 0; i < hidden; ++i) {
    uint64_t bits = random.bits();
    const auto pick = static_cast<size_t>(bits >> 8 & 7);
    const bool use_special = (bits & 0xFF) < 8;
    const float value = static_cast<float>(static_cast<int64_t>(bits >> 40) - (1 << 23)) * 0x1p-20f;
    switch (dtype) {
      case DType::fp64: {
        if (use_special) bits = special[pick];
        if (tame) write(row.data(), i, static_cast<double>(value) * 1.000000123);
        else write(row.data(), i, bits);
        break;
      }
      case DType::fp32:
        if (tame) write(row.data(), i, value);
        else write(row.data(), i, use_special ? special32[pick] : static_cast<uint32_t>(bits >> 32));
        break;
      case DType::bf16:
        if (tame) write(row.data(), i, core::float_to_bf16(value));
        else write(row.data(), i, use_special ? special16[pick] : static_cast<uint16_t>(bits >> 48));
        break;
      case DType::fp16:
        if (tame) write(row.data(), i, core::float_to_fp16(value));
        else write(row.data(), i, use_special ? special16[pick] : static_cast<uint16_t>(bits >> 48));
        break;
      default: write(row.data(), i, tame ? core::float_to_fp8_e4m3(value) : static_cast<uint8_t>(bits >> 56)); break;
    }
  }
  return row;
}

template <class Real>
Real load(DType dtype, const RowRef& row, int64_t i) {
  const auto* data = static_cast<const std::byte*>(row.data);
  switch (dtype) {
    case DType::fp64: return static_cast<Real>(read<double>(data, i));
    case DType::fp32: return static_cast<Real>(read<float>(data, i));
    case DType::bf16: return static_cast<Real>(core::bf16_to_float(read<uint16_t>(data, i)));
    case DType::fp16: return static_cast<Real>(core::fp16_to_float(read<uint16_t>(data, i)));
    default: return static_cast<Real>(core::dequantize(read<uint8_t>(data, i), row.scales[i / 128]));
  }
}

void store(DType dtype, std::byte* out, int64_t i, float x) {
  switch (dtype) {
    case DType::fp64: return write(out, i, core::canonical(static_cast<double>(x)));
    case DType::fp32: return write(out, i, core::canonical(x));
    case DType::bf16: return write(out, i, core::float_to_bf16(x));
    default: return write(out, i, core::float_to_fp16(x));
  }
}

void store(DType dtype, std::byte* out, int64_t i, double x) {
  switch (dtype) {
    case DType::fp64: return write(out, i, core::canonical(x));
    case DType::fp32: return write(out, i, core::double_to_float(x));
    case DType::bf16: return write(out, i, core::double_to_bf16(x));
    default: return write(out, i, core::double_to_fp16(x));
  }
}

/// What sum_rows must give, from its contract.
template <class Real>
void model_sum(const std::vector<RowRef>& terms, const float* weights, DType in, int64_t hidden, std::byte* out, float* out_scales, DType out_dtype) {
  std::vector<float> narrow(static_cast<size_t>(hidden));
  for (int64_t i = 0; i < hidden; ++i) {
    Real sum = 0;
    for (size_t t = 0; t < terms.size(); ++t) {
      const Real value = load<Real>(in, terms[t], i);
      const Real term = weights ? static_cast<Real>(weights[t]) * value : value;
      sum = t == 0 ? term : sum + term;
    }
    narrow[static_cast<size_t>(i)] = static_cast<float>(sum);
    if (out_dtype != DType::fp8_e4m3) store(out_dtype, out, i, sum);
  }
  if (out_dtype != DType::fp8_e4m3) return;
  for (int64_t begin = 0; begin < hidden; begin += 128) {
    core::quantize_block(narrow.data() + begin, std::min<int64_t>(128, hidden - begin), reinterpret_cast<uint8_t*>(out) + begin,
                         out_scales + begin / 128, nullptr);
  }
}

struct Output {
  Bytes memory;
  std::vector<float> scales;
  Output(int64_t hidden, DType dtype, size_t offset)
      : memory(kGuardBytes + offset + static_cast<size_t>(hidden) * size_of(dtype) + kGuardBytes, kGuard),
        scales(num_blocks(hidden) + 1, -1.0f),
        at_(kGuardBytes + offset) {}
  std::byte* data() { return memory.data() + at_; }
  /// Rows and what lies around them, and the scales with one more.
  bool operator==(const Output& other) const {
    return memory == other.memory && std::memcmp(scales.data(), other.scales.data(), scales.size() * sizeof(float)) == 0;
  }

 private:
  size_t at_;
};

std::vector<float> random_weights(Random& random, int n) {
  std::vector<float> weights;
  for (int i = 0; i < n; ++i) {
    const int64_t kind = random.below(16);
    weights.push_back(kind == 0   ? 0.0f
                      : kind == 1 ? INFINITY
                      : kind == 2 ? core::float_of(0xFF800001)
                                  : static_cast<float>(random.below(1 << 24)) * 0x1p-23f - 1.0f);
  }
  return weights;
}

void expect_sum(Random& random, DType in, DType out_dtype, int64_t hidden, int n, bool weighted, bool in_double) {
  std::vector<Row> rows;
  for (int t = 0; t < n; ++t) rows.push_back(random_row(random, in, hidden, static_cast<size_t>(random.below(16))));
  std::vector<RowRef> terms;
  for (Row& row : rows) terms.push_back(row.ref());
  const std::vector<float> weights = random_weights(random, n);
  const float* w = weighted ? weights.data() : nullptr;
  const auto offset = static_cast<size_t>(random.below(16));
  Output expected(hidden, out_dtype, offset);
  (in_double ? model_sum<double> : model_sum<float>)(terms, w, in, hidden, expected.data(), expected.scales.data(), out_dtype);
  for (Isa isa : isas()) {
    Output got(hidden, out_dtype, offset);
    float* scales = out_dtype == DType::fp8_e4m3 ? got.scales.data() : nullptr;
    row_kernels(isa).sum_rows(terms.data(), w, n, in, hidden, got.data(), scales, out_dtype, in_double);
    ASSERT_TRUE(got == expected) << name(isa) << ": " << n << " rows of " << name(in) << "[" << hidden << "] to " << name(out_dtype)
                                 << (weighted ? " weighted" : "") << (in_double ? " in double" : "");
  }
}

class SumRows : public ::testing::TestWithParam<DType> {};

TEST_P(SumRows, EqualsTheModelInEveryForm) {
  Random random(1);
  for (DType out : kTypes) {
    for (int64_t hidden : kHidden) {
      for (int n = 0; n <= 9; ++n) {
        for (bool weighted : {false, true}) {
          ASSERT_NO_FATAL_FAILURE(expect_sum(random, GetParam(), out, hidden, n, weighted, GetParam() == DType::fp64));
          if (hidden > 1025 || GetParam() == DType::fp64) continue;
          ASSERT_NO_FATAL_FAILURE(expect_sum(random, GetParam(), out, hidden, n, weighted, true));
        }
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Types, SumRows, ::testing::ValuesIn(kTypes), [](const auto& type) { return std::string(name(type.param)); });

TEST(SumRowsOf, OneNegativeZeroStaysNegative) {
  const uint16_t zero = 0x8000;
  const RowRef term{&zero, nullptr};
  for (Isa isa : isas()) {
    uint16_t out = 1;
    row_kernels(isa).sum_rows(&term, nullptr, 1, DType::bf16, 1, &out, nullptr, DType::bf16, false);
    EXPECT_EQ(out, 0x8000) << name(isa);
  }
}

TEST(SumRowsOf, MultiplyAndAddAreRoundedApart) {
  const float x[] = {1.0f + 0x1p-12f}, y[] = {-(1.0f + 0x1p-11f)};  // x * x rounds to 1 + 2^-11: a fused sum would leave 2^-24
  const RowRef terms[] = {{y, nullptr}, {x, nullptr}};
  const float weights[] = {1.0f, x[0]};
  for (Isa isa : isas()) {
    std::vector<float> out(1, 7.0f);
    row_kernels(isa).sum_rows(terms, weights, 2, DType::fp32, 1, out.data(), nullptr, DType::fp32, false);
    EXPECT_EQ(out[0], 0.0f) << name(isa);
  }
}

/// Every bf16 and fp16 through one kernel and back: denormals are not flushed, NaNs lose their payloads.
TEST(SumRowsOf, EveryHalfIsKept) {
  std::vector<uint16_t> codes(1 << 16), out(1 << 16);
  for (size_t i = 0; i < codes.size(); ++i) codes[i] = static_cast<uint16_t>(i);
  const RowRef term{codes.data(), nullptr};
  for (DType dtype : {DType::bf16, DType::fp16}) {
    const uint16_t infinity = dtype == DType::bf16 ? 0x7F80 : 0x7C00, nan = dtype == DType::bf16 ? core::kNanBf16 : core::kNanFp16;
    for (Isa isa : isas()) {
      row_kernels(isa).sum_rows(&term, nullptr, 1, dtype, 1 << 16, out.data(), nullptr, dtype, false);
      for (size_t i = 0; i < codes.size(); ++i) ASSERT_EQ(out[i], (i & 0x7FFF) > infinity ? nan : i) << name(isa) << " " << name(dtype);
    }
  }
}

/// fp32 to the narrow types over bits of every exponent.
TEST(SumRowsOf, AMillionFloatsRoundAsTheConversionsDo) {
  Random random(2);
  constexpr int64_t kN = 1'000'000;
  std::vector<float> x(kN);
  for (float& v : x) v = core::float_of(static_cast<uint32_t>(random.bits()));
  for (int64_t i = 0; i < kN; i += 2) {  // near the halves of fp16 and its denormals
    x[static_cast<size_t>(i)] =
        core::float_of((static_cast<uint32_t>(random.bits()) & 0x807FE000) | 0x1000 | static_cast<uint32_t>(100 + random.below(45)) << 23);
  }
  const RowRef term{x.data(), nullptr};
  std::vector<uint16_t> out(kN);
  for (Isa isa : isas()) {
    row_kernels(isa).sum_rows(&term, nullptr, 1, DType::fp32, kN, out.data(), nullptr, DType::bf16, false);
    for (size_t i = 0; i < kN; ++i) ASSERT_EQ(out[i], core::float_to_bf16(x[i])) << name(isa) << " " << x[i];
    row_kernels(isa).sum_rows(&term, nullptr, 1, DType::fp32, kN, out.data(), nullptr, DType::fp16, false);
    for (size_t i = 0; i < kN; ++i) ASSERT_EQ(out[i], core::float_to_fp16(x[i])) << name(isa) << " " << x[i];
  }
}

TEST(QuantizeRow, EqualsTheRuleOfScales) {
  Random random(3);
  for (DType in : {DType::bf16, DType::fp16, DType::fp32}) {
    for (int64_t hidden : kHidden) {
      for (int round = 0; round < 8; ++round) {
        Row row = random_row(random, in, hidden, static_cast<size_t>(random.below(16)));
        const bool ue8m0 = round % 2;
        std::vector<float> values, scales(num_blocks(hidden));
        for (int64_t i = 0; i < hidden; ++i) values.push_back(load<float>(in, row.ref(), i));
        std::vector<uint8_t> q(values.size()), exponents(scales.size());
        for (size_t b = 0; b < scales.size(); ++b) {
          core::quantize_block(values.data() + 128 * b, static_cast<int64_t>(std::min<size_t>(128, values.size() - 128 * b)), q.data() + 128 * b,
                               &scales[b], ue8m0 ? &exponents[b] : nullptr);
        }
        for (Isa isa : isas()) {
          std::vector<uint8_t> got(q.size() + 1, 0x5A), got_exponents(exponents.size() + 1, 0x5A);
          std::vector<float> got_scales(scales.size() + 1, -1.0f);
          row_kernels(isa).quantize_row(row.data(), in, hidden, got.data(), ue8m0 ? nullptr : got_scales.data(),
                                        ue8m0 ? got_exponents.data() : nullptr);
          ASSERT_EQ(got.back(), 0x5A);
          got.pop_back();
          ASSERT_EQ(got, q) << name(isa) << " " << name(in) << " " << hidden;
          if (ue8m0) {
            ASSERT_EQ(got_exponents.back(), 0x5A);
            got_exponents.pop_back();
            ASSERT_EQ(got_exponents, exponents);
          } else {
            ASSERT_EQ(got_scales.back(), -1.0f);
            got_scales.pop_back();
            ASSERT_EQ(got_scales, scales) << name(isa) << " " << name(in) << " " << hidden;
          }
        }
      }
    }
  }
}

TEST(CopyRow, CopiesEverySizeFromAndToAnywhere) {
  Random random(4);
  std::vector<size_t> sizes;
  for (size_t n = 0; n <= 300; ++n) sizes.push_back(n);
  for (size_t n : {512, 1023, 1024, 1025, 2047, 2048, 2049, 4096, 5760, 14336, 14337, 65536}) sizes.push_back(n);
  for (size_t n : sizes) {
    for (int round = 0; round < 8; ++round) {
      const auto from = static_cast<size_t>(random.below(65)), to = static_cast<size_t>(random.below(65));
      Bytes source(from + n + 1);
      for (auto& b : source) b = static_cast<std::byte>(random.bits());
      Bytes expected(to + n + 64, kGuard);
      std::copy_n(source.begin() + static_cast<std::ptrdiff_t>(from), n, expected.begin() + static_cast<std::ptrdiff_t>(to));
      for (Isa isa : isas()) {
        for (auto copy : {row_kernels(isa).copy_row, row_kernels(isa).copy_row_streaming}) {
          Bytes got(expected.size(), kGuard);
          copy(got.data() + to, source.data() + from, n);
          ASSERT_TRUE(got == expected) << name(isa) << " " << n << " bytes";
        }
      }
    }
  }
}

TEST(FillFailed, NanInFloatsAndZeroInIntegers) {
  for (DType dtype : {DType::u8, DType::i8, DType::i32, DType::i64}) {
    Bytes out(size_of(dtype) * 3 + 1, kGuard);
    fill_failed(out.data(), dtype, 3);
    EXPECT_EQ(out.back(), kGuard);
    out.pop_back();
    EXPECT_EQ(out, Bytes(out.size(), std::byte{0})) << name(dtype);
  }
  for (DType dtype : {DType::fp16, DType::bf16, DType::fp32, DType::fp64}) {
    Bytes out(size_of(dtype) * 3 + 1, kGuard);
    fill_failed(out.data(), dtype, 3);
    EXPECT_EQ(out.back(), kGuard);
    for (int64_t i = 0; i < 3; ++i) EXPECT_TRUE(std::isnan(load<double>(dtype, {out.data(), nullptr}, i))) << name(dtype);
  }
  uint8_t codes[3] = {};
  fill_failed(codes, DType::fp8_e4m3, 1);
  fill_failed(codes + 1, DType::fp8_e5m2, 1);
  fill_failed(codes + 2, DType::ue8m0, 1);
  EXPECT_TRUE(core::is_nan(core::fp8_e4m3_to_float(codes[0])));
  EXPECT_TRUE(core::is_nan(core::fp8_e5m2_to_float(codes[1])));
  EXPECT_TRUE(core::is_nan(core::ue8m0_to_float(codes[2])));
}

TEST(Isas, TheBestIsOneThatThisProcessorHas) {
  EXPECT_TRUE(has_isa(Isa::plain));
  EXPECT_TRUE(has_isa(best_isa()));
  for (Isa isa : isas()) EXPECT_EQ(row_kernels(isa).isa, isa);
}

}  // namespace
}  // namespace turnout::engine
