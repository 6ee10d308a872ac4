// A layer whose indexer scores pools, over packed sequences or ranges of rows.
#pragma once

#include <gtest/gtest.h>

#include "attention/pools.h"
#include "tests/layer_trial.h"

namespace winnow::attention {

using Ids = std::vector<std::int32_t>;

// One layer with random weights and rows; what it computes stays in the fields.
struct PoolsTrial : LayerTrial {
  std::vector<std::int64_t> cu_seqlens;  // left out, unless a test says them
  TokenSpans spans;
  PoolTables pools;
  Array output, d_output, d_x;

  explicit PoolsTrial(const AttentionConfig& c, std::int64_t rows, DType type = DType::kF64)
      : LayerTrial(c, rows, type) {}
  std::int64_t count() const { return std::ssize(positions); }
  // Packed sequences of these lengths; what is left of the rows is padding.
  PoolsTrial& packed(const Ids& lengths) {
    Ids cuts = {0};
    std::size_t row = 0;
    for (const std::int32_t length : lengths) {
      for (std::int32_t p = 0; p < length; ++p) positions[row++] = p;
      cuts.push_back(cuts.back() + length);
    }
    ranges = packed_ranges(cuts, count());
    return *this;
  }
  Rows rows() {
    Rows view = rows_of(positions, ranges);
    if (config.indexer.pools()) {
      pools.whole(ranges, cu_seqlens, spans, config.indexer.pool_size);
      view.pools = pools.view();
    }
    return view;
  }
  LayerOptions sparse() const {
    LayerOptions options;
    options.mode = AttentionMode::kSparse;
    return options;
  }
  void forward(const LayerOptions& options) {
    activations.cache.fit(config, dtype, count());
    output = Array(dtype, {count(), config.hidden_size});
    layer.forward(x.value, rows(), options, activations.kept(), memory, output);
  }
  void forward() { forward(sparse()); }
  void backward() {
    d_output = output.clone();
    d_x = Array(dtype, {count(), config.hidden_size});
    for (const auto& p : parameters.all()) p->grad.zero();
    layer.backward(x.value, rows(), sparse(), activations.kept(), d_output, d_x, {}, memory);
  }
  bool certificate() const { return activations.core.selected.rows_nonempty; }
  Ids selected(std::int64_t row) const {
    const Tensor& ids = activations.selection.topk_indices;
    const std::int32_t* list = ids.as<std::int32_t>() + row * ids.shape[1];
    const std::int32_t length = activations.selection.topk_lengths.as<std::int32_t>()[row];
    for (std::int64_t s = length; s < ids.shape[1]; ++s) EXPECT_EQ(list[s], -1);
    return {list, list + length};
  }
  std::vector<double> row(std::int64_t i) const { return model::numbers(output.view().rows(i, 1)); }
};

inline AttentionConfig with_pools(AttentionConfig c, std::int64_t pool_size, std::int64_t topk,
                                  bool tail = true) {
  c.indexer.pool_size = pool_size;
  c.indexer.topk = topk;
  c.indexer.select_tail = tail;
  c.max_positions = 256;
  return c;
}

inline AttentionConfig without_rotation(AttentionConfig c) {
  c.qk_rope_head_dim = c.indexer.rope_dim = 0;
  c.rope_theta = 0;
  return c;
}

}  // namespace winnow::attention
