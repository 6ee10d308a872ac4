#include "attention/layer.h"

#include <cmath>

#include "base/check.h"
#include "base/numbers.h"
#include "base/row_range.h"
#include "ops/values.h"
#include "winnow/attention_target.h"
#include "winnow/dense_index_loss.h"
#include "winnow/index_loss.h"
#include "winnow/index_scores_at.h"
#include "winnow/index_scores_at_backward.h"
#include "winnow/index_topk.h"
#include "winnow/sparse_attention.h"
#include "winnow/sparse_attention_backward.h"

namespace winnow::attention {
namespace {

const AttentionConfig& checked(const AttentionConfig& config) {
  validate(config);
  return config;
}

double sum(const Tensor& t) {
  double total = 0;
  for (std::int64_t i = 0; i < t.elements(); ++i) total += load_double(t.data, t.dtype, i);
  return total;
}

}  // namespace

Layer::Layer(const AttentionConfig& config, const RopeTables& ropes, ParameterList& parameters,
             const std::string& prefix, DType dtype)
    : c_(checked(config)),
      dtype_(dtype),
      projection_((c_.kind == AttentionKind::kMla ? make_mla : make_gqa)(
          c_, ropes.attention, parameters, prefix, dtype)),
      indexer_(c_, ropes.indexer, parameters, prefix + "indexer.", dtype) {}

LayerResult Layer::forward(const Tensor& x, const Rows& rows, const LayerOptions& options,
                           KeyCache& cache, Memory& memory, const Tensor& output) {
  const std::int64_t n = rows.count();
  const bool warmup = options.mode == AttentionMode::kWarmup;
  sparse_ = options.mode == AttentionMode::kSparse;
  if (c_.indexer.precision == SelectionPrecision::kMxfp8) {
    const std::string missing = missing_for_mxfp8(c_.indexer, dtype_, options.mode);
    WINNOW_CHECK("attention", missing.empty(), "indexer precision \"mxfp8\" needs {}", missing);
  }
  projection_->forward(x, rows, cache);
  const Keys keys = keys_of(cache, rows.keys());

  LayerResult result;
  if (options.mode != AttentionMode::kDense) {
    indexer_.forward(x, projection_->indexer_input(x), rows, cache, memory);
  }
  if (sparse_ || (warmup && options.measure_selection)) {
    select(rows, keys, memory, options.reuse_selection, sparse_ && options.index_loss);
  }
  const std::int64_t dim_v = c_.kind == AttentionKind::kMla ? c_.kv_lora_rank : c_.v_head_dim;
  attended_.fit(dtype_, {n, c_.heads, dim_v});
  lse_.fit(dtype_, {n, c_.heads});
  attend(rows, keys, sparse_, attended_, lse_, memory);
  if (!output.empty()) projection_->output(attended_, output);

  if (sparse_ && options.index_loss) result.index_kl = sparse_loss(x, rows, keys, options, memory);
  if (warmup) result.index_kl = dense_loss(x, rows, keys, options, memory);
  if (options.measure_selection && options.mode != AttentionMode::kDense) {
    Tensor dense_lse = lse_;
    if (sparse_) {
      dense_lse = memory.dense_lse.fit(dtype_, {n, c_.heads});
      attend(rows, keys, false, memory.dense_attended.fit(dtype_, {n, c_.heads, dim_v}), dense_lse,
             memory);
    }
    result.attention_mass_caught = mass_caught(rows, keys, dense_lse, memory);
  }
  return result;
}

void Layer::backward(const Tensor& x, const Rows& rows, const KeyCache& cache,
                     const Tensor& d_output, const Tensor& d_x, Memory& memory) {
  const std::int64_t n = rows.count();
  const Keys keys = keys_of(cache, rows.keys());
  const Tensor& query = projection_->query();
  const Tensor& d_attended =
      memory.d_attended.fit(dtype_, {n, c_.heads, attended_.view().shape[2]});
  projection_->output_backward(attended_, d_output, d_attended, memory);

  SparseAttentionBackwardArgs a;
  a.query = query;
  a.key = keys.key;
  a.value = keys.value;
  if (sparse_) {
    a.topk_indices = topk_indices_;
    a.topk_lengths = topk_lengths_;
  }
  a.starts = rows.starts;
  a.ends = rows.ends;
  a.softmax_scale = c_.softmax_scale();
  a.output = attended_;
  a.lse = lse_;
  a.d_output = d_attended;
  a.rows_nonempty = rows_nonempty(rows);
  a.d_query = memory.d_query.fit(dtype_, {n, c_.heads, query.shape[2]});
  a.d_key = memory.d_key.fit(dtype_, {n, keys.key.shape[1], query.shape[2]});
  if (!keys.value.empty()) {
    a.d_value = memory.d_value.fit(dtype_, {n, c_.kv_heads, c_.v_head_dim});
  }
  call(sparse_attention_backward, sparse_attention_backward_workspace_bytes, a, memory.scratch);
  projection_->backward(x, rows, a.d_query, a.d_key, a.d_value, d_x, memory);
}

bool Layer::rows_nonempty(const Rows& rows) const {
  const Tensor all;
  return ops::first_empty_row(rows.starts, rows.ends, rows.keys(), sparse_ ? topk_indices_ : all,
                              sparse_ ? topk_lengths_ : all) == rows.count();
}

Layer::Keys Layer::keys_of(const KeyCache& cache, std::int64_t keys) const {
  Keys view;
  view.key = cache.key.view().rows(0, keys);
  if (c_.kind == AttentionKind::kGqa) view.value = cache.value.view().rows(0, keys);
  view.index_key = cache.index_key.view().rows(0, keys);
  if (c_.indexer.precision == SelectionPrecision::kMxfp8) {
    view.index_key_data = cache.index_key_data.view().rows(0, keys);
    view.index_key_scale = cache.index_key_scale.view().rows(0, keys);
  }
  return view;
}

// Chooses the keys of every row, or keeps those that are there; memory.topk_scores gets the
// indexer's scores of them where asked for.
void Layer::select(const Rows& rows, const Keys& keys, Memory& memory, bool reuse,
                   bool with_scores) {
  const std::int64_t n = rows.count(), topk = c_.indexer.topk;
  Tensor scores;
  if (with_scores) scores = memory.topk_scores.fit(dtype_, {n, topk});
  const bool mxfp8 = c_.indexer.precision == SelectionPrecision::kMxfp8;
  if (!reuse) {
    IndexTopkArgs a;
    a.index_query = mxfp8 ? memory.index_query_data : memory.index_query;
    a.index_key = mxfp8 ? keys.index_key_data : keys.index_key;
    if (mxfp8) {
      a.index_query_scale = memory.index_query_scale;
      a.index_key_scale = keys.index_key_scale;
    }
    a.index_weights = memory.index_weights;
    a.starts = rows.starts;
    a.ends = rows.ends;
    a.relu = c_.indexer.relu;
    a.topk_indices = topk_indices_.fit(DType::kI32, {n, topk});
    a.topk_lengths = topk_lengths_.fit(DType::kI32, {n});
    a.topk_scores = mxfp8 ? memory.selection_scores.fit(DType::kF32, {n, topk}) : scores;
    call(index_topk, index_topk_workspace_bytes, a, memory.scratch);
    if (!mxfp8) return;
    drop_unusable(a.topk_scores);
  }
  const std::int64_t held = topk_indices_.view().empty() ? 0 : topk_indices_.view().shape[0];
  WINNOW_CHECK("attention", held == n, "a frozen selection of {} rows cannot serve {} rows", held,
               n);
  if (!with_scores) return;
  IndexScoresAtArgs a;
  a.index_query = memory.index_query;
  a.index_key = keys.index_key;
  a.index_weights = memory.index_weights;
  a.topk_indices = topk_indices_;
  a.starts = rows.starts;
  a.ends = rows.ends;
  a.relu = c_.indexer.relu;
  a.topk_scores = scores;
  call(index_scores_at, index_scores_at_workspace_bytes, a, memory.scratch);
}

// A score in MXFP8 that is not finite says nothing of the one that the loss will see: its slot is
// taken out. (NaN and -inf are never selected; what is left is +inf.)
void Layer::drop_unusable(const Tensor& scores) {
  const std::int64_t topk = c_.indexer.topk;
  for (std::int64_t i = 0; i < scores.shape[0]; ++i) {
    std::int32_t* ids = topk_indices_.as<std::int32_t>() + i * topk;
    std::int32_t& length = topk_lengths_.as<std::int32_t>()[i];
    std::int32_t kept = 0;
    for (std::int32_t s = 0; s < length; ++s) {
      if (std::isfinite(scores.as<float>()[i * topk + s])) ids[kept++] = ids[s];
    }
    for (std::int32_t s = kept; s < length; ++s) ids[s] = -1;
    length = kept;
  }
}

void Layer::attend(const Rows& rows, const Keys& keys, bool sparse, const Tensor& attended,
                   const Tensor& lse, Memory& memory) const {
  SparseAttentionArgs a;
  a.query = projection_->query();
  a.key = keys.key;
  a.value = keys.value;
  if (sparse) {
    a.topk_indices = topk_indices_;
    a.topk_lengths = topk_lengths_;
  }
  a.starts = rows.starts;
  a.ends = rows.ends;
  a.softmax_scale = c_.softmax_scale();
  a.output = attended;
  a.lse = lse;
  call(sparse_attention, sparse_attention_workspace_bytes, a, memory.scratch);
}

// memory.target = attention of the selected keys, summed over heads, by the given lse.
void Layer::targets(const Rows& rows, const Keys& keys, const Tensor& lse, Memory& memory) const {
  AttentionTargetArgs a;
  a.query = projection_->query();
  a.key = keys.key;
  a.lse = lse;
  a.topk_indices = topk_indices_;
  a.starts = rows.starts;
  a.ends = rows.ends;
  a.softmax_scale = c_.softmax_scale();
  a.attention_target = memory.target.fit(dtype_, {rows.count(), c_.indexer.topk});
  call(attention_target, attention_target_workspace_bytes, a, memory.scratch);
}

double Layer::sparse_loss(const Tensor& x, const Rows& rows, const Keys& keys,
                          const LayerOptions& options, Memory& memory) {
  targets(rows, keys, lse_, memory);
  IndexLossArgs loss;
  loss.attention_target = memory.target;
  loss.topk_scores = memory.topk_scores;
  loss.topk_indices = topk_indices_;
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
    a.topk_indices = topk_indices_;
    a.starts = rows.starts;
    a.ends = rows.ends;
    a.relu = c_.indexer.relu;
    a.d_scores = memory.d_scores;
    a.d_index_query = memory.d_index_query;
    a.d_index_key = memory.d_index_key;
    a.d_index_weights = memory.d_index_weights;
    call(index_scores_at_backward, index_scores_at_backward_workspace_bytes, a, memory.scratch);
    indexer_.backward(x, projection_->indexer_input(x), rows, memory);
  }
  return sum(memory.kl);
}

