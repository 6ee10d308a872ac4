// dense_index_loss: the indexer loss over all visible keys (the warm-up), and its gradients,
// streamed.
//
//   t[i, j]  = sum_h exp(softmax_scale * query[i, h, :] . key[j, h / group, :] - lse[i, h])
//   t^       = t / max(sum_j t, 1e-10)                               j in the row's range
//   ln p     = log_softmax over the range of I[i, :], as index_scores.h defines I
//   kl[i]    = sum_j t^ * (ln max(t^, 1e-10) - ln p)                 0 where t^ is 0
//   g[i, j]  = (p - t^) * d_kl
//   gradients from g as in index_scores_at_backward.h, over all j
//
// - Scores and targets exist for a tile of keys of a run of rows at a time: the keys are gone
//   through twice, first for the sums of a row, then for kl and the gradients. The workspace is
//   bounded by a constant for each row and thread, whatever the number of keys (the reference
//   holds one row and the gradient of the keys in double).
// - `reduce_target` sees t tile by tile, at most 64 rows x 1024 keys at a time, before it is used,
//   to sum it over tensor-parallel ranks. Tiles come in a fixed order, one at a time, from the
//   calling thread; the same tile may come twice, unreduced, where t is computed again. They
//   depend on the shapes, the ranges and the implementation: ranks that agree on these meet in the
//   same tile. Where a row does not see a key, the tile holds 0. On a GPU the tile lies there and
//   is ready in the order of the call's stream, on which the sum over ranks is to be queued.
// - An empty row: kl 0, no gradient. So has a row with no score above -inf.
// - NaN and infinity: as in index_loss.h and index_scores_at_backward.h.
// - Outputs are overwritten, summed in a fixed order, no atomics: bitwise equal for every thread
//   count. kl and the gradients by index_query and index_weights of a row depend on that row only.
// - Source: the loss of the dense warm-up stage, DeepSeek-V3.2-Exp report, "Continued
//   Pre-Training"; the two clamps at 1e-10 as in Megatron Core, ln p exact.
// - Errors, questions before memory exists: implementations.h.
#pragma once

#include <functional>

#include "winnow/implementations.h"
#include "winnow/tensor.h"

namespace winnow {

struct DenseIndexLossArgs {
  Tensor index_query;    // [rows, index_heads, index_dim] f64 | f32 | bf16 | f16
  Tensor index_key;      // [keys, index_dim], dtype of index_query
  Tensor index_weights;  // [rows, index_heads] f32 | bf16 (f64 with f64)
  bool relu = true;
  Tensor query;              // [rows, heads, dim_qk], of the attention; same dtype
  Tensor key;                // [keys, kv_heads, dim_qk]
  Tensor lse;                // f32 (f64 with f64) [rows, heads], of dense attention
  double softmax_scale = 0;  // required, > 0: of q . k of the attention, before the exponential
  Tensor starts;             // int32 [rows]
  Tensor ends;               // int32 [rows]
  double d_kl = 1;           // derivative of the caller's loss by each row's kl
  // Sums a contiguous tile [tile rows, tile keys] of t (f32, or f64 from the reference) over
  // ranks, in place. Empty: one rank.
  std::function<void(Tensor tile)> reduce_target;
  Tensor kl;               // out: f32 (f64 with f64) [rows]
  Tensor d_index_query;    // out: f32 (f64 with f64) [rows, index_heads, index_dim]
  Tensor d_index_key;      // out: f32 (f64 with f64) [keys, index_dim]
  Tensor d_index_weights;  // out: f32 (f64 with f64) [rows, index_heads]
};

void dense_index_loss(const DenseIndexLossArgs& args, Workspace workspace);
std::int64_t dense_index_loss_workspace_bytes(const DenseIndexLossArgs& args);
Explanation explain(const DenseIndexLossArgs& args);

}  // namespace winnow
