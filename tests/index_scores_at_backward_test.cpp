// What the shared problems of index_scores_at_backward do not show: finite differences, who gives
// to which gradient, the gate at 0, weights in bf16, memory that must not be touched.
#include "winnow/index_scores_at_backward.h"

#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "base/row_range.h"
#include "bench/case.h"
#include "bench/data.h"
#include "bench/guarded.h"
#include "tests/each.h"
#include "winnow/dense_index_loss.h"
#include "winnow/index_scores_at.h"

namespace winnow::testing {
namespace {

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

struct Indexer {
  Array query, key, weights, starts, ends, ids, scores, d_scores;
  bench::Guarded dq, dk, dw;
  Scratch scratch;

  Indexer(DType dtype, std::int64_t rows, std::int64_t keys, std::int64_t heads, std::int64_t dim,
          std::int64_t topk, const char* range, const char* kind)
      : query(dtype, {rows, heads, dim}),
        key(dtype, {keys, dim}),
        weights(wide(dtype), {rows, heads}),
        starts(DType::kI32, {rows}),
        ends(DType::kI32, {rows}),
        ids(DType::kI32, {rows, topk}),
        scores(wide(dtype), {rows, topk}),
        d_scores(wide(dtype), {rows, topk}),
        dq(wide(dtype), {rows, heads, dim}),
        dk(wide(dtype), {keys, dim}),
        dw(wide(dtype), {rows, heads}) {
    bench::Random random(5);
    bench::fill_gauss(query, random);
    bench::fill_gauss(key, random);
    bench::fill_gauss(weights, random);
    bench::fill_ranges(range, keys, topk, starts, ends, random);
    bench::fill_indices(kind, keys, starts, ends, ids, random);
    bench::fill_gauss(d_scores, random);
  }
  static DType wide(DType dtype) { return dtype == DType::kF64 ? DType::kF64 : DType::kF32; }
  IndexScoresAtBackwardArgs args(bool relu = true) const {
    return {query, key, weights, ids, starts, ends, relu, d_scores, dq, dk, dw};
  }
  void run(const IndexScoresAtBackwardArgs& a) {
    for (const Tensor& t : {dq.view(), dk.view(), dw.view()}) bench::poison(t);
    const bench::Guarded workspace(DType::kU8, {index_scores_at_backward_workspace_bytes(a)});
    index_scores_at_backward(a, {workspace.view().data, workspace.view().elements()});
  }
  std::vector<float> gradients() const {
    std::vector<float> all;
    for (const Tensor& t : {dq.view(), dk.view(), dw.view()})
      all.insert(all.end(), t.as<float>(), t.as<float>() + t.elements());
    return all;
  }
  // sum of d_scores * score over the slots that count.
  double loss(bool relu) {
    const IndexScoresAtArgs a = {query, key, weights, ids, starts, ends, relu, scores};
    index_scores_at(a, scratch.get(index_scores_at_workspace_bytes(a)));
    double sum = 0;
    for (std::int64_t n = 0; n < scores.elements(); ++n)
      if (std::isfinite(at(scores, n))) sum += at(scores, n) * at(d_scores, n);
    return sum;
  }
};

// In f64 against central differences: error h^2 and 1e-16 / h; no dot product of this seed lies
// within h of the kink of the ReLU.
TEST(IndexScoresAtBackward, GradientsEqualFiniteDifferences) {
  for (const bool relu : {true, false}) {
    Indexer x(DType::kF64, 5, 9, 2, 3, 6, "awkward", "scattered");
    x.ids.as<std::int32_t>()[1] = x.ids.as<std::int32_t>()[0];  // an id that stands twice
    x.run(x.args(relu));
    const std::pair<const Array*, Tensor> pairs[] = {
        {&x.query, x.dq.view()}, {&x.key, x.dk.view()}, {&x.weights, x.dw.view()}};
    for (const auto& [input, gradient] : pairs) {
      for (std::int64_t e = 0; e < input->elements(); ++e) {
        double& value = input->as<double>()[e];
        const double h = 1e-5, before = value;
        value = before + h;
        const double up = x.loss(relu);
        value = before - h;
        const double down = x.loss(relu);
        value = before;
        EXPECT_NEAR(gradient.as<double>()[e], (up - down) / (2 * h), 1e-8) << relu << " " << e;
      }
    }
  }
}

// At u = 0 and at NaN the gate is closed: d_index_weights gets relu(0) = 0, and no gradient passes.
TEST(IndexScoresAtBackward, TheGateIsClosedAtZero) {
  Indexer x(DType::kF32, 1, 3, 1, 2, 3, "full", "ascending");
  const float query[] = {1, 1}, key[] = {1, -1, -0.f, 0.f, 2, 3}, weight = 5, d[] = {7, 11, 13};
  std::memcpy(x.query.as<void>(), query, sizeof query);
  std::memcpy(x.key.as<void>(), key, sizeof key);
  x.weights.as<float>()[0] = weight;
  std::memcpy(x.d_scores.as<void>(), d, sizeof d);
  for (std::int32_t s = 0; s < 3; ++s) x.ids.as<std::int32_t>()[s] = s;
  for_each_implementation(x.args(), [&](const std::string&) {
    x.run(x.args());  // u: 0, 0, 5
    EXPECT_EQ(x.gradients(), (std::vector<float>{5 * 13 * 2, 5 * 13 * 3, 0, 0, 0, 0, 65, 65, 65}));
    x.run(x.args(false));
    EXPECT_EQ(x.gradients(), (std::vector<float>{5 * (7 * 1 + 13 * 2), 5 * (-7 + 13 * 3), 35, 35,
                                                 55, 55, 65, 65, 65}));
  });
}

// What does not count is never multiplied: ids outside the range with gradients of NaN, keys that
// no row lists and rows that list nothing, full of NaN.
TEST(IndexScoresAtBackward, WhatDoesNotCountMayHoldAnything) {
  constexpr std::int64_t kRows = 30, kKeys = 50, kTopk = 17;
  Indexer x(DType::kF32, kRows, kKeys, 3, 10, kTopk, "awkward", "scattered");
  std::vector<bool> listed(kKeys, false);
  for (std::int64_t i = 0; i < kRows; ++i) {
    const RowRange r = row_range(x.starts, x.ends, i, kKeys);
    bool any = false;
    for (std::int64_t s = 0; s < kTopk; ++s) {
      const std::int32_t id = x.ids.as<std::int32_t>()[i * kTopk + s];
      const bool counts = r.contains(id);
      any |= counts;
      if (counts) listed[static_cast<std::size_t>(id)] = true;
      if (!counts) x.d_scores.as<float>()[i * kTopk + s] = kNaN;
    }
    for (std::int64_t c = 0; c < 30 && !any; ++c) x.query.as<float>()[i * 30 + c] = kNaN;
    for (std::int64_t h = 0; h < 3 && !any; ++h) x.weights.as<float>()[i * 3 + h] = kNaN;
  }
  std::int64_t unlisted = 0;
  for (std::int64_t j = 0; j < kKeys; ++j) {
    if (listed[static_cast<std::size_t>(j)]) continue;
    ++unlisted;
    for (std::int64_t d = 0; d < 10; ++d) x.key.as<float>()[j * 10 + d] = kNaN;
  }
  EXPECT_GT(unlisted, 0);
  for_each_implementation(x.args(), [&](const std::string&) {
    x.run(x.args());
    for (const float g : x.gradients()) ASSERT_TRUE(std::isfinite(g));
    for (std::int64_t j = 0; j < kKeys; ++j)
      EXPECT_TRUE(listed[static_cast<std::size_t>(j)] || x.dk.view().as<float>()[j * 10] == 0) << j;
  });
}

// Weights in bf16 give what the same numbers in f32 give, here and in the dense loss.
TEST(IndexScoresAtBackward, WeightsInBf16EqualTheirNumbersInF32) {
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    Indexer x(dtype, 20, 90, 7, 24, 40, "awkward", "scattered");
    const Array narrow(DType::kBF16, {20, 7});
    for (std::int64_t n = 0; n < 140; ++n) {
      narrow.as<BF16>()[n] = to_bf16(x.weights.as<float>()[n]);
      x.weights.as<float>()[n] = to_float(narrow.as<BF16>()[n]);
    }
    IndexScoresAtBackwardArgs half = x.args();
    half.index_weights = narrow;
    for_each_implementation(half, [&](const std::string&) {
      x.run(x.args());
      const std::vector<float> want = x.gradients();
      x.run(half);
      EXPECT_EQ(x.gradients(), want);
    });
    Array kl(DType::kF32, {20}), lse(DType::kF32, {20, 7});
    bench::Random random(6);
    bench::fill_gauss(lse, random);
    DenseIndexLossArgs loss;
    loss.index_query = loss.query = x.query;
    loss.index_key = x.key;
    loss.key = x.key.view().reshape({90, 1, 24});
    loss.index_weights = x.weights;
    loss.lse = lse;
    loss.softmax_scale = 0.3;
    loss.starts = x.starts;
    loss.ends = x.ends;
    loss.kl = kl;
    loss.d_index_query = x.dq;
    loss.d_index_key = x.dk;
    loss.d_index_weights = x.dw;
    for_each_implementation(loss, [&](const std::string&) {
      const auto gradients = [&](const Tensor& weights) {
        DenseIndexLossArgs a = loss;
        a.index_weights = weights;
        dense_index_loss(a, x.scratch.get(dense_index_loss_workspace_bytes(a)));
        return x.gradients();
      };
      EXPECT_EQ(gradients(narrow), gradients(x.weights));
    });
  }
}

TEST(IndexScoresAtBackward, RefusesWrongDtypesBeforeAnyWrite) {
  Indexer x(DType::kBF16, 3, 10, 2, 4, 5, "full", "ascending");
  for (const Tensor& t : {x.dq.view(), x.dk.view(), x.dw.view()}) bench::poison(t);
  const auto message = [&](auto&& change) {
    IndexScoresAtBackwardArgs a = x.args();
    change(a);
    return error_of([&] { index_scores_at_backward(a, {}); });
  };
  EXPECT_EQ(message([](auto& a) { a.index_weights.dtype = DType::kF16; }),
            "[index_scores_at_backward] index_weights must be of dtype f32, bf16, got f16");
  EXPECT_EQ(message([](auto& a) { a.d_scores.dtype = DType::kBF16; }),
            "[index_scores_at_backward] d_scores must be of dtype f32, got bf16");
  EXPECT_EQ(message([](auto& a) { a.d_index_query.dtype = DType::kBF16; }),
            "[index_scores_at_backward] d_index_query must be of dtype f32, got bf16");
  EXPECT_EQ(message([](auto& a) { a.d_index_weights.dtype = DType::kBF16; }),
            "[index_scores_at_backward] d_index_weights must be of dtype f32, got bf16");
  for (const Tensor& t : {x.dq.view(), x.dk.view(), x.dw.view()})
    for (std::int64_t n = 0; n < t.elements(); ++n) ASSERT_TRUE(bench::is_poison(t, n));
}

// Together, alone, and in several chunks: the gradients by a row's own inputs have the same bits.
// The key gradient of one row alone is what that row adds.
TEST(IndexScoresAtBackward, ARowDoesNotDependOnTheOthers) {
  const std::int64_t rows = 60, keys = 900, heads = 9, dim = 20, topk = 130;
  Indexer x(DType::kF32, rows, keys, heads, dim, topk, "awkward", "scattered");
  const Array dq(DType::kF32, {rows, heads, dim}), dk(DType::kF32, {keys, dim}),
      dw(DType::kF32, {rows, heads});
  const IndexScoresAtBackwardArgs all{x.query, x.key,      x.weights, x.ids, x.starts, x.ends,
                                      true,    x.d_scores, dq,        dk,    dw};
  for_each_implementation(all, [&](const std::string&) {
    const ThreadsGuard threads(3);
    index_scores_at_backward(all, x.scratch.get(index_scores_at_backward_workspace_bytes(all)));
    const Array together_q = dq.clone(), together_w = dw.clone();
    for (std::int64_t i = 0; i < rows; i += 7) {
      IndexScoresAtBackwardArgs a = all;
      for (Tensor* t : {&a.index_query, &a.index_weights, &a.topk_indices, &a.starts, &a.ends,
                        &a.d_scores, &a.d_index_query, &a.d_index_weights})
        *t = t->rows(i, 1);
      index_scores_at_backward(a, x.scratch.get(index_scores_at_backward_workspace_bytes(a)));
      EXPECT_EQ(std::memcmp(a.d_index_query.data, together_q.view().rows(i, 1).data,
                            static_cast<std::size_t>(heads * dim) * sizeof(float)),
                0)
          << i;
      EXPECT_EQ(std::memcmp(a.d_index_weights.data, together_w.view().rows(i, 1).data,
                            static_cast<std::size_t>(heads) * sizeof(float)),
                0)
          << i;
      const RowRange r = row_range(x.starts, x.ends, i, keys);
      for (std::int64_t j = 0; j < keys; ++j) {  // nothing outside the row's range
        for (std::int64_t d = 0; d < dim && !r.contains(j); ++d)
          ASSERT_EQ(dk.as<float>()[j * dim + d], 0) << i << " " << j;
      }
    }
  });
}

// Two slots with one id: what both give arrives at the key, also within one register tile.
TEST(IndexScoresAtBackward, AnIdThatStandsTwiceCountsTwice) {
  const std::int64_t keys = 40, heads = 3, dim = 24, topk = 21;
  Indexer x(DType::kF32, 1, keys, heads, dim, topk, "full", "ascending");
  for (std::int64_t s = 0; s < topk; ++s) {
    x.ids.as<std::int32_t>()[s] = static_cast<std::int32_t>(s % 3 == 0 ? 7 : s);
  }
  const Array dq(DType::kF32, {1, heads, dim}), dk(DType::kF32, {keys, dim}),
      dw(DType::kF32, {1, heads});
  const IndexScoresAtBackwardArgs a{x.query, x.key,      x.weights, x.ids, x.starts, x.ends,
                                    true,    x.d_scores, dq,        dk,    dw};
  std::vector<float> expected;  // of the implementation that runs, one slot at a time
  for_each_implementation(a, [&](const std::string&) {
    expected.assign(dim, 0);
    for (std::int64_t s = 0; s < topk; ++s) {
      IndexScoresAtBackwardArgs one = a;
      one.topk_indices = x.ids.view().channels(s, 1);
      one.d_scores = x.d_scores.view().channels(s, 1);
      index_scores_at_backward(one, x.scratch.get(index_scores_at_backward_workspace_bytes(one)));
      for (std::int64_t d = 0; d < dim; ++d) expected[d] += dk.as<float>()[7 * dim + d];
    }
    index_scores_at_backward(a, x.scratch.get(index_scores_at_backward_workspace_bytes(a)));
    for (std::int64_t d = 0; d < dim; ++d) {
      EXPECT_NEAR(dk.as<float>()[7 * dim + d], expected[d], 1e-5 * (1 + std::abs(expected[d])))
          << d;
    }
  });
}

}  // namespace
}  // namespace winnow::testing
