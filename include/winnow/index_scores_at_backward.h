// index_scores_at_backward: from the gradient of the selected scores to the indexer's inputs.
//
//   u[h, s]                = index_query[i, h, :] . index_key[id_s, :]
//   the gate is open where u > 0; without ReLU always; for NaN it is closed
//   d_index_weights[i, h]  = sum_s d_scores[i, s] * relu(u[h, s])
//   gated[h, s]            = d_scores[i, s] where the gate is open, else 0
//   d_index_query[i, h, :] = index_weights[i, h] * sum_s gated[h, s] * index_key[id_s, :]
//   d_index_key[j, :]      = sum_h gated[h, s] * (index_weights[i, h] * index_query[i, h, :]),
//                            over every (i, s) with id_s = j
//
// - Ids outside [starts[i], ends[i]) take no part; an id that stands twice counts twice.
// - NaN and infinity: every product is formed for every slot that counts, also with a closed gate
//   (0 * NaN is NaN). What does not count is never multiplied; a row without a slot that counts has
//   gradient 0.
// - Sums in f32 (f64 with f64). With bf16 inputs an implementation on matrix units may round
//   gated * weight to bf16 before it is multiplied: d_index_query and d_index_key are off by at
//   most 2^-8 of the sum of the magnitudes of their terms more. On CPUs nothing is rounded.
// - Outputs are overwritten. Each row of d_index_key has one owner, which adds in ascending order
//   of the query rows: no atomics, bitwise equal for every thread count.
// - Source: the derivative of equation (1) of the DeepSeek-V3.2-Exp report; gate and dtypes as in
//   Megatron Core (the gate is closed at 0).
// - Errors, questions before memory exists: implementations.h.
#pragma once

#include "winnow/implementations.h"
#include "winnow/tensor.h"

namespace winnow {

struct IndexScoresAtBackwardArgs {
  Tensor index_query;    // [rows, index_heads, index_dim] f64 | f32 | bf16 | f16
  Tensor index_key;      // [keys, index_dim], dtype of index_query
  Tensor index_weights;  // [rows, index_heads] f32 | bf16 (f64 with f64)
  Tensor topk_indices;   // int32 [rows, topk]
  Tensor starts;         // int32 [rows]
  Tensor ends;           // int32 [rows]
  bool relu = true;
  Tensor d_scores;         // f32 (f64 with f64) [rows, topk]
  Tensor d_index_query;    // out: f32 (f64 with f64) [rows, index_heads, index_dim]
  Tensor d_index_key;      // out: f32 (f64 with f64) [keys, index_dim]
  Tensor d_index_weights;  // out: f32 (f64 with f64) [rows, index_heads]
};

void index_scores_at_backward(const IndexScoresAtBackwardArgs& args, Workspace workspace);
std::int64_t index_scores_at_backward_workspace_bytes(const IndexScoresAtBackwardArgs& args);
Explanation explain(const IndexScoresAtBackwardArgs& args);

}  // namespace winnow
