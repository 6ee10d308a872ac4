// How many rows at a time fit a byte budget: one pure function, asked by plans and by operations.
#pragma once

#include <cstdint>

#include "winnow/tensor.h"

namespace winnow {

struct RowChunks {
  std::int64_t rows = 0;   // of a chunk; the last may have fewer
  std::int64_t count = 0;  // chunks
  std::int64_t bytes = 0;  // scratch of one chunk
};

// Chunks of a [rows, columns] matrix of `dtype` whose selection keeps two 4-byte numbers for every
// row and column of a chunk, a score and an id.
// - The scratch of a chunk fits `budget` bytes, and has at most 2^31 numbers.
// - Every chunk begins at a multiple of 32 bytes of the matrix: its rows are a multiple of
//   32 / gcd(32, columns * dtype bytes), unless one chunk holds all rows.
// - Where not even the smallest such chunk fits, it is the answer, and `bytes` says what it takes.
RowChunks row_chunks(std::int64_t rows, std::int64_t columns, DType dtype, std::int64_t budget);

}  // namespace winnow
