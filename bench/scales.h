// The scales of a scorer's problem: FP8 ("e4m3") or MXFP8 ("mxfp8"); none for other dtypes.
#pragma once

#include <string>

#include "bench/data.h"
#include "bench/guarded.h"
#include "winnow/key_view.h"

namespace winnow::bench {

class Scales {
 public:
  Scales() = default;
  // `format` is the word of the parameter "dtype". For a query [rows, heads, dim] and keys of dim.
  // With `specials` the scales of keys hold the bytes 0, 127, 130 and 255 (FP8: 0, 1, 8 and NaN).
  Scales(const std::string& format, const Tensor& query, const KeyView& keys, bool specials,
         Random& random);
  const Tensor& query() const { return query_; }
  const Tensor& key() const { return key_; }

 private:
  Guarded query_, key_;
};

// The dtype of the data under such a word.
DType data_dtype(const std::string& format);

}  // namespace winnow::bench
