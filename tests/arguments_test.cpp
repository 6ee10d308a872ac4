// Arguments that every operation refuses before its first write: memory that is not there, memory
// that is shared, extents that an index of 32 bits does not reach.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "base/array.h"
#include "tests/each.h"
#include "winnow/append_pools.h"
#include "winnow/attention_target.h"
#include "winnow/dense_index_loss.h"
#include "winnow/dequantise.h"
#include "winnow/expand_pools.h"
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

constexpr std::int64_t kRows = 2, kKeys = 5, kHeads = 2, kDim = 4, kTopk = 3;

// Lends every tensor memory of its own, and knows when one was written.
class Arena {
 public:
  Arena() : memory_(kTensors * kBytes, 0) {}
  Tensor f32(std::initializer_list<std::int64_t> shape) { return take(DType::kF32, shape); }
  Tensor i32(std::initializer_list<std::int64_t> shape) { return take(DType::kI32, shape); }
  Tensor e4m3(std::initializer_list<std::int64_t> shape) { return take(DType::kE4M3, shape); }
  Tensor e8m0(std::initializer_list<std::int64_t> shape) { return take(DType::kE8M0, shape); }
  bool untouched() const {
    return std::all_of(memory_.begin(), memory_.end(), [](char byte) { return byte == 0; });
  }

 private:
  static constexpr std::size_t kTensors = 16, kBytes = 512;
  Tensor take(DType dtype, std::initializer_list<std::int64_t> shape) {
    return make_tensor(memory_.data() + kBytes * next_++, dtype, shape);
  }
  std::vector<char> memory_;
  std::size_t next_ = 0;
};

inline Tensor& tensor_of(Tensor& t) { return t; }
inline Tensor& tensor_of(KeyView& keys) { return keys.data; }

template <class Args>
struct Field {
  const char* name;
  Tensor& (*tensor)(Args&);
};

// Of each tensor in turn: a null pointer is fine for the questions about a call, and refused by
// name in the call itself; an output that lies in another tensor is refused with both names.
template <class Args>
void expect_refusals(const char* operation, const Arena& arena, const Args& call,
                     void (*run)(const Args&, Workspace),
                     std::int64_t (*workspace_bytes)(const Args&),
                     const std::vector<Field<Args>>& inputs,
                     const std::vector<Field<Args>>& outputs) {
  SCOPED_TRACE(operation);
  std::vector<char> scratch(static_cast<std::size_t>(workspace_bytes(call)));
  const Workspace workspace{scratch.data(), static_cast<std::int64_t>(scratch.size())};
  const auto message = [&](const Args& args) { return error_of([&] { run(args, workspace); }); };
  std::vector<Field<Args>> all = inputs;
  all.insert(all.end(), outputs.begin(), outputs.end());
  for (const Field<Args>& field : all) {
    Args args = call;
    field.tensor(args).data = nullptr;
    EXPECT_EQ(workspace_bytes(args), workspace.bytes);
    EXPECT_EQ(explain(args).chosen(), explain(call).chosen());
    EXPECT_EQ(message(args),
              fmt::format("[{}] {} must have data, got null", operation, field.name));
  }
  for (const Field<Args>& output : outputs) {
    for (const Field<Args>& input : inputs) {
      Args args = call;
      output.tensor(args).data = input.tensor(args).data;
      EXPECT_EQ(message(args),
                fmt::format("[{}] {} must not share memory with {}, but they overlap", operation,
                            output.name, input.name));
    }
  }
  EXPECT_TRUE(arena.untouched());
}

#define FIELD(Args, name)                                              \
  Field<Args> {                                                        \
#name, [](Args & args) -> Tensor& { return tensor_of(args.name); } \
  }

