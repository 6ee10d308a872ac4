// expand_pools: from selected pools to the tokens that attention reads.
//
// - Pool p holds the tokens [base, base + pool_size), base = pool_bases[p]; without pool_bases it
//   is p * pool_size: one sequence, or positions inside a paged request.
// - The row sees the tokens [start, end), which is [starts[i], ends[i]) clamped below at 0. Tokens
//   outside are absent, so a range that ends inside a pool works.
// - With always_select_tail the last (end - start) % pool_size tokens of the range, those of no
//   complete pool, are members besides. A token stands once, whatever the pools.
// - topk_indices: the tokens in the order of the pools, which ascends as index_topk gives them;
//   then the tail; then -1. Ids of no pool are skipped, wherever they stand.
// - An empty range gives -1 and length 0. Without the tail so does a row that sees no whole pool.
// - Source: KPool of Megatron Core (dsa_indexer_kpool), its always-selected tail.
// - Errors, questions before memory exists: implementations.h.
#pragma once

#include "winnow/implementations.h"
#include "winnow/tensor.h"

namespace winnow {

struct ExpandPoolsArgs {
  Tensor pool_indices;  // int32 [rows, topk / pool_size]: pools, ascending, -1 after the last
  Tensor pool_bases;    // int32 [pools]; may be left out
  Tensor starts;        // int32 [rows], tokens
  Tensor ends;          // int32 [rows], tokens
  std::int64_t pool_size = 1;
  bool always_select_tail = true;
  Tensor topk_indices;  // out: int32 [rows, topk], and pool_size - 1 columns more with the tail
  Tensor topk_lengths;  // out: int32 [rows], how many are valid
};

void expand_pools(const ExpandPoolsArgs& args, Workspace workspace);
std::int64_t expand_pools_workspace_bytes(const ExpandPoolsArgs& args);
Explanation explain(const ExpandPoolsArgs& args);

}  // namespace winnow
