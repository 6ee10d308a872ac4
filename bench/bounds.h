// Error bounds of f32 arithmetic, for comparisons with the double reference. Every bound that a
// test uses is derived where it is used, from these.
#pragma once

#include <cmath>
#include <string>

#include "base/check.h"
#include "bench/case.h"
#include "bench/placement.h"

namespace winnow::bench {

inline constexpr double kUnit = 0x1p-24;  // f32 unit roundoff

// gamma_n = n u / (1 - n u): relative error of a sum or product of n rounded operations, measured
// against the sum of the magnitudes of its terms (Higham, Accuracy and Stability, section 3.1).
inline double gamma(double n) { return n * kUnit / (1 - n * kUnit); }

// gamma_n of the arithmetic of a call: f32, or double where its inputs are f64. The unit of double,
// 2^-53, is 2^-29 of f32's, and n u / (1 - n u) shrinks by at least that. The truth of an f64 call
// is rounded in double too; no room is left for that, so such a call has n roundings in all.
inline double gamma_of(DType inputs, double n) {
  return inputs == DType::kF64 ? gamma(n) * 0x1p-29 : gamma(n);
}

// The same of sums of products that GPUs form on matrix units where the inputs have 16 bits:
// products are exact, and additions truncate to 24 bits or more, so that each is off by up to 2 u.
inline double product_gamma(DType inputs, double n) {
  const bool matrix_units = current_device().kind == Device::Kind::kCuda &&
                            (inputs == DType::kBF16 || inputs == DType::kF16);
  return gamma_of(inputs, matrix_units ? 2 * n : n);
}

// The worst element so far, as |difference| / bound. A NaN where the reference has a number (or the
// other way round) is an infinite error; equal infinities agree. So is a bound that is no number:
// it would hide behind every comparison.
class Worst {
 public:
  explicit Worst(std::string output) { comparison_.output = std::move(output); }

  template <class Where>
  void add(double actual, double truth, double bound, Where&& where) {
    double error = 0;
    if (std::isnan(actual) || std::isnan(truth)) {
      error = std::isnan(actual) == std::isnan(truth) ? 0 : INFINITY;
    } else if (actual != truth) {
      error = std::abs(actual - truth) / bound;  // a zero bound: infinite
      if (!std::isfinite(bound) || std::isnan(error)) error = INFINITY;
    }
    note(error, [&] { return fmt::format("{}: {} instead of {}", where(), actual, truth); });
  }

  // An element that must be equal.
  template <class Where>
  void add_exact(bool equal, Where&& where) {
    comparison_.exact = true;
    if (equal) return;
    if (comparison_.error == 0) comparison_.where = where();
    comparison_.error += 1;
  }

  const Comparison& comparison() const { return comparison_; }

 private:
  template <class Where>
  void note(double error, Where&& where) {
    if (error <= comparison_.error) return;
    comparison_.error = error;
    comparison_.where = where();
  }
  Comparison comparison_;
};

}  // namespace winnow::bench
