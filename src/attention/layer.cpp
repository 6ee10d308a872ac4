#include "attention/layer.h"

#include "base/arithmetic.h"
#include "base/check.h"
#include "base/row_range.h"
#include "nn/pointwise.h"
#include "ops/values.h"
#include "winnow/sparse_attention.h"
#include "winnow/sparse_attention_backward.h"

namespace winnow::attention {
namespace {

constexpr char kName[] = "attention";

double range_pairs(const Tensor& starts, const Tensor& ends, std::int64_t keys) {
  double pairs = 0;
  for (std::int64_t i = 0; i < starts.shape[0]; ++i) {
    pairs += static_cast<double>(row_range(starts, ends, i, keys).length());
  }
  return pairs;
}

const AttentionConfig& checked(const AttentionConfig& config) {
  validate(config);
  return config;
}

}  // namespace

Layer::Layer(const AttentionConfig& config, const RopeTables& ropes, ParameterList& parameters,
             const std::string& prefix, DType dtype, bool owns_indexer)
    : c_(checked(config)),
      dtype_(dtype),
      projection_((c_.kind == AttentionKind::kMla ? make_mla : make_gqa)(
          c_, ropes.attention, parameters, prefix, dtype)) {
  if (owns_indexer) indexer_.emplace(c_, ropes.indexer, parameters, prefix + "indexer.", dtype);
}

void Layer::check(const Rows& rows, const LayerOptions& options) const {
  if (options.mode == AttentionMode::kDense) return;
  WINNOW_CHECK(kName, options.head_ranks == nullptr || options.mode == AttentionMode::kSparse,
               "heads spread over ranks need the sparse loss: that of a warm-up makes its target "
               "inside, from the heads it is given");
  const bool learns = options.index_loss || options.mode == AttentionMode::kWarmup;
  WINNOW_CHECK(
      kName, !c_.indexer.pools() || !learns,
      "an indexer of pools does not learn, pool_size is {}: use the mode sparse (or dense) "
      "and no indexer loss",
      c_.indexer.pool_size);
  if (options.reuses_indices) {
    WINNOW_CHECK(kName, !options.selects() || !options.reused.empty(),
                 "a layer that reuses indices must be given a selection, got none");
    return;
  }
  WINNOW_CHECK(kName, indexer_.has_value(),
               "a layer that owns no indexer cannot compute indices: give it a selection to reuse");
  const std::string missing = missing_for_precision(c_.indexer, dtype_, options.mode);
  WINNOW_CHECK(kName, missing.empty(), "indexer precision \"{}\" needs {}",
               precision_name(c_.indexer.precision), missing);
  const std::int64_t ranges = rows.pools.starts.empty() ? 0 : rows.pools.starts.shape[0];
  WINNOW_CHECK(
      kName, !c_.indexer.pools() || ranges == rows.count(),
      "with pool_size {} every one of {} rows needs its range of pools (PoolTables), got {}",
      c_.indexer.pool_size, rows.count(), ranges);
}

LayerResult Layer::forward(const Tensor& x, const Rows& rows, const LayerOptions& options,
                           const Kept& kept, Memory& memory, const Tensor& output) const {
  check(rows, options);
  const bool warmup = options.mode == AttentionMode::kWarmup;
  const bool sparse = options.mode == AttentionMode::kSparse;
  projection_->query_latent(x, kept);
  projection_->query(x, rows, kept);
  if (!options.shared_keys) make_keys(x, rows, kept, memory);
  make_selection(x, rows, options, kept, memory);
  const Keys keys = keys_of(kept.cache, rows);
  core_attention(rows, keys, kept, memory);
  if (!output.empty()) {
    projection_->heads(kept);
    projection_->output(kept, output);
  }

  LayerResult result;
  if (!options.reuses_indices) {
    if (sparse && options.index_loss) {
      result.index_kl = sparse_loss(x, rows, keys, options, kept, memory);
    }
    if (warmup) result.index_kl = dense_loss(x, rows, keys, options, kept, memory);
  }
  if (options.measure_selection && options.selects()) {
    result.attention_mass_caught = mass_caught(rows, keys, options, kept, memory);
  }
  return result;
}

void Layer::replay(const Tensor& x, const Rows& rows, const LayerOptions& options,
                   const LayerReplay& parts, const Kept& kept, Memory& memory,
                   const Tensor& output) const {
  LayerOptions again = options;
  again.index_loss = again.index_gradient = again.measure_selection = false;
  check(rows, again);
  if (parts.latents) {
    projection_->query_latent(x, kept);
    if (!options.shared_keys) make_keys(x, rows, kept, memory);
  }
  if (parts.query) projection_->query(x, rows, kept);
  if (parts.core) {
    make_selection(x, rows, again, kept, memory);
    core_attention(rows, keys_of(kept.cache, rows), kept, memory);
    projection_->heads(kept);
  }
  if (!output.empty()) projection_->output(kept, output);
}

void Layer::backward(const Tensor& x, const Rows& rows, const LayerOptions& options,
                     const Kept& kept, const Tensor& d_output, const Tensor& d_x,
                     const Tensor& d_shared_keys, Memory& memory) const {
  const std::int64_t n = rows.count();
  const Keys keys = keys_of(kept.cache, rows);
  const CoreActivations& core = kept.core;
  const Tensor& query = kept.query.query;
  const Tensor& d_attended =
      memory.d_attended.fit(dtype_, {n, c_.heads, core.attended.view().shape[2]});
  projection_->output_backward(kept, d_output, d_attended, memory);

  SparseAttentionBackwardArgs a;
  a.query = query;
  a.key = keys.key;
  a.value = keys.value;
  if (core.sparse) {
    a.topk_indices = core.selected.topk_indices;
    a.topk_lengths = core.selected.topk_lengths;
  }
  a.starts = rows.starts;
  a.ends = rows.ends;
  a.softmax_scale = c_.softmax_scale();
  a.output = core.attended;
  a.lse = core.lse;
  a.d_output = d_attended;
  a.rows_nonempty = core.selected.rows_nonempty;
  a.d_query = memory.d_query.fit(dtype_, {n, c_.heads, query.shape[2]});
  a.d_key = memory.d_key.fit(dtype_, {rows.keys(), keys.key.shape[1], query.shape[2]});
  if (!keys.value.empty()) {
    a.d_value = memory.d_value.fit(dtype_, {rows.keys(), c_.kv_heads, c_.v_head_dim});
  }
  call(sparse_attention_backward, sparse_attention_backward_workspace_bytes, a, memory.scratch);
  counted_flops() += 2 * attention_flops(pairs(rows, core.sparse ? core.selected : Selection()));

  projection_->query_backward(x, rows, kept, a.d_query, d_x, memory);
  if (options.shared_keys) {
    nn::add(a.d_key, d_shared_keys);
    return;
  }
  if (!d_shared_keys.empty()) nn::add(d_shared_keys, a.d_key);
  ContextMemory& own = memory.context;
  const Tensor d_key = own_gradient(rows, a.d_key, own.d_key, memory);
  const Tensor d_value = own_gradient(rows, a.d_value, own.d_value, memory);
  projection_->keys_backward(x, rows, kept, d_key, d_value, d_x, memory);
}

Layer::Keys Layer::keys_of(const KeyCache& cache, const Rows& rows) const {
  const std::int64_t keys = rows.keys();
  Keys view;
  view.key = cache.key.view().rows(0, keys);
  if (c_.kind == AttentionKind::kGqa) view.value = cache.value.view().rows(0, keys);
  if (!indexer_) return view;
  const std::int64_t scored = c_.indexer.pools() ? rows.pools.count : keys;
  view.index_key = cache.index_key.view().rows(0, scored);
  if (c_.indexer.precision != SelectionPrecision::kFull) {
    view.index_key_data = cache.index_key_data.view().rows(0, scored);
    view.index_key_scale = cache.index_key_scale.view().rows(0, scored);
  }
  return view;
}

void Layer::core_attention(const Rows& rows, const Keys& keys, const Kept& kept,
                           Memory& memory) const {
  const std::int64_t n = rows.count();
  CoreActivations& core = kept.core;
  attend(rows, keys, kept.query.query, core.sparse ? core.selected : Selection(),
         core.attended.fit(dtype_, {n, c_.heads, c_.dim_v()}), core.lse.fit(dtype_, {n, c_.heads}),
         memory);
}

void Layer::attend(const Rows& rows, const Keys& keys, const Tensor& query,
                   const Selection& selection, const Tensor& attended, const Tensor& lse,
                   Memory& memory) const {
  SparseAttentionArgs a;
  a.query = query;
  a.key = keys.key;
  a.value = keys.value;
  a.topk_indices = selection.topk_indices;
  a.topk_lengths = selection.topk_lengths;
  a.starts = rows.starts;
  a.ends = rows.ends;
  a.softmax_scale = c_.softmax_scale();
  a.output = attended;
  a.lse = lse;
  call(sparse_attention, sparse_attention_workspace_bytes, a, memory.scratch);
  counted_flops() += attention_flops(pairs(rows, selection));
}

double Layer::visible_pairs(const Rows& rows) {
  return range_pairs(rows.starts, rows.ends, rows.keys());
}

double Layer::scored_pairs(const Rows& rows) const {
  if (!c_.indexer.pools()) return visible_pairs(rows);
  return range_pairs(rows.pools.starts, rows.pools.ends, rows.pools.count);
}

double Layer::pairs(const Rows& rows, const Selection& selection) {
  if (selection.empty()) return visible_pairs(rows);
  double pairs = 0;
  for (std::int64_t i = 0; i < rows.count(); ++i) {
    pairs += static_cast<double>(selection.topk_lengths.as<std::int32_t>()[i]);
  }
  return pairs;
}

double Layer::logit_flops(double pairs) const {
  return 2 * pairs * static_cast<double>(c_.heads * c_.dim_qk());
}

double Layer::attention_flops(double pairs) const {
  return logit_flops(pairs) + 2 * pairs * static_cast<double>(c_.heads * c_.dim_v());
}

double Layer::index_flops(double pairs) const {
  return 2 * pairs * static_cast<double>(c_.indexer.index_heads * c_.indexer.index_dim);
}

}  // namespace winnow::attention
