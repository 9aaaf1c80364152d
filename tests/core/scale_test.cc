// Block scales against the rule written in double, where a quotient or product of two floats rounds to fp32 as if exact.
#include "core/scale.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "support/random_routing.h"

namespace turnout::core {
namespace {

using testing::Random;

struct Block {
  std::vector<uint8_t> q;
  float scale = 0;
  uint8_t exponent = 0;
};

Block quantized(const std::vector<float>& x, bool ue8m0) {
  Block block;
  block.q.resize(x.size());
  quantize_block(x.data(), static_cast<int64_t>(x.size()), block.q.data(), &block.scale, ue8m0 ? &block.exponent : nullptr);
  return block;
}

Block model(const std::vector<float>& x, bool ue8m0) {
  double amax = 0;
  for (float v : x) {
    if (std::isfinite(v)) amax = std::max(amax, std::fabs(static_cast<double>(v)));
  }
  Block block;
  block.scale = static_cast<float>(std::max(amax, static_cast<double>(1e-4f)) / 448.0);
  if (ue8m0) {
    while (std::ldexp(1.0, block.exponent - 127) < static_cast<double>(block.scale)) ++block.exponent;
    block.scale = static_cast<float>(std::ldexp(1.0, block.exponent - 127));
  }
  const auto inverse = static_cast<float>(1.0 / static_cast<double>(block.scale));
  for (float v : x) block.q.push_back(float_to_fp8_e4m3(static_cast<float>(static_cast<double>(v) * static_cast<double>(inverse))));
  return block;
}

void expect_model(const std::vector<float>& x) {
  for (bool ue8m0 : {false, true}) {
    const Block got = quantized(x, ue8m0), expected = model(x, ue8m0);
    ASSERT_EQ(bits_of(got.scale), bits_of(expected.scale)) << "ue8m0 " << ue8m0;
    ASSERT_EQ(got.exponent, expected.exponent);
    ASSERT_EQ(got.q, expected.q);
  }
}

TEST(Scale, RandomBlocksOfEveryLengthFollowTheRule) {
  Random random(1);
  for (int round = 0; round < 200; ++round) {
    for (size_t n = 1; n <= 128; ++n) {
      std::vector<float> x(n);
      const auto high = static_cast<uint32_t>(random.between(1, 254));
      for (float& v : x) {
        v = float_of((static_cast<uint32_t>(random.bits()) & 0x807FFFFF) |
                     static_cast<uint32_t>(random.between(std::max<int64_t>(0, high - 20), high)) << 23);
      }
      expect_model(x);
    }
  }
}

TEST(Scale, AnyBitPattern) {
  Random random(2);
  for (int round = 0; round < 20'000; ++round) {
    std::vector<float> x(128);
    for (float& v : x) v = float_of(static_cast<uint32_t>(random.bits()));
    expect_model(x);
  }
}

TEST(Scale, TheReciprocalIsRoundedOnceAndThenMultiplied) {
  // Only beside half-way points between codes does this differ from a division; so go there.
  Random random(4);
  int differs = 0;
  for (int round = 0; round < 2000; ++round) {
    std::vector<float> x = {float_of((static_cast<uint32_t>(random.bits()) & 0x7FFFFF) | 127 << 23)};
    const float scale = model(x, false).scale;
    for (uint8_t code = 0x30; code < 0x6F; ++code) {
      const float middle = (fp8_e4m3_to_float(code) + fp8_e4m3_to_float(static_cast<uint8_t>(code + 1))) / 2 * scale;
      for (float near : {middle, std::nextafter(middle, 0.0f), std::nextafter(middle, INFINITY)}) x.push_back(near);
    }
    x.resize(128);
    expect_model(x);
    const Block block = quantized(x, false);
    for (size_t i = 0; i < x.size(); ++i) differs += block.q[i] != float_to_fp8_e4m3(x[i] / block.scale);
  }
  EXPECT_GT(differs, 100);
}

TEST(Scale, TheLargestElementBecomes448) {
  for (float amax : {1e-4f, 1.0f, 3.14159f, 448.0f, 1e30f, 3.4e38f}) {
    const Block block = quantized({amax, -amax, amax / 2}, false);
    EXPECT_EQ(block.q[0], 0x7E) << amax;
    EXPECT_EQ(block.q[1], 0xFE) << amax;
    EXPECT_NEAR(dequantize(block.q[0], block.scale) / amax, 1.0f, 1e-6f);
  }
}

TEST(Scale, SmallBlocksDoNotGetAScaleBelowTheLeast) {
  for (float amax : {0.0f, 1e-30f, 5e-5f, 1e-4f}) EXPECT_EQ(quantized({amax}, false).scale, 1e-4f / 448.0f) << amax;
  EXPECT_EQ(quantized({0.0f, -0.0f}, false).q, (std::vector<uint8_t>{0x00, 0x80}));
}

TEST(Scale, PowersOfTwoAreNotBelowTheScale) {
  EXPECT_EQ(quantized({448.0f}, true).exponent, 127);
  EXPECT_EQ(quantized({448.5f}, true).exponent, 128);
  EXPECT_EQ(quantized({224.0f}, true).exponent, 126);
}

TEST(Scale, NanAndInfinityTouchOnlyTheirOwnElement) {
  const std::vector<float> plain = {1.0f, -3.0f, 0.5f, 2.0f};
  for (bool ue8m0 : {false, true}) {
    const Block expected = quantized(plain, ue8m0);
    for (float special : {float_of(0x7FC00000), float_of(0xFF800001), INFINITY, -INFINITY}) {
      std::vector<float> x = plain;
      x.push_back(special);
      Block got = quantized(x, ue8m0);
      EXPECT_EQ(got.q.back(), is_nan(special) ? 0x7F : special > 0 ? 0x7E : 0xFE);
      got.q.pop_back();
      EXPECT_EQ(got.q, expected.q);
      EXPECT_EQ(got.scale, expected.scale);
    }
  }
  EXPECT_TRUE(is_nan(dequantize(0x7F, 1.0f)));
}

TEST(Scale, ErrorIsAtMostHalfAStepOfE4m3) {
  Random random(3);
  for (int round = 0; round < 2000; ++round) {
    std::vector<float> x(128);
    for (float& v : x) v = static_cast<float>(random.bits() % 20001) * 1e-3f - 10.0f;
    for (bool ue8m0 : {false, true}) {
      const Block block = quantized(x, ue8m0);
      for (size_t i = 0; i < x.size(); ++i) {
        const double error = std::fabs(static_cast<double>(dequantize(block.q[i], block.scale)) - static_cast<double>(x[i]));
        const double half_step = std::max(std::fabs(static_cast<double>(x[i])) / 16, static_cast<double>(block.scale) / 1024);
        ASSERT_LE(error, half_step * 1.00001) << x[i] << " in a block of scale " << block.scale;
      }
    }
  }
}

}  // namespace
}  // namespace turnout::core
