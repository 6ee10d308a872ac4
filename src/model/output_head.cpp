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

void OutputHead::normalise(const Tensor& x, const Tensor& normed, const Tensor& scale) const {
  nn::rms_norm(x, norm_->value, epsilon_, normed, scale);
}

void OutputHead::normalise_backward(const Tensor& x, const Tensor& scale, const Tensor& d_normed,
                                    const Tensor& d_x) const {
  nn::rms_norm_backward(x, norm_->value, scale, d_normed, d_x, norm_->grad);
}

double OutputHead::loss(const Tensor& normed, std::span<const std::int32_t> targets, double d_nll,
                        const Tensor& d_normed) {
  const std::int64_t rows = normed.shape[0], vocab = weight_->value.view().shape[0];
  const bool backward = !d_normed.empty();
  double total = 0;
  for (std::int64_t first = 0; first < rows; first += chunk_rows(vocab)) {
    const std::int64_t n = std::min(chunk_rows(vocab), rows - first);
    const Tensor chunk = normed.rows(first, n);
    const Tensor& logits = logits_.fit(dtype_, {n, vocab});
    const Tensor& nll = nll_.fit(dtype_, {n});
    nn::linear(chunk, weight_->value, logits);
    nn::cross_entropy(logits,
                      targets.subspan(static_cast<std::size_t>(first), static_cast<std::size_t>(n)),
                      nll, backward ? logits : Tensor(), d_nll);
    for (std::int64_t i = 0; i < n; ++i) total += load_double(nll.data, dtype_, i);
    if (backward) {
      nn::linear_backward(chunk, weight_->value, logits, d_normed.rows(first, n), weight_->grad);
    }
  }
  return total;
}

void OutputHead::log_probabilities(const Tensor& x, const Tensor& log_probabilities) {
  const std::int64_t rows = x.shape[0], vocab = weight_->value.view().shape[0];
  normalise(x, normed_.fit(dtype_, {rows, x.shape[1]}), scale_.fit(dtype_, {rows}));
  for (std::int64_t first = 0; first < rows; first += chunk_rows(vocab)) {
    const std::int64_t n = std::min(chunk_rows(vocab), rows - first);
    nn::linear(normed_.view().rows(first, n), weight_->value, logits_.fit(dtype_, {n, vocab}));
    nn::log_softmax(logits_, log_probabilities.rows(first, n));
  }
}

}  // namespace winnow::model
