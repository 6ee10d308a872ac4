// NaN and infinity in the inputs: every implementation makes the same elements of its outputs not
// finite as the reference does, and padding rows may hold anything.
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <utility>
#include <vector>

#include "bench/case.h"
#include "bench/data.h"
#include "tests/attention_call.h"
#include "tests/each.h"
#include "winnow/attention_target.h"
#include "winnow/dense_index_loss.h"
#include "winnow/index_loss.h"
#include "winnow/index_scores_at.h"
#include "winnow/index_scores_at_backward.h"

namespace winnow::testing {
namespace {

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();

std::vector<bool> not_finite(const std::vector<Array*>& outputs) {
  std::vector<bool> all;
  for (const Array* out : outputs) {
    for (std::int64_t e = 0; e < out->elements(); ++e) all.push_back(!std::isfinite(at(*out, e)));
  }
  return all;
}

// Puts NaN, +inf and -inf into some elements of each input, one at a time, and compares where the
// outputs of each implementation are not finite.
template <class Args>
void expect_same_places(const std::function<Args()>& args, void (*run)(const Args&, Workspace),
                        std::int64_t (*bytes)(const Args&), const std::vector<Array*>& inputs,
                        const std::vector<Array*>& outputs) {
  Scratch scratch;
  const auto places = [&](const std::string& name) {
    const bench::PinGuard pin(explain(args()).operation, name);
    for (Array* out : outputs)
      std::memset(out->as<void>(), 0x7f, static_cast<std::size_t>(out->bytes()));
    run(args(), scratch.get(bytes(args())));
    return not_finite(outputs);
  };
  std::int64_t poisoned = 0;
  for (std::size_t n = 0; n < inputs.size(); ++n) {
    for (std::int64_t e = 0; e < inputs[n]->elements(); e += inputs[n]->elements() / 7 + 1) {
      for (const float value : {kNaN, kInfinity, -kInfinity}) {
        float& x = inputs[n]->as<float>()[e];
        const float before = x;
        x = value;
        const std::vector<bool> truth = places("reference");
        for (const bool bad : truth) poisoned += bad ? 1 : 0;
        for (const Verdict& v : explain(args()).verdicts) {
          if (!v.refusal.empty()) continue;
          EXPECT_EQ(places(v.implementation), truth)
              << v.implementation << ": input " << n << " element " << e << " is " << value;
        }
        x = before;
      }
    }
  }
  EXPECT_GT(poisoned, 0);
}

TEST(NotFinite, SparseAttention) {
  for (const bool dense : {false, true}) {
    AttentionCall call(5, 30, 4, 2, 11, 9, true);
    for (int i = 0; i < 5; ++i) call.see(i, i < 3 ? 0 : 9, i == 1 ? 0 : 20 + 2 * i);
    if (!dense) {
      bench::Random random(4);
      call.ids = Array(DType::kI32, {5, 12});
      bench::fill_indices("scattered", 30, call.starts, call.ends, call.ids, random);
    }
    expect_same_places<SparseAttentionArgs>(
        [&] { return call.forward_args(); }, sparse_attention, sparse_attention_workspace_bytes,
        {&call.query, &call.key, &call.value}, {&call.output, &call.lse});
    call.forward();
    expect_same_places<SparseAttentionBackwardArgs>(
        [&] { return call.backward_args(); }, sparse_attention_backward,
        sparse_attention_backward_workspace_bytes,
        {&call.query, &call.key, &call.value, &call.lse, &call.d_output},
        {&call.d_query, &call.d_key, &call.d_value});
  }
}

// Inputs of the indexer and its losses: row 1 sees nothing.
struct Indexer {
  static constexpr std::int64_t kRows = 4, kKeys = 25, kHeads = 3, kDim = 9, kTopk = 10;
  Array q{DType::kF32, {kRows, kHeads, kDim}}, k{DType::kF32, {kKeys, kDim}},
      w{DType::kF32, {kRows, kHeads}}, query{DType::kF32, {kRows, 2, 6}},
      key{DType::kF32, {kKeys, 1, 6}}, lse{DType::kF32, {kRows, 2}},
      scores{DType::kF32, {kRows, kTopk}}, target{DType::kF32, {kRows, kTopk}};
  Array ids{DType::kI32, {kRows, kTopk}}, starts = ints({kRows}, {0, 4, 0, 12}),
                                          ends = ints({kRows}, {25, 4, 18, 24});
  Array kl{DType::kF32, {kRows}}, list{DType::kF32, {kRows, kTopk}},
      d_q{DType::kF32, {kRows, kHeads, kDim}}, d_k{DType::kF32, {kKeys, kDim}},
      d_w{DType::kF32, {kRows, kHeads}};

