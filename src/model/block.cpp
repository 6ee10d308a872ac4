#include "model/block.h"

#include "nn/matmul.h"
#include "nn/norm.h"
#include "nn/pointwise.h"

namespace winnow::model {

Block::Block(const ModelConfig& config, const attention::RopeTables& ropes,
             ParameterList& parameters, const std::string& prefix, DType dtype)
    : epsilon_(config.norm_epsilon),
      intermediate_size_(config.intermediate_size),
      dtype_(dtype),
      input_norm_(&parameters.add(prefix + "input_layernorm.weight", {config.attention.hidden_size},
                                  dtype)),
      attention_(config.attention, ropes, parameters, prefix + "self_attn.", dtype) {
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
                                      const attention::LayerOptions& options,
                                      attention::KeyCache& cache, BlockMemory& memory,
                                      const Tensor& y) {
  const std::int64_t n = x.shape[0], hidden = x.shape[1];
  nn::rms_norm(x, input_norm_->value, epsilon_, normed_input_.fit(dtype_, {n, hidden}),
               input_scale_.fit(dtype_, {n}));
  Tensor middle;
  if (!y.empty()) middle = middle_.fit(dtype_, {n, hidden});
  const attention::LayerResult result =
      attention_.forward(normed_input_, rows, options, cache, memory.attention, middle);
  if (y.empty()) return result;
  nn::add(x, middle_);
  mlp_forward(y);
  nn::add(middle_, y);
  return result;
}

void Block::mlp_forward(const Tensor& y) {
  const std::int64_t n = y.shape[0];
  nn::rms_norm(middle_, middle_norm_->value, epsilon_, normed_middle_.fit(dtype_, {n, y.shape[1]}),
               middle_scale_.fit(dtype_, {n}));
  nn::linear(normed_middle_, gate_->value, gate_out_.fit(dtype_, {n, intermediate_size_}));
  nn::linear(normed_middle_, up_->value, up_out_.fit(dtype_, {n, intermediate_size_}));
  nn::swiglu(gate_out_, up_out_, activated_.fit(dtype_, {n, intermediate_size_}));
  nn::linear(activated_, down_->value, y);
}

void Block::backward(const Tensor& x, const attention::Rows& rows, const attention::KeyCache& cache,
                     const Tensor& d_stream, BlockMemory& memory) {
  mlp_backward(d_stream, memory);
  const Tensor& d_normed = memory.d_normed.fit(dtype_, {x.shape[0], x.shape[1]});
  attention_.backward(normed_input_, rows, cache, d_stream, d_normed, memory.attention);
  nn::rms_norm_backward(x, input_norm_->value, input_scale_, d_normed, d_stream, input_norm_->grad,
                        true);
}

void Block::mlp_backward(const Tensor& d_stream, BlockMemory& memory) {
  const std::int64_t n = d_stream.shape[0];
  const Tensor& d_activated = memory.d_activated.fit(dtype_, {n, intermediate_size_});
  const Tensor& d_gate = memory.d_gate.fit(dtype_, {n, intermediate_size_});
  const Tensor& d_up = memory.d_up.fit(dtype_, {n, intermediate_size_});
  const Tensor& d_normed = memory.d_normed.fit(dtype_, {n, d_stream.shape[1]});
  nn::linear_backward(activated_, down_->value, d_stream, d_activated, down_->grad);
  nn::swiglu_backward(gate_out_, up_out_, d_activated, d_gate, d_up);
  nn::linear_backward(normed_middle_, gate_->value, d_gate, d_normed, gate_->grad);
  nn::linear_backward(normed_middle_, up_->value, d_up, d_normed, up_->grad, true);
  nn::rms_norm_backward(middle_, middle_norm_->value, middle_scale_, d_normed, d_stream,
                        middle_norm_->grad, true);
}

}  // namespace winnow::model
