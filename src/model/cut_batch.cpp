#include "model/cut_batch.h"

#include <algorithm>
#include <cstring>

#include "base/check.h"
#include "base/parallel.h"

namespace winnow::model {
namespace {

constexpr char kName[] = "cut_batch";

// An empty row of any batch: a token like any other, at a position like any other; nobody looks.
constexpr std::int32_t kToken = 0, kPosition = 0, kNoTarget = -1, kNoKey = 0;

// Which row of a batch becomes row i of another; -1: an empty row.
using Places = std::vector<std::int64_t>;

std::vector<std::int32_t> take(const std::vector<std::int32_t>& from, const Places& places,
                               std::int32_t otherwise) {
  std::vector<std::int32_t> to;
  to.reserve(places.size());
  for (const std::int64_t place : places) {
    to.push_back(place < 0 ? otherwise : from[static_cast<std::size_t>(place)]);
  }
  return to;
}

Batch take_rows(const Batch& batch, const Places& places) {
  Batch to;
  to.tokens = take(batch.tokens, places, kToken);
  if (batch.targets.size() == batch.tokens.size()) {  // they may be left out
    to.targets = take(batch.targets, places, kNoTarget);
  }
  to.positions = take(batch.positions, places, kPosition);
  to.ranges.starts = take(batch.ranges.starts, places, kNoKey);
  to.ranges.ends = take(batch.ranges.ends, places, kNoKey);
  for (const auto& tokens : batch.mtp_tokens) to.mtp_tokens.push_back(take(tokens, places, kToken));
  for (const auto& targets : batch.mtp_targets) {
    to.mtp_targets.push_back(take(targets, places, kNoTarget));
  }
  return to;
}

bool is_empty(const RowRanges& ranges, std::size_t row) {
  return ranges.ends[row] <= ranges.starts[row];
}

// Cutting is for sequences that keep to themselves.
void check_sequences(const Batch& batch) {
  const std::vector<std::int64_t>& cu = batch.cu_seqlens;
  const auto rows = static_cast<std::int64_t>(batch.tokens.size());
  WINNOW_CHECK(kName,
               !cu.empty() && cu.front() == 0 && std::ranges::is_sorted(cu) && cu.back() <= rows &&
                   batch.ranges.rows() == rows && !batch.context,
               "a batch can be cut if its cu_seqlens rise from 0 to at most its {} rows, and if it "
               "was not cut before; got {} boundaries up to {}",
               rows, cu.size(), cu.empty() ? 0 : cu.back());
  for (std::size_t g = 0; g < cu.size(); ++g) {
    const bool tail = g + 1 == cu.size();
    const std::int64_t end = tail ? rows : cu[g + 1];
    for (std::int64_t i = cu[g]; i < end; ++i) {
      const auto row = static_cast<std::size_t>(i);
      if (is_empty(batch.ranges, row)) continue;
      WINNOW_CHECK(kName, !tail, "rows after the last sequence must be empty, row {} sees keys", i);
      WINNOW_CHECK(kName, batch.ranges.starts[row] >= cu[g] && batch.ranges.ends[row] <= end,
                   "row {} must see keys of its sequence alone, [{}, {}), got [{}, {})", i, cu[g],
                   end, batch.ranges.starts[row], batch.ranges.ends[row]);
    }
  }
}

}  // namespace

Batch pad_sequences(const Batch& batch, std::int64_t multiple) {
  check_sequences(batch);
  WINNOW_CHECK(kName, multiple >= 1, "a multiple must be at least 1, got {}", multiple);
  const std::vector<std::int64_t>& cu = batch.cu_seqlens;
  std::vector<std::int64_t> padded = {0};
  Places places;
  for (std::size_t g = 0; g + 1 < cu.size(); ++g) {
    for (std::int64_t i = cu[g]; i < cu[g + 1]; ++i) places.push_back(i);
    padded.push_back(padded.back() + ceil_div(cu[g + 1] - cu[g], multiple) * multiple);
    places.resize(static_cast<std::size_t>(padded.back()), -1);
  }
  Batch to = take_rows(batch, places);
  for (std::size_t g = 0; g + 1 < cu.size(); ++g) {
    const auto shift = static_cast<std::int32_t>(padded[g] - cu[g]);
    for (std::int64_t i = padded[g]; i < padded[g + 1]; ++i) {
      const auto row = static_cast<std::size_t>(i);
      if (is_empty(to.ranges, row)) continue;
      to.ranges.starts[row] += shift;
      to.ranges.ends[row] += shift;
    }
  }
  to.spans = batch.spans;
  for (std::size_t s = 0; s < to.spans.begins.size(); ++s) {
    std::int32_t &begin = to.spans.begins[s], &end = to.spans.ends[s];
    const auto g = static_cast<std::size_t>(std::ranges::upper_bound(cu, begin) - cu.begin()) - 1;
    WINNOW_CHECK(kName, begin >= 0 && begin < end && g + 1 < cu.size() && end <= cu[g + 1],
                 "a span must lie in one sequence, got [{}, {})", begin, end);
    const auto shift = static_cast<std::int32_t>(padded[g] - cu[g]);
    begin += shift;
    end += shift;
  }
  to.cu_seqlens = padded;
  return to;
}

Batch cut_batch(const Batch& batch, std::shared_ptr<const attention::ContextGroup> context) {
  check_sequences(batch);
  const ContextTables& tables = context->tables();
  WINNOW_CHECK(kName, std::ranges::equal(tables.cu_seqlens(), batch.cu_seqlens),
               "the context's tables are those of other sequences than the batch's");
  Places places(tables.positions().begin(), tables.positions().end());
  for (std::int64_t& place : places) {
    if (place >= batch.cu_seqlens.back()) place = -1;
  }
  Batch mine = take_rows(batch, places);
  mine.cu_seqlens = batch.cu_seqlens;
  mine.spans = batch.spans;
  mine.context = std::move(context);
  return mine;
}

Batch share_batch(Batch batch, Communicator& ranks, std::int64_t local_rows) {
  const std::int64_t size = ranks.size();
  if (size == 1) return batch;
  const Batch padded = pad_sequences(batch, 2 * size);
  if (local_rows == 0) local_rows = std::max<std::int64_t>(1, padded.cu_seqlens.back() / size);
  return cut_batch(padded,
                   std::make_shared<attention::ContextGroup>(
                       ranks, ContextTables(padded.cu_seqlens, size, ranks.rank(), local_rows)));
}

Array gather_rows(const Batch& batch, const Batch& mine, const Tensor& rows) {
  const std::int64_t width = rows.shape[1], bytes = width * dtype_bytes(rows.dtype);
  Array to(rows.dtype, {static_cast<std::int64_t>(batch.tokens.size()), width});
  const auto copy = [&](const Tensor& from, std::int64_t first, std::int64_t row, std::int64_t n) {
    if (n == 0) return;
    std::memcpy(to.as<std::byte>() + row * bytes, from.as<std::byte>() + first * bytes,
                static_cast<std::size_t>(n * bytes));
  };
  if (!mine.context) {
    copy(rows, 0, 0, rows.shape[0]);
    return to;
  }
  const std::vector<std::int64_t>&cu = batch.cu_seqlens, &padded = mine.cu_seqlens;
  Array all(rows.dtype, {mine.context->keys(), width});
  Buffer exchanged;
  mine.context->gather(rows, all, exchanged);
  for (std::size_t g = 0; g + 1 < cu.size(); ++g) copy(all, padded[g], cu[g], cu[g + 1] - cu[g]);
  return to;
}

Array gather_selection(const Batch& batch, const Batch& mine, const Tensor& selection) {
  Array all = gather_rows(batch, mine, selection);
  if (!mine.context) return all;
  const std::vector<std::int64_t>&cu = batch.cu_seqlens, &padded = mine.cu_seqlens;
  const std::int64_t topk = selection.shape[1];
  for (std::size_t g = 0; g + 1 < cu.size(); ++g) {  // a row selects in its own sequence
    const auto shift = static_cast<std::int32_t>(cu[g] - padded[g]);
    for (std::int64_t i = cu[g] * topk; i < cu[g + 1] * topk; ++i) {
      std::int32_t& id = all.as<std::int32_t>()[i];
      if (id >= 0) id += shift;
    }
  }
  return all;
}

}  // namespace winnow::model
