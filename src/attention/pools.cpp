#include "attention/pools.h"

#include <algorithm>
#include <map>

#include "base/check.h"

namespace winnow::attention {
namespace {

Tensor ids(const std::vector<std::int32_t>& values) {
  return make_tensor(values.data(), DType::kI32, {static_cast<std::int64_t>(values.size())});
}

}  // namespace

TokenSpans spans_of(const RowRanges& rows, std::span<const std::int64_t> cu_seqlens) {
  std::map<std::int32_t, std::int32_t> end_of;  // by start
  for (std::size_t i = 0; i < rows.starts.size(); ++i) {
    if (rows.ends[i] <= rows.starts[i]) continue;
    std::int32_t& end = end_of[rows.starts[i]];
    end = std::max(end, rows.ends[i]);
  }
  TokenSpans spans;
  for (const auto& [start, end] : end_of) {
    const bool begins = cu_seqlens.empty() || std::ranges::binary_search(cu_seqlens, start);
    const bool apart = spans.ends.empty() || spans.ends.back() <= start;
    WINNOW_CHECK(
        "attention", begins && apart,
        "pools begin where sequences do, got rows that see theirs from key {} on, inside a "
        "sequence: say where its pools begin (Batch::spans)",
        start);
    spans.begins.push_back(start);
    spans.ends.push_back(end);
  }
  return spans;
}

void PoolTables::whole(const RowRanges& rows, std::span<const std::int64_t> cu_seqlens,
                       TokenSpans spans, std::int64_t pool_size) {
  if (spans.begins.empty()) spans = spans_of(rows, cu_seqlens);
  const PoolLayout layout = pool_layout(std::move(spans), pool_size);
  seen_ = pool_ranges(layout, rows);
  bases_ = layout.bases;
  slots_.clear();
  first_ = 0;
  count_ = std::ssize(bases_);
}

void PoolTables::growing(std::int64_t context, std::int64_t rows, std::int64_t pool_size) {
  seen_ = pool_ranges(causal_ranges(rows, context), pool_size);
  bases_.clear();
  first_ = context / pool_size;
  count_ = (context + rows) / pool_size;
  cu_seqlens_ = {0, static_cast<std::int32_t>(rows)};
  context_ = {static_cast<std::int32_t>(context)};
  slots_.clear();
  for (std::int64_t p = context; p < context + rows; ++p) {
    slots_.push_back((p + 1) % pool_size == 0 ? static_cast<std::int32_t>(p / pool_size) : -1);
  }
}

Pools PoolTables::view() const {
  Pools pools;
  pools.starts = ids(seen_.starts);
  pools.ends = ids(seen_.ends);
  pools.first = first_;
  pools.count = count_;
  if (slots_.empty()) {
    pools.bases = ids(bases_);
    return pools;
  }
  pools.cu_seqlens = ids(cu_seqlens_);
  pools.context = ids(context_);
  pools.slots = ids(slots_);
  return pools;
}

}  // namespace winnow::attention
