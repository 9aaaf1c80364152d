// Conversions against two models that share nothing with them: a table of all values of a type, searched for the nearest one
// (slow, obviously right), and division by the quantum in double (fast: a hundred million inputs).
#include "core/dtype.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdio>
#include <string>
#include <vector>

#include "support/random_routing.h"

namespace turnout::core {
namespace {

using testing::Random;

/// A small float type and how it is converted to and from.
struct Type {
  const char* name;
  int exponent_bits, mantissa_bits;
  uint32_t largest;   ///< code of the largest finite value
  uint32_t overflow;  ///< what exceeds it becomes: infinity, or the largest again
  uint32_t infinity;  ///< 0 where the type has none
  uint32_t nan;
  uint32_t (*narrow)(float);
  float (*widen)(uint32_t);
  int bias() const { return (1 << (exponent_bits - 1)) - 1; }
  uint32_t sign_bit() const { return 1u << (exponent_bits + mantissa_bits); }
  bool saturates() const { return overflow == largest; }

  /// Value of a finite code without sign, from its definition.
  long double value(uint32_t code) const {
    const int exponent = static_cast<int>(code >> mantissa_bits);
    const uint32_t mantissa = code & ((1u << mantissa_bits) - 1);
    const uint32_t significand = exponent == 0 ? mantissa : mantissa | 1u << mantissa_bits;
    return std::ldexp(static_cast<long double>(significand), std::max(exponent, 1) - bias() - mantissa_bits);
  }
};

const Type kTypes[] = {
    {"bf16", 8, 7, 0x7F7F, 0x7F80, 0x7F80, 0x7FC0, [](float x) -> uint32_t { return float_to_bf16(x); },
     [](uint32_t b) { return bf16_to_float(static_cast<uint16_t>(b)); }},
    {"fp16", 5, 10, 0x7BFF, 0x7C00, 0x7C00, 0x7E00, [](float x) -> uint32_t { return float_to_fp16(x); },
     [](uint32_t b) { return fp16_to_float(static_cast<uint16_t>(b)); }},
    {"fp8_e4m3", 4, 3, 0x7E, 0x7E, 0, 0x7F, [](float x) -> uint32_t { return float_to_fp8_e4m3(x); },
     [](uint32_t b) { return fp8_e4m3_to_float(static_cast<uint8_t>(b)); }},
    {"fp8_e5m2", 5, 2, 0x7B, 0x7B, 0x7C, 0x7E, [](float x) -> uint32_t { return float_to_fp8_e5m2(x); },
     [](uint32_t b) { return fp8_e5m2_to_float(static_cast<uint8_t>(b)); }},
};

/// The slow model: the nearest of all values, of two equally near ones the even code. Unless a type saturates, the code after
/// the largest stands for the power of two that would come next.
class Table {
 public:
  explicit Table(const Type& type) : type_(type) {
    for (uint32_t code = 0; code <= type.largest + (type.saturates() ? 0 : 1); ++code) values_.push_back(type.value(code));
  }
  uint32_t narrow(long double x) const {
    if (std::isnan(x)) return type_.nan;
    const uint32_t sign = std::signbit(x) ? type_.sign_bit() : 0;
    const long double magnitude = std::fabs(x);
    const auto above = std::lower_bound(values_.begin(), values_.end(), magnitude);
    if (above == values_.end()) return sign | type_.overflow;
    auto code = static_cast<uint32_t>(above - values_.begin());
    if (*above != magnitude) {
      const long double up = *above - magnitude, down = magnitude - values_[code - 1];
      if (down < up || (down == up && code % 2 == 1)) --code;
    }
    return sign | code;
  }
  const std::vector<long double>& values() const { return values_; }

