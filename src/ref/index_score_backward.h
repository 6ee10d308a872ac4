// The gradient of one index score by what it is made of, in double; both indexer losses end in it.
#pragma once

#include <algorithm>

#include "ref/attention.h"
#include "ref/index_score.h"

namespace winnow::ref {

// Doubles that `IndexScoreBackward` needs.
inline std::int64_t index_backward_doubles(const Tensor& q, const Tensor& k) {
  return k.elements() + (q.shape[2] + 1) * q.shape[1];
}

// Rows in ascending order: begin_row(i), add(j, g) for its keys, end_row; at last end.
class IndexScoreBackward {
 public:
  IndexScoreBackward(const Tensor& q, const Tensor& k, const Tensor& w, bool relu, double* doubles)
      : q_(q),
        k_(k),
        w_(w),
        relu_(relu),
        d_key_(doubles),
        d_query_(doubles + k.elements()),
        d_weights_(d_query_ + q.shape[1] * q.shape[2]) {
    std::fill(d_key_, d_query_, 0.0);
  }

  void begin_row(std::int64_t i) {
    row_ = i;
    empty_ = true;
    std::fill(d_query_, d_weights_ + heads(), 0.0);
  }

  // The loss changes by g with the score of (row, key j). A closed gate passes 0, and its products
  // are formed like any others.
  void add(std::int64_t j, double g) {
    empty_ = false;
    for (std::int64_t h = 0; h < heads(); ++h) {
      const double dot = index_dot(q_, k_, row_, h, j);
      d_weights_[h] += g * activate(dot, relu_);
      const double gated = relu_ && !(dot > 0) ? 0 : g;
      for (std::int64_t d = 0; d < dim(); ++d) {
        d_query_[h * dim() + d] += gated * get(k_, j, d);
        d_key_[j * dim() + d] += gated * (get(w_, row_, h) * get(q_, row_, h, d));
      }
    }
  }

  // A row without a key has gradient 0, whatever its weights hold.
  void end_row(const Tensor& d_index_query, const Tensor& d_index_weights) const {
    for (std::int64_t h = 0; h < heads(); ++h) {
      set(d_index_weights, row_, h, d_weights_[h]);
      for (std::int64_t d = 0; d < dim(); ++d)
        set(d_index_query, row_, h, d, empty_ ? 0 : get(w_, row_, h) * d_query_[h * dim() + d]);
    }
  }

  void end(const Tensor& d_index_key) const {
    for (std::int64_t j = 0; j < k_.shape[0]; ++j) {
      for (std::int64_t d = 0; d < dim(); ++d) set(d_index_key, j, d, d_key_[j * dim() + d]);
    }
  }

 private:
  std::int64_t heads() const { return q_.shape[1]; }
  std::int64_t dim() const { return q_.shape[2]; }

  const Tensor &q_, &k_, &w_;
  bool relu_;
  std::int64_t row_ = 0;
  bool empty_ = true;
  double *d_key_, *d_query_, *d_weights_;  // [keys, dim], [heads, dim], [heads]
};

}  // namespace winnow::ref
