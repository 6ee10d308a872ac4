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

// The scorer's inputs as numbers. In MXFP8 a number is code * power of two, as f32 holds it.
template <class Args>
double query_number(const Args& a, std::int64_t i, std::int64_t h, std::int64_t d) {
  const double code = get(a.index_query, i, h, d);
  if (a.index_query_scale.empty()) return code;
  return static_cast<float>(code * get(a.index_query_scale, i, h, d / 32));
}

// A key of a view with its scales.
template <class Args>
struct ScorerKey {
  const Args& a;
  KeyPlace key, scale;
  ScorerKey(const Args& args, std::int64_t i, std::int64_t j)
      : a(args), key(place_of(args.index_key, i, j)) {
    if (!a.index_key_scale.empty()) scale = place_of(a.index_key, a.index_key_scale, i, j);
  }
  bool missing() const { return key.missing(); }
  double number(std::int64_t d) const {
    const double code = get(key.keys, key.index, d);
    if (a.index_query_scale.empty()) return code;
    return static_cast<float>(code * get(scale.keys, scale.index, d / 32));
  }
  // What multiplies the finished score: FP8's scale of the key.
  double factor() const {
    const bool fp8 = !a.index_key_scale.empty() && a.index_query_scale.empty();
    return fp8 ? get(scale.keys, scale.index) : 1;
  }
};

// The score of key j for row i of a call of index_scores or index_topk; NaN where it is missing.
template <class Args>
double index_score_of(const Args& a, std::int64_t i, std::int64_t j) {
  const ScorerKey<Args> key(a, i, j);
  if (key.missing()) return std::numeric_limits<double>::quiet_NaN();
  const double dot_scale = static_cast<float>(a.dot_scale);
  double score = 0;
  for (std::int64_t h = 0; h < a.index_query.shape[1]; ++h) {
    double dot = 0;
    for (std::int64_t d = 0; d < a.index_query.shape[2]; ++d) {
      dot += query_number(a, i, h, d) * key.number(d);
    }
    score += get(a.index_weights, i, h) * activate(dot_scale * dot, a.relu);
  }
  return key.factor() * score;
}

}  // namespace winnow::ref
