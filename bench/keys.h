// The keys of a problem: in one piece, or in the pages of three requests.
#pragma once

#include <initializer_list>
#include <vector>

#include "bench/data.h"
#include "bench/guarded.h"
#include "winnow/key_view.h"

namespace winnow::bench {

class Keys {
 public:
  Keys() = default;
  // page 0: Gaussian [keys, extents...]. Else pages of `page` keys in a shuffled pool; pages that
  // nobody owns hold NaN; every fifth page of request 1 is missing; the requests of the rows change
  // every third row, and every 17th row belongs to none.
  Keys(DType dtype, std::int64_t rows, std::int64_t keys,
       std::initializer_list<std::int64_t> extents, std::int64_t page, Random& random);

  KeyView view() const { return {data_, table_, request_}; }
  const Tensor& data() const { return data_; }  // as of the view
  std::int64_t count() const { return view().keys(); }

 private:
  Guarded data_, table_, request_;
};

}  // namespace winnow::bench
