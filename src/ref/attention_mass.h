// The attention that one key gets from all heads of a row, in double.
#pragma once

#include <cmath>

#include "ref/attention.h"

namespace winnow::ref {

// sum_h exp(scale * query . key - lse); a head whose lse is -inf saw no key and gives 0.
inline double attention_mass(const Tensor& query, const Tensor& key, const Tensor& lse,
                             double scale, std::int64_t i, std::int64_t j) {
  const std::int64_t group = query.shape[1] / key.shape[1];
  double mass = 0;
  for (std::int64_t h = 0; h < query.shape[1]; ++h) {
    const double l = get(lse, i, h);
    if (l == -INFINITY) continue;
    mass += std::exp(scale * head_dot(query, i, h, key, j, h / group, query.shape[2]) - l);
  }
  return mass;
}

}  // namespace winnow::ref
