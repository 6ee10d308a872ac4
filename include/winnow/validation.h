// Validation mode: operations then look at the values of their integer inputs, too.
//
// Without it a call reads no value before it runs: ranges are clamped to the key space, ids outside
// a row's range are ignored, and an id that stands twice counts twice. With it the same inputs are
// an error, after the checks of the arguments and before the first write: "[operation] rule, row
// and value". For debugging; the checks cost time and memory on every call.
//
// - starts and ends: no negative length; a row that is not empty lies within the key space.
// - row_request and block_table: of a row that is not empty, a request, and pages for its range.
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
