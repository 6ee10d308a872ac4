// dequantise at the edges of its rule: every code under every scale, against powers of two made by
// ldexp, and what quantise and dequantise are to each other.
#include "winnow/dequantise.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "bench/case.h"
#include "bench/data.h"
#include "bench/guarded.h"
#include "tests/each.h"
#include "winnow/quantise.h"

namespace winnow::testing {
namespace {

using bench::Guarded;

// The number of a code by its three fields: S.EEEE.MMM, bias 7, E = 0 subnormal, 0x7f NaN.
double number_of(int code) {
  const int exponent = code >> 3 & 15, fraction = code & 7;
  if ((code & 127) == 127) return std::numeric_limits<double>::quiet_NaN();
  const double size =
      exponent == 0 ? std::ldexp(fraction, -9) : std::ldexp(8 + fraction, exponent - 7 - 3);
  return code < 128 ? size : -size;
}

void expect_same(float got, double want) {
  if (std::isnan(want)) {
    EXPECT_TRUE(std::isnan(got));
    return;
  }
  EXPECT_EQ(got, static_cast<float>(want));
  EXPECT_EQ(std::signbit(got), std::signbit(want));
}

TEST(Dequantise, EveryCodeUnderEveryScaleByte) {
  Guarded data(DType::kE4M3, {256, 256}), scale(DType::kE8M0, {256, 1}),
      output(DType::kF32, {256, 256});
  for (int n = 0; n < 65536; ++n)
    data.view().as<std::uint8_t>()[n] = static_cast<std::uint8_t>(n % 256);
  for (int byte = 0; byte < 256; ++byte)
    scale.view().as<std::uint8_t>()[byte] = static_cast<std::uint8_t>(byte);
  const DequantiseArgs args = {data, scale, output};
  for_each_implementation(args, [&](const std::string&) {
    bench::poison(output);
    dequantise(args, {});
    for (int n = 0; n < 65536 && !HasFatalFailure(); ++n) {
      SCOPED_TRACE(n);
      // Exact, or beyond f32: 448 * 2^127 becomes infinite.
      const double want = n / 256 == 255 ? std::numeric_limits<double>::quiet_NaN()
                                         : number_of(n % 256) * std::ldexp(1., n / 256 - 127);
      expect_same(output.view().as<float>()[n], want);
      if (HasFailure()) return;
    }
  });
}

// A product with a scale of f32 is rounded once.
TEST(Dequantise, EveryCodeUnderScalesOfF32) {
  const float scales[] = {1.f / 3,
                          1e-44f,
                          3e38f,
                          0.f,
                          -0.f,
                          -1.7f,
                          std::numeric_limits<float>::infinity(),
                          std::numeric_limits<float>::quiet_NaN()};
  Guarded data(DType::kE4M3, {8, 256}), scale(DType::kF32, {8, 1}), output(DType::kF32, {8, 256});
  for (int n = 0; n < 2048; ++n)
    data.view().as<std::uint8_t>()[n] = static_cast<std::uint8_t>(n % 256);
  std::memcpy(scale.view().data, scales, sizeof scales);
  const DequantiseArgs args = {data, scale, output};
  for_each_implementation(args, [&](const std::string&) {
    bench::poison(output);
    dequantise(args, {});
    for (int n = 0; n < 2048; ++n) {
      SCOPED_TRACE(n);
      expect_same(output.view().as<float>()[n],
                  number_of(n % 256) * static_cast<double>(scales[n / 256]));
      if (HasFailure()) return;
    }
  });
}

// Groups of any length that divides the channels, each with its own scale, none longer than it is.
TEST(Dequantise, AScaleEndsWithItsGroup) {
  constexpr std::int64_t kRows = 3, kDim = 60;
  for (const std::int64_t groups : {1, 2, 3, 4, 5, 6, 10, 12, 15, 20, 30, 60}) {
    Guarded data(DType::kE4M3, {kRows, kDim}), scale(DType::kF32, {kRows, groups}),
        output(DType::kF32, {kRows, kDim});
    std::memset(data.view().data, 0x38, kRows * kDim);  // 1
    for (std::int64_t g = 0; g < kRows * groups; ++g)
      scale.view().as<float>()[g] = static_cast<float>(g + 1);
    const DequantiseArgs args = {data, scale, output};
    for_each_implementation(args, [&](const std::string&) {
      bench::poison(output);
      dequantise(args, {});
      for (std::int64_t n = 0; n < kRows * kDim; ++n)
        ASSERT_EQ(output.view().as<float>()[n], static_cast<float>(n / (kDim / groups) + 1)) << n;
    });
  }
}

// Numbers that were quantised to powers of two once come back unchanged from then on.
TEST(Dequantise, QuantisingItsOwnNumbersChangesNone) {
  const Array source(DType::kF32, {40, 128}), data(DType::kE4M3, {40, 128}),
      scale(DType::kE8M0, {40, 4}), once(DType::kF32, {40, 128}), twice(DType::kF32, {40, 128});
  bench::Random random(2);
  bench::fill_gauss(source, random);
  for (std::int64_t n = 0; n < source.elements(); ++n)
    source.as<float>()[n] *= std::ldexp(1.f, static_cast<int>(random.below(40)) - 20);
  quantise({source, true, 0, data, scale}, {});
  for_each_implementation(DequantiseArgs{data, scale, once}, [&](const std::string&) {
    quantise({source, true, 0, data, scale}, {});
    dequantise({data, scale, once}, {});
    quantise({once, true, 0, data, scale}, {});
    dequantise({data, scale, twice}, {});
    EXPECT_EQ(
        std::memcmp(once.as<void>(), twice.as<void>(), static_cast<std::size_t>(once.bytes())), 0);
  });
}

// A view into wider rows and heads, and an output with gaps, which stay as they were.
TEST(Dequantise, StridedRowsAndHeads) {
  const Array wide(DType::kE4M3, {5, 3, 80}), scales(DType::kE8M0, {5, 3, 9}),
      plain(DType::kE4M3, {5, 3, 32}), plain_scale(DType::kE8M0, {5, 3, 2}),
      want(DType::kF32, {5, 3, 32}), output(DType::kF32, {5, 3, 50});
  bench::Random random(8);
  for (std::int64_t n = 0; n < wide.elements(); ++n)
    wide.as<std::uint8_t>()[n] = static_cast<std::uint8_t>(random.below(127));
  for (std::int64_t n = 0; n < scales.elements(); ++n)
    scales.as<std::uint8_t>()[n] = static_cast<std::uint8_t>(100 + random.below(50));
  for (std::int64_t r = 0; r < 15; ++r) {
    std::memcpy(plain.as<char>() + r * 32, wide.as<char>() + r * 80 + 11, 32);
    std::memcpy(plain_scale.as<char>() + r * 2, scales.as<char>() + r * 9 + 5, 2);
  }
  const DequantiseArgs args = {wide.view().channels(11, 32), scales.view().channels(5, 2),
                               output.view().channels(4, 32)};
  for_each_implementation(args, [&](const std::string&) {
    std::memset(output.as<void>(), 0, static_cast<std::size_t>(output.bytes()));
    dequantise({plain, plain_scale, want}, {});
    dequantise(args, {});
    for (std::int64_t n = 0; n < output.elements(); ++n) {
      const std::int64_t d = n % 50 - 4;
      EXPECT_EQ(output.as<float>()[n], d < 0 || d >= 32 ? 0 : want.as<float>()[n / 50 * 32 + d]);
    }
  });
}

TEST(Dequantise, RefusesWhatTheRuleDoesNotSay) {
  const Array data(DType::kE4M3, {2, 64}), scale(DType::kE8M0, {2, 2}), three(DType::kF32, {2, 3}),
      other(DType::kF32, {3, 2}), output(DType::kF32, {2, 64}), half(DType::kBF16, {2, 64}),
      narrow(DType::kF32, {2, 32});
  const auto message = [](const DequantiseArgs& a) { return error_of([&] { dequantise(a, {}); }); };
  EXPECT_EQ(message({data, scale, output}), "");
  EXPECT_EQ(message({data, three, output}),
            "[dequantise] the groups of scale must divide the 64 channels of data, got 3");
  EXPECT_EQ(message({data, other, output}),
            "[dequantise] scale must have the leading axes of data, e4m3 [2, 64], got f32 [3, 2]");
  EXPECT_EQ(message({output, scale, output}), "[dequantise] data must be of dtype e4m3, got f32");
  EXPECT_EQ(message({data, scale, half}), "[dequantise] output must be of dtype f32, got bf16");
  EXPECT_NE(message({data, scale, narrow}), "");
}

}  // namespace
}  // namespace winnow::testing
