// The visible keys of a row, clamped to the key space, in 64 bit.
#pragma once

#include <cstdint>

#include "winnow/tensor.h"

namespace winnow {

struct RowRange {
  std::int64_t start = 0, end = 0;  // start == end: an empty row
  std::int64_t length() const { return end - start; }
  bool contains(std::int64_t id) const { return id >= start && id < end; }
};

// Row i of int32 `starts` and `ends`, clamped to [0, keys).
inline RowRange row_range(const Tensor& starts, const Tensor& ends, std::int64_t row,
                          std::int64_t keys) {
  std::int64_t start = starts.as<std::int32_t>()[row * starts.strides[0]];
  std::int64_t end = ends.as<std::int32_t>()[row * ends.strides[0]];
  if (start < 0) start = 0;
  if (end > keys) end = keys;
  if (end <= start) return {0, 0};
  return {start, end};
}

}  // namespace winnow
