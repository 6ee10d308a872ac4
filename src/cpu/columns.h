// 16 channels of a row as two vectors, where the row may end before them.
#pragma once

#include "cpu/tile.h"

namespace winnow::cpu::WINNOW_ISA {

// Zeros past `valid`.
template <class T>
WINNOW_INLINE void load_columns(const T* row, std::int64_t valid, F8& a, F8& b) {
  if (valid >= kPanel) {
    a = load(row);
    b = load(row + 8);
    return;
  }
  float columns[kPanel] = {};
  for (std::int64_t c = 0; c < valid; ++c) columns[c] = to_float(row[c]);
  a = load(columns);
  b = load(columns + 8);
}

// Nothing is written past `valid`.
template <class T>
WINNOW_INLINE void store_columns(T* row, std::int64_t valid, F8 a, F8 b) {
  if constexpr (sizeof(T) == 4) {
    if (valid >= kPanel) {
      store(row, a);
      store(row + 8, b);
      return;
    }
  }
  float columns[kPanel];
  store(columns, a);
  store(columns + 8, b);
  for (std::int64_t c = 0; c < min64(kPanel, valid); ++c) row[c] = from_double<T>(columns[c]);
}

}  // namespace winnow::cpu::WINNOW_ISA
