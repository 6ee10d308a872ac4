// The layer's precision options: selection in MXFP8 with a loss from scores that are not quantised,
// outputs in BF16, and where MXFP8 cannot run.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "bench/data.h"
#include "tests/each.h"
#include "tests/layer_trial.h"
#include "winnow/index_scores_at.h"
#include "winnow/index_topk.h"
#include "winnow/quantise.h"

namespace winnow::attention {
namespace {

constexpr std::int64_t kRows = 40;

AttentionConfig mxfp8_config() {
  AttentionConfig c = model::tiny_mla();
  c.indexer.index_heads = 4;
  c.indexer.index_dim = 64;
  c.indexer.topk = 8;
  c.indexer.precision = SelectionPrecision::kMxfp8;
  return c;
}

// A layer with random weights over one causal sequence of kRows rows.
struct Trial : LayerTrial {
  Rows rows;

  explicit Trial(const AttentionConfig& c, DType type = DType::kF32) : LayerTrial(c, kRows, type) {
    std::iota(positions.begin(), positions.end(), 0);
    ranges = causal_ranges(kRows);
    rows = rows_of(positions, ranges);
    activations.cache.fit(c, type, kRows);
  }
  const Tensor& ids() const { return activations.core.selected.topk_indices; }
  LayerResult forward(const LayerOptions& options) {
    const Array output(x.value.view().dtype, {kRows, config.hidden_size});
    return layer.forward(x.value, rows, options, activations.kept(), memory, output);
  }
};

TEST(Mxfp8Selection, IsThatOfTheQuantisedInputsAndTheLossReadsTheOthers) {
  Trial trial(mxfp8_config());
  LayerOptions options;
  options.mode = AttentionMode::kSparse;
  options.index_loss = options.index_gradient = true;
  options.d_kl = 1;
  const LayerResult result = trial.forward(options);
  EXPECT_GT(result.index_kl, 0);

  const Array query(DType::kE4M3, {kRows, 4, 64}), query_scale(DType::kE8M0, {kRows, 4, 2}),
      key(DType::kE4M3, {kRows, 64}), key_scale(DType::kE8M0, {kRows, 2}),
      ids(DType::kI32, {kRows, 8}), lengths(DType::kI32, {kRows}), scores(DType::kF32, {kRows, 8}),
      quantised_scores(DType::kF32, {kRows, 8});
  quantise({trial.memory.index_query, true, 0, query, query_scale}, {});
  quantise({trial.activations.cache.index_key, true, 0, key, key_scale}, {});
  IndexTopkArgs topk = {query,
                        key,
                        trial.memory.index_weights,
                        trial.rows.starts,
                        trial.rows.ends,
                        true,
                        ids,
                        lengths,
                        quantised_scores};
  topk.index_query_scale = query_scale;
  topk.index_key_scale = key_scale;
  call(index_topk, index_topk_workspace_bytes, topk, trial.memory.scratch);
  const IndexScoresAtArgs at = {trial.memory.index_query,
                                trial.activations.cache.index_key.view(),
                                trial.memory.index_weights,
                                ids,
                                trial.rows.starts,
                                trial.rows.ends,
                                true,
                                scores};
  call(index_scores_at, index_scores_at_workspace_bytes, at, trial.memory.scratch);
  int differ = 0;
  for (std::int64_t n = 0; n < kRows * 8; ++n) {
    EXPECT_EQ(trial.ids().as<std::int32_t>()[n], ids.as<std::int32_t>()[n]) << n;
    EXPECT_EQ(trial.memory.topk_scores.as<float>()[n], scores.as<float>()[n]) << n;
    differ += scores.as<float>()[n] != quantised_scores.as<float>()[n] ? 1 : 0;
  }
  EXPECT_GT(differ, 200);  // the quantised scores would have been others
}

// Selecting row by row, as generation does, equals selecting in one call.
TEST(Mxfp8Selection, GrowsWithTheCache) {
  Trial whole(mxfp8_config()), grown(mxfp8_config());
  LayerOptions options;
  options.mode = AttentionMode::kSparse;
  whole.forward(options);
  for (std::int64_t i = 0; i < kRows; ++i) {
    Rows one;
    one.positions = std::span(grown.positions).subspan(static_cast<std::size_t>(i), 1);
    one.starts = grown.rows.starts.rows(i, 1);
    one.ends = grown.rows.ends.rows(i, 1);
    one.first_key = i;
    const Array output(DType::kF32, {1, grown.config.hidden_size});
    grown.layer.forward(grown.x.value.view().rows(i, 1), one, options, grown.activations.kept(),
                        grown.memory, output);
    for (std::int64_t s = 0; s < 8; ++s) {
      EXPECT_EQ(grown.ids().as<std::int32_t>()[s], whole.ids().as<std::int32_t>()[i * 8 + s]);
    }
  }
}

// A selected score that is not finite is dropped, and the rest of the list moves up.
TEST(Mxfp8Selection, ScoresThatAreNotFiniteAreDropped) {
  AttentionConfig c = model::tiny_simplified();
  c.hidden_size = 32;
  c.indexer.index_dim = 32;
  c.indexer.rope_dim = 0;
  c.indexer.topk = 3;
  c.indexer.precision = SelectionPrecision::kMxfp8;
  Trial trial(c);
  for (const char* name : {"indexer.wq.weight", "indexer.wk.weight"}) {
    const Tensor w = trial.parameters.find(name)->value;
    for (std::int64_t n = 0; n < 32 * 32; ++n) w.as<float>()[n] = n % 33 == 0 ? 1 : 0;
  }
  trial.x.value.zero();
  for (std::int64_t i = 0; i < kRows; ++i)
    trial.x.value.as<float>()[i * 32] = i == 2 || i == 4 ? 1e20f : 1;
  LayerOptions options;
  options.mode = AttentionMode::kSparse;
  trial.forward(options);
  const std::int32_t* ids = trial.ids().as<std::int32_t>();
  const std::vector<std::int32_t> row4(ids + 12, ids + 15), row5(ids + 15, ids + 18);
  EXPECT_EQ(row4, (std::vector<std::int32_t>{0, -1, -1}));  // 2 and 4 score +inf
  EXPECT_EQ(row5, (std::vector<std::int32_t>{0, 2, 4}));    // 1e20 is a number
}

// The bound on ln p between two orders of f32 sums, u = 2^-23, n = dim + heads + 2:
//   2 gamma_n (A_i + max_j A_j) + 2 (gamma_K + 4u (M + ln K)),
// A_i the score's sum of magnitudes, M the largest |score| of the row. Two instruction sets are two
// orders. Scores of MXFP8 are far outside: the loss may not read them.
TEST(Mxfp8Selection, TheLossScoresAreWithinTheBoundOfF32Sums) {
  constexpr std::int64_t kHeads = 32, kDim = 128, kK = 64;
  const Array query(DType::kBF16, {2, kHeads, kDim}), key(DType::kBF16, {kK, kDim}),
      weights(DType::kF32, {2, kHeads}), ids(DType::kI32, {2, kK}), starts(DType::kI32, {2}),
      ends(DType::kI32, {2}), scores(DType::kF32, {2, kK}), rounded(DType::kF32, {2, kK});
  bench::Random random(3);
  bench::fill_gauss(query, random);
  bench::fill_gauss(key, random);
  bench::fill_gauss(weights, random, 1 / std::sqrt(static_cast<double>(kHeads * kDim)));
  bench::fill_ranges("full", kK, kK, starts, ends, random);
  for (std::int64_t n = 0; n < 2 * kK; ++n) ids.as<std::int32_t>()[n] = static_cast<int>(n % kK);
  const auto log_p = [&](const Array& s, std::int64_t i) {
    double sum = 0;
    std::vector<double> p;
    for (std::int64_t j = 0; j < kK; ++j) sum += std::exp(testing::at(s, i * kK + j));
    for (std::int64_t j = 0; j < kK; ++j) p.push_back(testing::at(s, i * kK + j) - std::log(sum));
    return p;
  };
  const auto gamma = [](double n) { return n * 0x1p-23 / (1 - n * 0x1p-23); };
  const auto worst = [&](const std::vector<double>& a, const std::vector<double>& b,
                         std::int64_t i) {  // the largest difference over its bound
    std::vector<double> magnitude;
    double largest = 0, top = 0;
    for (std::int64_t j = 0; j < kK; ++j) {
      double sum = 0;
      for (std::int64_t h = 0; h < kHeads; ++h)
        for (std::int64_t d = 0; d < kDim; ++d)
          sum += std::abs(testing::at(weights, i * kHeads + h) *
                          testing::at(query, (i * kHeads + h) * kDim + d) *
                          testing::at(key, j * kDim + d));
      magnitude.push_back(sum);
      largest = std::max(largest, sum);
      top = std::max(top, std::abs(testing::at(scores, i * kK + j)));
    }
    double error = 0;
    for (std::size_t j = 0; j < kK; ++j) {
      const double bound = 2 * gamma(kDim + kHeads + 2) * (magnitude[j] + largest) +
                           2 * (gamma(kK) + 4 * 0x1p-23 * (top + std::log(kK)));
      error = std::max(error, std::abs(a[j] - b[j]) / bound);
    }
    return error;
  };
  const IndexScoresAtArgs args = {query, key, weights, ids, starts, ends, true, scores};
  std::vector<std::vector<double>> first;
  testing::for_each_implementation(args, [&](const std::string&) {
    Scratch scratch;
    index_scores_at(args, scratch.get(index_scores_at_workspace_bytes(args)));
    for (std::int64_t i = 0; i < 2; ++i) {
      if (first.size() < 2) first.push_back(log_p(scores, i));
      EXPECT_LE(worst(log_p(scores, i), first[static_cast<std::size_t>(i)], i), 1);
    }
  });
  const Array q(DType::kE4M3, {2, kHeads, kDim}), q_scale(DType::kE8M0, {2, kHeads, 4}),
      k(DType::kE4M3, {kK, kDim}), k_scale(DType::kE8M0, {kK, 4}), all(DType::kI32, {2, kK}),
      lengths(DType::kI32, {2});
  quantise({query, true, 0, q, q_scale}, {});
  quantise({key, true, 0, k, k_scale}, {});
  IndexTopkArgs topk = {q, k, weights, starts, ends, true, all, lengths, rounded};
  topk.index_query_scale = q_scale;
  topk.index_key_scale = k_scale;
  Scratch scratch;
  index_topk(topk, scratch.get(index_topk_workspace_bytes(topk)));
  EXPECT_GT(worst(log_p(rounded, 0), first[0], 0), 10);
}

TEST(Mxfp8Selection, WhatIsMissingIsNamedAtOnce) {
  AttentionConfig c = mxfp8_config();
  c.indexer.hadamard = false;
  c.indexer.index_dim = 48;
  EXPECT_EQ(
      testing::error_of([&] { validate(c); }),
      "[config] attention.indexer.precision \"mxfp8\" needs index_dim to be a multiple of 32, "
      "got 48");
  EXPECT_EQ(missing_for_precision(c.indexer, DType::kF64, AttentionMode::kWarmup),
            "index_dim to be a multiple of 32, got 48; a model of dtype f32, got f64; the sparse "
            "loss: the dense loss of a warm-up reads scores that are not quantised");
  LayerOptions warmup, dense;
  warmup.mode = AttentionMode::kWarmup;
  Trial trial(mxfp8_config());
  EXPECT_EQ(testing::error_of([&] { trial.forward(warmup); }),
            "[attention] indexer precision \"mxfp8\" needs the sparse loss: the dense loss of a "
            "warm-up reads scores that are not quantised");
  EXPECT_EQ(testing::error_of([&] { trial.forward(dense); }), "");  // the indexer does not run
  LayerOptions sparse;
  sparse.mode = AttentionMode::kSparse;
  EXPECT_EQ(testing::error_of([&] { Trial(mxfp8_config(), DType::kF64).forward(sparse); }),
            "[attention] indexer precision \"mxfp8\" needs a model of dtype f32, got f64");
}

// BF16 weights: the projection's result is rounded, and so is the product with each scale.
TEST(IndexerOutputs, WeightsInBf16AreRoundedThreeTimes) {
  AttentionConfig c = model::tiny_mla();  // 3 heads of 8
  LayerOptions options;
  options.mode = AttentionMode::kSparse;
  c.indexer.weights_output = OutputPrecision::kBf16;
  Trial trial(c);
  const Tensor w = trial.parameters.find("indexer.weights_proj.weight")->value;
  for (std::int64_t n = 0; n < 3 * 12; ++n) w.as<float>()[n] = n / 12 == n % 12 ? 1 : 0;
  trial.forward(options);
  const auto round = [](float x) { return to_float(to_bf16(x)); };
  for (std::int64_t i = 0; i < kRows; ++i) {
    for (std::int64_t h = 0; h < 3; ++h) {
      const float projected = trial.x.value.as<float>()[i * 12 + h];
      const float by_heads = round(round(projected) * static_cast<float>(1 / std::sqrt(3.)));
      EXPECT_EQ(trial.memory.index_weights.as<float>()[i * 3 + h],
                round(by_heads * static_cast<float>(1 / std::sqrt(8.))));
    }
  }
}

TEST(IndexerOutputs, TheNormedKeyInBf16) {
  AttentionConfig c = model::tiny_gqa();
  c.indexer.rope_dim = 0;
  LayerOptions options;
  options.mode = AttentionMode::kSparse;
  Trial full(c);
  full.forward(options);
  c.indexer.k_norm_output = OutputPrecision::kBf16;
  Trial rounded(c);
  rounded.forward(options);
  int differ = 0;
  for (std::int64_t n = 0; n < kRows * 8; ++n) {
    const float x = full.activations.cache.index_key.as<float>()[n];
    EXPECT_EQ(rounded.activations.cache.index_key.as<float>()[n], to_float(to_bf16(x)));
    differ += x != to_float(to_bf16(x)) ? 1 : 0;
  }
  EXPECT_GT(differ, 100);
}

}  // namespace
}  // namespace winnow::attention