double Layer::dense_loss(const Tensor& x, const Rows& rows, const Keys& keys,
                         const LayerOptions& options, Memory& memory) {
  fit_index_gradients(rows, memory);
  DenseIndexLossArgs a;
  a.index_query = memory.index_query;
  a.index_key = keys.index_key;
  a.index_weights = memory.index_weights;
  a.relu = c_.indexer.relu;
  a.query = projection_->query();
  a.key = keys.key;
  a.lse = lse_;
  a.softmax_scale = c_.softmax_scale();
  a.starts = rows.starts;
  a.ends = rows.ends;
  a.d_kl = options.d_kl;
  a.kl = memory.kl.fit(dtype_, {rows.count()});
  a.d_index_query = memory.d_index_query;
  a.d_index_key = memory.d_index_key;
  a.d_index_weights = memory.d_index_weights;
  call(dense_index_loss, dense_index_loss_workspace_bytes, a, memory.scratch);
  if (options.index_gradient) {
    indexer_.backward(x, projection_->indexer_input(x), rows, memory);
  }
  return sum(memory.kl);
}

double Layer::mass_caught(const Rows& rows, const Keys& keys, const Tensor& dense_lse,
                          Memory& memory) const {
  targets(rows, keys, dense_lse, memory);
  double total = 0;
  std::int64_t counted = 0;
  const Tensor& target = memory.target;
  for (std::int64_t i = 0; i < rows.count(); ++i) {
    if (row_range(rows.starts, rows.ends, i, rows.keys()).length() <= c_.indexer.topk) continue;
    total += sum(target.rows(i, 1)) / static_cast<double>(c_.heads);
    ++counted;
  }
  return counted == 0 ? 1 : total / static_cast<double>(counted);
}

void Layer::fit_index_gradients(const Rows& rows, Memory& memory) const {
  const std::int64_t n = rows.count();
  memory.d_index_query.fit(dtype_, {n, c_.indexer.index_heads, c_.indexer.index_dim});
  memory.d_index_key.fit(dtype_, {rows.keys(), c_.indexer.index_dim});
  memory.d_index_weights.fit(dtype_, {n, c_.indexer.index_heads});
}

}  // namespace winnow::attention
