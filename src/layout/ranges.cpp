#include <algorithm>
#include <limits>

#include "base/check.h"
#include "winnow/layout.h"

namespace winnow {
namespace {

constexpr std::int64_t kMaxId = std::numeric_limits<std::int32_t>::max();

}  // namespace

RowRanges causal_ranges(std::int64_t rows, std::int64_t context) {
  WINNOW_CHECK("layout", rows >= 0 && context >= 0 && context <= kMaxId - rows,
               "rows and context must be >= 0 and end below 2^31, got {} and {}", rows, context);
  return causal_ranges(rows, context + rows, CausalAlignment::kBottomRight);
}

RowRanges causal_ranges(std::int64_t rows, std::int64_t keys, CausalAlignment alignment) {
  WINNOW_CHECK("layout", rows >= 0 && rows <= kMaxId && keys >= 0 && keys <= kMaxId,
               "rows and keys must be from 0 to 2^31 - 1, got {} and {}", rows, keys);
  const std::int64_t first = alignment == CausalAlignment::kBottomRight ? keys - rows : 0;
  RowRanges ranges;
  ranges.starts.assign(static_cast<std::size_t>(rows), 0);
  for (std::int64_t t = 0; t < rows; ++t) {
    const std::int64_t seen = std::clamp<std::int64_t>(first + t + 1, 0, keys);
    ranges.ends.push_back(static_cast<std::int32_t>(seen));
  }
  return ranges;
}

RowRanges packed_ranges(std::span<const std::int32_t> cu_seqlens, std::int64_t rows) {
  WINNOW_CHECK("layout", !cu_seqlens.empty() && cu_seqlens.front() == 0,
               "cu_seqlens must start with 0, got {}",
               cu_seqlens.empty() ? "nothing" : fmt::format("{}", cu_seqlens.front()));
  WINNOW_CHECK("layout", rows >= cu_seqlens.back() && rows <= kMaxId,
               "rows must be at least cu_seqlens.back() = {}, got {}", cu_seqlens.back(), rows);
  for (std::size_t g = 0; g + 1 < cu_seqlens.size(); ++g) {
    WINNOW_CHECK("layout", cu_seqlens[g] <= cu_seqlens[g + 1],
                 "cu_seqlens must not fall, got {} after {} at entry {}", cu_seqlens[g + 1],
                 cu_seqlens[g], g + 1);
  }
  RowRanges ranges;
  for (std::size_t g = 0; g + 1 < cu_seqlens.size(); ++g) {
    for (std::int32_t row = cu_seqlens[g]; row < cu_seqlens[g + 1]; ++row) {
      ranges.starts.push_back(cu_seqlens[g]);
      ranges.ends.push_back(row + 1);
    }
  }
  ranges.starts.resize(static_cast<std::size_t>(rows), 0);
  ranges.ends.resize(static_cast<std::size_t>(rows), 0);
  return ranges;
}

RowRanges batched_ranges(std::int64_t batch, std::int64_t length) {
  WINNOW_CHECK(
      "layout", batch >= 0 && length >= 0 && batch <= kMaxId / std::max<std::int64_t>(1, length),
      "batch and length must be >= 0 and their product below 2^31, got {} and {}", batch, length);
  std::vector<std::int32_t> cu_seqlens;
  for (std::int64_t g = 0; g <= batch; ++g)
    cu_seqlens.push_back(static_cast<std::int32_t>(g * length));
  return packed_ranges(cu_seqlens, batch * length);
}

bool can_prove_all_rows_nonempty(std::span<const std::int32_t> starts,
                                 std::span<const std::int32_t> ends, std::int64_t keys,
                                 std::int64_t pool_size, bool select_tail) {
  WINNOW_CHECK("layout", starts.size() == ends.size(),
               "starts and ends must have one entry per row, got {} and {}", starts.size(),
               ends.size());
  WINNOW_CHECK("layout", pool_size >= 1, "pool_size must be at least 1, got {}", pool_size);
  if (pool_size > 1 && !select_tail) return false;
  for (std::size_t row = 0; row < starts.size(); ++row) {
    if (std::min<std::int64_t>(ends[row], keys) <= std::max(starts[row], 0)) return false;
  }
  return true;
}

std::vector<RowBlock> row_blocks(std::span<const std::int32_t> starts,
                                 std::span<const std::int32_t> ends, std::int64_t rows_per_block,
                                 std::int64_t capacity) {
  WINNOW_CHECK("layout", starts.size() == ends.size(),
               "starts and ends must be as long, got {} and {}", starts.size(), ends.size());
  WINNOW_CHECK("layout", rows_per_block >= 1, "rows_per_block must be at least 1, got {}",
               rows_per_block);
  std::vector<RowBlock> blocks;
  for (std::size_t row = 0; row < starts.size(); ++row) {
    if (ends[row] <= starts[row]) continue;
    const bool joins = !blocks.empty() && blocks.back().row_count < rows_per_block &&
                       blocks.back().key_begin == starts[row] &&
                       static_cast<std::size_t>(blocks.back().first_row) +
                               static_cast<std::size_t>(blocks.back().row_count) ==
                           row;
    if (!joins) blocks.push_back({static_cast<std::int32_t>(row), 0, starts[row], ends[row]});
    ++blocks.back().row_count;
    blocks.back().key_end = std::max(blocks.back().key_end, ends[row]);
  }
  if (capacity > 0) {
    WINNOW_CHECK("layout", static_cast<std::int64_t>(blocks.size()) <= capacity,
                 "capacity must hold {} blocks, got {}", blocks.size(), capacity);
    blocks.resize(static_cast<std::size_t>(capacity));
  }
  return blocks;
}

}  // namespace winnow
