#include "ops/values.h"

#include <algorithm>
#include <cmath>
#include <tuple>
#include <vector>

#include "base/check.h"
#include "base/numbers.h"
#include "base/row_range.h"
#include "ref/key_place.h"

namespace winnow::ops {
namespace {

std::int32_t int_at(const Tensor& t, std::int64_t i) {
  return t.as<std::int32_t>()[i * t.strides[0]];
}
std::int32_t id_at(const Tensor& t, std::int64_t i, std::int64_t s) {
  return t.as<std::int32_t>()[i * t.strides[0] + s * t.strides[1]];
}

// The first NaN among the e8m0 scales of a row that begins at `offset`, or their number.
std::int64_t first_nan_group(const Tensor& scale, std::int64_t offset, std::int64_t stride) {
  const std::int64_t groups = scale.shape[scale.rank - 1];
  for (std::int64_t g = 0; g < groups; ++g)
    if (scale.as<E8M0>()[offset + g * stride].bits == 255) return g;
  return groups;
}

void validate_key_scale(const char* operation, const KeyView& keys, const Tensor& key_scale,
                        std::int64_t row, std::int64_t key) {
  const ref::KeyPlace place = ref::place_of(keys, key_scale, row, key);
  if (place.missing()) return;
  const std::int64_t at = place.index * place.keys.strides[0];
  if (place.keys.dtype == DType::kF32) {
    const float scale = place.keys.as<float>()[at];
    WINNOW_CHECK(operation, scale >= 0 && std::isfinite(scale),
                 "index_key_scale must be finite and not negative, got {} for key {} of row {}",
                 scale, key, row);
  } else {
    const std::int64_t group = first_nan_group(place.keys, at, place.keys.strides[1]);
    WINNOW_CHECK(operation, group == place.keys.shape[1],
                 "index_key_scale must be a power of two, got 255 (NaN) for key {} group {} of row "
                 "{}",
                 key, group, row);
  }
}

}  // namespace

void validate_ranges(const char* operation, const Tensor& starts, const Tensor& ends,
                     std::int64_t keys) {
  if (!validates(starts)) return;
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
  if (!validates(starts) || !keys.paged()) return;
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

void validate_scales(const char* operation, const KeyView& keys, const Tensor& query_scale,
                     const Tensor& key_scale, const Tensor& starts, const Tensor& ends) {
  if (!validates(starts) || key_scale.empty()) return;
  std::vector<std::int64_t> rows;  // those that see keys
  for (std::int64_t i = 0; i < starts.shape[0]; ++i)
    if (row_range(starts, ends, i, keys.keys()).length() > 0) rows.push_back(i);
  for (const std::int64_t i : rows) {
    if (query_scale.empty()) break;  // FP8: it is in the weights
    for (std::int64_t h = 0; h < query_scale.shape[1]; ++h) {
      const std::int64_t at = i * query_scale.strides[0] + h * query_scale.strides[1];
      const std::int64_t group = first_nan_group(query_scale, at, query_scale.strides[2]);
      WINNOW_CHECK(operation, group == query_scale.shape[2],
                   "index_query_scale must be a power of two, got 255 (NaN) in row {} head {} "
                   "group {}",
                   i, h, group);
    }
  }
  auto request = [&](std::int64_t i) { return keys.paged() ? int_at(keys.row_request, i) : 0; };
  std::sort(rows.begin(), rows.end(), [&](std::int64_t a, std::int64_t b) {
    return std::tuple(request(a), int_at(starts, a), a) <
           std::tuple(request(b), int_at(starts, b), b);
  });
  std::int64_t looked_at = 0;  // positions of the request, each once
  for (std::size_t n = 0; n < rows.size(); ++n) {
    const RowRange range = row_range(starts, ends, rows[n], keys.keys());
    if (n > 0 && request(rows[n]) != request(rows[n - 1])) looked_at = 0;
    looked_at = std::max(looked_at, range.start);
    for (; looked_at < range.end; ++looked_at)
      validate_key_scale(operation, keys, key_scale, rows[n], looked_at);
  }
}

void validate_slots(const char* operation, const Tensor& starts, const Tensor& ends,
                    std::int64_t keys, const Tensor& topk_indices, const Tensor& topk_lengths) {
  if (!validates(starts)) return;
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
  if (!validates(starts)) return;
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
