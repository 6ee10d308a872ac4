// Norms, RoPE, pointwise functions, embedding and cross entropy: values against plain formulas in
// double, gradients against finite differences, and what their headers promise beyond that.
#include <gtest/gtest.h>

#include <cmath>
#include <numeric>
#include <vector>

#include "base/array.h"
#include "bench/bounds.h"
#include "bench/data.h"
#include "bench/guarded.h"
#include "nn/cross_entropy.h"
#include "nn/embedding.h"
#include "nn/norm.h"
#include "nn/pointwise.h"
#include "nn/rope.h"
#include "tests/gradient.h"
#include "winnow/threads.h"

namespace winnow::nn {
namespace {

using bench::fill_gauss;
using bench::kUnit;
using bench::Random;

Array gauss(DType dtype, std::initializer_list<std::int64_t> shape, std::uint64_t seed,
            double scale = 1) {
  Array a(dtype, shape);
  Random random(seed);
  fill_gauss(a, random, scale);
  return a;
}

double at(const Tensor& t, std::int64_t i) { return load_double(t.data, t.dtype, i); }

// sum of w * y, the loss of the gradient tests.
double dot(const Tensor& w, const Tensor& y) {
  double sum = 0;
  for (std::int64_t i = 0; i < y.elements(); ++i) sum += at(w, i) * at(y, i);
  return sum;
}

double relative_unit(DType dtype) { return dtype == DType::kF64 ? 0x1p-53 : kUnit; }

constexpr DType kReal[] = {DType::kF32, DType::kF64};

TEST(Norm, RmsNormIsTheFormula) {
  for (const DType dtype : kReal) {
    const std::int64_t rows = 70, width = 37;
    const Array x = gauss(dtype, {rows, width}, 1), weight = gauss(dtype, {width}, 2);
    Array y(dtype, {rows, width}), scale(dtype, {rows});
    rms_norm(x, weight, 1e-6, y, scale);
    for (std::int64_t i = 0; i < rows; ++i) {
      double squares = 0;
      for (std::int64_t j = 0; j < width; ++j) squares += std::pow(at(x, i * width + j), 2);
      const double s = 1 / std::sqrt(squares / width + 1e-6);
      // The scale in double, rounded once; two products on top: three roundings. In f64 the sum of
      // squares itself adds `width` of them, half of which pass through the root.
      const double roundings = dtype == DType::kF64 ? width : 4;
      for (std::int64_t j = 0; j < width; ++j) {
        const double truth = at(x, i * width + j) * s * at(weight, j);
        EXPECT_NEAR(at(y, i * width + j), truth,
                    roundings * relative_unit(dtype) * std::abs(truth));
      }
    }
  }
}

TEST(Norm, RmsNormGradient) {
  const Array x = gauss(DType::kF64, {5, 7}, 1), weight = gauss(DType::kF64, {7}, 2);
  const Array w = gauss(DType::kF64, {5, 7}, 3);
  Array y(DType::kF64, {5, 7}), scale(DType::kF64, {5});
  Array d_x(DType::kF64, {5, 7}), d_weight(DType::kF64, {7});
  auto loss = [&] {
    rms_norm(x, weight, 1e-2, y, scale);
    return dot(w, y);
  };
  loss();
  rms_norm_backward(x, weight, scale, w, d_x, d_weight);
  test::expect_gradient(x, d_x, 35, loss);
  test::expect_gradient(weight, d_weight, 35, loss);

  const Array once = d_x.clone();
  rms_norm_backward(x, weight, scale, w, d_x, d_weight, true);
  for (std::int64_t i = 0; i < 35; ++i) EXPECT_DOUBLE_EQ(at(d_x, i), 2 * at(once, i));
}

TEST(Norm, LayerNormIsTheFormula) {
  for (const DType dtype : kReal) {
    const std::int64_t rows = 67, width = 33;
    const Array x = gauss(dtype, {rows, width}, 1), weight = gauss(dtype, {width}, 2);
    const Array bias = gauss(dtype, {width}, 3);
    Array y(dtype, {rows, width}), mean(dtype, {rows}), scale(dtype, {rows});
    layer_norm(x, weight, bias, 1e-6, y, mean, scale);
    for (std::int64_t i = 0; i < rows; ++i) {
      double m = 0, squares = 0;
      for (std::int64_t j = 0; j < width; ++j) m += at(x, i * width + j) / width;
      for (std::int64_t j = 0; j < width; ++j) squares += std::pow(at(x, i * width + j) - m, 2);
      const double s = 1 / std::sqrt(squares / width + 1e-6);
      for (std::int64_t j = 0; j < width; ++j) {
        const double normal = (at(x, i * width + j) - m) * s;
        const double truth = normal * at(weight, j) + at(bias, j);
        // The mean is rounded once (an error of u |mean| s in the normalised value); then a
        // difference, two products and a sum; in f64 also the `width` roundings of each sum.
        const double magnitude =
            (std::abs(at(x, i * width + j)) + std::abs(m)) * s * std::abs(at(weight, j)) +
            std::abs(truth);
        const double roundings = dtype == DType::kF64 ? 2 * width : 5;
        EXPECT_NEAR(at(y, i * width + j), truth, roundings * relative_unit(dtype) * magnitude);
      }
    }
  }
}

TEST(Norm, LayerNormGradient) {
  const Array x = gauss(DType::kF64, {5, 7}, 1), weight = gauss(DType::kF64, {7}, 2);
  const Array bias = gauss(DType::kF64, {7}, 4), w = gauss(DType::kF64, {5, 7}, 3);
  Array y(DType::kF64, {5, 7}), mean(DType::kF64, {5}), scale(DType::kF64, {5});
  Array d_x(DType::kF64, {5, 7}), d_weight(DType::kF64, {7}), d_bias(DType::kF64, {7});
  auto loss = [&] {
    layer_norm(x, weight, bias, 1e-2, y, mean, scale);
    return dot(w, y);
  };
  loss();
  layer_norm_backward(x, weight, mean, scale, w, d_x, d_weight, d_bias);
  test::expect_gradient(x, d_x, 35, loss);
  test::expect_gradient(weight, d_weight, 35, loss);
  test::expect_gradient(bias, d_bias, 35, loss);

  const Array once = d_x.clone();
  layer_norm_backward(x, weight, mean, scale, w, d_x, d_weight, d_bias, true);
  for (std::int64_t i = 0; i < 35; ++i) EXPECT_DOUBLE_EQ(at(d_x, i), 2 * at(once, i));
}

TEST(Pointwise, SwigluGradient) {
  const Array gate = gauss(DType::kF64, {3, 11}, 1, 2), up = gauss(DType::kF64, {3, 11}, 2);
  const Array w = gauss(DType::kF64, {3, 11}, 3);
  Array y(DType::kF64, {3, 11}), d_gate(DType::kF64, {3, 11}), d_up(DType::kF64, {3, 11});
  auto loss = [&] {
    swiglu(gate, up, y);
    return dot(w, y);
  };
  loss();
  for (std::int64_t i = 0; i < 33; ++i) {
    EXPECT_NEAR(at(y, i), at(gate, i) / (1 + std::exp(-at(gate, i))) * at(up, i), 1e-14);
  }
  swiglu_backward(gate, up, w, d_gate, d_up);
  test::expect_gradient(gate, d_gate, 33, loss);
  test::expect_gradient(up, d_up, 33, loss);
}

// In f32, of every length, up to the guard pages. exp8 is within 1 ulp (2 u) of exp; the argument
// is exact. sigmoid: exp, a sum and a quotient, 4 u; two products on top: 6 u. The derivative d u s
// (1 + x (1 - s)) takes 1 - s with an absolute error of 5 u, hence (1 + |x|) beside it.
TEST(Pointwise, SwigluInSinglePrecision) {
  for (std::int64_t width = 1; width <= 40; ++width) {
    const std::initializer_list<std::int64_t> shape = {3, width};
    const bench::Guarded gate(DType::kF32, shape), up(DType::kF32, shape), y(DType::kF32, shape);
    const bench::Guarded d_y(DType::kF32, shape), d_gate(DType::kF32, shape);
    const bench::Guarded d_up(DType::kF32, shape);
    Random random(static_cast<std::uint64_t>(width));
    fill_gauss(gate, random, 20);
    fill_gauss(up, random);
    fill_gauss(d_y, random);
    swiglu(gate, up, y);
    swiglu_backward(gate, up, d_y, d_gate, d_up);
    for (std::int64_t i = 0; i < 3 * width; ++i) {
      const double x = at(gate, i), u = at(up, i), d = at(d_y, i), s = 1 / (1 + std::exp(-x));
      const double tiny = 1e-37;  // below it, f32 has fewer digits
      EXPECT_NEAR(at(y, i), x * s * u, 6 * kUnit * std::abs(x * s * u) + tiny);
      EXPECT_NEAR(at(d_up, i), d * x * s, 6 * kUnit * std::abs(d * x * s) + tiny);
      EXPECT_NEAR(at(d_gate, i), d * u * s * (1 + x * (1 - s)),
                  14 * kUnit * std::abs(d * u * s) * (1 + std::abs(x)) + tiny);
    }
  }
}

TEST(Pointwise, SwigluOfLargeNumbers) {
  const Array gate(DType::kF32, {4}), up(DType::kF32, {4}), y(DType::kF32, {4});
  const float large[] = {-1000, -89, 89, 1000};
  for (int i = 0; i < 4; ++i) {
    gate.as<float>()[i] = large[i];
    up.as<float>()[i] = 1;
  }
  swiglu(gate, up, y);
  for (int i = 0; i < 4; ++i) EXPECT_NEAR(at(y, i), std::max(large[i], 0.f), 1e-36);
}

TEST(Pointwise, Add) {
  for (const DType dtype : kReal) {
    const Array x = gauss(dtype, {5, 13}, 1), before = gauss(dtype, {5, 13}, 2);
    const Array y = before.clone();
    add(x, y);
    for (std::int64_t i = 0; i < 65; ++i) {
      const double sum = at(x, i) + at(before, i);
      EXPECT_EQ(at(y, i), dtype == DType::kF64 ? sum : static_cast<float>(sum));
    }
  }
}

TEST(Rope, PairingDecidesWhichKeyWins) {
  const RopeTable table(3, 4, 10000, DType::kF32);
  for (const RopePairing pairing : {RopePairing::kInterleaved, RopePairing::kHalfSplit}) {
    float query[4] = {1, 0, 0, 0};
    float keys[2][4] = {{0, 1, 0, 0}, {0, 0, 1, 0}};
    const std::int32_t query_position[] = {2}, key_positions[] = {0, 1};
    rope(make_tensor(query, DType::kF32, {1, 1, 4}), query_position, table, pairing);
    rope(make_tensor(keys, DType::kF32, {2, 1, 4}), key_positions, table, pairing);
    const double first = std::inner_product(query, query + 4, keys[0], 0.0);
    const double second = std::inner_product(query, query + 4, keys[1], 0.0);
    const bool interleaved = pairing == RopePairing::kInterleaved;
    EXPECT_NEAR(first, interleaved ? std::sin(2.0) : 0, 4 * kUnit);
    EXPECT_NEAR(second, interleaved ? 0 : std::sin(1.0), 4 * kUnit);
  }
}

TEST(Rope, RotatesEveryPairByItsAngle) {
  const std::int64_t rows = 70, heads = 3, dim = 10;
  const double theta = 10000;
  std::vector<std::int32_t> positions(rows);
  for (std::int64_t i = 0; i < rows; ++i) positions[i] = static_cast<std::int32_t>(i * 7 % 100);
  for (const DType dtype : kReal) {
    const RopeTable table(100, dim, theta, dtype);
    for (const RopePairing pairing : {RopePairing::kInterleaved, RopePairing::kHalfSplit}) {
      // A view of the last channels of a wider tensor: the others must stay.
      const Array wide = gauss(dtype, {rows, heads, dim + 5}, 1), before = wide.clone();
      rope(wide.view().channels(5, dim), positions, table, pairing);
      for (std::int64_t i = 0; i < rows * heads; ++i) {
        const double position = positions[static_cast<std::size_t>(i / heads)];
        const std::int64_t base = i * (dim + 5);
        for (std::int64_t j = 0; j < 5; ++j) EXPECT_EQ(at(wide, base + j), at(before, base + j));
        for (std::int64_t pair = 0; pair < dim / 2; ++pair) {
          const bool split = pairing == RopePairing::kHalfSplit;
          const std::int64_t first = base + 5 + (split ? pair : 2 * pair);
          const std::int64_t second = split ? first + dim / 2 : first + 1;
          const double angle = position * std::pow(theta, -2.0 * static_cast<double>(pair) / dim);
          const double a = at(before, first), b = at(before, second);
          const double bound = 4 * relative_unit(dtype) * (std::abs(a) + std::abs(b)) +
                               1e-14 * (std::abs(a) + std::abs(b));  // of the angle itself
          EXPECT_NEAR(at(wide, first), a * std::cos(angle) - b * std::sin(angle), bound);
          EXPECT_NEAR(at(wide, second), b * std::cos(angle) + a * std::sin(angle), bound);
        }
      }
    }
  }
}

TEST(Rope, TheInverseIsTheBackward) {
  const RopeTable table(50, 6, 100, DType::kF64);
  const std::int32_t positions[] = {0, 3, 49, 17};
  for (const RopePairing pairing : {RopePairing::kInterleaved, RopePairing::kHalfSplit}) {
    const Array x = gauss(DType::kF64, {4, 2, 6}, 1), w = gauss(DType::kF64, {4, 2, 6}, 2);
    auto loss = [&] {
      const Array y = x.clone();
      rope(y, positions, table, pairing);
      return dot(w, y);
    };
    const Array d_x = w.clone();
    rope(d_x, positions, table, pairing, true);
    test::expect_gradient(x, d_x, 48, loss);
  }
}

TEST(Rope, DimZeroDoesNothingAndPositionsAreChecked) {
  const std::int32_t positions[] = {5, 1000};
  const RopeTable none(10, 0, 10000, DType::kF32);
  const Array wide = gauss(DType::kF32, {2, 1, 4}, 1), before = wide.clone();
  rope(wide.view().channels(4, 0), positions, none, RopePairing::kInterleaved);
  const RopeTable table(10, 4, 10000, DType::kF32);
  EXPECT_THROW(rope(wide, positions, table, RopePairing::kInterleaved), Error);
  EXPECT_THROW(rope(wide.view().channels(0, 3), positions, table, RopePairing::kHalfSplit), Error);
  for (std::int64_t i = 0; i < 8; ++i) EXPECT_EQ(at(wide, i), at(before, i));
}

TEST(Embedding, CopiesAndAddsInOrder) {
  const Array table = gauss(DType::kF32, {5, 130}, 1);
  const std::int32_t tokens[] = {4, 0, 4, 4, 2};
  Array y(DType::kF32, {5, 130}), d_table = gauss(DType::kF32, {5, 130}, 2);
  embedding(table, tokens, y);
  for (std::int64_t i = 0; i < 5; ++i) {
    for (std::int64_t j = 0; j < 130; ++j)
      EXPECT_EQ(at(y, i * 130 + j), at(table, tokens[i] * 130 + j));
  }
  const Array d_y = gauss(DType::kF32, {5, 130}, 3), expected = d_table.clone();
  for (std::int64_t i = 0; i < 5; ++i) {
    for (std::int64_t j = 0; j < 130; ++j) {
      expected.as<float>()[tokens[i] * 130 + j] += d_y.as<float>()[i * 130 + j];
    }
  }
  embedding_backward(tokens, d_y, d_table);
  for (std::int64_t i = 0; i < 650; ++i) EXPECT_EQ(at(d_table, i), at(expected, i));
}

TEST(Embedding, RefusesTokensOutsideTheTableBeforeWriting) {
  const Array table = gauss(DType::kF32, {5, 4}, 1), y = gauss(DType::kF32, {2, 4}, 2);
  const Array before = y.clone();
  for (const std::int32_t bad : {-1, 5}) {
    const std::int32_t tokens[] = {0, bad};
    EXPECT_THROW(embedding(table, tokens, y), Error);
    EXPECT_THROW(embedding_backward(tokens, table.view().rows(0, 2), y), Error);
  }
  for (std::int64_t i = 0; i < 8; ++i) EXPECT_EQ(at(y, i), at(before, i));
}

TEST(CrossEntropy, GradientInPlaceAndRowsWithoutTarget) {
  const Array logits = gauss(DType::kF64, {4, 9}, 1, 2);
  const std::int32_t targets[] = {3, -1, 0, 8};
  Array nll(DType::kF64, {4}), d_logits(DType::kF64, {4, 9});
  auto loss = [&] {
    cross_entropy(logits, targets, nll, {}, 0);
    double sum = 0;
    for (std::int64_t i = 0; i < 4; ++i) sum += at(nll, i);
    return 0.25 * sum;
  };
  loss();
  EXPECT_EQ(at(nll, 1), 0);
  for (std::int64_t i = 0; i < 4; ++i) {
    if (targets[i] < 0) continue;
    double sum = 0;
    for (std::int64_t j = 0; j < 9; ++j) sum += std::exp(at(logits, i * 9 + j));
    EXPECT_NEAR(at(nll, i), std::log(sum) - at(logits, i * 9 + targets[i]), 1e-14 * 20);
  }
  cross_entropy(logits, targets, nll, d_logits, 0.25);
  for (std::int64_t j = 0; j < 9; ++j) EXPECT_EQ(at(d_logits, 9 + j), 0);
  test::expect_gradient(logits, d_logits, 36, loss);
  cross_entropy(logits, targets, nll, logits, 0.25);
  for (std::int64_t i = 0; i < 36; ++i) EXPECT_EQ(at(logits, i), at(d_logits, i));
}

// In f32, of every width, up to the guard pages. exp8 of a rounded difference x - top: 2 u, and
// |x - top| u from its argument; the sum is in double. A probability then takes two roundings more;
// the loss is rounded once.
TEST(CrossEntropy, InSinglePrecision) {
  for (std::int64_t vocab = 1; vocab <= 40; ++vocab) {
    const bench::Guarded logits(DType::kF32, {2, vocab}), d_logits(DType::kF32, {2, vocab});
    const bench::Guarded nll(DType::kF32, {2});
    Random random(static_cast<std::uint64_t>(vocab));
    fill_gauss(logits, random, 10);
    const std::int32_t targets[] = {static_cast<std::int32_t>(vocab - 1), 0};
    cross_entropy(logits, targets, nll, d_logits, 0.5);
    for (std::int64_t i = 0; i < 2; ++i) {
      double sum = 0, top = -INFINITY, low = INFINITY;
      for (std::int64_t j = 0; j < vocab; ++j) {
        sum += std::exp(at(logits, i * vocab + j));
        top = std::max(top, at(logits, i * vocab + j));
        low = std::min(low, at(logits, i * vocab + j));
      }
      const double relative = (5 + 2 * (top - low)) * kUnit;
      const double loss = std::log(sum) - at(logits, i * vocab + targets[i]);
      EXPECT_NEAR(at(nll, i), loss, relative + kUnit * std::abs(loss));
      for (std::int64_t j = 0; j < vocab; ++j) {
        const double p = std::exp(at(logits, i * vocab + j)) / sum;
        const double truth = 0.5 * (p - (j == targets[i] ? 1 : 0));
        EXPECT_NEAR(at(d_logits, i * vocab + j), truth, 0.5 * relative + kUnit * std::abs(truth));
      }
    }
  }
}

TEST(CrossEntropy, RefusesTargetsOutsideTheVocabularyBeforeWriting) {
  const Array logits = gauss(DType::kF32, {2, 4}, 1), before = logits.clone();
  Array nll(DType::kF32, {2});
  for (const std::int32_t bad : {-2, 4}) {
    const std::int32_t targets[] = {0, bad};
    EXPECT_THROW(cross_entropy(logits, targets, nll, logits, 1), Error);
  }
  for (std::int64_t i = 0; i < 8; ++i) EXPECT_EQ(at(logits, i), at(before, i));
}

TEST(CrossEntropy, LogSoftmax) {
  for (const DType dtype : kReal) {
    const Array logits = gauss(dtype, {66, 50}, 1, 5);
    Array y(dtype, {66, 50});
    log_softmax(logits, y);
    for (std::int64_t i = 0; i < 66; ++i) {
      double sum = 0;
      for (std::int64_t j = 0; j < 50; ++j) sum += std::exp(at(logits, i * 50 + j));
      for (std::int64_t j = 0; j < 50; ++j) {
        const double truth = at(logits, i * 50 + j) - std::log(sum);
        // One rounding of the result, and a relative error of a few units in the sum of exps.
        EXPECT_NEAR(at(y, i * 50 + j), truth, relative_unit(dtype) * (std::abs(truth) + 50));
      }
    }
  }
}

// Sums over rows, and rows alone: the same bits for every number of threads and neighbours.
TEST(Determinism, ThreadsAndNeighboursDoNotMatter) {
  const int before = num_threads();
  const Array x = gauss(DType::kF32, {300, 45}, 1), weight = gauss(DType::kF32, {45}, 2);
  const Array bias = gauss(DType::kF32, {45}, 3), d_y = gauss(DType::kF32, {300, 45}, 4);
  Array y(DType::kF32, {300, 45}), mean(DType::kF32, {300}), scale(DType::kF32, {300});
  Array d_x[2], d_weight[2], d_bias[2];
  for (int run = 0; run < 2; ++run) {
    set_num_threads(run == 0 ? 1 : 3);
    d_x[run] = Array(DType::kF32, {300, 45});
    d_weight[run] = Array(DType::kF32, {45});
    d_bias[run] = Array(DType::kF32, {45});
    layer_norm(x, weight, bias, 1e-6, y, mean, scale);
    layer_norm_backward(x, weight, mean, scale, d_y, d_x[run], d_weight[run], d_bias[run]);
  }
  set_num_threads(before);
  for (std::int64_t i = 0; i < 300 * 45; ++i) ASSERT_EQ(at(d_x[0], i), at(d_x[1], i));
  for (std::int64_t i = 0; i < 45; ++i) {
    ASSERT_EQ(at(d_weight[0], i), at(d_weight[1], i));
    ASSERT_EQ(at(d_bias[0], i), at(d_bias[1], i));
  }
  Array alone(DType::kF32, {1, 45}), one_mean(DType::kF32, {1}), one_scale(DType::kF32, {1});
  for (std::int64_t i = 0; i < 300; i += 37) {
    layer_norm(x.view().rows(i, 1), weight, bias, 1e-6, alone, one_mean, one_scale);
    for (std::int64_t j = 0; j < 45; ++j) ASSERT_EQ(at(alone, j), at(y, i * 45 + j));
  }
}

}  // namespace
}  // namespace winnow::nn
