// The keys that a layer's rows attend to: made by its indexer, or reused.
#include <cmath>

#include "attention/layer.h"
#include "base/arithmetic.h"
#include "base/check.h"
#include "ops/values.h"
#include "winnow/expand_pools.h"
#include "winnow/index_scores_at.h"
#include "winnow/index_topk.h"

namespace winnow::attention {
namespace {

constexpr char kName[] = "attention";

}  // namespace

bool Layer::rows_nonempty(const Rows& rows, const Selection& selection) {
  return ops::first_empty_row(rows.starts, rows.ends, rows.keys(), selection.topk_indices,
                              selection.topk_lengths) == rows.count();
}

// Runs the indexer where the call does not reuse; kept.core.selected becomes what the rows attend
// to, or what they would in a warm-up that measures.
void Layer::make_selection(const Tensor& x, const Rows& rows, const LayerOptions& options,
                           const Kept& kept, Memory& memory) const {
  kept.core.sparse = options.mode == AttentionMode::kSparse;
  kept.core.selected = {{}, {}, rows.starts, rows.ends, false};
  if (options.mode == AttentionMode::kDense) {
    kept.core.selected.rows_nonempty = rows_nonempty(rows, {});
    return;
  }
  if (options.reuses_indices) {
    if (options.selects()) kept.core.selected = reuse(options.reused, rows);
    return;
  }
  const Timed timed(memory.index_seconds);
  make_index_keys(x, rows, options, kept, memory);
  if (!options.selects()) return;
  kept.core.selected = select(rows, keys_of(kept.cache, rows), options, kept.selection, memory);
}

// The certificate of a reused selection is the word of the layer that made it, as far as this
// layer sees the same ranges.
Selection Layer::reuse(const Selection& reused, const Rows& rows) const {
  const std::int64_t held = reused.topk_indices.shape[0];
  WINNOW_CHECK(kName, held == rows.count(), "a selection of {} rows cannot serve {} rows", held,
               rows.count());
  Selection selection = reused;
  selection.rows_nonempty = reused.rows_nonempty && reused.starts.data == rows.starts.data &&
                            reused.ends.data == rows.ends.data;
  selection.starts = rows.starts;
  selection.ends = rows.ends;
  return selection;
}

// Chooses the keys of every row, or keeps those that are there; memory.topk_scores gets the
// indexer's scores of them where the loss needs them. The certificate is read from the selection:
// the ranges cannot prove it where scores are NaN, or where a selection is held under other ranges.
// Pools without the tail never get it: a row before its first whole pool selects nothing.
Selection Layer::select(const Rows& rows, const Keys& keys, const LayerOptions& options,
                        SelectionMemory& into, Memory& memory) const {
  const std::int64_t n = rows.count(), topk = c_.indexer.topk;
  Tensor scores;
  const bool sparse = options.mode == AttentionMode::kSparse;
  if (sparse && options.index_loss) scores = memory.topk_scores.fit(dtype_, {n, topk});
  const bool mxfp8 = c_.indexer.precision == SelectionPrecision::kMxfp8;
  if (!options.hold_selection) choose(rows, keys, scores, into, memory);
  const std::int64_t held =
      into.topk_indices.view().empty() ? 0 : into.topk_indices.view().shape[0];
  WINNOW_CHECK(kName, held == n, "a held selection of {} rows cannot serve {} rows", held, n);
  if (!scores.empty() && (mxfp8 || options.hold_selection)) {
    IndexScoresAtArgs a;
    a.index_query = memory.index_query;
    a.index_key = keys.index_key;
    a.index_weights = memory.index_weights;
    a.topk_indices = into.topk_indices;
    a.starts = rows.starts;
    a.ends = rows.ends;
    a.relu = c_.indexer.relu;
    a.topk_scores = scores;
    call(index_scores_at, index_scores_at_workspace_bytes, a, memory.scratch);
    counted_flops() += index_flops(pairs(rows, {into.topk_indices, into.topk_lengths, {}, {}}));
  }
  Selection selection{into.topk_indices, into.topk_lengths, rows.starts, rows.ends};
  const bool provable = !c_.indexer.pools() || c_.indexer.select_tail;
  selection.rows_nonempty = sparse && provable && rows_nonempty(rows, selection);
  return selection;
}

void Layer::choose(const Rows& rows, const Keys& keys, const Tensor& scores, SelectionMemory& into,
                   Memory& memory) const {
  const IndexerConfig& i = c_.indexer;
  const std::int64_t n = rows.count(), best = i.topk / i.pool_size;
  const bool mxfp8 = i.precision == SelectionPrecision::kMxfp8,
             e4m3 = i.precision == SelectionPrecision::kE4m3;
  IndexTopkArgs a;
  a.index_query = mxfp8 || e4m3 ? memory.index_query_data : memory.index_query;
  a.index_key = mxfp8 || e4m3 ? keys.index_key_data : keys.index_key;
  if (mxfp8) {
    a.index_query_scale = memory.index_query_scale;
    a.index_key_scale = keys.index_key_scale;
  }
  if (e4m3) a.index_key_scale = keys.index_key_scale.reshape({rows.pools.count});
  a.index_weights = memory.index_weights;
  a.starts = i.pools() ? rows.pools.starts : rows.starts;
  a.ends = i.pools() ? rows.pools.ends : rows.ends;
  a.relu = i.relu;
  if (i.hf_scoring) a.dot_scale = 1 / std::sqrt(static_cast<double>(i.index_dim));
  Buffer& ids = i.pools() ? memory.pool_indices : into.topk_indices;
  Buffer& lengths = i.pools() ? memory.pool_lengths : into.topk_lengths;
  a.topk_indices = ids.fit(DType::kI32, {n, best});
  a.topk_lengths = lengths.fit(DType::kI32, {n});
  a.topk_scores = mxfp8 ? memory.selection_scores.fit(DType::kF32, {n, best}) : scores;
  call(index_topk, index_topk_workspace_bytes, a, memory.scratch);
  counted_flops() += index_flops(scored_pairs(rows));
  ++memory.selections;
  if (mxfp8) drop_unusable(a.topk_scores, into);
  if (i.pools()) expand(rows, into, memory);
}

// From the selected pools to their tokens and the tail.
void Layer::expand(const Rows& rows, SelectionMemory& into, Memory& memory) const {
  const std::int64_t n = rows.count();
  ExpandPoolsArgs a;
  a.pool_indices = memory.pool_indices;
  a.pool_bases = rows.pools.bases;
  a.starts = rows.starts;
  a.ends = rows.ends;
  a.pool_size = c_.indexer.pool_size;
  a.always_select_tail = c_.indexer.select_tail;
  a.topk_indices = into.topk_indices.fit(DType::kI32, {n, c_.indexer.selection_width()});
  a.topk_lengths = into.topk_lengths.fit(DType::kI32, {n});
  call(expand_pools, expand_pools_workspace_bytes, a, memory.scratch);
}

// A score in MXFP8 that is not finite says nothing of the one that the loss will see: its slot is
// taken out. (NaN and -inf are never selected; what is left is +inf.)
void Layer::drop_unusable(const Tensor& scores, const SelectionMemory& selection) const {
  const std::int64_t topk = c_.indexer.topk;
  for (std::int64_t i = 0; i < scores.shape[0]; ++i) {
    std::int32_t* ids = selection.topk_indices.as<std::int32_t>() + i * topk;
    std::int32_t& length = selection.topk_lengths.as<std::int32_t>()[i];
    std::int32_t kept = 0;
    for (std::int32_t s = 0; s < length; ++s) {
      if (std::isfinite(scores.as<float>()[i * topk + s])) ids[kept++] = ids[s];
    }
    for (std::int32_t s = kept; s < length; ++s) ids[s] = -1;
    length = kept;
  }
}

}  // namespace winnow::attention
