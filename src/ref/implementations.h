// The reference of every operation: plain loops in double precision, written from the contract in
// include/winnow. It accepts every call, and every test compares with it.
#pragma once

#include <string>

#include "base/implementation.h"
#include "winnow/append_pools.h"
#include "winnow/attention_target.h"
#include "winnow/dense_index_loss.h"
#include "winnow/dequantise.h"
#include "winnow/expand_pools.h"
#include "winnow/hadamard.h"
#include "winnow/index_loss.h"
#include "winnow/index_scores.h"
#include "winnow/index_scores_at.h"
#include "winnow/index_scores_at_backward.h"
#include "winnow/index_topk.h"
#include "winnow/merge_attention.h"
#include "winnow/pool_keys.h"
#include "winnow/quantise.h"
#include "winnow/select_topk.h"
#include "winnow/sparse_attention.h"
#include "winnow/sparse_attention_backward.h"
#include "winnow/tile_scales.h"

namespace winnow::ref {

template <class Args>
Refusal accept(const Args&) {
  return "";
}
template <class Args>
std::int64_t no_workspace(const Args&) {
  return 0;
}

extern const Implementation<IndexScoresArgs> index_scores_implementation;
extern const Implementation<SelectTopkArgs> select_topk_implementation;
extern const Implementation<IndexTopkArgs> index_topk_implementation;
extern const Implementation<SparseAttentionArgs> sparse_attention_implementation;
extern const Implementation<SparseAttentionBackwardArgs> sparse_attention_backward_implementation;
extern const Implementation<MergeAttentionArgs> merge_attention_implementation;
extern const Implementation<AttentionTargetArgs> attention_target_implementation;
extern const Implementation<IndexLossArgs> index_loss_implementation;
extern const Implementation<IndexScoresAtArgs> index_scores_at_implementation;
extern const Implementation<IndexScoresAtBackwardArgs> index_scores_at_backward_implementation;
extern const Implementation<DenseIndexLossArgs> dense_index_loss_implementation;
extern const Implementation<PoolKeysArgs> pool_keys_implementation;
extern const Implementation<AppendPoolsArgs> append_pools_implementation;
extern const Implementation<ExpandPoolsArgs> expand_pools_implementation;
extern const Implementation<HadamardArgs> hadamard_implementation;
extern const Implementation<QuantiseArgs> quantise_implementation;
extern const Implementation<DequantiseArgs> dequantise_implementation;
extern const Implementation<TileScalesArgs> tile_scales_implementation;

}  // namespace winnow::ref
