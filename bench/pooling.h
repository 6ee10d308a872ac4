// What the problems of pool_keys and append_pools share: gates, keys, and between which numbers a
// pooled key may lie.
#pragma once

#include <algorithm>
#include <vector>

#include "bench/bounds.h"
#include "bench/data.h"
#include "ref/reader.h"
#include "winnow/pool_keys.h"

namespace winnow::bench {

PoolRounding pool_rounding(const Problem& p);  // of the parameter "rounding": once or key

// Keys and gates of tokens, and ape, by the word of "data":
//   gauss    gates of a few units
//   flat     gates and ape 0: every weight is 1 / pool_size
//   sharp    gates of hundreds: weights of 1 and of 0, subnormals between
//   special  gauss; every eighth token has a NaN or an infinity in a key or a gate
struct PoolData {
  Guarded key, gate, ape;
  PoolData(const Problem& p, std::int64_t tokens, Random& random);
};

// The least and the largest number that a pooled channel may be.
struct Interval {
  double low, high;
  template <class Where>
  void add_to(Worst* worst, double actual, Where&& where) const {
    const double half = low == high ? 0 : (high - low) / 2;  // equal infinities have no difference
    worst->add(actual, low + half, half, where);
  }
};

// One token of a pool in one channel.
struct PooledTerm {
  double key, gate, ape;
};
Interval pooled_interval(const std::vector<PooledTerm>& terms, DType dtype, PoolRounding rounding);

}  // namespace winnow::bench
