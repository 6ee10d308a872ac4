// The language-model loss of each row, and its gradient.
#pragma once

#include <cstdint>
#include <span>

#include "winnow/tensor.h"

namespace winnow::nn {

// nll[i] = logsumexp(logits[i, :]) - logits[i, targets[i]]; rows with target -1 take no part (nll
// 0). With d_logits (may be left out, may be logits itself): (softmax - onehot) * d_nll, 0 for rows
// that take no part. logits [rows, vocab], nll [rows], f32 or f64.
void cross_entropy(const Tensor& logits, std::span<const std::int32_t> targets, const Tensor& nll,
                   const Tensor& d_logits, double d_nll);

// log_probabilities[i, :] = logits[i, :] - logsumexp(logits[i, :])
void log_softmax(const Tensor& logits, const Tensor& log_probabilities);

}  // namespace winnow::nn
