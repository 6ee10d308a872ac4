// quantise and dequantise at the edges of the rule, each against numbers worked out by hand.
#include "winnow/quantise.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "bench/case.h"
#include "bench/data.h"
#include "tests/each.h"
#include "winnow/dequantise.h"
#include "winnow/hadamard.h"
#include "winnow/index_scores.h"

namespace winnow::testing {
namespace {

struct Quantised {
  std::vector<std::uint8_t> data;
  std::vector<double> scale;
};

// One row in groups; the answer of every implementation, which must agree.
Quantised quantised(const std::vector<float>& x, std::int64_t groups, DType scale_dtype,
                    bool power_of_two, double floor = 0) {
  const auto dim = static_cast<std::int64_t>(x.size());
  const Array data(DType::kE4M3, {1, dim}), scale(scale_dtype, {1, groups});
  const QuantiseArgs args = {make_tensor(x.data(), DType::kF32, {1, dim}), power_of_two, floor,
                             data, scale};
  Quantised first;
  for_each_implementation(args, [&](const std::string&) {
    quantise(args, {});
    Quantised q;
    q.data.assign(data.as<std::uint8_t>(), data.as<std::uint8_t>() + dim);
    for (std::int64_t g = 0; g < groups; ++g) q.scale.push_back(at(scale, g));
    if (first.data.empty()) first = q;
    EXPECT_EQ(q.data, first.data);
    for (std::size_t g = 0; g < q.scale.size(); ++g) {
      EXPECT_TRUE(q.scale[g] == first.scale[g] || std::isnan(first.scale[g]));
    }
  });
  return first;
}

std::vector<float> block_of(float largest) {
  std::vector<float> x(32, largest / 3);
  x[7] = -largest;
  return x;
}

// Round up: amax is exactly 448 * 2^e, a hair above, a hair below.
TEST(Quantise, ScalesRoundUpToAPowerOfTwo) {
  for (int e = -110; e <= 119; ++e) {
    const float amax = std::ldexp(448.f, e);
    EXPECT_EQ(quantised(block_of(amax), 1, DType::kE8M0, true).scale[0], std::ldexp(1., e)) << e;
    EXPECT_EQ(quantised(block_of(std::nextafter(amax, INFINITY)), 1, DType::kE8M0, true).scale[0],
              std::ldexp(1., e + 1))
        << e;
    EXPECT_EQ(quantised(block_of(std::nextafter(amax, 0.f)), 1, DType::kE8M0, true).scale[0],
              std::ldexp(1., e))
        << e;
    const Quantised exact = quantised(block_of(amax), 1, DType::kE8M0, true);
    EXPECT_EQ(exact.data[7], 0xfe) << e;  // -448: nothing saturates
    EXPECT_EQ(quantised(block_of(std::nextafter(amax, INFINITY)), 1, DType::kF32, true).data[7],
              0xf6)
        << e;  // -224
  }
}

TEST(Quantise, TheLargestAndTheSmallestNumbers) {
  const float largest = std::numeric_limits<float>::max();
  const Quantised top = quantised(block_of(largest), 1, DType::kE8M0, true);
  EXPECT_EQ(top.scale[0], 0x1p120);
  EXPECT_EQ(top.data[7], 0xf8);  // -256
  for (const float tiny : {0x1p-149f, 0x1p-140f, 0x1p-127f, 0x1p-126f}) {
    const Quantised q = quantised(block_of(tiny), 1, DType::kE8M0, true);
    EXPECT_EQ(q.scale[0], 0x1p-127) << tiny;
    const double want = -static_cast<double>(tiny) * 0x1p127;
    EXPECT_EQ(to_float(E4M3{q.data[7]}), to_float(to_e4m3(static_cast<float>(want)))) << tiny;
  }
  // amax / 448 is no f32 above 0: scale 0, data 0.
  const Quantised none = quantised(block_of(0x1p-145f), 1, DType::kF32, false);
  EXPECT_EQ(none.scale[0], 0);
  EXPECT_EQ(none.data[7], 0x80);
  EXPECT_EQ(none.data[0], 0x00);
}

// amax = 0: byte 0, which decodes as 2^-127, and data 0.
TEST(Quantise, ZerosGiveByteZeroAndDataZero) {
  const std::vector<float> zeros(64, 0.f);
  const Array data(DType::kE4M3, {2, 32}), scale(DType::kE8M0, {2, 1});
  const QuantiseArgs args = {make_tensor(zeros.data(), DType::kF32, {2, 32}), true, 0, data, scale};
  for_each_implementation(args, [&](const std::string&) {
    std::memset(scale.view().data, 0x55, 2);
    std::memset(data.view().data, 0x55, 64);
    quantise(args, {});
    for (int i = 0; i < 2; ++i) EXPECT_EQ(scale.as<std::uint8_t>()[i], 0);
    for (int i = 0; i < 64; ++i) EXPECT_EQ(data.as<std::uint8_t>()[i], 0);
  });
  EXPECT_EQ(quantised(zeros, 2, DType::kF32, false).scale[1], 0);
}

TEST(Quantise, NanAndInfinityStayInTheirGroup) {
  for (const float bad : {NAN, INFINITY, -INFINITY}) {
    std::vector<float> x(96, 1.f);
    x[40] = bad;
    for (const DType dtype : {DType::kF32, DType::kE8M0}) {
      const Quantised q = quantised(x, 3, dtype, true);
      for (std::size_t d = 0; d < 96; ++d)
        EXPECT_EQ(q.data[d], d / 32 == 1 ? 0x7f : to_e4m3(256).bits) << d;
      EXPECT_TRUE(std::isnan(q.scale[1]));
      EXPECT_EQ(q.scale[0], 0x1p-8);
    }
  }
}

TEST(Quantise, ScaleOfARowIsItsLargestOver448) {
  const Quantised q = quantised({1, -3, 2, 0.5f}, 1, DType::kF32, false);
  EXPECT_EQ(q.scale[0], 3.f / 448.f);
  EXPECT_EQ(to_float(E4M3{q.data[1]}), -448);
  EXPECT_EQ(to_float(E4M3{q.data[0]}), 144);  // 149.33
  EXPECT_EQ(to_float(E4M3{q.data[3]}), 72);   // 74.67
  EXPECT_EQ(quantised({0, 0}, 1, DType::kF32, false, 1e-4).scale[0], 1e-4f / 448.f);
  EXPECT_EQ(quantised({0, 0}, 1, DType::kF32, true, 1e-4).scale[0],
            0x1p-22);  // 1e-4/448 = 2^-22.09
}

// M1: every group has a scale of its own; rows of very different sizes come back within one
// quantum.
TEST(Quantise, M1TheScaleIsThatOfItsOwnRow) {
  constexpr std::int64_t kRows = 64, kDim = 128, kGroups = 4;
  const double sizes[] = {1, 8, 0.125, 32};
  const Array input(DType::kF32, {kRows, kDim}), back(DType::kF32, {kRows, kDim});
  const Array data(DType::kE4M3, {kRows, kDim}), scale(DType::kE8M0, {kRows, kGroups});
  bench::Random random(5);
  for (std::int64_t i = 0; i < kRows; ++i)
    for (std::int64_t d = 0; d < kDim; ++d)
      input.as<float>()[i * kDim + d] =
          static_cast<float>(random.gauss() * sizes[(i + d / 32) % 4]);
  const QuantiseArgs args = {input, true, 0, data, scale};
  const DequantiseArgs decode = {data, scale, back};
  for_each_implementation(args, [&](const std::string&) {
    quantise(args, {});
    for_each_implementation(decode, [&](const std::string&) {
      dequantise(decode, {});
      for (std::int64_t n = 0; n < kRows * kDim; ++n) {
        const double x = at(input, n), s = at(scale, n / 32);
        // Half of the distance between codes: 2^-4 of the number, and half of the least code.
        EXPECT_LE(std::abs(at(back, n) - x), std::max(std::abs(x) * 0x1p-4, s * 0x1p-10)) << n;
      }
    });
  });
}

// Pooled keys (and queries) of KPool in E4M3: rotated, rounded to BF16, a power of two per row with
// amax at least 1e-4, and back to f32. Three operations; the rule written out beside them.
TEST(Quantise, PooledKeysAreRotatedRoundedAndQuantised) {
  constexpr std::int64_t kRows = 5, kDim = 64;
  const Array x(DType::kF32, {kRows, kDim}), y(DType::kBF16, {kRows, kDim}),
      data(DType::kE4M3, {kRows, kDim}), scale(DType::kF32, {kRows, 1}),
      output(DType::kF32, {kRows, kDim});
  bench::Random random(9);
  bench::fill_gauss(x, random, 5);
  for (std::int64_t d = 0; d < kDim; ++d) {
    x.as<float>()[3 * kDim + d] *= 1e-7f;  // below the floor
    x.as<float>()[4 * kDim + d] = 0;
  }
  Scratch scratch;
  const HadamardArgs rotate = {x, y};
  hadamard(rotate, scratch.get(hadamard_workspace_bytes(rotate)));
  const QuantiseArgs args = {y, true, 1e-4, data, scale};
  for_each_implementation(args, [&](const std::string&) {
    quantise(args, {});
    dequantise({data, scale, output}, {});
    for (std::int64_t i = 0; i < kRows; ++i) {
      double amax = 1e-4f;
      for (std::int64_t d = 0; d < kDim; ++d) amax = std::max(amax, std::abs(at(y, i * kDim + d)));
      const double power = std::exp2(std::ceil(std::log2(amax / 448)));  // no amax is near an edge
      EXPECT_EQ(at(scale, i), power);
      for (std::int64_t d = 0; d < kDim; ++d) {
        const double clamped = std::clamp(at(y, i * kDim + d) / power, -448., 448.);
        EXPECT_EQ(at(output, i * kDim + d),
                  to_double(to_e4m3(static_cast<float>(clamped))) * power);
      }
    }
  });
}

// M4: a row of an index cache of 128 channels is 132 bytes in MXFP8 and in FP8, on any machine:
// codes and scales are written side by side into rows of exactly that many, with nothing behind the
// last, and the scorer reads them there. (68 bytes would be FP4, which there is not.)
TEST(Quantise, M4ARowOf128ChannelsTakes132Bytes) {
  constexpr std::int64_t kKeys = 70, kDim = 128, kRow = 132;
  const Array source(DType::kF32, {kKeys, kDim}), query(DType::kF32, {3, 2, kDim}),
      query_data(DType::kE4M3, {3, 2, kDim}), weights(DType::kF32, {3, 2}),
      starts = ints({3}, {0, 0, 5}), ends = ints({3}, {70, 64, 69});
  bench::Random random(12);
  bench::fill_gauss(source, random);
  bench::fill_gauss(query, random);
  bench::fill_gauss(weights, random);
  for (const bool mxfp8 : {true, false}) {
    const DType dtype = mxfp8 ? DType::kE8M0 : DType::kF32;
    const std::int64_t groups = mxfp8 ? 4 : 1;
    const bench::Guarded cache(DType::kU8, {kKeys, kRow});
    Tensor data = make_tensor(cache.view().data, DType::kE4M3, {kKeys, kDim});
    Tensor scale = make_tensor(cache.view().as<char>() + kDim, dtype, {kKeys, groups});
    data.strides[0] = kRow;
    scale.strides[0] = kRow / dtype_bytes(dtype);
    const Array want_data(DType::kE4M3, {kKeys, kDim}), want_scale(dtype, {kKeys, groups}),
        query_scale(dtype, {3, 2, groups});
    quantise({source, mxfp8, 0, want_data, want_scale}, {});
    quantise({query, mxfp8, 0, query_data, query_scale}, {});
    const QuantiseArgs args = {source, mxfp8, 0, data, scale};
    for_each_implementation(args, [&](const std::string&) {
      bench::poison(cache);
      quantise(args, {});
      for (std::int64_t j = 0; j < kKeys; ++j) {
        const auto* row = cache.view().as<std::uint8_t>() + j * kRow;
        EXPECT_EQ(std::memcmp(row, want_data.as<std::uint8_t>() + j * kDim, kDim), 0) << j;
        EXPECT_EQ(std::memcmp(row + kDim, want_scale.as<std::uint8_t>() + j * 4, 4), 0) << j;
      }
    });
    const Array scores(DType::kF32, {3, kKeys}), want(DType::kF32, {3, kKeys});
    IndexScoresArgs score = {query_data, data, weights, starts, ends, true, scores};
    if (mxfp8) score.index_query_scale = query_scale;
    score.index_key_scale = scale;
    IndexScoresArgs apart = score;
    apart.index_key = want_data;
    apart.index_key_scale = want_scale;
    apart.index_scores = want;
    if (!mxfp8) {
      score.index_key_scale = scale.rows(0, kKeys);
      for (Tensor* t : {&score.index_key_scale, &apart.index_key_scale}) t->rank = 1;
    }
    for_each_implementation(score, [&](const std::string&) {
      Scratch scratch;
      index_scores(score, scratch.get(index_scores_workspace_bytes(score)));
      index_scores(apart, scratch.get(index_scores_workspace_bytes(apart)));
      EXPECT_EQ(std::memcmp(scores.as<void>(), want.as<void>(), 3 * kKeys * 4), 0);
      EXPECT_NE(at(scores, 69), 0);
    });
  }
}

TEST(Quantise, StridedRowsAndHeads) {
  const Array wide(DType::kBF16, {5, 3, 80}), data(DType::kE4M3, {5, 3, 50}),
      scale(DType::kF32, {5, 3, 9}), plain(DType::kBF16, {5, 3, 32}),
      want(DType::kE4M3, {5, 3, 32}), want_scale(DType::kF32, {5, 3, 2});
  bench::Random random(3);
  bench::fill_gauss(wide, random);
  for (std::int64_t r = 0; r < 15; ++r)
    for (std::int64_t d = 0; d < 32; ++d)
      plain.as<BF16>()[r * 32 + d] = wide.as<BF16>()[r * 80 + 11 + d];
  const QuantiseArgs plain_args = {plain, false, 0, want, want_scale};
  const QuantiseArgs args = {wide.view().channels(11, 32), false, 0, data.view().channels(4, 32),
                             scale.view().channels(5, 2)};
  quantise(plain_args, {});
  for_each_implementation(args, [&](const std::string&) {
    quantise(args, {});
    for (std::int64_t r = 0; r < 15; ++r) {
      for (std::int64_t d = 0; d < 50; ++d) {
        const int code = d < 4 || d >= 36 ? 0 : want.as<std::uint8_t>()[r * 32 + d - 4];
        EXPECT_EQ(data.as<std::uint8_t>()[r * 50 + d], code);
      }
      for (std::int64_t g = 0; g < 9; ++g) {
        EXPECT_EQ(at(scale, r * 9 + g), g < 5 || g >= 7 ? 0 : at(want_scale, r * 2 + g - 5));
      }
    }
  });
}

TEST(Quantise, RefusesWhatTheRuleDoesNotSay) {
  const Array x(DType::kF32, {2, 64}), data(DType::kE4M3, {2, 64}), scale(DType::kE8M0, {2, 2}),
      three(DType::kF32, {2, 3}), other(DType::kF32, {3, 2});
  const auto message = [](const QuantiseArgs& a) { return error_of([&] { quantise(a, {}); }); };
  EXPECT_EQ(message({x, false, 0, data, scale}),
            "[quantise] an e8m0 scale needs power_of_two, got false");
  EXPECT_EQ(message({x, true, 0, data, three}),
            "[quantise] the groups of scale must divide the 64 channels of input, got 3");
  EXPECT_EQ(message({x, true, 0, data, other}),
            "[quantise] scale must have the leading axes of input, f32 [2, 64], got f32 [3, 2]");
  EXPECT_EQ(message({x, true, -1, data, scale}),
            "[quantise] amax_floor must be from 0 to 1e30, got -1");
  EXPECT_EQ(message({x, true, 0, x, scale}), "[quantise] data must be of dtype e4m3, got f32");
  EXPECT_EQ(message({data, true, 0, data, scale}),
            "[quantise] input must be of dtype f32, bf16, f16, got e4m3");
}

}  // namespace
}  // namespace winnow::testing
