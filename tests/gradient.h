// Finite differences for gradients in f64.
#pragma once

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cmath>

#include "winnow/tensor.h"

namespace winnow::test {

// Compares `gradient` with differences of `loss`, a function of the elements of contiguous f64 `x`.
//
// The five-point rule with h = 1e-3 leaves h^4 / 30 * f^(5), under 1e-12 for the smooth losses of
// these tests (fifth derivatives under 30), and rounding of 1.5 ulp(loss) / h, about 1e-13 of the
// sum of the loss's magnitudes: 1e-9 * `magnitude` has three digits to spare, and a wrong factor or
// sign in any formula is nine digits larger.
template <class Loss>
void expect_gradient(const Tensor& x, const Tensor& gradient, double magnitude, Loss&& loss) {
  constexpr double kStep = 1e-3;
  for (std::int64_t i = 0; i < x.elements(); ++i) {
    double& value = x.as<double>()[i];
    const double kept = value;
    auto at = [&](double steps) {
      value = kept + steps * kStep;
      return loss();
    };
    const double slope = (8 * (at(1) - at(-1)) - (at(2) - at(-2))) / (12 * kStep);
    value = kept;
    EXPECT_NEAR(gradient.as<double>()[i], slope, 1e-9 * magnitude) << "element " << i;
  }
}

}  // namespace winnow::test