  Indexer() {
    bench::Random random(8);
    for (Array* x : {&q, &k, &w, &query, &key, &lse, &scores, &target})
      bench::fill_gauss(*x, random);
    for (std::int64_t e = 0; e < target.elements(); ++e)
      target.as<float>()[e] = std::abs(target.as<float>()[e]);
    bench::fill_indices("scattered", kKeys, starts, ends, ids, random);
  }
  DenseIndexLossArgs dense(bool relu) const {
    return {q, k, w, relu, query, key, lse, 0.4, starts, ends, 0.8, {}, kl, d_q, d_k, d_w};
  }
  IndexScoresAtBackwardArgs backward(bool relu) const {
    return {q, k, w, ids, starts, ends, relu, scores, d_q, d_k, d_w};
  }
};

TEST(NotFinite, IndexerAndItsLosses) {
  Indexer x;
  for (const bool relu : {true, false}) {
    expect_same_places<IndexScoresAtArgs>(
        [&] { return IndexScoresAtArgs{x.q, x.k, x.w, x.ids, x.starts, x.ends, relu, x.list}; },
        index_scores_at, index_scores_at_workspace_bytes, {&x.q, &x.k, &x.w}, {&x.list});
    expect_same_places<IndexScoresAtBackwardArgs>(
        [&] { return x.backward(relu); }, index_scores_at_backward,
        index_scores_at_backward_workspace_bytes, {&x.q, &x.k, &x.w, &x.scores},
        {&x.d_q, &x.d_k, &x.d_w});
    expect_same_places<DenseIndexLossArgs>(
        [&] { return x.dense(relu); }, dense_index_loss, dense_index_loss_workspace_bytes,
        {&x.q, &x.k, &x.w, &x.query, &x.key, &x.lse}, {&x.kl, &x.d_q, &x.d_k, &x.d_w});
  }
  expect_same_places<AttentionTargetArgs>(
      [&] {
        return AttentionTargetArgs{x.query, x.key, x.lse, x.ids, x.starts, x.ends, 0.4, x.list};
      },
      attention_target, attention_target_workspace_bytes, {&x.query, &x.key, &x.lse}, {&x.list});
  expect_same_places<IndexLossArgs>(
      [&] { return IndexLossArgs{x.target, x.scores, x.ids, x.starts, x.ends, 1, x.kl, x.list}; },
      index_loss, index_loss_workspace_bytes, {&x.target, &x.scores}, {&x.kl, &x.list});
}

// Row 1 is padding: what it holds reaches no result.
TEST(NotFinite, PaddingRowsMayHoldAnything) {
  Indexer x;
  for (Array* t : {&x.q, &x.w, &x.query, &x.lse, &x.scores}) {
    const std::int64_t row = t->elements() / Indexer::kRows;
    for (std::int64_t e = row; e < 2 * row; ++e) t->as<float>()[e] = kNaN;
  }
  Scratch scratch;
  const auto expect_finite = [&](const std::vector<const Array*>& outputs) {
    for (const Array* out : outputs) {
      const std::int64_t row = out->elements() / Indexer::kRows;
      for (std::int64_t e = 0; e < out->elements(); ++e) EXPECT_TRUE(std::isfinite(at(*out, e)));
      if (out == &x.d_k) continue;
      for (std::int64_t e = row; e < 2 * row; ++e) EXPECT_EQ(at(*out, e), 0);
    }
  };
  for_each_implementation(x.backward(true), [&](const std::string&) {
    index_scores_at_backward(
        x.backward(true), scratch.get(index_scores_at_backward_workspace_bytes(x.backward(true))));
    expect_finite({&x.d_q, &x.d_k, &x.d_w});
  });
  for_each_implementation(x.dense(true), [&](const std::string&) {
    dense_index_loss(x.dense(true), scratch.get(dense_index_loss_workspace_bytes(x.dense(true))));
    expect_finite({&x.kl, &x.d_q, &x.d_k, &x.d_w});
  });
  AttentionCall call(Indexer::kRows, 30, 4, 2, 11, 9, true);
  call.see(1, 3, 3);
  for (Array* t : {&call.query, &call.d_output}) {
    const std::int64_t row = t->elements() / Indexer::kRows;
    for (std::int64_t e = row; e < 2 * row; ++e) t->as<float>()[e] = kNaN;
  }
  with_each(explain(call.forward_args()), [&](const std::string&) {
    for (Array* out : {&call.output, &call.lse})
      std::memset(out->as<void>(), 0xff, static_cast<std::size_t>(out->bytes()));
    call.forward();
    expect_finite({&call.output});
    EXPECT_EQ(at(call.lse, 4), -kInfinity);
  });
  with_each(explain(call.backward_args()), [&](const std::string&) {
    call.backward();
    expect_finite({&call.d_query});
    for (const Array* out : {&call.d_key, &call.d_value}) {
      for (std::int64_t e = 0; e < out->elements(); ++e) EXPECT_TRUE(std::isfinite(at(*out, e)));
    }
  });
}

}  // namespace
}  // namespace winnow::testing
