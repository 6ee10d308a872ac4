// index_scores_at: the indexer's scores of given keys, such as a selection that is being replayed.
//
//   topk_scores[i, s] = I[i, topk_indices[i, s]], as index_scores defines I
//
// - -inf where the id lies outside [starts[i], ends[i]).
// - Bit for bit the number that index_scores of the same implementation gives for that key.
// - Source: as index_scores.h, at the keys of a selection.
// - Errors, questions before memory exists: implementations.h.
#pragma once

#include "winnow/implementations.h"
#include "winnow/tensor.h"

namespace winnow {

struct IndexScoresAtArgs {
  Tensor index_query;    // [rows, index_heads, index_dim] f64 | f32 | bf16 | f16
  Tensor index_key;      // [keys, index_dim], dtype of index_query
  Tensor index_weights;  // [rows, index_heads] f32 | bf16 (f64 with f64)
  Tensor topk_indices;   // int32 [rows, topk]
  Tensor starts;         // int32 [rows]
  Tensor ends;           // int32 [rows]
  bool relu = true;
  Tensor topk_scores;  // out: f32 (f64 with f64) [rows, topk]
};

void index_scores_at(const IndexScoresAtArgs& args, Workspace workspace);
std::int64_t index_scores_at_workspace_bytes(const IndexScoresAtArgs& args);
Explanation explain(const IndexScoresAtArgs& args);

}  // namespace winnow
