#include "apps/winnow/golden_bounds.h"

#include <algorithm>
#include <cmath>

#include "apps/winnow/golden_reader.h"
#include "bench/bounds.h"

namespace winnow::app {
namespace {

using bench::gamma;
using bench::kUnit;

// The largest p-norm of a vector along the last axis: p = 2, or 1.
double norm(const Tensor& t, std::int64_t channels, int p) {
  double largest = 0;
  const std::int64_t dim = t.shape[t.rank - 1];
  for (std::int64_t i = 0; i < t.elements(); i += dim) {
    double sum = 0;
    for (std::int64_t d = 0; d < channels; ++d)
      sum += p == 2 ? element(t, i + d) * element(t, i + d) : std::abs(element(t, i + d));
    largest = std::max(largest, p == 2 ? std::sqrt(sum) : sum);
  }
  return largest;
}

double log_of(double n) { return std::log(std::max(1.0, n)); }

double probability_error(double logit, double dim, double n) {
  return 2 * gamma(dim + 1) * logit + gamma(n + 8) + 2 * kUnit * (logit + log_of(n));
}

}  // namespace

double peak(const Tensor& t) {
  double largest = 0;
  for (std::int64_t i = 0; i < t.elements(); ++i)
    largest = std::max(largest, std::abs(element(t, i)));
  return largest;
}
double norm2(const Tensor& t, std::int64_t channels) { return norm(t, channels, 2); }
double norm2(const Tensor& t) { return norm(t, t.shape[t.rank - 1], 2); }
double norm1(const Tensor& t) { return norm(t, t.shape[t.rank - 1], 1); }

AttentionBounds::AttentionBounds(const Tensor& q, const Tensor& k, const Tensor& v,
                                 std::int64_t dim_v, const Tensor& d_output, double scale,
                                 double n) {
  const auto dim = static_cast<double>(q.shape[2]);
  const double m = static_cast<double>(q.shape[0] * q.shape[1]);
  const double v_norm = norm2(v, dim_v), D = norm2(d_output) * v_norm;
  probability = probability_error(scale * norm2(q) * norm2(k), dim, n);
  const double E = 3 * probability + 3 * gamma(static_cast<double>(dim_v) + n + 4);
  output = (probability + gamma(n + 1)) * peak(v);
  d_query = scale * D * (E + 2 * gamma(n + 2)) * peak(k);
  d_key = scale * D * (E + 2 * gamma(m + 2)) * m * peak(q);
  d_value = (probability + gamma(m + 2)) * m * peak(d_output);
}

IndexerBounds::IndexerBounds(const Tensor& q, const Tensor& k, const Tensor& w, double probability,
                             double attention_heads, double n, double d_kl) {
  const auto rows = static_cast<double>(q.shape[0]), heads = static_cast<double>(q.shape[1]);
  const auto dim = static_cast<double>(q.shape[2]);
  const double dot = norm2(q) * norm2(k), w1 = norm1(w), A = w1 * dot;
  score = gamma(dim + heads + 2) * A;
  const double T = 2 * score + gamma(n + 8) + 2 * kUnit * (2 * A + log_of(n));
  const double R = 2 * probability + 2 * gamma(n + attention_heads + 2);
  kl = (R + gamma(n + 2)) * (24 + 2 * A + log_of(n)) + R + T;
  d_weights = d_kl * (R + T + 2 * gamma(dim + n + 3)) * dot;
  d_query = d_kl * (R + T + 2 * gamma(n + 4)) * peak(w) * peak(k);
  d_key = d_kl * (R + T + 2 * gamma(rows * heads + 4)) * rows * w1 * peak(q);
}

}  // namespace winnow::app
