// 16 channels of a row, which may end before them.
#pragma once

#include "cpu/tile.h"

namespace winnow::cpu::WINNOW_ISA {

// Zeros past `valid`.
template <class T>
WINNOW_INLINE Wide load_columns(const T* row, std::int64_t valid) {
  if (valid >= kPanel) return join(load(row), load(row + 8));
  float columns[kPanel] = {};
  for (std::int64_t c = 0; c < valid; ++c) columns[c] = to_float(row[c]);
  return load16(columns);
}

// Nothing is written past `valid`.
template <class T>
WINNOW_INLINE void store_columns(T* row, std::int64_t valid, Wide x) {
  if constexpr (sizeof(T) == 4) {
    if (valid >= kPanel) return store(row, x);
  }
  float columns[kPanel];
  store(columns, x);
  for (std::int64_t c = 0; c < min64(kPanel, valid); ++c) row[c] = from_double<T>(columns[c]);
}

}  // namespace winnow::cpu::WINNOW_ISA
