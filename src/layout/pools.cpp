// Where pools begin, which of them a row sees, and where they lie in pages. A pool of a span that
// begins at token o holds the tokens [o + m P, o + m P + P), so a row with the tokens [s, e) of
// that span sees the last token of pools floor((s - o) / P) up to floor((e - o) / P) - 1.
#include "winnow/pools.h"

#include <algorithm>
#include <limits>
#include <string>

#include "base/check.h"

namespace winnow {
namespace {

constexpr std::int64_t kMaxId = std::numeric_limits<std::int32_t>::max();

void check_pool_size(std::int64_t pool_size) {
  WINNOW_CHECK("pools", pool_size >= 1, "pool_size must be at least 1, got {}", pool_size);
}

// A mask of batch * rows * keys bytes, whose tokens batch * keys are ids.
void check_mask(std::span<const std::uint8_t> mask, std::int64_t batch, std::int64_t rows,
                std::int64_t keys) {
  WINNOW_CHECK("pools", batch >= 0 && rows >= 0 && keys >= 0,
               "the extents of a mask must not be negative, got [{}, {}, {}]", batch, rows, keys);
  WINNOW_CHECK("pools",
               batch <= kMaxId / std::max<std::int64_t>(1, keys) &&
                   batch <= kMaxId / std::max<std::int64_t>(1, rows),
               "batch * keys and batch * rows must be below 2^31, got [{}, {}, {}]", batch, rows,
               keys);
  WINNOW_CHECK("pools", static_cast<std::int64_t>(mask.size()) == batch * rows * keys,
               "the mask must have {} * {} * {} bytes, got {}", batch, rows, keys, mask.size());
}

struct Span {
  std::int64_t begin = 0, end = 0;
};

// The one run of non-zero bytes; empty at 0 if there is none.
Span only_run(std::span<const std::uint8_t> mask, const std::string& name) {
  const auto set = [](std::uint8_t byte) { return byte != 0; };
  const auto begin = std::find_if(mask.begin(), mask.end(), set);
  const auto end = std::find_if_not(begin, mask.end(), set);
  const auto again = std::find_if(end, mask.end(), set);
  WINNOW_CHECK("pools", again == mask.end(),
               "{} must have one valid span, got a gap at token {} with token {} valid behind it",
               name, end - mask.begin(), again - mask.begin());
  if (begin == mask.end()) return {};
  return {begin - mask.begin(), end - mask.begin()};
}

void append(TokenSpans* spans, std::int64_t begin, std::int64_t end) {
  spans->begins.push_back(static_cast<std::int32_t>(begin));
  spans->ends.push_back(static_cast<std::int32_t>(end));
}

void append(RowRanges* ranges, std::int64_t start, std::int64_t end) {
  ranges->starts.push_back(static_cast<std::int32_t>(start));
  ranges->ends.push_back(static_cast<std::int32_t>(end));
}

// Spans ascend, do not overlap, and may be empty.
void check_spans(const TokenSpans& spans) {
  WINNOW_CHECK("pools", spans.begins.size() == spans.ends.size(),
               "begins and ends must be as long, got {} and {}", spans.begins.size(),
               spans.ends.size());
  std::int64_t last = 0;
  for (std::size_t g = 0; g < spans.begins.size(); ++g) {
    WINNOW_CHECK("pools", last <= spans.begins[g] && spans.begins[g] <= spans.ends[g],
                 "spans must ascend without overlap, got [{}, {}) behind token {}", spans.begins[g],
                 spans.ends[g], last);
    last = spans.ends[g];
  }
}

}  // namespace

TokenSpans packed_spans(std::span<const std::int32_t> cu_seqlens) {
  WINNOW_CHECK("pools", !cu_seqlens.empty() && cu_seqlens.front() == 0,
               "cu_seqlens must start with 0, got {}",
               cu_seqlens.empty() ? "nothing" : fmt::format("{}", cu_seqlens.front()));
  TokenSpans spans;
  for (std::size_t g = 0; g + 1 < cu_seqlens.size(); ++g) {
    WINNOW_CHECK("pools", cu_seqlens[g] <= cu_seqlens[g + 1],
                 "cu_seqlens must not fall, got {} after {} at entry {}", cu_seqlens[g + 1],
                 cu_seqlens[g], g + 1);
    append(&spans, cu_seqlens[g], cu_seqlens[g + 1]);
  }
  return spans;
}

TokenSpans valid_spans(std::span<const std::uint8_t> mask, std::int64_t batch,
                       std::int64_t length) {
  check_mask(mask, batch, 1, length);
  TokenSpans spans;
  for (std::int64_t b = 0; b < batch; ++b) {
    const Span run = only_run(
        mask.subspan(static_cast<std::size_t>(b * length), static_cast<std::size_t>(length)),
        fmt::format("sample {} of the mask", b));
    append(&spans, b * length + run.begin, b * length + run.end);
  }
  return spans;
}

MaskedRows masked_rows(std::span<const std::uint8_t> mask, std::int64_t batch, std::int64_t rows,
                       std::int64_t keys) {
  check_mask(mask, batch, rows, keys);
  MaskedRows masked;
  for (std::int64_t b = 0; b < batch; ++b) {
    Span seen{keys, 0};
    for (std::int64_t i = 0; i < rows; ++i) {
      const Span run = only_run(mask.subspan(static_cast<std::size_t>((b * rows + i) * keys),
                                             static_cast<std::size_t>(keys)),
                                fmt::format("row {} of sample {} of the mask", i, b));
      if (run.begin == run.end) {
        append(&masked.rows, 0, 0);
        continue;
      }
      append(&masked.rows, b * keys + run.begin, b * keys + run.end);
      seen = {std::min(seen.begin, run.begin), std::max(seen.end, run.end)};
    }
    if (seen.begin > seen.end) seen = {};
    append(&masked.spans, b * keys + seen.begin, b * keys + seen.end);
  }
  return masked;
}

RowRanges causal_ranges(const TokenSpans& spans, std::int64_t rows) {
  check_spans(spans);
  const std::int64_t last = spans.ends.empty() ? 0 : spans.ends.back();
  WINNOW_CHECK("pools", rows >= last && rows <= kMaxId,
               "rows must be at least the end of the last span, {}, got {}", last, rows);
  RowRanges ranges;
  ranges.starts.resize(static_cast<std::size_t>(rows), 0);
  ranges.ends.resize(static_cast<std::size_t>(rows), 0);
  for (std::size_t g = 0; g < spans.begins.size(); ++g) {
    for (std::int32_t t = spans.begins[g]; t < spans.ends[g]; ++t) {
      ranges.starts[static_cast<std::size_t>(t)] = spans.begins[g];
      ranges.ends[static_cast<std::size_t>(t)] = t + 1;
    }
  }
  return ranges;
}

PoolLayout pool_layout(TokenSpans spans, std::int64_t pool_size) {
  check_pool_size(pool_size);
  check_spans(spans);
  PoolLayout layout{pool_size, std::move(spans), {}, {0}};
  for (std::size_t g = 0; g < layout.spans.begins.size(); ++g) {
    const std::int64_t begin = layout.spans.begins[g], end = layout.spans.ends[g];
    for (std::int64_t base = begin; base + pool_size <= end; base += pool_size)
      layout.bases.push_back(static_cast<std::int32_t>(base));
    layout.first_pool.push_back(static_cast<std::int32_t>(layout.bases.size()));
  }
  return layout;
}

RowRanges pool_ranges(const PoolLayout& pools, const RowRanges& rows) {
  const std::vector<std::int32_t>&begins = pools.spans.begins, &ends = pools.spans.ends;
  RowRanges ranges;
  for (std::size_t i = 0; i < rows.starts.size(); ++i) {
    const std::int64_t start = rows.starts[i], end = rows.ends[i];
    if (end <= start) {
      append(&ranges, 0, 0);
      continue;
    }
    // The last span that does not begin behind `start`: of those that begin there, empty ones
    // included, the one that has tokens.
    const auto g = static_cast<std::size_t>(std::upper_bound(begins.begin(), begins.end(), start) -
                                            begins.begin() - 1);
    WINNOW_CHECK("pools", start >= 0 && g < begins.size() && end <= ends[g],
                 "row {} must stay in one sequence, got the tokens [{}, {})", i, start, end);
    const std::int64_t first = pools.first_pool[g], begin = begins[g];
    append(&ranges, first + (start - begin) / pools.pool_size,
           first + (end - begin) / pools.pool_size);
  }
  return ranges;
}

RowRanges pool_ranges(const RowRanges& rows, std::int64_t pool_size) {
  check_pool_size(pool_size);
  RowRanges ranges;
  for (std::size_t i = 0; i < rows.starts.size(); ++i) {
    const std::int64_t start = std::max(0, rows.starts[i]), end = std::max(0, rows.ends[i]);
    append(&ranges, start / pool_size, end <= start ? start / pool_size : end / pool_size);
  }
  return ranges;
}

std::int64_t pools_per_page(std::int64_t page_size, std::int64_t pool_size) {
  check_pool_size(pool_size);
  WINNOW_CHECK("pools", page_size >= 1 && page_size % pool_size == 0,
               "pool_size must divide page_size, got {} and {}", pool_size, page_size);
  return page_size / pool_size;
}

std::vector<std::int32_t> pool_slots(std::span<const std::int32_t> block_table,
                                     std::int64_t page_size, std::int64_t pool_size,
                                     std::int64_t context, std::int64_t tokens) {
  const std::int64_t per_page = pools_per_page(page_size, pool_size);
  WINNOW_CHECK("pools", context >= 0 && tokens >= 0 && context <= kMaxId - tokens,
               "context and tokens must be >= 0 and end below 2^31, got {} and {}", context,
               tokens);
  const auto columns = static_cast<std::int64_t>(block_table.size());
  std::vector<std::int32_t> slots;
  for (std::int64_t position = context; position < context + tokens; ++position) {
    const std::int64_t column = position / page_size;
    WINNOW_CHECK("pools", column < columns,
                 "position {} must lie in the block table of {} pages, got page {}", position,
                 columns, column);
    const std::int64_t page = block_table[static_cast<std::size_t>(column)];
    WINNOW_CHECK("pools", page >= 0 && (page + 1) * per_page <= kMaxId,
                 "position {} must lie on a page from 0 to {}, got {}", position,
                 kMaxId / per_page - 1, page);
    const bool completes = (position + 1) % pool_size == 0;
    const std::int64_t slot = page * per_page + position % page_size / pool_size;
    slots.push_back(completes ? static_cast<std::int32_t>(slot) : -1);
  }
  return slots;
}

}  // namespace winnow