TEST(Arguments, OfIndexScores) {
  Arena m;
  using A = IndexScoresArgs;
  A a{m.f32({kRows, kHeads, kDim}),
      m.f32({kKeys, kDim}),
      m.f32({kRows, kHeads}),
      m.i32({kRows}),
      m.i32({kRows}),
      true,
      m.f32({kRows, kKeys})};
  expect_refusals<A>("index_scores", m, a, index_scores, index_scores_workspace_bytes,
                     {FIELD(A, index_query), FIELD(A, index_key), FIELD(A, index_weights),
                      FIELD(A, starts), FIELD(A, ends)},
                     {FIELD(A, index_scores)});
}

TEST(Arguments, OfScalesOfTheScorer) {
  Arena m;
  using A = IndexScoresArgs;
  A a{m.e4m3({kRows, kHeads, 32}),
      m.e4m3({kKeys, 32}),
      m.f32({kRows, kHeads}),
      m.i32({kRows}),
      m.i32({kRows}),
      true,
      m.f32({kRows, kKeys})};
  a.index_query_scale = m.e8m0({kRows, kHeads, 1});
  a.index_key_scale = m.e8m0({kKeys, 1});
  expect_refusals<A>("index_scores", m, a, index_scores, index_scores_workspace_bytes,
                     {FIELD(A, index_query_scale), FIELD(A, index_key_scale)},
                     {FIELD(A, index_scores)});
}

TEST(Arguments, OfQuantise) {
  Arena m;
  using A = QuantiseArgs;
  A a{m.f32({kRows, 32}), true, 0, m.e4m3({kRows, 32}), m.e8m0({kRows, 2})};
  expect_refusals<A>("quantise", m, a, quantise, quantise_workspace_bytes, {FIELD(A, input)},
                     {FIELD(A, data), FIELD(A, scale)});
}

TEST(Arguments, OfDequantise) {
  Arena m;
  using A = DequantiseArgs;
  A a{m.e4m3({kRows, 32}), m.e8m0({kRows, 2}), m.f32({kRows, 32})};
  expect_refusals<A>("dequantise", m, a, dequantise, dequantise_workspace_bytes,
                     {FIELD(A, data), FIELD(A, scale)}, {FIELD(A, output)});
}

TEST(Arguments, OfTileScales) {
  Arena m;
  using A = TileScalesArgs;
  A a{m.e8m0({kRows, kHeads, 4}), m.i32({2}), m.i32({2}), m.e8m0({1, 1, 512})};
  expect_refusals<A>("tile_scales", m, a, tile_scales, tile_scales_workspace_bytes,
                     {FIELD(A, scale), FIELD(A, cu_seqlens), FIELD(A, padded_cu_seqlens)},
                     {FIELD(A, tiles)});
  a.inverse = true;
  expect_refusals<A>("tile_scales", m, a, tile_scales, tile_scales_workspace_bytes,
                     {FIELD(A, tiles), FIELD(A, cu_seqlens), FIELD(A, padded_cu_seqlens)},
                     {FIELD(A, scale)});
}

TEST(Arguments, OfSelectTopk) {
  Arena m;
  using A = SelectTopkArgs;
  A a{m.f32({kRows, kKeys}), m.i32({kRows}), m.i32({kRows}),
      m.i32({kRows, kTopk}), m.i32({kRows}), m.f32({kRows, kTopk})};
  expect_refusals<A>("select_topk", m, a, select_topk, select_topk_workspace_bytes,
                     {FIELD(A, scores), FIELD(A, starts), FIELD(A, ends)},
                     {FIELD(A, topk_indices), FIELD(A, topk_lengths), FIELD(A, topk_scores)});
}

TEST(Arguments, OfIndexTopk) {
  Arena m;
  using A = IndexTopkArgs;
  A a{m.f32({kRows, kHeads, kDim}),
      m.f32({kKeys, kDim}),
      m.f32({kRows, kHeads}),
      m.i32({kRows}),
      m.i32({kRows}),
      true,
      m.i32({kRows, kTopk}),
      m.i32({kRows}),
      m.f32({kRows, kTopk})};
  expect_refusals<A>("index_topk", m, a, index_topk, index_topk_workspace_bytes,
                     {FIELD(A, index_query), FIELD(A, index_key), FIELD(A, index_weights),
                      FIELD(A, starts), FIELD(A, ends)},
                     {FIELD(A, topk_indices), FIELD(A, topk_lengths), FIELD(A, topk_scores)});
}