 private:
  const Type& type_;
  std::vector<long double> values_;
};

/// The fast model: how many quanta, rounded by adding 2^52 in double.
uint32_t narrow_by_quantum(const Type& type, float x) {
  if (x != x) return type.nan;
  const uint32_t sign = std::signbit(x) ? type.sign_bit() : 0;
  const double magnitude = std::fabs(static_cast<double>(x));
  if (magnitude > 1e300) return sign | type.overflow;
  const int exponent = std::max(static_cast<int>(std::bit_cast<uint64_t>(magnitude) >> 52) - 1023, 1 - type.bias());
  const auto power_of_two = [](int e) { return std::bit_cast<double>(static_cast<uint64_t>(e + 1023) << 52); };
  const double quanta = (magnitude * power_of_two(type.mantissa_bits - exponent) + 0x1p52) - 0x1p52;
  const auto code = (static_cast<int64_t>(exponent + type.bias() - 1) << type.mantissa_bits) + static_cast<int64_t>(quanta);
  return sign | (code > type.largest ? type.overflow : static_cast<uint32_t>(code));
}

std::string hex(uint32_t bits) {
  char text[16];
  std::snprintf(text, sizeof text, "0x%08X", bits);
  return text;
}

class Narrow : public ::testing::TestWithParam<Type> {};

TEST_P(Narrow, EveryCodeWidensToItsValueAndComesBack) {
  const Type& type = GetParam();
  for (uint32_t code = 0; code < 2 * type.sign_bit(); ++code) {
    const uint32_t magnitude = code & ~type.sign_bit();
    const float value = type.widen(code);
    if (magnitude <= type.largest) {
      const long double expected = code == magnitude ? type.value(magnitude) : -type.value(magnitude);
      ASSERT_EQ(static_cast<long double>(value), expected) << type.name << " " << hex(code);
      ASSERT_EQ(std::signbit(value), code != magnitude);
      ASSERT_EQ(type.narrow(value), code);
    } else if (magnitude == type.infinity) {
      ASSERT_TRUE(std::isinf(value)) << type.name << " " << hex(code);
      ASSERT_EQ(std::signbit(value), code != magnitude);
      ASSERT_EQ(type.narrow(value), type.overflow | (code & type.sign_bit()));
    } else {
      ASSERT_EQ(bits_of(value), 0x7FC00000u) << type.name << " " << hex(code);
      ASSERT_EQ(type.narrow(value), type.nan);
    }
  }
}

TEST_P(Narrow, HalfWayPointsAndTheirNeighbours) {
  const Type& type = GetParam();
  const Table table(type);
  for (size_t i = 0; i + 1 < table.values().size(); ++i) {
    const auto middle = static_cast<float>((table.values()[i] + table.values()[i + 1]) / 2);
    for (float x : {middle, std::nextafter(middle, 0.0f), std::nextafter(middle, INFINITY), static_cast<float>(table.values()[i])}) {
      ASSERT_EQ(type.narrow(x), table.narrow(x)) << type.name << " " << hex(bits_of(x));
      ASSERT_EQ(type.narrow(-x), table.narrow(-x)) << type.name << " " << hex(bits_of(-x));
    }
  }
}

TEST_P(Narrow, SpecialValues) {
  const Type& type = GetParam();
  const Table table(type);
  for (uint32_t exponent = 0; exponent < 256; ++exponent) {
    for (uint32_t mantissa : {0u, 1u, 0x1FFFFFu, 0x200000u, 0x3FFFFFu, 0x400000u, 0x400001u, 0x7FFFFEu, 0x7FFFFFu}) {
      for (uint32_t sign : {0u, 0x80000000u}) {
        const float x = float_of(sign | exponent << 23 | mantissa);
        ASSERT_EQ(type.narrow(x), table.narrow(x)) << type.name << " " << hex(bits_of(x));
      }
    }
  }
}

TEST_P(Narrow, AMillionRandomInputsAgainstTheTable) {
  const Type& type = GetParam();
  const Table table(type);
  Random random(1);
  for (int i = 0; i < 1'000'000; ++i) {
    auto bits = static_cast<uint32_t>(random.bits());
    if (i % 2)
      bits = (bits & 0x807FFFFF) |
             static_cast<uint32_t>(127 - type.bias() - type.mantissa_bits - 2 + random.below(2 * type.bias() + type.mantissa_bits)) << 23;
    const float x = float_of(bits);
    ASSERT_EQ(type.narrow(x), table.narrow(x)) << type.name << " " << hex(bits);
  }
}

INSTANTIATE_TEST_SUITE_P(Types, Narrow, ::testing::ValuesIn(kTypes), [](const auto& type) { return std::string(type.param.name); });

/// Compiled once per type, so that a hundred million of each take seconds.
template <int kType, class F>
void compare_random(F narrow) {
  Random random(2);
  for (int i = 0; i < 50'000'000; ++i) {
    const uint64_t two = random.bits();
    for (uint32_t bits : {static_cast<uint32_t>(two), static_cast<uint32_t>(two >> 32)}) {
      const float x = float_of(bits);
      const uint32_t got = narrow(x), expected = narrow_by_quantum(kTypes[kType], x);
      if (got != expected) FAIL() << kTypes[kType].name << " of " << hex(bits) << " is " << hex(got) << ", expected " << hex(expected);
    }
  }
}

TEST(NarrowRandom, HundredMillionToBf16) { compare_random<0>(float_to_bf16); }
TEST(NarrowRandom, HundredMillionToFp16) { compare_random<1>(float_to_fp16); }
TEST(NarrowRandom, HundredMillionToE4m3) { compare_random<2>(float_to_fp8_e4m3); }
TEST(NarrowRandom, HundredMillionToE5m2) { compare_random<3>(float_to_fp8_e5m2); }

TEST(Double, NarrowsWithOneRounding) {
  const Table bf16(kTypes[0]), fp16(kTypes[1]);
  Random random(3);
  for (int i = 0; i < 1'000'000; ++i) {
    uint64_t bits = random.bits();
    // Near half-way points of the small type, where rounding to fp32 first goes wrong, and with exponents it can hold.
    if (i % 2) bits = (bits & 0x800FFE0000000FFF) | (i % 4 == 1 ? 0x0000100000000000 : 0x0000020000000000);
    if (i % 3) bits = (bits & 0x800FFFFFFFFFFFFF) | static_cast<uint64_t>(1023 - 30 + random.below(60)) << 52;
    const double x = std::bit_cast<double>(bits);
    ASSERT_EQ(double_to_bf16(x), bf16.narrow(x)) << std::hexfloat << x;
    ASSERT_EQ(double_to_fp16(x), fp16.narrow(x)) << std::hexfloat << x;
  }
  for (double x : {0.0, -0.0, 1e308, -1e308, 5e-324, -5e-324, static_cast<double>(INFINITY), -static_cast<double>(INFINITY), std::nan("")}) {
    ASSERT_EQ(double_to_bf16(x), bf16.narrow(x)) << x;
    ASSERT_EQ(double_to_fp16(x), fp16.narrow(x)) << x;
  }
  EXPECT_EQ(double_to_bf16(1.00390625 + 0x1p-40), 0x3F81);  // through fp32 it would be a tie and fall to 0x3F80
}

TEST(Double, NanIsCanonical) {
  for (uint64_t bits : {uint64_t{0x7FF0000000000001}, uint64_t{0x7FF8000000000000}, uint64_t{0x7FFFFFFFFFFFFFFF}, uint64_t{0xFFFFFFFFFFFFFFFF}}) {
    const double nan = std::bit_cast<double>(bits);
    EXPECT_EQ(std::bit_cast<uint64_t>(canonical(nan)), 0x7FF8000000000000u);
    EXPECT_EQ(bits_of(double_to_float(nan)), 0x7FC00000u);
  }
  EXPECT_EQ(bits_of(canonical(float_of(0xFF800001))), 0x7FC00000u);
  EXPECT_EQ(bits_of(canonical(float_of(0xFF800000))), 0xFF800000u);
}

TEST(Ue8m0, EveryCodeIsItsPowerOfTwo) {
  for (int code = 0; code < 255; ++code) ASSERT_EQ(ue8m0_to_float(static_cast<uint8_t>(code)), std::ldexp(1.0f, code - 127)) << code;
  EXPECT_EQ(bits_of(ue8m0_to_float(255)), 0x7FC00000u);
}

TEST(Ue8m0, RoundsUpToTheNextPowerOfTwo) {
  for (int e = -126; e <= 127; ++e) {
    const float power = std::ldexp(1.0f, e);
    EXPECT_EQ(float_to_ue8m0_up(power), e + 127);
    EXPECT_EQ(float_to_ue8m0_up(e > -126 ? std::nextafter(power, 0.0f) : power), e + 127);
    if (e == 127) continue;
    EXPECT_EQ(float_to_ue8m0_up(std::nextafter(power, INFINITY)), e + 128);
  }
}

}  // namespace
}  // namespace turnout::core
