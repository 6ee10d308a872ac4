#include "model/block.h"

#include "nn/matmul.h"
#include "nn/norm.h"
#include "nn/pointwise.h"

namespace winnow::model {

Block::Block(const ModelConfig& config, const attention::RopeTables& ropes,
             ParameterList& parameters, const std::string& prefix, DType dtype, bool owns_indexer)
    : epsilon_(config.norm_epsilon),
      intermediate_size_(config.intermediate_size),
      dtype_(dtype),
      input_norm_(&parameters.add(prefix + "input_layernorm.weight", {config.attention.hidden_size},
                                  dtype)),
      attention_(config.attention, ropes, parameters, prefix + "self_attn.", dtype, owns_indexer) {
  const std::int64_t hidden = config.attention.hidden_size;
  const auto add = [&](const char* name, std::initializer_list<std::int64_t> shape) {
    return &parameters.add(prefix + name, shape, dtype);
  };
  middle_norm_ = add("post_attention_layernorm.weight", {hidden});
  gate_ = add("mlp.gate_proj.weight", {intermediate_size_, hidden});
  up_ = add("mlp.up_proj.weight", {intermediate_size_, hidden});
  down_ = add("mlp.down_proj.weight", {hidden, intermediate_size_});
}

attention::LayerResult Block::forward(const Tensor& x, const attention::Rows& rows,
                                      const attention::LayerOptions& options, const BlockKept& kept,
                                      BlockMemory& memory, const Tensor& y) const {
  norm_input(x, kept);
  Tensor middle;
  if (!y.empty()) middle = kept.middle.fit(dtype_, {x.shape[0], x.shape[1]});
  const attention::LayerResult result = attention_.forward(
      kept.norms.normed_input, rows, options, kept.attention, memory.attention, middle);
  if (y.empty()) return result;
  nn::add(x, middle);
  norm_middle(kept);
  activate(kept);
  nn::linear(kept.mlp.activated, down_->value, y);
  nn::add(middle, y);
  return result;
}

void Block::replay(const Tensor& x, const attention::Rows& rows,
                   const attention::LayerOptions& options, const Recompute& recompute,
                   const BlockKept& kept, BlockMemory& memory) const {
  const Recompute& r = recompute;
  if (r.full || r.norms) norm_input(x, kept);
  Tensor middle;
  if (r.full) middle = kept.middle.fit(dtype_, {x.shape[0], x.shape[1]});
  attention_.replay(kept.norms.normed_input, rows, options,
                    {r.full, r.full || r.query_up_projection, r.full || r.core_attention},
                    kept.attention, memory.attention, middle);
  if (r.full) nn::add(x, middle);
  if (r.full || r.norms) norm_middle(kept);
  if (r.full || r.mlp) activate(kept);
}

void Block::norm_input(const Tensor& x, const BlockKept& kept) const {
  const std::int64_t n = x.shape[0], hidden = x.shape[1];
  nn::rms_norm(x, input_norm_->value, epsilon_, kept.norms.normed_input.fit(dtype_, {n, hidden}),
               kept.norms.input_scale.fit(dtype_, {n}));
}

void Block::norm_middle(const BlockKept& kept) const {
  const Tensor& middle = kept.middle;
  const std::int64_t n = middle.shape[0], hidden = middle.shape[1];
  nn::rms_norm(middle, middle_norm_->value, epsilon_,
               kept.norms.normed_middle.fit(dtype_, {n, hidden}),
               kept.norms.middle_scale.fit(dtype_, {n}));
}

// The MLP up to its last projection.
void Block::activate(const BlockKept& kept) const {
  const Tensor& x = kept.norms.normed_middle;
  const std::int64_t n = x.shape[0];
  MlpActivations& mlp = kept.mlp;
  nn::linear(x, gate_->value, mlp.gate.fit(dtype_, {n, intermediate_size_}));
  nn::linear(x, up_->value, mlp.up.fit(dtype_, {n, intermediate_size_}));
  nn::swiglu(mlp.gate, mlp.up, mlp.activated.fit(dtype_, {n, intermediate_size_}));
}

void Block::backward(const Tensor& x, const attention::Rows& rows,
                     const attention::LayerOptions& options, const BlockKept& kept,
                     const Tensor& d_stream, const Tensor& d_shared_keys,
                     BlockMemory& memory) const {
  mlp_backward(kept, d_stream, memory);
  const Tensor& d_normed = memory.d_normed.fit(dtype_, {x.shape[0], x.shape[1]});
  attention_.backward(kept.norms.normed_input, rows, options, kept.attention, d_stream, d_normed,
                      d_shared_keys, memory.attention);
  nn::rms_norm_backward(x, input_norm_->value, kept.norms.input_scale, d_normed, d_stream,
                        input_norm_->grad, true);
}

void Block::mlp_backward(const BlockKept& kept, const Tensor& d_stream, BlockMemory& memory) const {
  const std::int64_t n = d_stream.shape[0];
  const MlpActivations& mlp = kept.mlp;
  const NormActivations& norms = kept.norms;
  const Tensor& d_activated = memory.d_activated.fit(dtype_, {n, intermediate_size_});
  const Tensor& d_gate = memory.d_gate.fit(dtype_, {n, intermediate_size_});
  const Tensor& d_up = memory.d_up.fit(dtype_, {n, intermediate_size_});
  const Tensor& d_normed = memory.d_normed.fit(dtype_, {n, d_stream.shape[1]});
  nn::linear_backward(mlp.activated, down_->value, d_stream, d_activated, down_->grad);
  nn::swiglu_backward(mlp.gate, mlp.up, d_activated, d_gate, d_up);
  nn::linear_backward(norms.normed_middle, gate_->value, d_gate, d_normed, gate_->grad);
  nn::linear_backward(norms.normed_middle, up_->value, d_up, d_normed, up_->grad, true);
  nn::rms_norm_backward(kept.middle, middle_norm_->value, norms.middle_scale, d_normed, d_stream,
                        middle_norm_->grad, true);
}

}  // namespace winnow::model
