// KPool and NoPE in the layer: against the plain reference in double, over packed sequences, padding
// and explicit origins; certificates; what is refused. Scores: tests/attention_pools_scores_test.cpp.
#include <cmath>
#include <set>

#include "tests/each.h"
#include "tests/layer_reference.h"
#include "tests/pools_trial.h"

namespace winnow::attention {
namespace {

std::vector<AttentionConfig> kinds() {
  AttentionConfig plain = without_rotation(model::tiny_mla());
  plain.q_lora_rank = 0;
  return {model::tiny_mla(),
          model::tiny_gqa(),
          model::tiny_simplified(),
          without_rotation(model::tiny_mla()),
          without_rotation(model::tiny_gqa()),
          without_rotation(model::tiny_simplified()),
          plain};
}

// `origins`: where the sequence of each row begins; left out: where the row does.
void expect_reference(PoolsTrial& trial, const Ids& origins = {}) {
  const LayerReference reference(trial.config, trial.parameters, trial.x.value, trial.positions);
  trial.forward();
  for (std::int64_t i = 0; i < trial.count(); ++i) {
    const auto at = static_cast<std::size_t>(i);
    const std::int32_t start = trial.ranges.starts[at], end = trial.ranges.ends[at];
    const Ids want = end <= start
                         ? Ids{}
                         : reference.selected(i, start, end, origins.empty() ? start : origins[at]);
    ASSERT_EQ(trial.selected(i), want) << "row " << i;
    const std::vector<double> expected = reference.output(i, want), got = trial.row(i);
    for (std::size_t d = 0; d < got.size(); ++d) {
      // Some hundred roundings of numbers below 100.
      ASSERT_NEAR(got[d], expected[d], 1e-11) << "row " << i;
    }
  }
}

// Every kind with and without rotation, pools (1: none), tail and packing; two rows of padding.
TEST(AttentionPools, EqualsThePlainReference) {
  struct Sizes {
    std::int64_t pool, topk;
  };
  for (std::size_t kind = 0; kind < kinds().size(); ++kind) {
    for (const Sizes& sizes : {Sizes{1, 5}, {2, 4}, {3, 6}, {4, 4}, {8, 16}}) {
      for (const bool tail : {true, false}) {
        if (sizes.pool == 1 && !tail) continue;
        const ::testing::ScopedTrace trace(__FILE__, __LINE__,
                                           fmt::format("kind {} pool {}", kind, sizes.pool));
        PoolsTrial trial(with_pools(kinds()[kind], sizes.pool, sizes.topk, tail), 42);
        expect_reference(trial.packed({23, 0, 1, 7, 9}));
      }
    }
  }
}

// Padding on the left: pools begin at the first key that is there.
TEST(AttentionPools, RowsOfAPaddedBatchStartTheirPools) {
  PoolsTrial trial(with_pools(without_rotation(model::tiny_mla()), 4, 8), 30);
  const std::vector<std::uint8_t> mask = [] {
    std::vector<std::uint8_t> m(30, 1);
    for (const std::size_t t : {0, 1, 2, 15, 29}) m[t] = 0;  // 3 to 14 and 16 to 28
    return m;
  }();
  trial.ranges = causal_ranges(valid_spans(mask, 2, 15), 30);
  for (std::int32_t t = 0; t < 30; ++t) trial.positions[static_cast<std::size_t>(t)] = t % 15;
  expect_reference(trial);
}

// A window over one sequence: its rows start at other keys, so only the caller knows where pools
// begin.
TEST(AttentionPools, ExplicitOriginsForRowsThatStartLater) {
  PoolsTrial trial(with_pools(model::tiny_mla(), 4, 8), 40);
  trial.packed({2, 38});
  for (std::size_t i = 2; i < 40; ++i) {
    trial.ranges.starts[i] = std::max(2, static_cast<std::int32_t>(i) - 19);
  }
  const std::string message = testing::error_of([&] { trial.forward(); });
  EXPECT_NE(message.find("Batch::spans"), std::string::npos) << message;
  EXPECT_NE(message.find("from key 3 on"), std::string::npos) << message;
  trial.cu_seqlens = {0, 2, 40};
  EXPECT_EQ(testing::error_of([&] { trial.forward(); }), message);
  trial.spans = packed_spans(Ids{0, 2, 40});
  Ids origins(40, 2);
  origins[0] = origins[1] = 0;
  expect_reference(trial, origins);
}

// Below the budget a row attends to all that it sees.
TEST(AttentionPools, BelowBudgetIsTheCausalPrefix) {
  for (const Ids& lengths : {Ids{8}, Ids{7}, Ids{3}, Ids{3, 6}, Ids{5, 9, 3}}) {
    std::int64_t rows = 0;
    for (const std::int32_t length : lengths) rows += length;
    PoolsTrial trial(with_pools(model::tiny_mla(), 4, 16), rows, DType::kF32);
    trial.packed(lengths).forward();
    EXPECT_EQ(trial.activations.selection.topk_indices.view().shape[1], 19);
    for (std::int64_t i = 0; i < rows; ++i) {
      const auto at = static_cast<std::size_t>(i);
      Ids prefix;
      for (std::int32_t t = trial.ranges.starts[at]; t < trial.ranges.ends[at]; ++t) {
        prefix.push_back(t);
      }
      EXPECT_EQ(trial.selected(i), prefix) << i;
    }
    EXPECT_TRUE(trial.certificate());
  }
}

// A pack selects in each sequence what the sequence alone selects, with the same bits of output.
TEST(AttentionPools, APoolNeverSpansTwoSequences) {
  const Ids lengths = {13, 1, 6, 22};
  PoolsTrial together(with_pools(model::tiny_mla(), 4, 8), 42, DType::kF32);
  together.packed(lengths).forward();
  std::int32_t first = 0;
  for (const std::int32_t length : lengths) {
    PoolsTrial alone(with_pools(model::tiny_mla(), 4, 8), length, DType::kF32);
    alone.packed({length});
    std::copy_n(together.x.value.as<float>() + first * 12, length * 12, alone.x.value.as<float>());
    alone.forward();
    for (std::int32_t i = 0; i < length; ++i) {
      Ids shifted = alone.selected(i);
      for (std::int32_t& id : shifted) id += first;
      EXPECT_EQ(together.selected(first + i), shifted);
      EXPECT_EQ(together.row(first + i), alone.row(i));
    }
    first += length;
  }
}

// F10: nothing of a later token reaches a row, through no pool either. Row 2 of 8 sees no pool of 4,
// whatever the best key of group 1.
TEST(AttentionPools, F10TrainingNeverSeesTheFuture) {
  PoolsTrial before(with_pools(model::tiny_mla(), 4, 4), 8), after(before.config, 8);
  before.packed({8}).forward();
  EXPECT_EQ(before.selected(2), (Ids{0, 1, 2}));  // the tail
  for (std::int64_t t = 3; t < 8; ++t) {
    after.packed({8});
    std::copy_n(before.x.value.as<double>(), 8 * 12, after.x.value.as<double>());
    for (std::int64_t d = 0; d < 12; ++d) after.x.value.as<double>()[t * 12 + d] *= -3;
    after.forward();
    for (std::int64_t i = 0; i < t; ++i) {
      EXPECT_EQ(before.row(i), after.row(i)) << t;
      EXPECT_EQ(before.selected(i), after.selected(i)) << t;
    }
    EXPECT_NE(before.row(t), after.row(t)) << t;
  }
}

// Rows before the first whole pool attend to nothing: no output, no gradient, and no certificate
// even where all rows have one.
TEST(AttentionPools, WithoutTailNothingIsCertified) {
  PoolsTrial trial(with_pools(model::tiny_mla(), 4, 8, false), 11);
  trial.packed({11}).forward();
  EXPECT_FALSE(trial.certificate());
  trial.backward();
  for (std::int64_t i = 0; i < 11; ++i) {
    const std::vector<double> row = trial.row(i);
    EXPECT_EQ(trial.selected(i).empty(), i < 3);
    EXPECT_EQ(std::all_of(row.begin(), row.end(), [](double v) { return v == 0; }), i < 3);
  }
  for (std::int64_t i = 0; i < trial.d_x.elements(); ++i) {
    EXPECT_TRUE(std::isfinite(trial.d_x.as<double>()[i]));
  }
  // Rows that all see a whole pool, still.
  PoolsTrial late(with_pools(without_rotation(model::tiny_mla()), 4, 8, false), 8);
  late.packed({8});
  for (std::int32_t& end : late.ranges.ends) end = 8;
  late.forward();
  for (std::int64_t i = 0; i < 8; ++i) EXPECT_FALSE(late.selected(i).empty());
  EXPECT_FALSE(late.certificate());
}

// The word of a selection with its tail changes no bit of a gradient: a row of padding takes it away.
TEST(AttentionPools, TheCertificateChangesNoBit) {
  PoolsTrial with(with_pools(model::tiny_mla(), 4, 8), 11, DType::kF32),
      without(with.config, 12, DType::kF32);
  with.packed({7, 4}).forward();
  with.backward();
  without.packed({7, 4});
  std::copy_n(with.x.value.as<float>(), 11 * 12, without.x.value.as<float>());
  without.forward();
  without.backward();
  EXPECT_TRUE(with.certificate());
  EXPECT_FALSE(without.certificate());
  EXPECT_EQ(model::numbers(with.d_x), model::numbers(without.d_x.view().rows(0, 11)));
  for (std::size_t p = 0; p < with.parameters.all().size(); ++p) {
    EXPECT_EQ(model::numbers(with.parameters.all()[p]->grad),
              model::numbers(without.parameters.all()[p]->grad));
    if (with.parameters.all()[p]->indexer) {
      for (const double g : model::numbers(with.parameters.all()[p]->grad)) EXPECT_EQ(g, 0);
    }
  }
}

// Pools of fewer tokens than one needs: nothing to score, the tail alone; and no rows at all.
TEST(AttentionPools, NoPoolAndNoRow) {
  PoolsTrial trial(with_pools(model::tiny_mla(), 8, 8), 5);
  expect_reference(trial.packed({3, 2}));
  PoolsTrial none(with_pools(model::tiny_mla(), 4, 16), 0, DType::kF32);
  none.packed({}).forward();
  EXPECT_EQ(none.activations.selection.topk_indices.view().shape[0], 0);
  EXPECT_EQ(none.activations.selection.topk_indices.view().shape[1], 19);
}

// NoPE: without rotary channels nothing depends on positions, and with them it does.
TEST(AttentionNoPe, PositionsDoNotMatter) {
  for (const bool rotates : {false, true}) {
    for (const AttentionConfig& kind :
         {model::tiny_mla(), model::tiny_gqa(), model::tiny_simplified()}) {
      const AttentionConfig c = rotates ? kind : without_rotation(kind);
      validate(c);
      PoolsTrial near(c, 30), far(c, 30);
      near.packed({30}).forward();
      far.packed({30});
      for (std::int32_t& p : far.positions) p = 63 - (p * 7) % 30;
      far.forward();
      near.backward();
      far.backward();
      const bool same = model::numbers(near.output) == model::numbers(far.output) &&
                        model::numbers(near.d_x) == model::numbers(far.d_x);
      EXPECT_EQ(same, !rotates);
      if (!rotates) {
        EXPECT_TRUE(near.ropes.attention.cosine.empty() && near.ropes.indexer.cosine.empty());
      }
    }
  }
}

// Rows whose ranges do not overlap look like sequences of their own, unless the sequences are said.
TEST(AttentionPools, SequencesThatAreSaidAreBelieved) {
  RowRanges rows;
  rows.starts = {0, 3, 6};
  rows.ends = {3, 6, 9};
  EXPECT_EQ(spans_of(rows).begins, (Ids{0, 3, 6}));
  EXPECT_EQ(spans_of(rows, std::vector<std::int64_t>{0, 3, 3, 6, 9}).begins, (Ids{0, 3, 6}));
  EXPECT_NE(testing::error_of([&] {
              spans_of(rows, std::vector<std::int64_t>{0, 9});
            }).find("from key 3 on"),
            std::string::npos);
}

TEST(AttentionPools, RefusesWhatPoolsCannotDo) {
  const AttentionConfig good = with_pools(model::tiny_mla(), 4, 8);
  const auto refusal = [&](auto&& change) {
    AttentionConfig c = good;
    change(c.indexer);
    return testing::error_of([&] { validate(c); });
  };
  EXPECT_EQ(refusal([](IndexerConfig&) {}), "");
  EXPECT_EQ(refusal([](IndexerConfig& i) { i.topk = 6; }),
            "[config] attention.indexer.topk must be a multiple of attention.indexer.pool_size = "
            "4, got 6");
  EXPECT_EQ(refusal([](IndexerConfig& i) { i.pool_size = 0; }),
            "[config] attention.indexer.pool_size must be from 1 to 4096, got 0");
  EXPECT_EQ(refusal([](IndexerConfig& i) {
              i.index_dim = 32;
              i.precision = SelectionPrecision::kMxfp8;
            }),
            "[config] attention.indexer.precision \"mxfp8\" needs pool_size 1, got 4");
  EXPECT_EQ(refusal([](IndexerConfig& i) { i.precision = SelectionPrecision::kE4m3; }),
            "[config] attention.indexer.precision \"e4m3\" needs hadamard to be false: it rotates "
            "by itself");
  EXPECT_EQ(refusal([](IndexerConfig& i) {
              i.hadamard = false;
              i.pool_size = 1;
              i.precision = SelectionPrecision::kE4m3;
            }),
            "[config] attention.indexer.precision \"e4m3\" needs pool_size above 1, got 1");
  const auto hf = [](IndexerConfig& i) {
    i.hf_scoring = true;
    i.weights_output = OutputPrecision::kBf16;
  };
  EXPECT_EQ(refusal(hf), "");
  const std::string head = "[config] attention.indexer.hf_scoring needs attention.indexer.";
  EXPECT_EQ(refusal([](IndexerConfig& i) { i.hf_scoring = true; }),
            head + "weights_output \"bf16\"");
  EXPECT_EQ(refusal([&](IndexerConfig& i) { hf(i), i.pool_size = 1; }), head + "pool_size above 1");
  EXPECT_EQ(refusal([&](IndexerConfig& i) { hf(i), i.relu = false; }), head + "relu");

  // And at run time.
  PoolsTrial trial(good, 9, DType::kF32);
  trial.packed({9});
  const std::string frozen =
      "[attention] an indexer of pools does not learn, pool_size is 4: use the mode sparse (or "
      "dense) and no indexer loss";
  LayerOptions options = trial.sparse();
  options.index_loss = true;
  EXPECT_EQ(testing::error_of([&] { trial.forward(options); }), frozen);
  options = {};
  options.mode = AttentionMode::kWarmup;
  EXPECT_EQ(testing::error_of([&] { trial.forward(options); }), frozen);
  options.mode = AttentionMode::kDense;
  EXPECT_EQ(testing::error_of([&] { trial.forward(options); }), "");
  Rows bare = trial.rows();
  bare.pools = {};
  EXPECT_EQ(testing::error_of([&] {
              trial.layer.forward(trial.x.value, bare, trial.sparse(), trial.activations.kept(),
                                  trial.memory, trial.output);
            }),
            "[attention] with pool_size 4 every one of 9 rows needs its range of pools "
            "(PoolTables), got 0");
}

}  // namespace
}  // namespace winnow::attention
