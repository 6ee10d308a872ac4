#include "model/mtp.h"

#include <fmt/format.h>

#include "nn/embedding.h"
#include "nn/matmul.h"
#include "nn/norm.h"

namespace winnow::model {
namespace {

std::string prefix_of(const ModelConfig& config) {
  return fmt::format("model.layers.{}.", config.layers);
}

}  // namespace

Mtp::Mtp(const ModelConfig& config, const attention::RopeTables& ropes, Parameter& embedding,
         ParameterList& parameters, DType dtype)
    : epsilon_(config.norm_epsilon),
      dtype_(dtype),
      embedding_(embedding),
      embedding_norm_(&parameters.add(prefix_of(config) + "enorm.weight",
                                      {config.attention.hidden_size}, dtype)),
      hidden_norm_(&parameters.add(prefix_of(config) + "hnorm.weight",
                                   {config.attention.hidden_size}, dtype)),
      projection_(&parameters.add(prefix_of(config) + "eh_proj.weight",
                                  {config.attention.hidden_size, 2 * config.attention.hidden_size},
                                  dtype)),
      block_(config, ropes, parameters, prefix_of(config), dtype,
             computes_indices(config.sharing, config.layers + 1)),
      output_norm_(&parameters.add(prefix_of(config) + "shared_head.norm.weight",
                                   {config.attention.hidden_size}, dtype)) {}

void Mtp::join(const Tensor& previous, std::span<const std::int32_t> tokens, MtpJoin& join) const {
  const std::int64_t n = previous.shape[0], hidden = previous.shape[1];
  const Tensor& joined = join.joined.fit(dtype_, {n, 2 * hidden});
  nn::embedding(embedding_.value, tokens, join.embedded.fit(dtype_, {n, hidden}));
  nn::rms_norm(join.embedded, embedding_norm_->value, epsilon_, joined.channels(0, hidden),
               join.embedded_scale.fit(dtype_, {n}));
  nn::rms_norm(previous, hidden_norm_->value, epsilon_, joined.channels(hidden, hidden),
               join.hidden_scale.fit(dtype_, {n}));
}

void Mtp::project(const MtpJoin& join, const Tensor& x) const {
  nn::linear(join.joined, projection_->value, x);
}

void Mtp::join_backward(const Tensor& previous, std::span<const std::int32_t> tokens,
                        const MtpJoin& join, const Tensor& d_x, const Tensor& d_previous,
                        MtpMemory& memory) const {
  const std::int64_t n = previous.shape[0], hidden = previous.shape[1];
  const Tensor& d_joined = memory.d_joined.fit(dtype_, {n, 2 * hidden});
  const Tensor& d_embedded = memory.d_embedded.fit(dtype_, {n, hidden});
  nn::linear_backward(join.joined, projection_->value, d_x, d_joined, projection_->grad);
  nn::rms_norm_backward(previous, hidden_norm_->value, join.hidden_scale,
                        d_joined.channels(hidden, hidden), d_previous, hidden_norm_->grad, true);
  nn::rms_norm_backward(join.embedded, embedding_norm_->value, join.embedded_scale,
                        d_joined.channels(0, hidden), d_embedded, embedding_norm_->grad);
  nn::embedding_backward(tokens, d_embedded, embedding_.grad);
}

void Mtp::normalise(MtpActivations& kept) const {
  const Tensor& x = kept.output;
  nn::rms_norm(x, output_norm_->value, epsilon_, kept.normed.fit(dtype_, {x.shape[0], x.shape[1]}),
               kept.scale.fit(dtype_, {x.shape[0]}));
}

void Mtp::normalise_backward(const MtpActivations& kept, const Tensor& d_normed,
                             const Tensor& d_output) const {
  nn::rms_norm_backward(kept.output, output_norm_->value, kept.scale, d_normed, d_output,
                        output_norm_->grad);
}

}  // namespace winnow::model
