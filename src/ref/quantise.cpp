// The rule of include/winnow/quantise.h the slow way: powers of two by trying them, the nearest
// code by looking at all of them. Quotients of f32 numbers in double, rounded to f32: one rounding.
#include <algorithm>
#include <cmath>
#include <limits>

#include "base/numbers.h"
#include "base/row_offset.h"
#include "ref/implementations.h"

namespace winnow::ref {
namespace {

double quotient(double a, double b) { return static_cast<float>(a / b); }

// The least power of two, from 2^-127, that keeps amax within 448 of it.
double power_scale(double amax) {
  double scale = 0x1p-127;
  while (448 * scale < amax) scale *= 2;
  return scale;
}

// The code nearest to x, in the middle between two the even one.
E4M3 nearest_code(double x) {
  E4M3 best{0};
  for (int code = 0; code < 0x7f; ++code) {
    const E4M3 candidate{static_cast<std::uint8_t>(code)};
    const double near = std::abs(to_double(best) - std::abs(x));
    const double distance = std::abs(to_double(candidate) - std::abs(x));
    if (distance < near || (distance == near && code % 2 == 0)) best = candidate;
  }
  return {static_cast<std::uint8_t>(best.bits | (std::signbit(x) ? 0x80 : 0))};
}

void run(const QuantiseArgs& a, Workspace) {
  const std::int64_t dim = last_extent(a.input), groups = last_extent(a.scale);
  const std::int64_t size = dim / groups;
  const int last = a.input.rank - 1;
  for (std::int64_t row = 0; row < row_count(a.input); ++row) {
    const std::int64_t from = row_offset(a.input, row), to = row_offset(a.data, row);
    for (std::int64_t g = 0; g < groups; ++g) {
      double amax = static_cast<float>(a.amax_floor);
      bool finite = true;
      for (std::int64_t d = g * size; d < (g + 1) * size; ++d) {
        const double x = load_double(a.input.data, a.input.dtype, from + d * a.input.strides[last]);
        finite = finite && std::isfinite(x);
        amax = std::max(amax, std::abs(x));
      }
      double scale = a.power_of_two ? power_scale(finite ? amax : 0) : quotient(amax, 448);
      if (!finite) scale = std::numeric_limits<double>::quiet_NaN();
      store_double(a.scale.data, a.scale.dtype,
                   row_offset(a.scale, row) + g * a.scale.strides[last], scale);
      for (std::int64_t d = g * size; d < (g + 1) * size; ++d) {
        const double x = load_double(a.input.data, a.input.dtype, from + d * a.input.strides[last]);
        E4M3 code{0x7f};
        if (finite) code = nearest_code(scale > 0 ? quotient(x, scale) : std::copysign(0., x));
        a.data.as<E4M3>()[to + d * a.data.strides[last]] = code;
      }
    }
  }
}

}  // namespace

const Implementation<QuantiseArgs> quantise_implementation = {"reference", accept, no_workspace,
                                                              run};

}  // namespace winnow::ref
