// index_topk: scoring and exact selection in one pass; the score matrix never exists.
//
// - Equals select_topk(index_scores(...)) of the same implementation, bit for bit, ids and scores.
// - Keys stream by once. On CPUs each row keeps its best candidates so far; on GPUs the scores of
//   as many rows as fit wait in the workspace, and are selected from there.
// - Extra memory is the workspace alone, which is bounded whatever the number of keys (a few keys
//   take less). On CPUs it grows with the threads; on GPUs it takes 1 GiB at most, or what the
//   scores of one row take if that is more.
// - Row ranges, order of ids, ties, NaN, -inf and keys that are always kept: as in select_topk.h.
// - With a workspace_budget, workspace_bytes is at most that, or the call is an error that names
//   the least that works. The result is the same for every budget.
// - Source: the indexer and the token selection, DeepSeek-V3.2-Exp report, "Prototype of DSA",
//   equations (1) and (2).
// - Errors, questions before memory exists: implementations.h.
#pragma once

#include "winnow/implementations.h"
#include "winnow/key_view.h"
#include "winnow/selection_statistics.h"
#include "winnow/tensor.h"

namespace winnow {

struct IndexTopkArgs {
  Tensor index_query;    // [rows, index_heads, index_dim] f64 | f32 | bf16 | f16 | e4m3
  KeyView index_key;     // [keys, index_dim] or pages, dtype of index_query
  Tensor index_weights;  // [rows, index_heads] f32 | bf16 (f64 with f64), scaled
  Tensor starts;         // int32 [rows]
  Tensor ends;           // int32 [rows]
  bool relu = true;      // false: the identity in place of ReLU
  Tensor topk_indices;   // out: int32 [rows, topk], topk >= 1
  Tensor topk_lengths;   // out: int32 [rows]
  Tensor topk_scores;  // out, may be left out: f32 (f64 with f64) [rows, topk], -inf after the last

  // As in index_scores.h:
  Tensor index_query_scale{};  // MXFP8: e8m0 [rows, index_heads, index_dim / 32]
  Tensor index_key_scale{};    // FP8: f32 [keys]; MXFP8: e8m0 [keys, index_dim / 32]
  double dot_scale = 1;        // positive, finite: of q . k, before the ReLU; rounded to f32

  // As in select_topk.h:
  bool keep_minus_inf = false;
  std::int32_t keep_first = 0, keep_last = 0;  // keep_first + keep_last <= topk

  std::int64_t workspace_budget = 0;  // bytes; 0: none
};

void index_topk(const IndexTopkArgs& args, Workspace workspace);
std::int64_t index_topk_workspace_bytes(const IndexTopkArgs& args);
Explanation explain(const IndexTopkArgs& args);

}  // namespace winnow
