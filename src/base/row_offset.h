// A tensor seen as rows: all axes but the last count them, whatever their strides.
#pragma once

#include "winnow/tensor.h"

namespace winnow {

inline std::int64_t last_extent(const Tensor& t) { return t.shape[t.rank - 1]; }

inline std::int64_t row_count(const Tensor& t) {
  std::int64_t rows = 1;
  for (int axis = 0; axis < t.rank - 1; ++axis) rows *= t.shape[axis];
  return rows;
}

// Where row `row` begins, in elements.
inline std::int64_t row_offset(const Tensor& t, std::int64_t row) {
  std::int64_t offset = 0;
  for (int axis = t.rank - 2; axis > 0; --axis) {
    offset += row % t.shape[axis] * t.strides[axis];
    row /= t.shape[axis];
  }
  return t.rank > 1 ? offset + row * t.strides[0] : 0;
}

}  // namespace winnow
