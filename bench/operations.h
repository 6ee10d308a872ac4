// The operations that have problems, and the training step; one file of bench/ each.
#pragma once

#include "bench/case.h"

namespace winnow::bench {

Operation index_scores_operation();
Operation select_topk_operation();
Operation index_topk_operation();
Operation matmul_operation();
Operation sparse_attention_operation();
Operation sparse_attention_backward_operation();
Operation merge_attention_operation();
Operation attention_target_operation();
Operation dense_index_loss_operation();
Operation index_loss_operation();
Operation index_scores_at_operation();
Operation index_scores_at_backward_operation();
Operation pool_keys_operation();
Operation append_pools_operation();
Operation expand_pools_operation();
Operation hadamard_operation();
Operation quantise_operation();
Operation dequantise_operation();
Operation tile_scales_operation();
Operation training_step_operation();

}  // namespace winnow::bench
