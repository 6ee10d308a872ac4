// The keys of a layer: made from the rows and, with context parallelism, gathered from all ranks;
// their gradients on the way back.
#include "attention/layer.h"
#include "base/check.h"

namespace winnow::attention {
namespace {

constexpr char kName[] = "attention";

void gather(const Rows& rows, const Buffer& mine, const Buffer& all, Memory& memory) {
  rows.context->gather(mine, all.view().rows(0, rows.keys()), memory.context.exchanged);
}

void check_context(const Rows& rows) {
  WINNOW_CHECK(kName, rows.first_key == 0 && rows.count() == rows.context->rows(),
               "with context parallelism a pass has the rank's {} rows and no keys before them, "
               "got {} rows after {} keys",
               rows.context->rows(), rows.count(), rows.first_key);
}

}  // namespace

void Layer::make_keys(const Tensor& x, const Rows& rows, const Kept& kept, Memory& memory) const {
  if (rows.context == nullptr) return projection_->keys(x, rows, kept);
  check_context(rows);
  KeyCache& own = memory.context.own;
  own.fit(c_, dtype_, rows.count(), indexer_.has_value());
  projection_->keys(x, rows, {own, kept.latents, kept.query, kept.core, kept.selection});
  gather(rows, own.key, kept.cache.key, memory);
  if (c_.kind == AttentionKind::kGqa) gather(rows, own.value, kept.cache.value, memory);
}

// Gathers what somebody reads: the selection its precision, the losses the model's dtype.
void Layer::make_index_keys(const Tensor& x, const Rows& rows, const LayerOptions& options,
                            const Kept& kept, Memory& memory) const {
  const Tensor input = projection_->indexer_input(x, kept);
  if (c_.indexer.pools()) return make_pools(x, input, rows, options, kept, memory);
  if (rows.context == nullptr) return indexer_->forward(x, input, rows, kept.cache, memory);
  check_context(rows);
  KeyCache &own = memory.context.own, &all = kept.cache;
  own.fit(c_, dtype_, rows.count());
  indexer_->forward(x, input, rows, own, memory);
  const bool mxfp8 = c_.indexer.precision == SelectionPrecision::kMxfp8;
  const bool scores = options.selects() && !options.hold_selection;
  const bool learns = options.index_loss || options.mode == AttentionMode::kWarmup;
  if (learns || (scores && !mxfp8)) gather(rows, own.index_key, all.index_key, memory);
  if (!scores || !mxfp8) return;
  gather(rows, own.index_key_data, all.index_key_data, memory);
  gather(rows, own.index_key_scale, all.index_key_scale, memory);
}

// A rank pools what its rows see, from keys and gates of all ranks.
void Layer::make_pools(const Tensor& x, const Tensor& input, const Rows& rows,
                       const LayerOptions& options, const Kept& kept, Memory& memory) const {
  indexer_->forward(x, input, rows, kept.cache, memory);
  if (!options.selects() || options.hold_selection) return;
  if (rows.context == nullptr) {
    return indexer_->pool(memory.index_key, memory.index_gate, rows, kept.cache, memory);
  }
  check_context(rows);
  ContextMemory& all = memory.context;
  const std::int64_t keys = rows.keys(), dim = c_.indexer.index_dim;
  all.index_key.fit(dtype_, {keys, dim});
  all.index_gate.fit(dtype_, {keys, dim});
  gather(rows, memory.index_key, all.index_key, memory);
  gather(rows, memory.index_gate, all.index_gate, memory);
  indexer_->pool(all.index_key, all.index_gate, rows, kept.cache, memory);
}

Tensor Layer::own_gradient(const Rows& rows, const Tensor& d_all, Buffer& own, Memory& memory) {
  if (rows.context == nullptr || d_all.empty()) return d_all;
  const std::int64_t n = rows.count();
  const Tensor& mine = d_all.rank == 3 ? own.fit(d_all.dtype, {n, d_all.shape[1], d_all.shape[2]})
                                       : own.fit(d_all.dtype, {n, d_all.shape[1]});
  rows.context->scatter_sum(d_all, mine, memory.context.exchanged);
  return mine;
}

}  // namespace winnow::attention
