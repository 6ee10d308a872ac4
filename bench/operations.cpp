#include "bench/operations.h"

namespace winnow::bench {

const std::vector<Operation>& operations() {
  static const std::vector<Operation> all = {
      index_scores_operation(),     select_topk_operation(),
      index_topk_operation(),       matmul_operation(),
      sparse_attention_operation(), sparse_attention_backward_operation(),
      merge_attention_operation(),  attention_target_operation(),
      dense_index_loss_operation(), index_loss_operation(),
      index_scores_at_operation(),  index_scores_at_backward_operation(),
      pool_keys_operation(),        append_pools_operation(),
      expand_pools_operation(),     hadamard_operation(),
      quantise_operation(),         dequantise_operation(),
      tile_scales_operation(),      training_step_operation(),
  };
  return all;
}

std::vector<std::string> all_check_problems() {
  std::vector<std::string> all;
  for (const Operation& operation : operations())
    all.insert(all.end(), operation.check_problems.begin(), operation.check_problems.end());
  return all;
}

}  // namespace winnow::bench