TEST(Arguments, OfSparseAttention) {
  Arena m;
  using A = SparseAttentionArgs;
  A a{m.f32({kRows, kHeads, kDim}),
      m.f32({kKeys, 1, kDim}),
      m.f32({kKeys, 1, kDim}),
      m.i32({kRows, kTopk}),
      m.i32({kRows}),
      m.i32({kRows}),
      m.i32({kRows}),
      0.5,
      m.f32({kRows, kHeads, kDim}),
      m.f32({kRows, kHeads})};
  expect_refusals<A>("sparse_attention", m, a, sparse_attention, sparse_attention_workspace_bytes,
                     {FIELD(A, query), FIELD(A, key), FIELD(A, value), FIELD(A, topk_indices),
                      FIELD(A, topk_lengths), FIELD(A, starts), FIELD(A, ends)},
                     {FIELD(A, output), FIELD(A, lse)});
}

TEST(Arguments, OfSparseAttentionBackward) {
  Arena m;
  using A = SparseAttentionBackwardArgs;
  A a{m.f32({kRows, kHeads, kDim}),
      m.f32({kKeys, 1, kDim}),
      m.f32({kKeys, 1, kDim}),
      m.i32({kRows, kTopk}),
      m.i32({kRows}),
      m.i32({kRows}),
      m.i32({kRows}),
      0.5,
      m.f32({kRows, kHeads, kDim}),
      m.f32({kRows, kHeads}),
      m.f32({kRows, kHeads, kDim}),
      m.f32({kRows, kHeads, kDim}),
      m.f32({kKeys, 1, kDim}),
      m.f32({kKeys, 1, kDim})};
  expect_refusals<A>("sparse_attention_backward", m, a, sparse_attention_backward,
                     sparse_attention_backward_workspace_bytes,
                     {FIELD(A, query), FIELD(A, key), FIELD(A, value), FIELD(A, topk_indices),
                      FIELD(A, topk_lengths), FIELD(A, starts), FIELD(A, ends), FIELD(A, output),
                      FIELD(A, lse), FIELD(A, d_output)},
                     {FIELD(A, d_query), FIELD(A, d_key), FIELD(A, d_value)});
  // Without a value there are two gradients, which share no memory with anything either.
  a.value = a.d_value = {};
  expect_refusals<A>("sparse_attention_backward", m, a, sparse_attention_backward,
                     sparse_attention_backward_workspace_bytes, {FIELD(A, query), FIELD(A, key)},
                     {FIELD(A, d_query), FIELD(A, d_key)});
}

TEST(Arguments, OfMergeAttention) {
  Arena m;
  using A = MergeAttentionArgs;
  A a{m.f32({2, kRows, kHeads, kDim}), m.f32({2, kRows, kHeads}), m.f32({kRows, kHeads, kDim}),
      m.f32({kRows, kHeads})};
  expect_refusals<A>("merge_attention", m, a, merge_attention, merge_attention_workspace_bytes,
                     {FIELD(A, part_output), FIELD(A, part_lse)},
                     {FIELD(A, output), FIELD(A, lse)});
}

TEST(Arguments, OfAttentionTarget) {
  Arena m;
  using A = AttentionTargetArgs;
  A a{m.f32({kRows, kHeads, kDim}),
      m.f32({kKeys, 1, kDim}),
      m.f32({kRows, kHeads}),
      m.i32({kRows, kTopk}),
      m.i32({kRows}),
      m.i32({kRows}),
      0.5,
      m.f32({kRows, kTopk})};
  expect_refusals<A>("attention_target", m, a, attention_target, attention_target_workspace_bytes,
                     {FIELD(A, query), FIELD(A, key), FIELD(A, lse), FIELD(A, topk_indices),
                      FIELD(A, starts), FIELD(A, ends)},
                     {FIELD(A, attention_target)});
}

