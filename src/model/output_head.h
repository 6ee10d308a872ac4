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

  // Sum of the rows' nll. With d_x (may be left out) also the gradients of nll * d_nll.
  double loss(const Tensor& x, std::span<const std::int32_t> targets, double d_nll,
              const Tensor& d_x);

  // log_probabilities [rows, vocab]
  void log_probabilities(const Tensor& x, const Tensor& log_probabilities);

 private:
  const double epsilon_;
  const DType dtype_;
  Parameter *norm_, *weight_;
  Buffer normed_, scale_, d_normed_;  // [rows, hidden], [rows], [rows, hidden]
  Buffer logits_, nll_;               // [chunk rows, vocab], [chunk rows]
};

}  // namespace winnow::model
