#include "winnow/chunks.h"

#include <algorithm>
#include <numeric>

#include "base/check.h"

namespace winnow {
namespace {

constexpr std::int64_t kNumbersPerColumn = 2, kNumberBytes = 4;
constexpr std::int64_t kMaxNumbers = std::int64_t{1} << 31;
constexpr std::int64_t kAlignment = 32;  // bytes

}  // namespace

RowChunks row_chunks(std::int64_t rows, std::int64_t columns, DType dtype, std::int64_t budget) {
  constexpr std::int64_t kMaxExtent = (std::int64_t{1} << 31) - 1;
  WINNOW_CHECK("row_chunks", rows >= 0 && rows <= kMaxExtent, "rows must be from 0 to {}, got {}",
               kMaxExtent, rows);
  WINNOW_CHECK("row_chunks", columns >= 0 && columns <= kMaxExtent,
               "columns must be from 0 to {}, got {}", kMaxExtent, columns);
  WINNOW_CHECK("row_chunks", budget >= 0, "budget must not be negative, got {}", budget);
  if (rows == 0) return {};
  if (columns == 0) return {rows, 1, 0};
  const std::int64_t row_numbers = kNumbersPerColumn * columns;
  const std::int64_t row_bytes = kNumberBytes * row_numbers;
  const std::int64_t fitting = std::min(budget / row_bytes, kMaxNumbers / row_numbers);
  const std::int64_t group = kAlignment / std::gcd(kAlignment, columns * dtype_bytes(dtype));
  const std::int64_t chunk = std::min(rows, std::max(group, fitting / group * group));
  return {chunk, (rows + chunk - 1) / chunk, chunk * row_bytes};
}

}  // namespace winnow
