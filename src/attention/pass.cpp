#include "attention/pass.h"

namespace winnow::attention {

Rows rows_of(std::span<const std::int32_t> positions, const RowRanges& ranges) {
  Rows view;
  view.positions = positions;
  view.starts = make_tensor(ranges.starts.data(), DType::kI32, {ranges.rows()});
  view.ends = make_tensor(ranges.ends.data(), DType::kI32, {ranges.rows()});
  return view;
}

void KeyCache::fit(const AttentionConfig& config, DType dtype, std::int64_t capacity,
                   bool indexer) {
  if (config.kind == AttentionKind::kMla) {
    key.fit(dtype, {capacity, 1, config.dim_qk()});
  } else {
    key.fit(dtype, {capacity, config.kv_heads, config.dim_qk()});
    value.fit(dtype, {capacity, config.kv_heads, config.dim_v()});
  }
  if (!indexer) return;
  const IndexerConfig& i = config.indexer;
  const std::int64_t scored = capacity / i.pool_size;
  index_key.fit(dtype, {scored, i.index_dim});
  if (i.precision != SelectionPrecision::kFull) {
    index_key_data.fit(DType::kE4M3, {scored, i.index_dim});
  }
  if (i.precision == SelectionPrecision::kMxfp8) {
    index_key_scale.fit(DType::kE8M0, {scored, i.index_dim / 32});
  }
  if (i.precision == SelectionPrecision::kE4m3) index_key_scale.fit(DType::kF32, {scored, 1});
  if (i.pools()) {
    open_key.fit(dtype, {1, i.pool_size - 1, i.index_dim});
    open_gate.fit(dtype, {1, i.pool_size - 1, i.index_dim});
  }
}

RopeTables::RopeTables(const AttentionConfig& config, DType dtype) {
  const auto table = [&](std::int64_t dim) {
    return dim == 0 ? nn::RopeTable()
                    : nn::RopeTable(config.max_positions, dim, config.rope_theta, dtype);
  };
  attention = table(config.qk_rope_head_dim);
  indexer = table(config.indexer.rope_dim);
}

}  // namespace winnow::attention
