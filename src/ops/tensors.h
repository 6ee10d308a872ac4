// The tensors of every operation by name: what it reads and what it writes. The rules on memory
// (rules.h) and whoever moves the tensors of a call elsewhere go through these lists.
#pragma once

#include <array>

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

namespace winnow::ops {

// A tensor of a call by the name of its argument; left out where it is empty.
struct Named {
  const char* name;
  const Tensor& tensor;
};

// The inputs of index_scores and index_topk by their names.
template <class Args>
std::array<Named, 9> scorer_inputs(const Args& a) {
  return {{{"index_query", a.index_query},
           {"index_key", a.index_key.data},
           {"block_table", a.index_key.block_table},
           {"row_request", a.index_key.row_request},
           {"index_weights", a.index_weights},
           {"starts", a.starts},
           {"ends", a.ends},
           {"index_query_scale", a.index_query_scale},
           {"index_key_scale", a.index_key_scale}}};
}

inline auto inputs_of(const AppendPoolsArgs& a) {
  return std::array{
      Named{"index_key", a.index_key},   Named{"gate", a.gate},       Named{"ape", a.ape},
      Named{"cu_seqlens", a.cu_seqlens}, Named{"context", a.context}, Named{"rings", a.rings},
      Named{"pool_slots", a.pool_slots}};
}
inline auto outputs_of(const AppendPoolsArgs& a) {
  return std::array{Named{"open_key", a.open_key}, Named{"open_gate", a.open_gate},
                    Named{"pooled_key", a.pooled_key}};
}

inline auto inputs_of(const AttentionTargetArgs& a) {
  return std::array{Named{"query", a.query},   Named{"key", a.key},
                    Named{"lse", a.lse},       Named{"topk_indices", a.topk_indices},
                    Named{"starts", a.starts}, Named{"ends", a.ends}};
}
inline auto outputs_of(const AttentionTargetArgs& a) {
  return std::array{Named{"attention_target", a.attention_target}};
}

inline auto inputs_of(const DenseIndexLossArgs& a) {
  return std::array{Named{"index_query", a.index_query},
                    Named{"index_key", a.index_key},
                    Named{"index_weights", a.index_weights},
                    Named{"query", a.query},
                    Named{"key", a.key},
                    Named{"lse", a.lse},
                    Named{"starts", a.starts},
                    Named{"ends", a.ends}};
}
inline auto outputs_of(const DenseIndexLossArgs& a) {
  return std::array{Named{"kl", a.kl}, Named{"d_index_query", a.d_index_query},
                    Named{"d_index_key", a.d_index_key},
                    Named{"d_index_weights", a.d_index_weights}};
}

inline auto inputs_of(const DequantiseArgs& a) {
  return std::array{Named{"data", a.data}, Named{"scale", a.scale}};
}
inline auto outputs_of(const DequantiseArgs& a) { return std::array{Named{"output", a.output}}; }

inline auto inputs_of(const ExpandPoolsArgs& a) {
  return std::array{Named{"pool_indices", a.pool_indices}, Named{"pool_bases", a.pool_bases},
                    Named{"starts", a.starts}, Named{"ends", a.ends}};
}
inline auto outputs_of(const ExpandPoolsArgs& a) {
  return std::array{Named{"topk_indices", a.topk_indices}, Named{"topk_lengths", a.topk_lengths}};
}

inline auto inputs_of(const HadamardArgs& a) { return std::array{Named{"input", a.input}}; }
inline auto outputs_of(const HadamardArgs& a) { return std::array{Named{"output", a.output}}; }

inline auto inputs_of(const IndexLossArgs& a) {
  return std::array{Named{"attention_target", a.attention_target},
                    Named{"topk_scores", a.topk_scores}, Named{"topk_indices", a.topk_indices},
                    Named{"starts", a.starts}, Named{"ends", a.ends}};
}
inline auto outputs_of(const IndexLossArgs& a) {
  return std::array{Named{"kl", a.kl}, Named{"d_scores", a.d_scores}};
}

inline auto inputs_of(const IndexScoresArgs& a) { return scorer_inputs(a); }
inline auto outputs_of(const IndexScoresArgs& a) {
  return std::array{Named{"index_scores", a.index_scores}};
}

inline auto inputs_of(const IndexScoresAtArgs& a) {
  return std::array{Named{"index_query", a.index_query},
                    Named{"index_key", a.index_key},
                    Named{"index_weights", a.index_weights},
                    Named{"topk_indices", a.topk_indices},
                    Named{"starts", a.starts},
                    Named{"ends", a.ends}};
}
inline auto outputs_of(const IndexScoresAtArgs& a) {
  return std::array{Named{"topk_scores", a.topk_scores}};
}

inline auto inputs_of(const IndexScoresAtBackwardArgs& a) {
  return std::array{Named{"index_query", a.index_query},
                    Named{"index_key", a.index_key},
                    Named{"index_weights", a.index_weights},
                    Named{"topk_indices", a.topk_indices},
                    Named{"starts", a.starts},
                    Named{"ends", a.ends},
                    Named{"d_scores", a.d_scores}};
}
inline auto outputs_of(const IndexScoresAtBackwardArgs& a) {
  return std::array{Named{"d_index_query", a.d_index_query}, Named{"d_index_key", a.d_index_key},
                    Named{"d_index_weights", a.d_index_weights}};
}

inline auto inputs_of(const IndexTopkArgs& a) { return scorer_inputs(a); }
inline auto outputs_of(const IndexTopkArgs& a) {
  return std::array{Named{"topk_indices", a.topk_indices}, Named{"topk_lengths", a.topk_lengths},
                    Named{"topk_scores", a.topk_scores}};
}

inline auto inputs_of(const MergeAttentionArgs& a) {
  return std::array{Named{"part_output", a.part_output}, Named{"part_lse", a.part_lse}};
}
inline auto outputs_of(const MergeAttentionArgs& a) {
  return std::array{Named{"output", a.output}, Named{"lse", a.lse}};
}

inline auto inputs_of(const PoolKeysArgs& a) {
  return std::array{Named{"index_key", a.index_key}, Named{"gate", a.gate}, Named{"ape", a.ape},
                    Named{"pool_bases", a.pool_bases}};
}
inline auto outputs_of(const PoolKeysArgs& a) {
  return std::array{Named{"pooled_key", a.pooled_key}};
}

inline auto inputs_of(const QuantiseArgs& a) { return std::array{Named{"input", a.input}}; }
inline auto outputs_of(const QuantiseArgs& a) {
  return std::array{Named{"data", a.data}, Named{"scale", a.scale}};
}

inline auto inputs_of(const SelectTopkArgs& a) {
  return std::array{Named{"scores", a.scores}, Named{"starts", a.starts}, Named{"ends", a.ends}};
}
inline auto outputs_of(const SelectTopkArgs& a) {
  return std::array{Named{"topk_indices", a.topk_indices}, Named{"topk_lengths", a.topk_lengths},
                    Named{"topk_scores", a.topk_scores}};
}

inline auto inputs_of(const SparseAttentionArgs& a) {
  return std::array{Named{"query", a.query},
                    Named{"key", a.key.data},
                    Named{"block_table", a.key.block_table},
                    Named{"row_request", a.key.row_request},
                    Named{"value", a.value},
                    Named{"topk_indices", a.topk_indices},
                    Named{"topk_lengths", a.topk_lengths},
                    Named{"starts", a.starts},
                    Named{"ends", a.ends}};
}
inline auto outputs_of(const SparseAttentionArgs& a) {
  return std::array{Named{"output", a.output}, Named{"lse", a.lse}};
}

inline auto inputs_of(const SparseAttentionBackwardArgs& a) {
  return std::array{Named{"query", a.query},
                    Named{"key", a.key},
                    Named{"value", a.value},
                    Named{"topk_indices", a.topk_indices},
                    Named{"topk_lengths", a.topk_lengths},
                    Named{"starts", a.starts},
                    Named{"ends", a.ends},
                    Named{"output", a.output},
                    Named{"lse", a.lse},
                    Named{"d_output", a.d_output}};
}
inline auto outputs_of(const SparseAttentionBackwardArgs& a) {
  return std::array{Named{"d_query", a.d_query}, Named{"d_key", a.d_key},
                    Named{"d_value", a.d_value}};
}

inline auto inputs_of(const TileScalesArgs& a) {
  return std::array{a.inverse ? Named{"tiles", a.tiles} : Named{"scale", a.scale},
                    Named{"cu_seqlens", a.cu_seqlens},
                    Named{"padded_cu_seqlens", a.padded_cu_seqlens}};
}
inline auto outputs_of(const TileScalesArgs& a) {
  return std::array{a.inverse ? Named{"scale", a.scale} : Named{"tiles", a.tiles}};
}

// Where a call runs: the device of what it writes first.
template <class Args>
Device device_of(const Args& a) {
  return outputs_of(a)[0].tensor.device;
}

}  // namespace winnow::ops