TEST(Arguments, OfIndexLoss) {
  Arena m;
  using A = IndexLossArgs;
  A a{m.f32({kRows, kTopk}), m.f32({kRows, kTopk}), m.i32({kRows, kTopk}),
      m.i32({kRows}),        m.i32({kRows}),        1,
      m.f32({kRows}),        m.f32({kRows, kTopk})};
  expect_refusals<A>("index_loss", m, a, index_loss, index_loss_workspace_bytes,
                     {FIELD(A, attention_target), FIELD(A, topk_scores), FIELD(A, topk_indices),
                      FIELD(A, starts), FIELD(A, ends)},
                     {FIELD(A, kl), FIELD(A, d_scores)});
}

TEST(Arguments, OfIndexScoresAt) {
  Arena m;
  using A = IndexScoresAtArgs;
  A a{m.f32({kRows, kHeads, kDim}),
      m.f32({kKeys, kDim}),
      m.f32({kRows, kHeads}),
      m.i32({kRows, kTopk}),
      m.i32({kRows}),
      m.i32({kRows}),
      true,
      m.f32({kRows, kTopk})};
  expect_refusals<A>("index_scores_at", m, a, index_scores_at, index_scores_at_workspace_bytes,
                     {FIELD(A, index_query), FIELD(A, index_key), FIELD(A, index_weights),
                      FIELD(A, topk_indices), FIELD(A, starts), FIELD(A, ends)},
                     {FIELD(A, topk_scores)});
}

TEST(Arguments, OfIndexScoresAtBackward) {
  Arena m;
  using A = IndexScoresAtBackwardArgs;
  A a{m.f32({kRows, kHeads, kDim}),
      m.f32({kKeys, kDim}),
      m.f32({kRows, kHeads}),
      m.i32({kRows, kTopk}),
      m.i32({kRows}),
      m.i32({kRows}),
      true,
      m.f32({kRows, kTopk}),
      m.f32({kRows, kHeads, kDim}),
      m.f32({kKeys, kDim}),
      m.f32({kRows, kHeads})};
  expect_refusals<A>("index_scores_at_backward", m, a, index_scores_at_backward,
                     index_scores_at_backward_workspace_bytes,
                     {FIELD(A, index_query), FIELD(A, index_key), FIELD(A, index_weights),
                      FIELD(A, topk_indices), FIELD(A, starts), FIELD(A, ends), FIELD(A, d_scores)},
                     {FIELD(A, d_index_query), FIELD(A, d_index_key), FIELD(A, d_index_weights)});
}

TEST(Arguments, OfDenseIndexLoss) {
  Arena m;
  using A = DenseIndexLossArgs;
  A a{m.f32({kRows, kHeads, kDim}),
      m.f32({kKeys, kDim}),
      m.f32({kRows, kHeads}),
      true,
      m.f32({kRows, kHeads, kDim}),
      m.f32({kKeys, 1, kDim}),
      m.f32({kRows, kHeads}),
      0.5,
      m.i32({kRows}),
      m.i32({kRows}),
      1,
      {},
      m.f32({kRows}),
      m.f32({kRows, kHeads, kDim}),
      m.f32({kKeys, kDim}),
      m.f32({kRows, kHeads})};
  expect_refusals<A>(
      "dense_index_loss", m, a, dense_index_loss, dense_index_loss_workspace_bytes,
      {FIELD(A, index_query), FIELD(A, index_key), FIELD(A, index_weights), FIELD(A, query),
       FIELD(A, key), FIELD(A, lse), FIELD(A, starts), FIELD(A, ends)},
      {FIELD(A, kl), FIELD(A, d_index_query), FIELD(A, d_index_key), FIELD(A, d_index_weights)});
}

