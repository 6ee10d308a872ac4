// sparse_attention_backward: gradients of sparse_attention by query, key and value.
//
//   dp[h, s] = d_output[i, h, :] . value[id_s]        delta[h] = sum_s p[h, s] * dp[h, s]
//   dz[h, s] = p[h, s] * (dp[h, s] - delta[h])        p is recomputed from lse
//   d_query[i, h, :] = softmax_scale * sum_s dz[h, s] * key[id_s]
//   d_key[j, :]      = softmax_scale * sum dz[h, s] * query[i, h, :]   } over every (i, h, s)
//   d_value[j, :]    = sum p[h, s] * d_output[i, h, :]                 } with id_s = j
//
// - Without a separate value (MLA) the value part is added to the first dim_v channels of d_key.
// - Which slots count: as in sparse_attention.h. Rows without one give and get gradient 0.
// - Every row of d_key and d_value has one owner, which adds the contributions in ascending order
//   of the query rows:
//   no atomics, bitwise equal from run to run and for every thread count.
// - Outputs are overwritten, not added to. The gradient never flows through the indices.
// - Sums in f32 (f64 with f64). With bf16 inputs an implementation on matrix units may round p, dz
//   and a d_output in f32 to bf16 before they are multiplied: a gradient is off by at most 2^-8 of
//   the sum of the magnitudes of its terms more, for each. Where d_key holds both gradients, what
//   one row adds to one key may be kept in f16 times a power of two of the row: off by 2^-11 of
//   that sum more, and by 2^-39 of a bound on all that the row adds to any key, which is
//   sum_h max_s p (softmax_scale (max_s |dp| + |delta|) max |query[h]| + max |d_output[h]|).
//   On CPUs nothing is rounded.
// - NaN and infinity: every product of the formulas is formed for every slot that counts, also
//   where p is 0 (0 * NaN is NaN); a head whose lse is -inf has p = dz = 0. What does not count is
//   never multiplied: NaN in a row or key reaches the rows that list the key and the keys that the
//   row lists, and no others.
// - `rows_nonempty` lets an implementation leave out what it does for empty rows; the bits are the
//   same with it and without. layout.h proves it from the ranges. On CPUs there is nothing to leave
//   out: a row costs what its list holds, an empty one next to nothing. Validation mode checks it.
// - Source: the derivative of sparse_attention.h; delta as in FlashAttention (Dao et al., 2022),
//   appendix B.
// - Errors, questions before memory exists: implementations.h.
#pragma once

#include "winnow/implementations.h"
#include "winnow/tensor.h"

namespace winnow {

struct SparseAttentionBackwardArgs {
  Tensor query;         // [rows, heads, dim_qk] f64 | f32 | bf16 | f16
  Tensor key;           // [keys, kv_heads, dim_qk], dtype of query
  Tensor value;         // [keys, kv_heads, dim_v], dtype of query; or left out: key[..., :dim_v]
  Tensor topk_indices;  // int32 [rows, topk]; or left out: the whole range
  Tensor topk_lengths;  // int32 [rows]; or left out
  Tensor starts;        // int32 [rows]
  Tensor ends;          // int32 [rows]
  double softmax_scale = 0;  // required, > 0: of q . k, before the exponential
  Tensor output;             // [rows, heads, dim_v] of the forward, dtype of query or f32
  Tensor lse;                // f32 (f64 with f64) [rows, heads] of the forward
  Tensor d_output;           // [rows, heads, dim_v], dtype of output
  Tensor d_query;            // out: f32 (f64 with f64) [rows, heads, dim_qk]
  Tensor d_key;              // out: f32 (f64 with f64) [keys, kv_heads, dim_qk]
  Tensor d_value;            // out: f32 (f64 with f64) [keys, kv_heads, dim_v]; left out with value
  bool rows_nonempty = false;  // the caller's word that every row has a slot that counts
};

void sparse_attention_backward(const SparseAttentionBackwardArgs& args, Workspace workspace);
std::int64_t sparse_attention_backward_workspace_bytes(const SparseAttentionBackwardArgs& args);
Explanation explain(const SparseAttentionBackwardArgs& args);

}  // namespace winnow
