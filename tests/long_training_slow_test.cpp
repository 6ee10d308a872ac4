// G10: 262,144 tokens, forward and backward, through every operation of a sparse training step:
// it ends, and its memory beside inputs and outputs is stated and does not grow with the context.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <initializer_list>
#include <string>
#include <vector>

#include "bench/data.h"
#include "tests/attention_call.h"
#include "tests/each.h"
#include "winnow/attention_target.h"
#include "winnow/index_loss.h"
#include "winnow/index_scores_at.h"
#include "winnow/index_scores_at_backward.h"
#include "winnow/index_topk.h"

namespace winnow::testing {
namespace {

constexpr std::int64_t kHeads = 2, kDim = 16, kTopk = 64;

// Bytes of workspace by operation, printed, and the sum of what a step needs at once.
struct Memory {
  std::vector<std::pair<std::string, std::int64_t>> bytes;
  template <class Args>
  void run(void (*operation)(const Args&, Workspace), std::int64_t (*ask)(const Args&),
           const Args& args) {
    Scratch scratch;
    operation(args, scratch.get(ask(args)));
    bytes.emplace_back(explain(args).operation, ask(args));
  }
  std::int64_t most() const {
    std::int64_t most = 0;
    for (const auto& [name, n] : bytes) most = std::max(most, n);
    return most;
  }
};

// One step over `length` causal rows; the last rows select among all keys, the others keep the
// selection of a window, so that the test does not score 2^35 pairs.
Memory step(AttentionCall& x, std::int64_t scored) {
  const std::int64_t length = x.rows;
  const Array index_key(DType::kF32, {length, kDim}), weights(DType::kF32, {length, kHeads}),
      scores(DType::kF32, {length, kTopk}), target(DType::kF32, {length, kTopk}),
      kl(DType::kF32, {length}), d_scores(DType::kF32, {length, kTopk}),
      dq(DType::kF32, {length, kHeads, kDim}), dk(DType::kF32, {length, kDim}),
      dw(DType::kF32, {length, kHeads});
  bench::Random random(2);
  bench::fill_gauss(index_key, random);
  bench::fill_gauss(weights, random);
  x.ids = Array(DType::kI32, {length, kTopk});
  x.lengths = Array(DType::kI32, {length});
  for (std::int64_t i = 0; i < length; ++i) {
    x.see(i, 0, static_cast<int>(i + 1));
    const std::int64_t n = std::min(i + 1, kTopk), step = std::max<std::int64_t>(1, i / kTopk);
    x.lengths.as<std::int32_t>()[i] = static_cast<std::int32_t>(n);
    for (std::int64_t s = 0; s < kTopk; ++s)
      x.ids.as<std::int32_t>()[i * kTopk + s] = s < n ? static_cast<std::int32_t>(s * step) : -1;
  }
  Memory memory;
  IndexTopkArgs topk = {x.query, index_key, weights,   x.starts, x.ends,
                        true,    x.ids,     x.lengths, scores};
  for (Tensor* t : {&topk.index_query, &topk.index_weights, &topk.starts, &topk.ends,
                    &topk.topk_indices, &topk.topk_lengths, &topk.topk_scores})
    *t = t->rows(length - scored, scored);
  memory.run(index_topk, index_topk_workspace_bytes, topk);
  memory.run(sparse_attention, sparse_attention_workspace_bytes, x.forward_args());
  memory.run(sparse_attention_backward, sparse_attention_backward_workspace_bytes,
             x.backward_args());
  memory.run(attention_target, attention_target_workspace_bytes,
             AttentionTargetArgs{x.query, x.key, x.lse, x.ids, x.starts, x.ends, x.scale, target});
  memory.run(index_scores_at, index_scores_at_workspace_bytes,
             IndexScoresAtArgs{x.query, index_key, weights, x.ids, x.starts, x.ends, true, scores});
  memory.run(index_loss, index_loss_workspace_bytes,
             IndexLossArgs{target, scores, x.ids, x.starts, x.ends, 1, kl, d_scores});
  memory.run(index_scores_at_backward, index_scores_at_backward_workspace_bytes,
             IndexScoresAtBackwardArgs{x.query, index_key, weights, x.ids, x.starts, x.ends, true,
                                       d_scores, dq, dk, dw});
  for (const Array* out : std::initializer_list<const Array*>{&x.output, &x.lse, &x.d_query,
                                                              &x.d_key, &kl, &dq, &dk, &dw}) {
    double size = 0;
    for (std::int64_t n = 0; n < out->elements(); ++n) {
      if (!std::isfinite(at(*out, n))) ADD_FAILURE() << "not finite: element " << n;
      if (::testing::Test::HasFailure()) return memory;
      size += std::abs(at(*out, n));
    }
    EXPECT_GT(size, 0);
  }
  return memory;
}

TEST(LongTraining, G10AStepOf262144Tokens) {
  constexpr std::int64_t kLong = 262144;
  AttentionCall x(kLong, kLong, kHeads, 1, kDim, kDim),
      quarter(kLong / 4, kLong / 4, kHeads, 1, kDim, kDim);
  const Memory memory = step(x, 256), less = step(quarter, 256);
  for (const auto& [name, bytes] : memory.bytes) {
    RecordProperty("bytes_" + name, std::to_string(bytes));
    std::printf("%-26s %10lld bytes of workspace\n", name.c_str(), static_cast<long long>(bytes));
  }
  EXPECT_LE(memory.most(), std::int64_t{64} << 20);
  for (std::size_t n = 0; n < memory.bytes.size(); ++n)
    EXPECT_LE(memory.bytes[n].second, 2 * less.bytes[n].second + (1 << 20))
        << memory.bytes[n].first;
  // Rows alone give the bits that they give in the step.
  for (const std::int64_t i : {std::int64_t{0}, std::int64_t{63}, kLong / 2 + 1, kLong - 1}) {
    SparseAttentionArgs a = x.forward_args();
    const Array output(DType::kF32, {1, kHeads, kDim}), lse(DType::kF32, {1, kHeads});
    for (Tensor* t : {&a.query, &a.topk_indices, &a.topk_lengths, &a.starts, &a.ends})
      *t = t->rows(i, 1);
    a.output = output;
    a.lse = lse;
    AttentionCall::forward(a);
    EXPECT_TRUE(same_bits(output, x.output.view().rows(i, 1))) << i;
    EXPECT_TRUE(same_bits(lse, x.lse.view().rows(i, 1))) << i;
  }
}

}  // namespace
}  // namespace winnow::testing
