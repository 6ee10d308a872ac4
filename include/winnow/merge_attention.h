// merge_attention: one attention out of partial ones over disjoint sets of keys.
//
//   m              = max_p part_lse[p, i, h]
//   w[p]           = exp(part_lse[p, i, h] - m)                    parts p with an lse above -inf
//   output[i, h]   = sum_p w[p] * part_output[p, i, h] / sum_p w[p]
//   lse[i, h]      = m + ln sum_p w[p]
//
// - For keys that lie on several ranks, in several caches, or came in several chunks: each part is
//   what sparse_attention gives for the row over its own keys, with its lse (natural logarithm).
// - A part whose lse is -inf contributes nothing, whatever its output holds, NaN included: it owns
//   none of the row's keys. Where all parts are such: output 0, lse -inf.
// - Where one part alone contributes, its output and lse are passed on bit for bit.
// - An lse of +inf or NaN is a part that overflowed or is broken: with another part that
//   contributes, the head's output and lse are NaN.
// - Parts are added in ascending order: a result depends on the parts of its row and head only, for
//   any thread count and batch.
// - Source: the online softmax (Milakov and Gimelshein, 2018), over parts.
// - Errors, questions before memory exists: implementations.h.
#pragma once

#include "winnow/implementations.h"
#include "winnow/tensor.h"

namespace winnow {

struct MergeAttentionArgs {
  Tensor part_output;  // [parts, rows, heads, dim_v] f64 | f32 | bf16 | f16
  Tensor part_lse;     // f32 (f64 with f64) [parts, rows, heads]
  Tensor output;       // out: [rows, heads, dim_v], dtype of part_output or f32
  Tensor lse;          // out: f32 (f64 with f64) [rows, heads]
};

void merge_attention(const MergeAttentionArgs& args, Workspace workspace);
std::int64_t merge_attention_workspace_bytes(const MergeAttentionArgs& args);
Explanation explain(const MergeAttentionArgs& args);

}  // namespace winnow
