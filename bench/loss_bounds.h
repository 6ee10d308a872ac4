// Error bounds of the indexer losses: what f32 kernels may differ from the double reference.
//
// All of it is first-order rounding analysis with the constants of bench/bounds.h; nothing is
// fitted.
#pragma once

#include <array>
#include <vector>

#include "bench/case.h"
#include "ref/index_score.h"

namespace winnow::bench {

// A number that a kernel computes, and how far off it may be.
struct Approximate {
  double value = 0, error = 0;
};

// I[i, j] of f32 arithmetic: one product and `dim` additions per dot, one product and `heads`
// additions per score, so every term w q k passes at most dim + heads + 2 roundings. ReLU is
// 1-Lipschitz and adds none.
Approximate approximate_score(const Tensor& query, const Tensor& key, const Tensor& weights,
                              bool relu, std::int64_t i, std::int64_t j);

// sum_h exp(scale * query . key - lse).
Approximate approximate_target(const Tensor& query, const Tensor& key, const Tensor& lse,
                               double scale, std::int64_t i, std::int64_t j);

// The loss of one row from targets and scores that may themselves be off.
struct RowBounds {
  Approximate kl;
  std::vector<Approximate> gradient;  // (p - t) * d_kl
};
RowBounds row_bounds(DType inputs, const std::vector<Approximate>& target,
                     const std::vector<Approximate>& score, double d_kl);

// Bounds of the gradients by index_query, index_key and index_weights, from the terms that are
// added up in them.
//
// ReLU's step is not continuous: where |u| is at most the error E of u, f32 may take the other
// side. Such a term counts with its whole magnitude, so the bound covers both sides; where |u| > E,
// both arithmetics agree on the side.
class BackwardBounds {
 public:
  BackwardBounds(const Tensor& query, const Tensor& key, const Tensor& weights, bool relu);
  void add(std::int64_t i, std::int64_t j, Approximate g);  // g: gradient of the loss by I[i, j]
  double query(std::int64_t i, std::int64_t h, std::int64_t d) const;
  double key(std::int64_t j, std::int64_t d) const;
  double weights(std::int64_t i, std::int64_t h) const;

 private:
  struct Sum {
    double magnitude = 0;  // of the terms
    double error = 0;      // that the terms bring with them
    double terms = 0;
    void add(double term, double off, double count) {
      magnitude += term;
      error += off;
      terms += count;
    }
  };
  double bound(const Sum& sum) const;

  Tensor query_, key_, weights_;
  bool relu_;
  std::int64_t heads_, dim_;
  std::vector<Sum> d_query_, d_key_, d_weights_;
};

// d_index_query, d_index_key, d_index_weights against their truth.
std::vector<Comparison> compare_indexer_gradients(const BackwardBounds& bounds,
                                                  const std::array<Tensor, 3>& actual,
                                                  const std::array<Tensor, 3>& truth);

}  // namespace winnow::bench
