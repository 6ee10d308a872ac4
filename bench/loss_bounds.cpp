#include "bench/loss_bounds.h"

#include <cmath>

#include "bench/attention.h"
#include "bench/bounds.h"
#include "ref/attention.h"
#include "ref/attention_mass.h"
#include "ref/kl.h"

namespace winnow::bench {
namespace {

// Roundings of a sum in the order of cpu/kl.h, whatever its length: at most 8 additions per lane
// and 3 in the tree; the additions in double do not count. One more for the rounding of the result.
constexpr double kBlockSum = 12;
constexpr double kTiny = 0x1p-148;  // a result among the subnormals is off by an ulp of theirs

double dot_magnitude(const Tensor& query, const Tensor& key, std::int64_t i, std::int64_t h,
                     std::int64_t j) {
  double sum = 0;
  for (std::int64_t d = 0; d < query.shape[2]; ++d)
    sum += std::abs(ref::get(query, i, h, d) * ref::get(key, j, d));
  return sum;
}

}  // namespace

Approximate approximate_score(const Tensor& query, const Tensor& key, const Tensor& weights,
                              bool relu, std::int64_t i, std::int64_t j) {
  const auto heads = static_cast<double>(query.shape[1]), dim = static_cast<double>(query.shape[2]);
  double magnitude = 0;
  for (std::int64_t h = 0; h < query.shape[1]; ++h)
    magnitude += std::abs(ref::get(weights, i, h)) * dot_magnitude(query, key, i, h, j);
  return {ref::index_score(query, key, weights, relu, i, j),
          product_gamma(query.dtype, dim + heads + 2) * magnitude};
}

Approximate approximate_target(const Tensor& query, const Tensor& key, const Tensor& lse,
                               double scale, std::int64_t i, std::int64_t j) {
  const std::int64_t heads = query.shape[1], dim = query.shape[2], group = heads / key.shape[1];
  const double u = gamma_of(query.dtype, 1);
  Approximate sum;
  for (std::int64_t h = 0; h < heads; ++h) {
    const double l = ref::get(lse, i, h);
    if (l == -INFINITY) continue;
    double magnitude = 0;
    for (std::int64_t d = 0; d < dim; ++d)
      magnitude += std::abs(ref::get(query, i, h, d) * ref::get(key, j, h / group, d));
    const double x = scale * ref::head_dot(query, i, h, key, j, h / group, dim) - l;
    // The dot: dim + 1 roundings per term, the f32 scale one more; then one of x. exp carries the
    // error of x over and adds 1 ulp, two unit roundoffs.
    const double off =
        product_gamma(query.dtype, static_cast<double>(dim) + 2) * scale * magnitude +
        u * std::abs(x);
    const double value = std::exp(x);
    sum.value += value;
    sum.error += value * std::expm1(off) + 2 * u * value * std::exp(off) + kTiny;
  }
  sum.error += gamma_of(query.dtype, static_cast<double>(heads) + 1) * (sum.value + sum.error);
  return sum;
}

RowBounds row_bounds(DType inputs, const std::vector<Approximate>& target,
                     const std::vector<Approximate>& score, double d_kl) {
  const double u = gamma_of(inputs, 1), sum_error = gamma_of(inputs, kBlockSum);
  const std::size_t n = target.size();
  ref::RowLoss loss;
  double mass_off = 0;
  for (std::size_t s = 0; s < n; ++s) {
    loss.see(target[s].value, score[s].value);
    mass_off += target[s].error + sum_error * (target[s].value + target[s].error);
  }
  RowBounds row;
  row.gradient.resize(n);
  if (n == 0 || loss.empty()) return row;

  // x = score - maximum, one rounding; the maximum itself cancels. exp adds 1 ulp.
  auto x_off = [&](std::size_t s) {
    return score[s].error + u * std::abs(score[s].value - loss.maximum);
  };
  double sum_off = sum_error;  // relative
  for (std::size_t s = 0; s < n; ++s)
    sum_off += std::exp(loss.log_p(score[s].value)) * (std::expm1(x_off(s)) + 3 * u);
  const double log_sum = std::log(loss.sum);
  const double log_sum_off = sum_off / (1 - sum_off) + u * std::abs(log_sum);
  // 1 / mass: the clamp is 1-Lipschitz; rounded to f32. Of an infinite mass: 0, exactly.
  const double clamped = ref::clamped(loss.mass);
  const double inverse_off = std::isfinite(clamped) ? mass_off / (clamped - mass_off) + 2 * u : 0;

  double kl = 0, kl_off = 0, magnitude = 0;
  for (std::size_t s = 0; s < n; ++s) {
    const double t = loss.t(target[s].value), log_p = loss.log_p(score[s].value);
    const double p = std::exp(log_p), log_t = std::log(ref::clamped(t));
    const double t_off = (target[s].error / clamped + t * inverse_off) * (1 + inverse_off) + u * t;
    const double log_p_off = x_off(s) + log_sum_off + u * std::abs(log_p);
    const double p_off = p * (std::expm1(log_p_off) + 3 * u) + kTiny;
    row.gradient[s] = {(p - t) * d_kl, std::abs(d_kl) * (p_off + t_off + 3 * u * (p + t)) + kTiny};
    // ln t: its derivative is at most 1 / the clamp; log adds 1 ulp, the difference one rounding.
    const double difference = log_t - log_p;
    const double difference_off = t_off / ref::clamped(t - t_off) + 2 * u * std::abs(log_t) +
                                  log_p_off + u * std::abs(difference);
    kl += loss.kl(target[s].value, score[s].value);
    kl_off += (t + t_off) * difference_off + t_off * std::abs(difference);
    magnitude += t * std::abs(difference);
  }
  row.kl = {kl, kl_off + (sum_error + u) * (magnitude + kl_off) + kTiny};
  return row;
}

BackwardBounds::BackwardBounds(const Tensor& query, const Tensor& key, const Tensor& weights,
                               bool relu)
    : query_(query),
      key_(key),
      weights_(weights),
      relu_(relu),
      heads_(query.shape[1]),
      dim_(query.shape[2]),
      d_query_(static_cast<std::size_t>(query.elements())),
      d_key_(static_cast<std::size_t>(key.elements())),
      d_weights_(static_cast<std::size_t>(weights.elements())) {}

// On GPUs the gated gradient of a head times its weight is rounded to bf16, with bf16 inputs.
void BackwardBounds::add(std::int64_t i, std::int64_t j, Approximate g) {
  const bool rounds = current_device().kind == Device::Kind::kCuda && query_.dtype == DType::kBF16;
  const double most_g = std::abs(g.value) + g.error;
  for (std::int64_t h = 0; h < heads_; ++h) {
    const double u = ref::index_dot(query_, key_, i, h, j), w = std::abs(ref::get(weights_, i, h));
    const double u_off = product_gamma(query_.dtype, static_cast<double>(dim_) + 1) *
                         dot_magnitude(query_, key_, i, h, j);
    const double active = std::abs(ref::activate(u, relu_));
    d_weights_[static_cast<std::size_t>(i * heads_ + h)].add(most_g * active,
                                                             g.error * active + most_g * u_off, 1);
    const bool unsure = relu_ && std::abs(u) <= u_off;
    const bool open = !relu_ || u > 0 || unsure;
    for (std::int64_t d = 0; d < dim_; ++d) {
      const double term = open ? w * most_g : 0;
      double off = open ? w * (unsure ? most_g : g.error) : 0;
      if (rounds) off += storage_error(DType::kBF16, term);
      const double k = std::abs(ref::get(key_, j, d)), q = std::abs(ref::get(query_, i, h, d));
      d_query_[static_cast<std::size_t>((i * heads_ + h) * dim_ + d)].add(term * k, off * k, 1);
      d_key_[static_cast<std::size_t>(j * dim_ + d)].add(term * q, off * q, 1);
    }
  }
}

// A chain of `terms`, 8 lanes or parts more to be added up, and the products of each term.
double BackwardBounds::bound(const Sum& sum) const {
  return sum.error + product_gamma(query_.dtype, sum.terms + 8 + 4) * (sum.magnitude + sum.error) +
         kTiny * (sum.terms + 1);
}

double BackwardBounds::query(std::int64_t i, std::int64_t h, std::int64_t d) const {
  return bound(d_query_[static_cast<std::size_t>((i * heads_ + h) * dim_ + d)]);
}
double BackwardBounds::key(std::int64_t j, std::int64_t d) const {
  return bound(d_key_[static_cast<std::size_t>(j * dim_ + d)]);
}
double BackwardBounds::weights(std::int64_t i, std::int64_t h) const {
  return bound(d_weights_[static_cast<std::size_t>(i * heads_ + h)]);
}

std::vector<Comparison> compare_indexer_gradients(const BackwardBounds& bounds,
                                                  const std::array<Tensor, 3>& actual,
                                                  const std::array<Tensor, 3>& truth) {
  Worst query("d_index_query"), key("d_index_key"), weights("d_index_weights");
  const std::int64_t rows = actual[0].shape[0], heads = actual[0].shape[1],
                     dim = actual[0].shape[2];
  for (std::int64_t i = 0; i < rows; ++i) {
    for (std::int64_t h = 0; h < heads; ++h) {
      weights.add(ref::get(actual[2], i, h), ref::get(truth[2], i, h), bounds.weights(i, h),
                  [&] { return fmt::format("row {} head {}", i, h); });
      for (std::int64_t d = 0; d < dim; ++d) {
        query.add(ref::get(actual[0], i, h, d), ref::get(truth[0], i, h, d), bounds.query(i, h, d),
                  [&] { return fmt::format("row {} head {} channel {}", i, h, d); });
      }
    }
  }
  for (std::int64_t j = 0; j < actual[1].shape[0]; ++j) {
    for (std::int64_t d = 0; d < dim; ++d) {
      key.add(ref::get(actual[1], j, d), ref::get(truth[1], j, d), bounds.key(j, d),
              [&] { return fmt::format("key {} channel {}", j, d); });
    }
  }
  return {query.comparison(), key.comparison(), weights.comparison()};
}

}  // namespace winnow::bench
