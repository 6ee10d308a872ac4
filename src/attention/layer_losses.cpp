// What the indexer of a layer learns from, and how well it does: its losses with their gradients,
// and the share of the dense attention that a selection catches.
#include <span>

#include "attention/layer.h"
#include "base/arithmetic.h"
#include "base/numbers.h"
#include "base/row_range.h"
#include "comm/collectives.h"
#include "nn/rows.h"
#include "winnow/attention_target.h"
#include "winnow/dense_index_loss.h"
#include "winnow/index_loss.h"
#include "winnow/index_scores_at_backward.h"

namespace winnow::attention {
namespace {

double sum(const Tensor& t) {
  double total = 0;
  for (std::int64_t i = 0; i < t.elements(); ++i) total += load_double(t.data, t.dtype, i);
  return total;
}

}  // namespace

// memory.target = attention of the selected keys, summed over all heads, by the given lse.
void Layer::targets(const Rows& rows, const Keys& keys, const LayerOptions& options,
                    const Tensor& lse, const Kept& kept, Memory& memory) const {
  AttentionTargetArgs a;
  a.query = kept.query.query;
  a.key = keys.key;
  a.lse = lse;
  a.topk_indices = kept.core.selected.topk_indices;
  a.starts = rows.starts;
  a.ends = rows.ends;
  a.softmax_scale = c_.softmax_scale();
  a.attention_target = memory.target.fit(dtype_, {rows.count(), a.topk_indices.shape[1]});
  call(attention_target, attention_target_workspace_bytes, a, memory.scratch);
  counted_flops() += logit_flops(pairs(rows, kept.core.selected));
  if (options.head_ranks == nullptr) return;
  const Tensor& target = memory.target;
  nn::with_real(target.dtype, [&]<class T>(T) {
    comm::sum(*options.head_ranks,
              std::span<T>(target.as<T>(), static_cast<std::size_t>(target.elements())));
  });
}

double Layer::sparse_loss(const Tensor& x, const Rows& rows, const Keys& keys,
                          const LayerOptions& options, const Kept& kept, Memory& memory) const {
  const Timed timed(memory.index_seconds);
  const Tensor& ids = kept.core.selected.topk_indices;
  targets(rows, keys, options, kept.core.lse, kept, memory);
  IndexLossArgs loss;
  loss.attention_target = memory.target;
  loss.topk_scores = memory.topk_scores;
  loss.topk_indices = ids;
  loss.starts = rows.starts;
  loss.ends = rows.ends;
  loss.d_kl = options.d_kl;
  loss.kl = memory.kl.fit(dtype_, {rows.count()});
  loss.d_scores = memory.d_scores.fit(dtype_, {rows.count(), c_.indexer.topk});
  call(index_loss, index_loss_workspace_bytes, loss, memory.scratch);
  if (options.index_gradient) {
    fit_index_gradients(rows, memory);
    IndexScoresAtBackwardArgs a;
    a.index_query = memory.index_query;
    a.index_key = keys.index_key;
    a.index_weights = memory.index_weights;
    a.topk_indices = ids;
    a.starts = rows.starts;
    a.ends = rows.ends;
    a.relu = c_.indexer.relu;
    a.d_scores = memory.d_scores;
    a.d_index_query = memory.d_index_query;
    a.d_index_key = memory.d_index_key;
    a.d_index_weights = memory.d_index_weights;
    call(index_scores_at_backward, index_scores_at_backward_workspace_bytes, a, memory.scratch);
    counted_flops() += 2 * index_flops(pairs(rows, kept.core.selected));
    indexer_backward(x, rows, kept, memory);
  }
  return sum(memory.kl);
}

double Layer::dense_loss(const Tensor& x, const Rows& rows, const Keys& keys,
                         const LayerOptions& options, const Kept& kept, Memory& memory) const {
  const Timed timed(memory.index_seconds);
  fit_index_gradients(rows, memory);
  DenseIndexLossArgs a;
  a.index_query = memory.index_query;
  a.index_key = keys.index_key;
  a.index_weights = memory.index_weights;
  a.relu = c_.indexer.relu;
  a.query = kept.query.query;
  a.key = keys.key;
  a.lse = kept.core.lse;
  a.softmax_scale = c_.softmax_scale();
  a.starts = rows.starts;
  a.ends = rows.ends;
  a.d_kl = options.d_kl;
  a.kl = memory.kl.fit(dtype_, {rows.count()});
  a.d_index_query = memory.d_index_query;
  a.d_index_key = memory.d_index_key;
  a.d_index_weights = memory.d_index_weights;
  call(dense_index_loss, dense_index_loss_workspace_bytes, a, memory.scratch);
  const double seen = visible_pairs(rows);
  counted_flops() += logit_flops(seen) + 3 * index_flops(seen);
  if (options.index_gradient) indexer_backward(x, rows, kept, memory);
  return sum(memory.kl);
}

double Layer::mass_caught(const Rows& rows, const Keys& keys, const LayerOptions& options,
                          const Kept& kept, Memory& memory) const {
  Tensor dense_lse = kept.core.lse;
  if (kept.core.sparse) {
    const Tensor& attended = kept.core.attended;
    dense_lse = memory.dense_lse.fit(dtype_, {rows.count(), c_.heads});
    attend(rows, keys, kept.query.query, {},
           memory.dense_attended.fit(dtype_, {rows.count(), c_.heads, attended.shape[2]}),
           dense_lse, memory);
  }
  targets(rows, keys, options, dense_lse, kept, memory);
  const std::int64_t parts = options.head_ranks == nullptr ? 1 : options.head_ranks->size();
  const auto heads = static_cast<double>(parts * c_.heads);
  double sums[] = {0, 0};
  auto& [total, counted] = sums;
  const Tensor& target = memory.target;
  for (std::int64_t i = 0; i < rows.count(); ++i) {
    if (row_range(rows.starts, rows.ends, i, rows.keys()).length() <= target.shape[1]) continue;
    total += sum(target.rows(i, 1)) / heads;
    ++counted;
  }
  if (rows.context != nullptr) {
    comm::sum(rows.context->ranks(), std::span<double>(sums));
  }
  return counted == 0 ? 1 : total / counted;
}

void Layer::fit_index_gradients(const Rows& rows, Memory& memory) const {
  const std::int64_t n = rows.count();
  memory.d_index_query.fit(dtype_, {n, c_.indexer.index_heads, c_.indexer.index_dim});
  memory.d_index_key.fit(dtype_, {rows.keys(), c_.indexer.index_dim});
  memory.d_index_weights.fit(dtype_, {n, c_.indexer.index_heads});
}

void Layer::indexer_backward(const Tensor& x, const Rows& rows, const Kept& kept,
                             Memory& memory) const {
  const Tensor d_index_key =
      own_gradient(rows, memory.d_index_key, memory.context.d_index_key, memory);
  indexer_->backward(x, projection_->indexer_input(x, kept), rows, d_index_key, memory);
}

}  // namespace winnow::attention
