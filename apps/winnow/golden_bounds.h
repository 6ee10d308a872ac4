// Bounds of what f32 arithmetic adds to attention and to the indexer losses, to first order in the
// unit roundoff u, from norms of the inputs of a golden file.
#pragma once

#include "winnow/tensor.h"

namespace winnow::app {

double peak(const Tensor& t);  // the largest magnitude
// The largest 2-norm of a vector along the last axis, of its first `channels` or all of them; and
// the largest sum of magnitudes.
double norm2(const Tensor& t, std::int64_t channels);
double norm2(const Tensor& t);
double norm1(const Tensor& t);

// A logit z = scale q.k has |z| <= Z = scale |q||k| and error gamma(dim + 1) Z, so a probability
// over n keys, exp(z - lse), has relative error
//   P = 2 gamma(dim + 1) Z + gamma(n + 8) + 2 u (Z + ln n)       (both logits, the sum, lse itself)
//
// Attention of `rows` rows over n keys each. With D = |d_output||value|:
//   output    sum_s p v                    (P + gamma(n + 1)) max|v|
//   dz        p (dp - delta)               p D E,  E = 3 P + 3 gamma(dim_v + n + 4): P and the two
//                                          dots, |dp| and |delta| <= D; and |dz| <= 2 p D
//   d_query   scale sum_s dz k             scale D (E + 2 gamma(n + 2)) max|k|, as sum_s p = 1
//   d_key     scale sum_ih dz q            scale D (E + 2 gamma(m + 2)) m max|q|, m = rows heads >=
//                                          the sum of p over rows and heads
//   d_value   sum_ih p d_output            (P + gamma(m + 2)) m max|d_output|
struct AttentionBounds {
  double probability, output, d_query, d_key, d_value;
  AttentionBounds(const Tensor& q, const Tensor& k, const Tensor& v, std::int64_t dim_v,
                  const Tensor& d_output, double scale, double n);
};

// The indexer and its loss, over n keys a row. A score has error S = gamma(dim + heads + 2) A with
// A = |w|_1 |q||k|; so ln p of the scores has T = 2 S + gamma(n + 8) + 2 u (2 A + ln n); the
// normalised target has relative error R = 2 P + 2 gamma(n + attention heads + 2).
//   kl       sum t (ln t - ln p)           (R + gamma(n + 2)) (24 + 2 A + ln n) + R + T, as
//                                          |ln max(t, 1e-10)| < 24
//   g        (p - t) d_kl                  sums of |error| and |g| over a row: d_kl (R + T), 2 d_kl
//   d_weights   sum_j g relu(u)            d_kl (R + T + 2 gamma(dim + n + 3)) |q||k|
//   d_query     w sum_j g k                d_kl (R + T + 2 gamma(n + 4)) max|w| max|k|
//   d_key       sum_ih g w q               d_kl (R + T + 2 gamma(rows heads + 4)) rows |w|_1 max|q|
struct IndexerBounds {
  double score, kl, d_query, d_key, d_weights;
  IndexerBounds(const Tensor& q, const Tensor& k, const Tensor& w, double probability,
                double attention_heads, double n, double d_kl);
};

}  // namespace winnow::app
