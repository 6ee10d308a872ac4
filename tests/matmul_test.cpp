// nn::matmul: equal, bit for bit, to one scalar chain of multiply-adds per element, for every
// layout, shape, tiling and number of threads.
#include "nn/matmul.h"

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "bench/bounds.h"
#include "bench/data.h"
#include "bench/guarded.h"
#include "tests/gradient.h"
#include "winnow/implementations.h"
#include "winnow/threads.h"

namespace winnow::nn {
namespace {

using bench::fill_gauss;
using bench::Guarded;
using bench::Random;

struct Shape {
  std::int64_t m, n, k;
};

// [rows, columns] as a view of guarded memory whose last byte is the last element, with `gap` spare
// elements between the rows; transposed: the columns are contiguous.
struct Operand {
  Guarded memory;
  Tensor view;
  Operand(std::int64_t rows, std::int64_t columns, bool transposed, std::int64_t gap,
          std::uint64_t seed, DType dtype = DType::kF32) {
    const std::int64_t lines = transposed ? columns : rows, length = transposed ? rows : columns;
    memory = Guarded(dtype, {lines, length + gap});
    Random random(seed);
    fill_gauss(memory, random);
    view = memory.view().channels(gap, length);
    if (transposed) view = view.transposed();
  }
};

float get(const Tensor& t, std::int64_t i, std::int64_t j) {
  return t.as<float>()[i * t.strides[0] + j * t.strides[1]];
}

// The chain of the contract: fused on AVX2, a product and a sum in portable code.
std::vector<float> chains(const Tensor& a, const Tensor& b, const Tensor& c, bool accumulate,
                          bool fused) {
  std::vector<float> all;
  for (std::int64_t i = 0; i < c.shape[0]; ++i) {
    for (std::int64_t j = 0; j < c.shape[1]; ++j) {
      float sum = accumulate ? get(c, i, j) : 0.f;
      for (std::int64_t k = 0; k < a.shape[1]; ++k) {
        const float x = get(a, i, k), y = get(b, k, j);
        sum = fused ? std::fma(x, y, sum) : x * y + sum;
      }
      all.push_back(sum);
    }
  }
  return all;
}

class Pin {
 public:
  explicit Pin(const std::string& implementation) { pin_implementation("matmul", implementation); }
  ~Pin() { pin_implementation("matmul", ""); }
};

std::vector<std::string> fast_implementations() {
  std::vector<std::string> names;
  const Tensor one = make_tensor(nullptr, DType::kF32, {1, 1});
  for (const Verdict& v : explain_matmul(one, one, one).verdicts) {
    if (v.refusal.empty() && v.implementation != "reference") names.push_back(v.implementation);
  }
  return names;
}

// Every layout of A and B, with and without accumulation, rows side by side or apart.
void expect_chains(const Shape& s, const std::string& implementation) {
  const Pin pin(implementation);
  for (int layout = 0; layout < 8; ++layout) {
    const bool a_transposed = (layout & 1) != 0, b_transposed = (layout & 2) != 0;
    const bool accumulate = (layout & 4) != 0;
    const std::int64_t gap = layout % 3;
    const Operand a(s.m, s.k, a_transposed, gap, 1), b(s.k, s.n, b_transposed, gap, 2);
    const Operand c(s.m, s.n, layout == 5, gap, 3);
    const std::vector<float> expected =
        chains(a.view, b.view, c.view, accumulate, implementation != "cpu.portable");
    matmul(a.view, b.view, c.view, accumulate);
    EXPECT_EQ(last_implementation("matmul"), implementation);
    std::int64_t wrong = 0;
    for (std::int64_t i = 0; i < s.m; ++i) {
      for (std::int64_t j = 0; j < s.n; ++j) {
        wrong += get(c.view, i, j) != expected[static_cast<std::size_t>(i * s.n + j)];
      }
    }
    EXPECT_EQ(wrong, 0) << implementation << " " << s.m << " x " << s.n << " x " << s.k
                        << ", layout " << layout;
  }
}

TEST(Matmul, IsOneChainPerElement) {
  for (const std::string& implementation : fast_implementations()) {
    for (const std::int64_t m : {1, 2, 3, 4, 5, 6, 7, 9, 13, 17, 31, 33, 130}) {
      expect_chains({m, 35, 77}, implementation);
    }
    for (const std::int64_t n : {1, 2, 7, 8, 15, 16, 17, 64}) {
      expect_chains({5, n, 19}, implementation);
      expect_chains({40, n, 19}, implementation);
    }
    for (const std::int64_t k : {0, 1, 7, 8, 9, 15, 64, 65, 511, 512, 513}) {
      expect_chains({7, 18, k}, implementation);
      expect_chains({38, 18, k}, implementation);
    }
    // Several tasks, several blocks of k, several panels.
    expect_chains({250, 34, 530}, implementation);
    expect_chains({50, 270, 40}, implementation);
    expect_chains({9, 270, 530}, implementation);
    expect_chains({0, 5, 3}, implementation);
    expect_chains({5, 0, 3}, implementation);
  }
}

// The bits of C, for any number of threads.
TEST(Matmul, ThreadsDoNotMatter) {
  const int before = num_threads();
  for (const bool b_transposed : {false, true}) {
    for (const std::int64_t m : {20, 300}) {
      const Operand a(m, 90, false, 0, 1), b(90, 530, b_transposed, 0, 2);
      const Operand one(m, 530, false, 0, 3), three(m, 530, false, 0, 4);
      set_num_threads(1);
      matmul(a.view, b.view, one.view);
      set_num_threads(3);
      matmul(a.view, b.view, three.view);
      for (std::int64_t i = 0; i < m; ++i) {
        for (std::int64_t j = 0; j < 530; ++j) {
          ASSERT_EQ(get(one.view, i, j), get(three.view, i, j));
        }
      }
    }
  }
  set_num_threads(before);
}

TEST(Matmul, ARowAloneEqualsTheBatch) {
  for (const bool b_transposed : {false, true}) {
    const Operand a(50, 70, false, 3, 1), b(70, 45, b_transposed, 0, 2);
    const Operand all(50, 45, false, 0, 3), alone(1, 45, false, 0, 4);
    matmul(a.view, b.view, all.view);
    for (std::int64_t i = 0; i < 50; ++i) {
      matmul(a.view.rows(i, 1), b.view, alone.view);
      for (std::int64_t j = 0; j < 45; ++j) {
        ASSERT_EQ(get(alone.view, 0, j), get(all.view, i, j)) << "row " << i;
      }
    }
  }
}

TEST(Matmul, TheReferenceServesF64AndOddStrides) {
  const std::int64_t m = 9, n = 70, k = 11;
  const Operand a(m, k, false, 0, 1, DType::kF64), b(k, n, true, 0, 2, DType::kF64);
  const Operand c(m, n, false, 0, 3, DType::kF64);
  matmul(a.view, b.view, c.view);
  EXPECT_EQ(last_implementation("matmul"), "reference");
  for (std::int64_t i = 0; i < m; ++i) {
    for (std::int64_t j = 0; j < n; ++j) {
      double sum = 0, magnitude = 0;
      for (std::int64_t x = 0; x < k; ++x) {
        const double term = a.view.as<double>()[i * k + x] * b.view.as<double>()[j * k + x];
        sum += term;
        magnitude += std::abs(term);
      }
      // k products and k sums, here and there: at most 2 gamma(k) of the magnitudes.
      EXPECT_NEAR(c.view.as<double>()[i * n + j], sum, 2.0 * k * 0x1p-53 * magnitude);
    }
  }
  const Operand wide(4, 10, false, 0, 1), weight(5, 3, false, 0, 2), out(4, 3, false, 0, 3);
  Tensor every_second = wide.view;
  every_second.shape[1] = 5;
  every_second.strides[1] = 2;
  matmul(every_second, weight.view, out.view);
  EXPECT_EQ(last_implementation("matmul"), "reference");
  for (std::int64_t i = 0; i < 4; ++i) {
    for (std::int64_t j = 0; j < 3; ++j) {
      double sum = 0;
      for (std::int64_t x = 0; x < 5; ++x) {
        sum += static_cast<double>(get(every_second, i, x)) *
               static_cast<double>(get(weight.view, x, j));
      }
      EXPECT_EQ(get(out.view, i, j), static_cast<float>(sum));  // exact products, same order
    }
  }
}

TEST(Matmul, ErrorsNameRuleAndValue) {
  const Operand a(2, 3, false, 0, 1), b(4, 5, false, 0, 2), c(2, 5, false, 0, 3);
  try {
    matmul(a.view, b.view, c.view);
    ADD_FAILURE() << "no error";
  } catch (const Error& e) {
    EXPECT_STREQ(e.what(), "[matmul] b must be [K, N] = [3, any], got f32 [4, 5]");
  }
  const Operand wide(3, 5, false, 0, 2, DType::kF64);
  EXPECT_THROW(matmul(a.view, wide.view, c.view), Error);
}

TEST(Matmul, InPlaceIsRefused) {
  const Operand a(3, 3, false, 0, 1), b(3, 3, false, 0, 2);
  const auto message = [&](const Tensor& c) {
    try {
      matmul(a.view, b.view, c);
    } catch (const Error& e) {
      return std::string(e.what());
    }
    return std::string("no error");
  };
  EXPECT_EQ(message(a.view), "[matmul] c must not share memory with a, but they begin together");
  EXPECT_EQ(message(b.view), "[matmul] c must not share memory with b, but they begin together");
}

// Heads beside one another in one buffer: their byte ranges overlap, their elements do not.
TEST(Matmul, OneHeadIntoTheNextOfTheSameRows) {
  const Operand heads(4, 6, false, 0, 1), b(3, 3, false, 0, 2), apart(4, 3, false, 0, 3);
  const Tensor from = heads.view.channels(0, 3), into = heads.view.channels(3, 3);
  matmul(from, b.view, apart.view);
  matmul(from, b.view, into);
  for (std::int64_t i = 0; i < 4; ++i) {
    for (std::int64_t j = 0; j < 3; ++j) EXPECT_EQ(get(into, i, j), get(apart.view, i, j));
  }
}

TEST(Linear, GradientsAndLeadingAxes) {
  Guarded x(DType::kF64, {2, 3, 4}), weight(DType::kF64, {5, 4}), w(DType::kF64, {2, 3, 5});
  Guarded y(DType::kF64, {2, 3, 5}), d_x(DType::kF64, {2, 3, 4}), d_weight(DType::kF64, {5, 4});
  Random random(1);
  for (const Guarded* t : {&x, &weight, &w}) fill_gauss(*t, random);
  auto loss = [&] {
    linear(x, weight, y);
    double sum = 0;
    for (std::int64_t i = 0; i < 30; ++i)
      sum += w.view().as<double>()[i] * y.view().as<double>()[i];
    return sum;
  };
  linear_backward(x, weight, w, d_x, d_weight);
  test::expect_gradient(x, d_x, 30, loss);
  test::expect_gradient(weight, d_weight, 30, loss);
  const std::vector<double> once(d_x.view().as<double>(), d_x.view().as<double>() + 24);
  linear_backward(x, weight, w, d_x, {}, true);
  for (std::size_t i = 0; i < 24; ++i) {
    EXPECT_NEAR(d_x.view().as<double>()[i], 2 * once[i], 1e-14 * 30);
  }
}

}  // namespace
}  // namespace winnow::nn
