// The 8-bit number types: every code, every middle between two codes, and one rounding from double.
#include "base/numbers.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>

namespace winnow {
namespace {

// What a code stands for, from the definition of the format.
double e4m3_by_definition(int code) {
  const int exponent = (code >> 3) & 15, fraction = code & 7;
  if (exponent == 15 && fraction == 7) return std::numeric_limits<double>::quiet_NaN();
  const double magnitude =
      exponent == 0 ? std::ldexp(fraction, -9) : std::ldexp(8 + fraction, exponent - 10);
  return (code & 0x80) != 0 ? -magnitude : magnitude;
}

E4M3 e4m3(int code) { return {static_cast<std::uint8_t>(code)}; }

TEST(E4M3, EveryCodeDecodesByDefinitionAndComesBack) {
  for (int code = 0; code < 256; ++code) {
    const double want = e4m3_by_definition(code);
    const float value = to_float(e4m3(code));
    if (std::isnan(want)) {
      EXPECT_TRUE(std::isnan(value)) << code;
      EXPECT_EQ(std::signbit(value), code >= 128) << code;
    } else {
      EXPECT_EQ(value, want) << code;
      EXPECT_EQ(std::signbit(value), code >= 128) << code;
    }
    EXPECT_EQ(to_e4m3(value).bits, code);
    EXPECT_EQ(from_double<E4M3>(value).bits, code);
  }
  EXPECT_EQ(to_float(e4m3(0x7e)), kLargestE4M3);
}

TEST(E4M3, MiddlesGoToTheEvenCodeAndNeighboursToTheNearer) {
  for (int code = 0; code < 0x7e; ++code) {
    const double middle = (e4m3_by_definition(code) + e4m3_by_definition(code + 1)) / 2;
    const auto m = static_cast<float>(middle);
    ASSERT_EQ(m, middle);
    const int even = code % 2 == 0 ? code : code + 1;
    for (const int sign : {0, 0x80}) {
      const float s = sign == 0 ? 1.f : -1.f;
      EXPECT_EQ(to_e4m3(s * m).bits, even | sign) << code;
      EXPECT_EQ(to_e4m3(s * std::nextafter(m, 0.f)).bits, code | sign) << code;
      EXPECT_EQ(to_e4m3(s * std::nextafter(m, INFINITY)).bits, (code + 1) | sign) << code;
      // Nearer to the middle than float can tell: through a nearest float they would tie.
      EXPECT_EQ(from_double<E4M3>(s * std::nextafter(middle, 0)).bits, code | sign) << code;
      EXPECT_EQ(from_double<E4M3>(s * std::nextafter(middle, INFINITY)).bits, (code + 1) | sign);
    }
  }
}

TEST(E4M3, SaturatesAndKeepsNan) {
  for (const float x : {448.f, 464.f, 480.f, 1e30f, INFINITY}) {
    EXPECT_EQ(to_e4m3(x).bits, 0x7e) << x;
    EXPECT_EQ(to_e4m3(-x).bits, 0xfe) << x;
  }
  EXPECT_EQ(to_e4m3(std::nextafter(448.f, 0.f)).bits, 0x7e);
  EXPECT_EQ(to_e4m3(NAN).bits & 0x7f, 0x7f);
  EXPECT_EQ(to_e4m3(-NAN).bits, 0xff);
  EXPECT_EQ(to_e4m3(0x1p-10f).bits, 0);  // half of the least: to even
  EXPECT_EQ(to_e4m3(-0x1p-149f).bits, 0x80);
}

// M2: the byte of a scale is an exponent, not a number.
TEST(E8M0, M2EveryByteIsAPowerOfTwo) {
  EXPECT_EQ(to_float(E8M0{127}), 1.f);
  EXPECT_EQ(to_float(E8M0{130}), 8.f);
  EXPECT_EQ(to_float(E8M0{0}), 0x1p-127f);
  EXPECT_TRUE(std::isnan(to_float(E8M0{255})));
  for (int byte = 0; byte < 255; ++byte) {
    const float value = to_float(E8M0{static_cast<std::uint8_t>(byte)});
    EXPECT_EQ(value, std::ldexp(1., byte - 127)) << byte;
    EXPECT_EQ(to_e8m0(value).bits, byte);
    if (byte < 254) {
      EXPECT_EQ(to_e8m0(std::nextafter(value, INFINITY)).bits, byte + 1);
    }
  }
}

TEST(E8M0, WhatNoPowerHoldsIsNan) {
  for (const float x : {NAN, INFINITY, -1.f, -INFINITY, std::nextafter(0x1p127f, INFINITY)}) {
    EXPECT_EQ(to_e8m0(x).bits, 255) << x;
  }
  for (const float x : {0.f, -0.f, 0x1p-149f}) EXPECT_EQ(to_e8m0(x).bits, 0) << x;
}

// Rounding to a 16-bit type is one rounding also from double.
TEST(Numbers, DoubleRoundsOnce) {
  for (std::uint16_t bits = 0; bits < 0x7c00; ++bits) {  // F16; its largest excluded
    if (bits + 1 == 0x7c00) break;
    const double low = to_float(F16{bits});
    const double high = to_float(F16{static_cast<std::uint16_t>(bits + 1)});
    const double middle = (low + high) / 2;
    ASSERT_EQ(from_double<F16>(std::nextafter(middle, 0)).bits, bits);
    ASSERT_EQ(from_double<F16>(std::nextafter(middle, INFINITY)).bits, bits + 1);
    ASSERT_EQ(from_double<F16>(-std::nextafter(middle, 0)).bits, bits | 0x8000);
    ASSERT_EQ(from_double<F16>(middle).bits, bits % 2 == 0 ? bits : bits + 1);
  }
  EXPECT_EQ(from_double<BF16>(1 + 0x1p-8 + 0x1p-40).bits, 0x3f81);
  EXPECT_EQ(from_double<BF16>(1 + 0x1p-8 - 0x1p-40).bits, 0x3f80);
  EXPECT_EQ(from_double<BF16>(1e300).bits, 0x7f80);
  EXPECT_EQ(from_double<BF16>(-1e-300).bits, 0x8000);
  EXPECT_EQ(from_double<BF16>(3.3961775292304957e38).bits, 0x7f80);  // 2^128 (1 - 2^-9 + 2^-50)
  EXPECT_EQ(from_double<BF16>(-INFINITY).bits, 0xff80);
  EXPECT_TRUE(std::isnan(to_float(from_double<BF16>(NAN))));
  double x = 0;
  for (const DType dtype : {DType::kBF16, DType::kF16}) {
    store_double(&x, dtype, 0, 1.5 + 0x1p-30);
    EXPECT_EQ(load_double(&x, dtype, 0), 1.5);
  }
}

TEST(Numbers, EightBitTensors) {
  std::uint8_t bytes[4] = {};
  store_double(bytes, DType::kE4M3, 1, 500);
  store_double(bytes, DType::kE8M0, 2, 5);
  EXPECT_EQ(bytes[1], 0x7e);
  EXPECT_EQ(bytes[2], 130);
  EXPECT_EQ(load_double(bytes, DType::kE4M3, 1), 448);
  EXPECT_EQ(load_double(bytes, DType::kE8M0, 2), 8);
  EXPECT_EQ(dtype_bytes(DType::kE4M3) + dtype_bytes(DType::kE8M0), 2);
  EXPECT_STREQ(dtype_name(DType::kE4M3), "e4m3");
  EXPECT_STREQ(dtype_name(DType::kE8M0), "e8m0");
}

}  // namespace
}  // namespace winnow
