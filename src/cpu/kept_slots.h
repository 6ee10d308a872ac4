// The slots of a row's list that count, side by side.
#pragma once

#include "base/row_range.h"
#include "cpu/tile.h"

namespace winnow::cpu::WINNOW_ISA {

// Slots [first, last) of row i whose id lies in the range: their places and ids, in list order.
// Returns how many. Nothing is written past last - first.
inline std::int64_t keep_slots(const Tensor& topk_indices, std::int64_t i, std::int64_t first,
                               std::int64_t last, RowRange range, std::int32_t* slot,
                               std::int32_t* id) {
  const std::int64_t stride = topk_indices.strides[1];
  const std::int32_t* list = topk_indices.as<std::int32_t>() + i * topk_indices.strides[0];
  std::int64_t count = 0;
  for (std::int64_t s = first; s < last; ++s) {
    const std::int32_t key = list[s * stride];
    slot[count] = static_cast<std::int32_t>(s);
    id[count] = key;
    count += range.contains(key) ? 1 : 0;
  }
  return count;
}

// The rows of 16 ids from `first` on; past `count` the last is repeated.
template <class T>
WINNOW_INLINE void gathered_rows(const T* base, std::int64_t stride, const std::int32_t* id,
                                 std::int64_t first, std::int64_t count, const T* (&row)[kPanel]) {
  for (int r = 0; r < kPanel; ++r) row[r] = base + id[min64(first + r, count - 1)] * stride;
}

}  // namespace winnow::cpu::WINNOW_ISA
