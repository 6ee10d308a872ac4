// Validation mode: operations then look at the values of their integer inputs and scales, too.
//
// Without it a call reads no value before it runs: ranges are clamped to the key space, ids outside
// a row's range are ignored, an id that stands twice counts twice, and a NaN scale makes its key's
// scores NaN. With it the same inputs are an error, after the checks of the arguments and before
// the first write: "[operation] rule, row and value". For debugging; the checks cost time and
// memory on every call. Values on a GPU are not checked: reading them would wait for it.
//
// - starts and ends: no negative length; a row that is not empty lies within the key space.
// - row_request and block_table: of a row that is not empty, a request, and pages for its range.
// - index_query_scale and index_key_scale, of rows that are not empty and the keys that they see:
//   no NaN (byte 255 of E8M0), no infinity, none below 0. A scale of 0 is that of zeros
//   (quantise.h).
// - topk_lengths: from 0 to topk.
// - topk_indices, up to topk_lengths: -1, or an id in the row's range that stands there once.
// - pool_indices: -1, or pools that ascend and share no token.
// - append_pools: cu_seqlens ascend within the tokens; no ring and no slot stands twice.
// - What a caller certifies (rows_nonempty of sparse_attention_backward) is true.
#pragma once

namespace winnow {

// Off by default; WINNOW_VALIDATE=1 in the environment turns it on. For all threads.
void set_validation(bool on);
bool validation();

}  // namespace winnow
