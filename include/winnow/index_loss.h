// index_loss: the sparse indexer loss, KL(target || softmax of the selected scores), per row.
//
//   t[s]           = attention_target[i, s] / max(sum of the row, 1e-10)
//   ln p           = log_softmax(topk_scores[i, :])
//   kl[i]          = sum_s t[s] * (ln max(t[s], 1e-10) - ln p[s])        0 where t[s] is 0
//   d_scores[i, s] = (p[s] - t[s]) * d_kl
//
// - Slots whose id lies outside [starts[i], ends[i]) take no part: their target and score may hold
//   anything, and d_scores is 0 there. A row without a valid slot (or with no score above -inf):
//   kl 0, d_scores 0.
// - A score of -inf has p = 0: where its t is not 0, kl is +inf. NaN makes the row's results NaN.
// - The caller chooses what the rows are divided by, and says it in d_kl: the derivative of its
//   loss by each row's kl (coefficient / valid rows for a mean, coefficient for a sum).
// - index_scores_at_backward takes d_scores on to index_query, index_key and index_weights.
// - Source: the loss of the sparse training stage, DeepSeek-V3.2-Exp report, "Continued
//   Pre-Training"; the two clamps at 1e-10 as in Megatron Core, ln p exact.
// - Errors, questions before memory exists: implementations.h.
#pragma once

#include "winnow/implementations.h"
#include "winnow/tensor.h"

namespace winnow {

struct IndexLossArgs {
  Tensor attention_target;  // f32 (f64) [rows, topk], summed over heads (and ranks)
  Tensor topk_scores;       // dtype of attention_target [rows, topk]
  Tensor topk_indices;      // int32 [rows, topk]
  Tensor starts;            // int32 [rows]
  Tensor ends;              // int32 [rows]
  double d_kl = 1;
  Tensor kl;        // out: dtype of attention_target [rows]
  Tensor d_scores;  // out: dtype of attention_target [rows, topk]
};

void index_loss(const IndexLossArgs& args, Workspace workspace);
std::int64_t index_loss_workspace_bytes(const IndexLossArgs& args);
Explanation explain(const IndexLossArgs& args);

}  // namespace winnow
