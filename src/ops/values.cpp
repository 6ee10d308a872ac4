#include "ops/values.h"

#include <algorithm>
#include <vector>

#include "base/check.h"
#include "base/row_range.h"
#include "winnow/validation.h"

namespace winnow::ops {
namespace {

std::int32_t int_at(const Tensor& t, std::int64_t i) {
  return t.as<std::int32_t>()[i * t.strides[0]];
}
std::int32_t id_at(const Tensor& t, std::int64_t i, std::int64_t s) {
  return t.as<std::int32_t>()[i * t.strides[0] + s * t.strides[1]];
}

}  // namespace

void validate_ranges(const char* operation, const Tensor& starts, const Tensor& ends,
                     std::int64_t keys) {
  if (!validation()) return;
  for (std::int64_t i = 0; i < starts.shape[0]; ++i) {
    const std::int32_t start = int_at(starts, i), end = int_at(ends, i);
    WINNOW_CHECK(operation, end >= start, "ends must not be below starts, got {} and {} in row {}",
                 end, start, i);
    WINNOW_CHECK(operation, end == start || (start >= 0 && end <= keys),
                 "a row's range must lie within {} keys, got [{}, {}) in row {}", keys, start, end,
                 i);
  }
}

void validate_pages(const char* operation, const KeyView& keys, const Tensor& starts,
                    const Tensor& ends) {
  if (!validation() || !keys.paged()) return;
  for (std::int64_t i = 0; i < starts.shape[0]; ++i) {
    const RowRange range = row_range(starts, ends, i, keys.keys());
    if (range.length() == 0) continue;
    const std::int64_t request = int_at(keys.row_request, i), pages = keys.data.shape[0];
    WINNOW_CHECK(operation, request >= 0 && request < keys.block_table.shape[0],
                 "row_request must be from 0 to {}, got {} in row {}",
                 keys.block_table.shape[0] - 1, request, i);
    for (std::int64_t c = range.start / keys.page_size(); c * keys.page_size() < range.end; ++c) {
      const std::int32_t page = id_at(keys.block_table, request, c);
      WINNOW_CHECK(operation, page >= 0 && page < pages,
                   "block_table must hold pages from 0 to {}, got {} for request {} column {}",
                   pages - 1, page, request, c);
    }
  }
}

void validate_slots(const char* operation, const Tensor& starts, const Tensor& ends,
                    std::int64_t keys, const Tensor& topk_indices, const Tensor& topk_lengths) {
  if (!validation()) return;
  validate_ranges(operation, starts, ends, keys);
  if (topk_indices.empty()) return;
  const std::int64_t topk = topk_indices.shape[1];
  std::vector<std::int32_t> seen;
  for (std::int64_t i = 0; i < topk_indices.shape[0]; ++i) {
    std::int64_t length = topk;
    if (!topk_lengths.empty()) {
      length = int_at(topk_lengths, i);
      WINNOW_CHECK(operation, length >= 0 && length <= topk,
                   "topk_lengths must be from 0 to topk = {}, got {} in row {}", topk, length, i);
    }
    const RowRange range = row_range(starts, ends, i, keys);
    seen.clear();
    for (std::int64_t s = 0; s < length; ++s) {
      const std::int32_t id = id_at(topk_indices, i, s);
      if (id == -1) continue;
      WINNOW_CHECK(operation, range.contains(id),
                   "topk_indices must be -1 or in the row's range [{}, {}), got {} in row {} slot "
                   "{}",
                   range.start, range.end, id, i, s);
      seen.push_back(id);
    }
    std::sort(seen.begin(), seen.end());
    const auto twice = std::adjacent_find(seen.begin(), seen.end());
    WINNOW_CHECK(operation, twice == seen.end(),
                 "an id must stand in topk_indices once, got {} twice in row {}", *twice, i);
  }
}

void validate_nonempty(const char* operation, const Tensor& starts, const Tensor& ends,
                       std::int64_t keys, const Tensor& topk_indices, const Tensor& topk_lengths) {
  if (!validation()) return;
  const std::int64_t row = first_empty_row(starts, ends, keys, topk_indices, topk_lengths);
  WINNOW_CHECK(operation, row == starts.shape[0],
               "with rows_nonempty every row must have a valid slot, got none in row {}", row);
}

std::int64_t first_empty_row(const Tensor& starts, const Tensor& ends, std::int64_t keys,
                             const Tensor& topk_indices, const Tensor& topk_lengths) {
  const std::int64_t rows = starts.shape[0];
  for (std::int64_t i = 0; i < rows; ++i) {
    const RowRange range = row_range(starts, ends, i, keys);
    bool found = topk_indices.empty() && range.length() > 0;
    if (!topk_indices.empty()) {
      std::int64_t length = topk_indices.shape[1];
      if (!topk_lengths.empty()) length = std::min<std::int64_t>(length, int_at(topk_lengths, i));
      for (std::int64_t s = 0; s < length && !found; ++s)
        found = range.contains(id_at(topk_indices, i, s));
    }
    if (!found) return i;
  }
  return rows;
}

}  // namespace winnow::ops
