#include "model/output_head.h"

#include <algorithm>

#include "base/numbers.h"
#include "nn/cross_entropy.h"
#include "nn/matmul.h"
#include "nn/norm.h"

namespace winnow::model {
namespace {

// Rows of one chunk of logits: about 4 M numbers.
std::int64_t chunk_rows(std::int64_t vocab) {
  return std::max<std::int64_t>(64, (std::int64_t{1} << 22) / vocab);
}

}  // namespace

OutputHead::OutputHead(const ModelConfig& config, Parameter& embedding, ParameterList& parameters,
                       DType dtype)
    : epsilon_(config.norm_epsilon), dtype_(dtype) {
  const std::int64_t hidden = config.attention.hidden_size;
  norm_ = &parameters.add("model.norm.weight", {hidden}, dtype);
  weight_ = config.tied_embeddings
                ? &embedding
                : &parameters.add("lm_head.weight", {config.vocab_size, hidden}, dtype);
}

double OutputHead::loss(const Tensor& x, std::span<const std::int32_t> targets, double d_nll,
                        const Tensor& d_x) {
  const std::int64_t rows = x.shape[0], hidden = x.shape[1], vocab = weight_->value.view().shape[0];
  const bool backward = !d_x.empty();
  nn::rms_norm(x, norm_->value, epsilon_, normed_.fit(dtype_, {rows, hidden}),
               scale_.fit(dtype_, {rows}));
  if (backward) d_normed_.fit(dtype_, {rows, hidden});
  double total = 0;
  for (std::int64_t first = 0; first < rows; first += chunk_rows(vocab)) {
    const std::int64_t n = std::min(chunk_rows(vocab), rows - first);
    const Tensor chunk = normed_.view().rows(first, n);
    const Tensor& logits = logits_.fit(dtype_, {n, vocab});
    const Tensor& nll = nll_.fit(dtype_, {n});
    nn::linear(chunk, weight_->value, logits);
    nn::cross_entropy(logits,
                      targets.subspan(static_cast<std::size_t>(first), static_cast<std::size_t>(n)),
                      nll, backward ? logits : Tensor(), d_nll);
    for (std::int64_t i = 0; i < n; ++i) total += load_double(nll.data, dtype_, i);
    if (backward) {
      nn::linear_backward(chunk, weight_->value, logits, d_normed_.view().rows(first, n),
                          weight_->grad);
    }
  }
  if (backward) {
    nn::rms_norm_backward(x, norm_->value, scale_, d_normed_, d_x, norm_->grad);
  }
  return total;
}

void OutputHead::log_probabilities(const Tensor& x, const Tensor& log_probabilities) {
  const std::int64_t rows = x.shape[0], vocab = weight_->value.view().shape[0];
  nn::rms_norm(x, norm_->value, epsilon_, normed_.fit(dtype_, {rows, x.shape[1]}),
               scale_.fit(dtype_, {rows}));
  for (std::int64_t first = 0; first < rows; first += chunk_rows(vocab)) {
    const std::int64_t n = std::min(chunk_rows(vocab), rows - first);
    nn::linear(normed_.view().rows(first, n), weight_->value, logits_.fit(dtype_, {n, vocab}));
    nn::log_softmax(logits_, log_probabilities.rows(first, n));
  }
}

}  // namespace winnow::model
