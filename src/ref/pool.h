// One pooled key, in double; pool_keys and append_pools call it with their own places of tokens.
#pragma once

#include <cmath>

#include "ref/reader.h"
#include "winnow/pool_keys.h"

namespace winnow::ref {

// x rounded to the dtype, where the option asks for it.
inline double pool_rounded(double x, DType dtype, PoolRounding rounding) {
  if (rounding == PoolRounding::kOnce) return x;
  std::uint64_t cell = 0;
  store_double(&cell, dtype, 0, x);
  return load_double(&cell, dtype, 0);
}

// sum_t softmax_t(gate(t) + ape[t, d]) * key(t); `key` and `gate` give the channel of token t.
template <class Key, class Gate>
double pooled_channel(const Tensor& ape, std::int64_t d, DType dtype, PoolRounding rounding,
                      Key&& key, Gate&& gate) {
  const std::int64_t pool_size = ape.shape[0];
  double maximum = -INFINITY, sum = 0, pooled = 0;
  for (std::int64_t t = 0; t < pool_size; ++t)
    maximum = std::fmax(maximum, gate(t) + get(ape, t, d));
  for (std::int64_t t = 0; t < pool_size; ++t) sum += std::exp(gate(t) + get(ape, t, d) - maximum);
  for (std::int64_t t = 0; t < pool_size; ++t) {
    const double weight =
        pool_rounded(std::exp(gate(t) + get(ape, t, d) - maximum) / sum, dtype, rounding);
    pooled += pool_rounded(weight * key(t), dtype, rounding);
  }
  return pooled;
}

}  // namespace winnow::ref
