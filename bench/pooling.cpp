// Bounds of a pooled key, to first order in the unit roundoff u (2^-24; 2^-52 for f64 calls, whose
// truth is rounded as well). Let a_t = gate_t + ape_t, A = max |a_t|, D = max a - min a.
//
//   a_t is rounded once and so is its distance to the largest: the exponent of e_t is off by at
//   most E = u (A + D), and exp by 2 u more. The largest cancels: it divides every e_t and their
//   sum. So a weight e_t * (1 / sum e) has relative error R = 2 E + 4 u + gamma(P - 1) + 2 u; and
//   an absolute one of T = 2^-126, since an exponential below the normal range may be 0.
//
// kOnce: sum_t w_t k_t is off by sum |w_t k_t| (R + gamma(P + 1)) and P T (1 + max |k|); rounding
// to the dtype is monotone, so the result lies between the rounded ends.
// kKeyDtype: every rounding in between is monotone too: each weight, and then each product, lies
// between the rounded ends of its own interval, and the ends are added up, with gamma(P) of the
// sum's own roundings. Where no end crosses a rounding boundary the interval is one number.
#include "bench/pooling.h"

#include <cmath>

#include "base/check.h"
#include "base/numbers.h"

namespace winnow::bench {
namespace {

double rounded(double x, DType dtype) {
  std::uint64_t cell = 0;
  store_double(&cell, dtype, 0, x);
  return load_double(&cell, dtype, 0);
}

}  // namespace

PoolRounding pool_rounding(const Problem& p) {
  const std::string& word = p.word("rounding");
  return word == "once" ? PoolRounding::kOnce : PoolRounding::kKeyDtype;
}

PoolData::PoolData(const Problem& p, std::int64_t tokens, Random& random) {
  const std::int64_t dim = p.number("index_dim");
  const std::string& kind = p.word("data");
  key = Guarded(p.dtype(), {tokens, dim});
  gate = Guarded(p.dtype(), {tokens, dim});
  ape = Guarded(p.dtype() == DType::kF64 ? DType::kF64 : DType::kF32, {p.number("pool_size"), dim});
  if (ShapesOnly::on()) return;
  fill_gauss(key, random);
  if (kind == "flat") return;
  fill_gauss(gate, random, kind == "sharp" ? 60 : 2);
  fill_gauss(ape, random, 0.5);
  if (kind != "special" || dim == 0) return;
  constexpr double kSpecial[] = {NAN, INFINITY, -INFINITY};
  for (std::int64_t t = 0; t < tokens; t += 8) {
    const Tensor& tensor = random.below(2) == 0 ? key.view() : gate.view();
    ref::set(tensor, t, random.below(dim), kSpecial[random.below(3)]);
  }
}

Interval pooled_interval(const std::vector<PooledTerm>& terms, DType dtype, PoolRounding rounding) {
  const double u = dtype == DType::kF64 ? 0x1p-52 : kUnit;
  const double T = dtype == DType::kF64 ? 0x1p-1022 : 0x1p-126;
  const auto P = static_cast<double>(terms.size());
  double top = -INFINITY, low = INFINITY, A = 0, sum = 0, most = 0;
  for (const PooledTerm& term : terms) {
    const double a = term.gate + term.ape;
    if (std::isnan(a) || a == INFINITY) return {NAN, NAN};
    top = std::max(top, a);
    if (a == -INFINITY) continue;  // weighs exactly 0
    low = std::min(low, a);
    A = std::max(A, std::abs(a));
    most = std::max(most, std::abs(term.key));
  }
  if (top == -INFINITY) return {NAN, NAN};
  for (const PooledTerm& term : terms) sum += std::exp(term.gate + term.ape - top);
  const double E = u * (A + (top - low)), R = 2 * E + u * (P + 5);
  Interval total{0, 0};
  double magnitude = 0;
  for (const PooledTerm& term : terms) {
    const double weight = std::exp(term.gate + term.ape - top) / sum;
    if (rounding == PoolRounding::kOnce) {
      total.low += weight * term.key;
      total.high += weight * term.key;
      magnitude += std::abs(weight * term.key);
      continue;
    }
    const double w[] = {rounded(std::max(0.0, weight * (1 - R) - T), dtype),
                        rounded(weight * (1 + R) + T, dtype)};
    const double x = rounded(w[0] * term.key, dtype), y = rounded(w[1] * term.key, dtype);
    total.low += std::min(x, y);
    total.high += std::max(x, y);
    magnitude += std::max(std::abs(x), std::abs(y));
  }
  if (!std::isfinite(magnitude)) return total;  // infinite keys; a NaN among them
  const double own = rounding == PoolRounding::kOnce
                         ? magnitude * (R + u * (P + 1)) + P * T * (1 + most)
                         : magnitude * u * P;
  return {rounded(total.low - own, dtype), rounded(total.high + own, dtype)};
}

}  // namespace winnow::bench
