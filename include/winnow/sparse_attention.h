// sparse_attention: attention of every query row over its selected keys.
//
//   z[h, s]         = softmax_scale * query[i, h, :] . key[id_s, h / group, :]
//   p[h, s]         = softmax of z[h, :] over the valid slots s         group = heads / kv_heads
//   output[i, h, :] = sum_s p[h, s] * value[id_s, h / group, :]
//
// - MLA: key is the latent, [keys, 1, 512 + 64]; leave `value` out, and the value is the first
//   dim_v channels of the key.
// - GQA and MHA: a separate value.
// - A slot counts if its id lies in [starts[i], ends[i]) (clamped to the key space)
//   and it stands before topk_lengths[i].
//   Any other id, not only -1, is ignored wherever it stands: never dereferenced.
//   Ids are distinct by contract; an id that stands twice counts twice.
// - Keys may lie in pages (key_view.h): ids, `starts` and `ends` are positions in the row's
//   request, `value` lies in the same pages, with strides of its own, and a slot whose page is
//   missing is ignored. The result is bit for bit that of the same keys in one piece.
// - Leave `topk_indices` out for dense attention:
//   every key of the row's range, in ascending order.
//   The result is bit for bit that of the same ids given as a list.
// - A row without a valid slot: output 0, lse -inf. So is a head whose logits are all -inf.
// - NaN and infinity: every product is formed for every slot that counts, with a weight of 0, too
//   (0 * NaN is NaN); a logit of NaN or +inf makes the head's output and lse NaN. What does not
//   count is never multiplied.
// - lse is the natural logarithm of the sum of exp of the scaled logits: ln sum_s exp(z[h, s]).
// - Softmax in f32 (f64 with f64). With 16-bit inputs an implementation on matrix units may round
//   the weights exp(z - max) to the inputs' dtype before their product with the value, but never
//   in their sum or in lse. That moves an output by at most u * sum_s p[h, s] * |value|, u = 2^-8
//   (bf16) or 2^-11 (f16, and 2^-25 * sum |value| where weights are subnormal). On CPUs nothing is
//   rounded.
// - A row's result depends on its own query and list only, for any thread count and batch.
// - Source: attention over the selected entries, DeepSeek-V3.2-Exp report, "Prototype of DSA",
//   equation (2); MLA in its absorbed form, DeepSeek-V2 (2024), section 2.1.
// - Errors, questions before memory exists: implementations.h.
#pragma once

#include "winnow/implementations.h"
#include "winnow/key_view.h"
#include "winnow/tensor.h"

namespace winnow {

struct SparseAttentionArgs {
  Tensor query;         // [rows, heads, dim_qk] f64 | f32 | bf16 | f16
  KeyView key;          // of [kv_heads, dim_qk], dtype of query; heads % kv_heads == 0
  Tensor value;         // [keys, kv_heads, dim_v], in pages [pages, page_size, kv_heads, dim_v],
                        // dtype of query; or left out: key[..., :dim_v]
  Tensor topk_indices;  // int32 [rows, topk]; or left out: the whole range
  Tensor topk_lengths;  // int32 [rows]; or left out: every slot may count
  Tensor starts;        // int32 [rows]
  Tensor ends;          // int32 [rows]
  double softmax_scale = 0;  // required, > 0: of q . k, before the exponential
  Tensor output;             // out: [rows, heads, dim_v], dtype of query or f32
  Tensor lse;                // out: f32 (f64 with f64) [rows, heads]
};

void sparse_attention(const SparseAttentionArgs& args, Workspace workspace);
std::int64_t sparse_attention_workspace_bytes(const SparseAttentionArgs& args);
Explanation explain(const SparseAttentionArgs& args);

}  // namespace winnow
