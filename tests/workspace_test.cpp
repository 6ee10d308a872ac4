// What every operation says before memory exists: who would run, and how much scratch it takes, for
// shapes of a public model at 64K and at a million tokens. Nothing here is allocated.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "tests/each.h"
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

namespace winnow::testing {
namespace {

constexpr std::int64_t kIndexHeads = 64, kIndexDim = 128, kHeads = 128, kDim = 576, kValue = 512,
                       kTopk = 2048, kMiB = 1 << 20;

Tensor none(DType dtype, std::initializer_list<std::int64_t> shape) {
  return make_tensor(nullptr, dtype, shape);
}
Tensor bf16(std::initializer_list<std::int64_t> shape) { return none(DType::kBF16, shape); }
Tensor f32(std::initializer_list<std::int64_t> shape) { return none(DType::kF32, shape); }
Tensor i32(std::initializer_list<std::int64_t> shape) { return none(DType::kI32, shape); }
Tensor e4m3(std::initializer_list<std::int64_t> shape) { return none(DType::kE4M3, shape); }
Tensor e8m0(std::initializer_list<std::int64_t> shape) { return none(DType::kE8M0, shape); }

struct Answer {
  std::string operation, chosen;
  std::size_t verdicts = 0;
  std::int64_t bytes = 0;
};

template <class Args>
Answer ask(std::int64_t (*bytes)(const Args&), const Args& args) {
  const Explanation all = explain(args);
  return {all.operation, all.chosen(), all.verdicts.size(), bytes(args)};
}

// Every operation at `n` rows over `n` keys.
std::vector<Answer> answers(std::int64_t n) {
  const Tensor index_query = bf16({n, kIndexHeads, kIndexDim}), index_key = bf16({n, kIndexDim}),
               index_weights = f32({n, kIndexHeads}), range = i32({n}), ids = i32({n, kTopk}),
               slots = f32({n, kTopk}), query = bf16({n, kHeads, kDim}), key = bf16({n, 1, kDim}),
               output = bf16({n, kHeads, kValue}), lse = f32({n, kHeads}),
               d_index_query = f32({n, kIndexHeads, kIndexDim}), d_index_key = f32({n, kIndexDim});
  const SparseAttentionBackwardArgs backward = {query,
                                                key,
                                                {},
                                                ids,
                                                range,
                                                range,
                                                range,
                                                0.1,
                                                output,
                                                lse,
                                                output,
                                                f32({n, kHeads, kDim}),
                                                f32({n, 1, kDim}),
                                                {}};
  return {
      ask(index_scores_workspace_bytes,
          IndexScoresArgs{index_query, index_key, index_weights, range, range, true, f32({n, n})}),
      ask(select_topk_workspace_bytes,
          SelectTopkArgs{f32({n, n}), range, range, ids, range, slots}),
      ask(index_topk_workspace_bytes, IndexTopkArgs{index_query, index_key, index_weights, range,
                                                    range, true, ids, range, slots}),
      ask(index_scores_at_workspace_bytes,
          IndexScoresAtArgs{index_query, index_key, index_weights, ids, range, range, true, slots}),
      ask(index_scores_at_backward_workspace_bytes,
          IndexScoresAtBackwardArgs{index_query, index_key, index_weights, ids, range, range, true,
                                    slots, d_index_query, d_index_key, index_weights}),
      ask(dense_index_loss_workspace_bytes, DenseIndexLossArgs{index_query,
                                                               index_key,
                                                               index_weights,
                                                               true,
                                                               query,
                                                               key,
                                                               lse,
                                                               0.1,
                                                               range,
                                                               range,
                                                               1,
                                                               {},
                                                               f32({n}),
                                                               d_index_query,
                                                               d_index_key,
                                                               index_weights}),
      ask(index_loss_workspace_bytes,
          IndexLossArgs{slots, slots, ids, range, range, 1, f32({n}), slots}),
      ask(attention_target_workspace_bytes,
          AttentionTargetArgs{query, key, lse, ids, range, range, 0.1, slots}),
      ask(sparse_attention_workspace_bytes,
          SparseAttentionArgs{query, key, {}, ids, range, range, range, 0.1, output, lse}),
      ask(sparse_attention_backward_workspace_bytes, backward),
      ask(merge_attention_workspace_bytes,
          MergeAttentionArgs{bf16({8, n, kHeads, kValue}), f32({8, n, kHeads}), output, lse}),
      ask(pool_keys_workspace_bytes,
          PoolKeysArgs{index_key, index_key, f32({4, kIndexDim}), i32({n / 4}), PoolRounding::kOnce,
                       bf16({n / 4, kIndexDim})}),
      ask(append_pools_workspace_bytes,
          AppendPoolsArgs{index_key, index_key, f32({4, kIndexDim}), i32({257}), i32({256}),
                          i32({256}), range, 0, PoolRounding::kOnce, bf16({256, 3, kIndexDim}),
                          bf16({256, 3, kIndexDim}), bf16({n / 4, kIndexDim})}),
      ask(expand_pools_workspace_bytes,
          ExpandPoolsArgs{
              i32({n, kTopk / 4}), {}, range, range, 4, true, i32({n, kTopk + 3}), range}),
      ask(hadamard_workspace_bytes, HadamardArgs{index_key, index_key}),
      ask(quantise_workspace_bytes,
          QuantiseArgs{index_key, true, 0, e4m3({n, kIndexDim}), e8m0({n, kIndexDim / 32})}),
      ask(dequantise_workspace_bytes,
          DequantiseArgs{e4m3({n, kIndexDim}), e8m0({n, kIndexDim / 32}), f32({n, kIndexDim})}),
      ask(tile_scales_workspace_bytes,
          TileScalesArgs{e8m0({n, 1, 4}), i32({2}), i32({2}), e8m0({n / 128, 1, 512})})};
}

// Contract 17: the question about a call needs no memory, and names who would run.
TEST(Workspace, EveryOperationAnswersBeforeMemoryExists) {
  for (const Answer& a : answers(65536)) {
    EXPECT_GE(a.verdicts, 2u) << a.operation;
    EXPECT_EQ(a.chosen.substr(0, 4), "cpu.") << a.operation;
    EXPECT_GE(a.bytes, 0) << a.operation;
  }
}

// Contract 15: scratch is a matter of threads and of one row's sizes. Sixteen times the rows and
// the keys need no more of it: only index_topk's is worth a budget.
TEST(Workspace, DoesNotGrowWithRowsAndKeys) {
  for (const int count : {1, 16}) {
    const ThreadsGuard threads(count);
    const std::vector<Answer> few = answers(65536), many = answers(1 << 20);
    for (std::size_t n = 0; n < few.size(); ++n) {
      EXPECT_LE(many[n].bytes, few[n].bytes) << few[n].operation;
      EXPECT_LE(many[n].bytes, 64 * kMiB + 16 * kMiB * count) << few[n].operation;
    }
  }
}

}  // namespace
}  // namespace winnow::testing
