// Quantised data of problems: numbers that must be equal, and tensors that hold them.
#pragma once

#include <cmath>
#include <string>

#include "base/numbers.h"
#include "bench/bounds.h"
#include "bench/data.h"
#include "bench/guarded.h"

namespace winnow::bench {

// Bit for bit, except that one NaN is as good as another. Contiguous tensors of one shape.
inline Comparison equal_numbers(const char* name, const Tensor& actual, const Tensor& want) {
  Worst worst(name);
  for (std::int64_t i = 0; i < want.elements(); ++i) {
    const double a = load_double(actual.data, actual.dtype, i);
    const double b = load_double(want.data, want.dtype, i);
    const bool equal = std::isnan(b) ? std::isnan(a) : a == b && std::signbit(a) == std::signbit(b);
    worst.add_exact(equal, [&] { return fmt::format("element {}: {} instead of {}", i, a, b); });
  }
  return worst.comparison();
}

}  // namespace winnow::bench
