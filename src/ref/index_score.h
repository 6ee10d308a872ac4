// One score of the lightning indexer, in double; what every reference that scores calls.
#pragma once

#include <limits>

#include "ref/key_place.h"
#include "ref/reader.h"

namespace winnow::ref {

// q[i, h, :] . k[j, :]
inline double index_dot(const Tensor& q, const Tensor& k, std::int64_t i, std::int64_t h,
                        std::int64_t j) {
  double dot = 0;
  for (std::int64_t d = 0; d < q.shape[2]; ++d) dot += get(q, i, h, d) * get(k, j, d);
  return dot;
}

// ReLU that keeps NaN; the identity if off.
inline double activate(double dot, bool relu) { return relu && dot < 0 ? 0 : dot; }

inline double index_score(const Tensor& q, const Tensor& k, const Tensor& w, bool relu,
                          std::int64_t i, std::int64_t j) {
  double score = 0;
  for (std::int64_t h = 0; h < q.shape[1]; ++h)
    score += get(w, i, h) * activate(index_dot(q, k, i, h, j), relu);
  return score;
}

// The same of a key view; NaN where the key is missing.
inline double index_score_in(const Tensor& q, const KeyView& k, const Tensor& w, bool relu,
                             std::int64_t i, std::int64_t j) {
  const KeyPlace place = place_of(k, i, j);
  if (place.missing()) return std::numeric_limits<double>::quiet_NaN();
  return index_score(q, place.keys, w, relu, i, place.index);
}

}  // namespace winnow::ref
