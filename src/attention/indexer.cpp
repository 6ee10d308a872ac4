#include "attention/indexer.h"

#include <algorithm>
#include <cmath>

#include "attention/views.h"
#include "base/numbers.h"
#include "nn/matmul.h"
#include "nn/norm.h"
#include "winnow/append_pools.h"
#include "winnow/hadamard.h"
#include "winnow/quantise.h"

namespace winnow::attention {
namespace {

void round_to_bf16(const Tensor& t) {  // contiguous
  for (std::int64_t i = 0; i < t.elements(); ++i) {
    const BF16 rounded = from_double<BF16>(load_double(t.data, t.dtype, i));
    store_double(t.data, t.dtype, i, to_double(rounded));
  }
}

// MXFP8: a power of two per 32 channels, rounded up.
void quantise_mxfp8(const Tensor& input, const Tensor& data, const Tensor& scale, Memory& memory) {
  call(quantise, quantise_workspace_bytes, QuantiseArgs{input, true, 0, data, scale},
       memory.scratch);
}

// E4M3: rotated, rounded to BF16, then a power of two for all channels of a row. t [.., dim].
void quantise_e4m3(const Tensor& t, const Tensor& data, const Tensor& scale, Memory& memory) {
  constexpr double kLeast = 1e-4;  // of the largest channel
  const std::int64_t dim = t.shape[static_cast<std::size_t>(t.rank - 1)], rows = t.elements() / dim;
  const Tensor& rotated = memory.rotated.fit(DType::kBF16, {rows, dim});
  call(hadamard, hadamard_workspace_bytes, HadamardArgs{t.reshape({rows, dim}), rotated},
       memory.scratch);
  const QuantiseArgs a{rotated, true, kLeast, data.reshape({rows, dim}), scale.reshape({rows, 1})};
  call(quantise, quantise_workspace_bytes, a, memory.scratch);
}

void fill(const Tensor& t, double value) {
  for (std::int64_t i = 0; i < t.elements(); ++i) store_double(t.data, t.dtype, i, value);
}

}  // namespace

Indexer::Indexer(const AttentionConfig& config, const nn::RopeTable& rope,
                 ParameterList& parameters, const std::string& prefix, DType dtype)
    : c_(config.indexer),
      rope_first_(config.kind == AttentionKind::kMla),
      rope_(rope),
      dtype_(dtype) {
  const auto add = [&](const char* name, std::initializer_list<std::int64_t> shape) {
    Parameter& p = parameters.add(prefix + name, shape, dtype);
    p.indexer = true;
    return &p;
  };
  const bool mla = config.kind == AttentionKind::kMla;
  const bool from_latent = mla && config.q_lora_rank > 0;
  query_ =
      add(mla ? "wq_b.weight" : "wq.weight",
          {c_.index_heads * c_.index_dim, from_latent ? config.q_lora_rank : config.hidden_size});
  key_ = add("wk.weight", {c_.index_dim, config.hidden_size});
  if (standard()) {
    norm_weight_ = add("k_norm.weight", {c_.index_dim});
    norm_bias_ = add("k_norm.bias", {c_.index_dim});
    weights_ = add("weights_proj.weight", {c_.index_heads, config.hidden_size});
  }
  if (c_.pools()) {
    gate_ = add("index_kpool_compress_gate", {c_.index_dim, config.hidden_size});
    ape_ = add("index_kpool_compress_ape", {c_.pool_size, c_.index_dim});
  }
}

void Indexer::forward(const Tensor& x, const Tensor& query_input, const Rows& rows, KeyCache& cache,
                      Memory& memory) const {
  const std::int64_t n = rows.count();
  const Tensor& query = memory.index_query.fit(dtype_, {n, c_.index_heads, c_.index_dim});
  const Tensor& weights = memory.index_weights.fit(dtype_, {n, c_.index_heads});
  // Keys that are pooled need not outlive the layer.
  const Tensor key = c_.pools() ? memory.index_key.fit(dtype_, {n, c_.index_dim})
                                : cache.index_key.view().rows(rows.first_key, n);
  nn::linear(query_input, query_->value, join_heads(query));
  if (standard()) {
    nn::linear(x, key_->value, memory.k_projected.fit(dtype_, {n, c_.index_dim}));
    nn::layer_norm(memory.k_projected, norm_weight_->value, norm_bias_->value, c_.k_norm_epsilon,
                   key, memory.k_mean.fit(dtype_, {n}), memory.k_scale.fit(dtype_, {n}));
    if (c_.k_norm_output == OutputPrecision::kBf16) round_to_bf16(key);
    nn::linear(x, weights_->value, weights);
    scale_weights(weights);
  } else {
    nn::linear(x, key_->value, key);
    fill(weights, weight_scale());
  }
  rotate(query, rows, false, memory);
  if (c_.precision != SelectionPrecision::kFull) quantise_query(memory);
  if (c_.pools()) {  // Hadamard comes after pooling
    turn_positions(as_one_head(key), rows, false);
    return nn::linear(x, gate_->value, memory.index_gate.fit(dtype_, {n, c_.index_dim}));
  }
  rotate(as_one_head(key), rows, false, memory);
  if (c_.precision != SelectionPrecision::kMxfp8) return;
  quantise_mxfp8(key, cache.index_key_data.view().rows(rows.first_key, n),
                 cache.index_key_scale.view().rows(rows.first_key, n), memory);
}

void Indexer::quantise_query(Memory& memory) const {
  const Tensor& query = memory.index_query;
  const std::int64_t n = query.shape[0];
  const Tensor& data = memory.index_query_data.fit(DType::kE4M3, {n, c_.index_heads, c_.index_dim});
  if (c_.precision == SelectionPrecision::kMxfp8) {
    const std::int64_t groups = c_.index_dim / 32;
    quantise_mxfp8(query, data,
                   memory.index_query_scale.fit(DType::kE8M0, {n, c_.index_heads, groups}), memory);
    return;
  }
  // The scale is positive, so it may stand on the weight.
  const Tensor& scale = memory.index_query_scale.fit(DType::kF32, {n, c_.index_heads});
  quantise_e4m3(query, data, scale, memory);
  for (std::int64_t i = 0; i < scale.elements(); ++i) {
    memory.index_weights.as<float>()[i] *= scale.as<float>()[i];
  }
}

void Indexer::pool(const Tensor& index_key, const Tensor& gate, const Rows& rows, KeyCache& cache,
                   Memory& memory) const {
  const Pools& pools = rows.pools;
  const Tensor& pooled = cache.index_key;
  if (pools.grows()) {
    AppendPoolsArgs a;
    a.index_key = index_key;
    a.gate = gate;
    a.ape = ape_->value;
    a.cu_seqlens = pools.cu_seqlens;
    a.context = pools.context;
    a.pool_slots = pools.slots;
    a.rounding = c_.pool_rounding;
    a.open_key = cache.open_key;
    a.open_gate = cache.open_gate;
    a.pooled_key = pooled;
    call(append_pools, append_pools_workspace_bytes, a, memory.scratch);
  } else {
    const PoolKeysArgs a{
        index_key, gate, ape_->value, pools.bases, c_.pool_rounding, pooled.rows(0, pools.count)};
    call(pool_keys, pool_keys_workspace_bytes, a, memory.scratch);
  }
  const std::int64_t made = pools.count - pools.first;
  if (made == 0) return;
  const Tensor fresh = pooled.rows(pools.first, made);
  if (c_.hadamard) turn_channels(fresh, memory);
  if (c_.precision == SelectionPrecision::kE4m3) {
    quantise_e4m3(fresh, cache.index_key_data.view().rows(pools.first, made),
                  cache.index_key_scale.view().rows(pools.first, made), memory);
  }
}

void Indexer::backward(const Tensor& x, const Tensor& query_input, const Rows& rows,
                       const Tensor& d_index_key, Memory& memory) const {
  const Tensor detached;  // a gradient that nobody gets
  rotate(memory.d_index_query, rows, true, memory);
  rotate(as_one_head(d_index_key), rows, true, memory);
  nn::linear_backward(query_input, query_->value, join_heads(memory.d_index_query), detached,
                      query_->grad);
  if (!standard()) {
    nn::linear_backward(x, key_->value, d_index_key, detached, key_->grad);
    return;
  }
  const Tensor& d_k = memory.d_k.fit(dtype_, {rows.count(), c_.index_dim});
  nn::layer_norm_backward(memory.k_projected, norm_weight_->value, memory.k_mean, memory.k_scale,
                          d_index_key, d_k, norm_weight_->grad, norm_bias_->grad);
  nn::linear_backward(x, key_->value, d_k, detached, key_->grad);
  scale(memory.d_index_weights, weight_scale());
  nn::linear_backward(x, weights_->value, memory.d_index_weights, detached, weights_->grad);
}

double Indexer::weight_scale() const {
  return 1 / std::sqrt(static_cast<double>(c_.index_heads) * static_cast<double>(c_.index_dim));
}

// With weights in BF16: the projection's result is rounded, and so is each of two products; with
// hf_scoring it is scaled by the heads alone, and not rounded again.
void Indexer::scale_weights(const Tensor& weights) const {
  if (c_.weights_output == OutputPrecision::kFull) return scale(weights, weight_scale());
  round_to_bf16(weights);
  if (c_.hf_scoring) return scale(weights, 1 / std::sqrt(static_cast<double>(c_.index_heads)));
  for (const std::int64_t size : {c_.index_heads, c_.index_dim}) {
    scale(weights, 1 / std::sqrt(static_cast<double>(size)));
    round_to_bf16(weights);
  }
}

// RoPE, then Hadamard; their inverses in the other order. t [rows, heads, index_dim], contiguous.
void Indexer::rotate(const Tensor& t, const Rows& rows, bool inverse, Memory& memory) const {
  if (c_.hadamard && inverse) turn_channels(t, memory);
  turn_positions(t, rows, inverse);
  if (c_.hadamard && !inverse) turn_channels(t, memory);
}

void Indexer::turn_positions(const Tensor& t, const Rows& rows, bool inverse) const {
  if (c_.rope_dim == 0) return;
  const std::int64_t first = rope_first_ ? 0 : c_.index_dim - c_.rope_dim;
  nn::rope(t.channels(first, c_.rope_dim), rows.positions, rope_, c_.rope_pairing, inverse);
}

void Indexer::turn_channels(const Tensor& t, Memory& memory) const {
  call(hadamard, hadamard_workspace_bytes, HadamardArgs{t, t}, memory.scratch);
}

}  // namespace winnow::attention
