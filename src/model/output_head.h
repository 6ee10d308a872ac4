// The end of the transformer: final RMSNorm, logits over the vocabulary, language loss.
//
// Logits exist for a chunk of rows at a time, so their memory does not grow with the step.
#pragma once

#include <span>

#include "attention/buffer.h"
#include "base/parameters.h"
#include "model/config.h"

namespace winnow::model {

using attention::Buffer;

class OutputHead {
 public:
  // Adds model.norm.weight and, unless the embedding table serves, lm_head.weight.
  OutputHead(const ModelConfig& config, Parameter& embedding, ParameterList& parameters,
             DType dtype);

  // The final norm. x, normed [rows, hidden]; scale [rows].
  void normalise(const Tensor& x, const Tensor& normed, const Tensor& scale) const;
  // d_x is overwritten.
  void normalise_backward(const Tensor& x, const Tensor& scale, const Tensor& d_normed,
                          const Tensor& d_x) const;

  // Sum of the rows' nll. With d_normed (may be left out) also the gradients of nll * d_nll.
  double loss(const Tensor& normed, std::span<const std::int32_t> targets, double d_nll,
              const Tensor& d_normed);

  // log_probabilities [rows, vocab] of x, not normed yet.
  void log_probabilities(const Tensor& x, const Tensor& log_probabilities);

 private:
  const double epsilon_;
  const DType dtype_;
  Parameter *norm_, *weight_;
  Buffer normed_, scale_;  // [rows, hidden], [rows]
  Buffer logits_, nll_;    // [chunk rows, vocab], [chunk rows]
};

}  // namespace winnow::model
