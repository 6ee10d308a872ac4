// The implementations that this build has, for the ordered lists of src/ops: the fastest first.
//
// src/cpu is compiled once per instruction set; each copy exports one Implementation per operation
// in its own namespace.
#pragma once

#include "ref/implementations.h"

#define WINNOW_DECLARE_CPU(isa)                                                                   \
  namespace winnow::cpu::isa {                                                                    \
  extern const Implementation<IndexScoresArgs> index_scores_implementation;                       \
  extern const Implementation<SelectTopkArgs> select_topk_implementation;                         \
  extern const Implementation<IndexTopkArgs> index_topk_implementation;                           \
  extern const Implementation<SparseAttentionArgs> sparse_attention_implementation;               \
  extern const Implementation<SparseAttentionBackwardArgs>                                        \
      sparse_attention_backward_implementation;                                                   \
  extern const Implementation<MergeAttentionArgs> merge_attention_implementation;                 \
  extern const Implementation<AttentionTargetArgs> attention_target_implementation;               \
  extern const Implementation<IndexLossArgs> index_loss_implementation;                           \
  extern const Implementation<IndexScoresAtArgs> index_scores_at_implementation;                  \
  extern const Implementation<IndexScoresAtBackwardArgs> index_scores_at_backward_implementation; \
  extern const Implementation<DenseIndexLossArgs> dense_index_loss_implementation;                \
  extern const Implementation<PoolKeysArgs> pool_keys_implementation;                             \
  extern const Implementation<AppendPoolsArgs> append_pools_implementation;                       \
  extern const Implementation<ExpandPoolsArgs> expand_pools_implementation;                       \
  extern const Implementation<HadamardArgs> hadamard_implementation;                              \
  extern const Implementation<QuantiseArgs> quantise_implementation;                              \
  extern const Implementation<DequantiseArgs> dequantise_implementation;                          \
  extern const Implementation<TileScalesArgs> tile_scales_implementation;                         \
  }

// src/cuda: portable kernels of every operation, and in sm90/ those of the hot ones. The
// declaration of an operation stands here when its kernels do.
#if defined(WINNOW_CUDA)
namespace winnow::cuda {
extern const Implementation<IndexScoresArgs> index_scores_implementation;
extern const Implementation<SelectTopkArgs> select_topk_implementation;
extern const Implementation<SparseAttentionArgs> sparse_attention_implementation;
extern const Implementation<SparseAttentionBackwardArgs> sparse_attention_backward_implementation;
extern const Implementation<IndexTopkArgs> index_topk_implementation;
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
}  // namespace winnow::cuda
namespace winnow::cuda::sm90 {
extern const Implementation<IndexScoresArgs> index_scores_implementation;
extern const Implementation<IndexTopkArgs> index_topk_implementation;
extern const Implementation<IndexScoresArgs> index_scores_fp8_implementation;
extern const Implementation<IndexTopkArgs> index_topk_fp8_implementation;
extern const Implementation<SelectTopkArgs> select_topk_implementation;
extern const Implementation<SparseAttentionArgs> sparse_attention_implementation;
extern const Implementation<SparseAttentionBackwardArgs> sparse_attention_backward_implementation;
}  // namespace winnow::cuda::sm90
#define WINNOW_CUDA_IMPLEMENTATION(operation) &cuda::operation##_implementation,
#define WINNOW_SM90_IMPLEMENTATION(operation) &cuda::sm90::operation##_implementation,
// It rounds more: behind the portable one, which accepts as much, so that it runs where it is pinned.
#define WINNOW_SM90_FP8_IMPLEMENTATION(operation) &cuda::sm90::operation##_fp8_implementation,
#else
#define WINNOW_CUDA_IMPLEMENTATION(operation)
#define WINNOW_SM90_IMPLEMENTATION(operation)
#define WINNOW_SM90_FP8_IMPLEMENTATION(operation)
#endif

WINNOW_DECLARE_CPU(portable)
#if defined(WINNOW_X86)
WINNOW_DECLARE_CPU(avx2)
WINNOW_DECLARE_CPU(avx512)
namespace winnow::cpu::amx {
extern const Implementation<IndexScoresArgs> index_scores_implementation;
extern const Implementation<IndexTopkArgs> index_topk_implementation;
}  // namespace winnow::cpu::amx
#define WINNOW_AMX_IMPLEMENTATION(operation) &cpu::amx::operation##_implementation,
#define WINNOW_CPU_IMPLEMENTATIONS(operation)                                       \
  &cpu::avx512::operation##_implementation, &cpu::avx2::operation##_implementation, \
      &cpu::portable::operation##_implementation,
#else
#define WINNOW_AMX_IMPLEMENTATION(operation)
#define WINNOW_CPU_IMPLEMENTATIONS(operation) &cpu::portable::operation##_implementation,
#endif