TEST(Arguments, OfPoolKeys) {
  Arena m;
  using A = PoolKeysArgs;
  A a{m.f32({kKeys, kDim}), m.f32({kKeys, kDim}), m.f32({2, kDim}),
      m.i32({kRows}),       PoolRounding::kOnce,  m.f32({kRows, kDim})};
  expect_refusals<A>("pool_keys", m, a, pool_keys, pool_keys_workspace_bytes,
                     {FIELD(A, index_key), FIELD(A, gate), FIELD(A, ape), FIELD(A, pool_bases)},
                     {FIELD(A, pooled_key)});
}

TEST(Arguments, OfAppendPools) {
  Arena m;
  using A = AppendPoolsArgs;
  A a{m.f32({kKeys, kDim}),    m.f32({kKeys, kDim}),
      m.f32({3, kDim}),        m.i32({kRows + 1}),
      m.i32({kRows}),          m.i32({kRows}),
      m.i32({kKeys}),          6,
      PoolRounding::kOnce,     m.f32({kRows, 2, kDim}),
      m.f32({kRows, 2, kDim}), m.f32({kRows, 2, kDim})};
  expect_refusals<A>("append_pools", m, a, append_pools, append_pools_workspace_bytes,
                     {FIELD(A, index_key), FIELD(A, gate), FIELD(A, ape), FIELD(A, cu_seqlens),
                      FIELD(A, context), FIELD(A, rings), FIELD(A, pool_slots)},
                     {FIELD(A, open_key), FIELD(A, open_gate), FIELD(A, pooled_key)});
}

TEST(Arguments, OfExpandPools) {
  Arena m;
  using A = ExpandPoolsArgs;
  A a{m.i32({kRows, kTopk}), m.i32({kKeys}), m.i32({kRows}), m.i32({kRows}), 2, true,
      m.i32({kRows, 7}),     m.i32({kRows})};
  expect_refusals<A>(
      "expand_pools", m, a, expand_pools, expand_pools_workspace_bytes,
      {FIELD(A, pool_indices), FIELD(A, pool_bases), FIELD(A, starts), FIELD(A, ends)},
      {FIELD(A, topk_indices), FIELD(A, topk_lengths)});
}

#undef FIELD

IndexScoresArgs score_args(std::int64_t rows, std::int64_t keys, std::int64_t heads) {
  const auto f32 = [](std::initializer_list<std::int64_t> shape) {
    return make_tensor(nullptr, DType::kF32, shape);
  };
  const Tensor range = make_tensor(nullptr, DType::kI32, {rows});
  return {f32({rows, heads, 1}), f32({keys, 1}), f32({rows, heads}), range, range, true,
          f32({rows, keys})};
}

// Explanations need no memory, so these sizes can be asked about.
TEST(Arguments, AnExtentEndsAtTheLargestInt) {
  constexpr std::int64_t kMost = (std::int64_t{1} << 31) - 1;
  const auto error = [](const IndexScoresArgs& args) { return error_of([&] { explain(args); }); };
  EXPECT_FALSE(explain(score_args(kMost, 1, 1)).chosen().empty());
  EXPECT_FALSE(explain(score_args(1, kMost, 1)).chosen().empty());
  EXPECT_FALSE(explain(score_args(1, 1, kMost)).chosen().empty());
  EXPECT_EQ(error(score_args(kMost + 1, 1, 1)),
            "[index_scores] index_query must have extents of at most 2147483647, got f32 "
            "[2147483648, 1, 1]");
  EXPECT_EQ(error(score_args(1, kMost + 1, 1)),
            "[index_scores] index_key must have extents of at most 2147483647, got f32 "
            "[2147483648, 1]");
  EXPECT_EQ(error(score_args(1, 1, kMost + 1)),
            "[index_scores] index_query must have extents of at most 2147483647, got f32 "
            "[1, 2147483648, 1]");
}

}  // namespace
}  // namespace winnow::testing
