// attention_target: how much attention the selected keys get, summed over heads; what the indexer
// learns.
//
//   attention_target[i, s] = sum_h exp(softmax_scale * query[i, h, :] . key[id_s, h / group, :]
//                                      - lse[i, h])
//
// - With the lse of the sparse attention: the sparse loss's target, before the all-reduce over
//   tensor-parallel ranks and before normalisation. With the lse of dense attention: the share of
//   the dense attention mass that the selection catches (divide the row's sum by heads).
// - Slots whose id lies outside [starts[i], ends[i]) get 0, and a head whose lse is -inf gives 0.
// - Not differentiated: the target carries no gradient.
// - Source: the target p of the indexer's loss before its normalisation, DeepSeek-V3.2-Exp report,
//   "Continued Pre-Training".
// - Errors, questions before memory exists: implementations.h.
#pragma once

#include "winnow/implementations.h"
#include "winnow/tensor.h"

namespace winnow {

struct AttentionTargetArgs {
  Tensor query;              // [rows, heads, dim_qk] f64 | f32 | bf16 | f16
  Tensor key;                // [keys, kv_heads, dim_qk], dtype of query
  Tensor lse;                // f32 (f64 with f64) [rows, heads]
  Tensor topk_indices;       // int32 [rows, topk]
  Tensor starts;             // int32 [rows]
  Tensor ends;               // int32 [rows]
  double softmax_scale = 0;  // required, > 0: of q . k, before the exponential
  Tensor attention_target;   // out: f32 (f64 with f64) [rows, topk]
};

void attention_target(const AttentionTargetArgs& args, Workspace workspace);
std::int64_t attention_target_workspace_bytes(const AttentionTargetArgs& args);
Explanation explain(const AttentionTargetArgs& args);

}  // namespace winnow
