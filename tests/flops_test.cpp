// Floating-point operations of a step: closed forms against loops, identities, and what sharing, pools
// and multi-token prediction take away or add.
#include "plan/flops.h"

#include <gtest/gtest.h>

#include "tests/tiny_models.h"

namespace winnow::plan {
namespace {

using attention::AttentionMode;

using Lengths = std::vector<std::int64_t>;

PlanConfig config_of(const model::ModelConfig& model, AttentionMode mode = AttentionMode::kSparse,
                     bool index_loss = true) {
  PlanConfig c;
  c.model = model;
  c.stages = {{"stage", mode, index_loss}};
  c.context = 64;
  return c;
}

PlanConfig tiny(AttentionMode mode = AttentionMode::kSparse, bool index_loss = true) {
  return config_of(model::tiny_model(model::tiny_mla()), mode, index_loss);
}

constexpr double kTokens = 100;
const Pairs kPairs = {5000, 4000, 300};

double core_of(const PlanConfig& c) { return layer_flops(c, 1, 0, kTokens, kPairs).index_core; }

attention::IndexerConfig pools_of(std::int64_t pool_size, std::int64_t topk, bool tail = true) {
  attention::IndexerConfig c;
  c.pool_size = pool_size;
  c.topk = topk;
  c.select_tail = tail;
  return c;
}

TEST(Flops, O1O4CausalPairsAndSelectedPairs) {
  const Pairs ten = exact_pairs(Lengths{10}, pools_of(1, 4));
  EXPECT_EQ(ten.visible, 55);
  EXPECT_EQ(ten.selected, 34);
  const Pairs longer = exact_pairs(Lengths{131072}, pools_of(1, 2048));
  EXPECT_EQ(longer.selected, 266339328.0);
  EXPECT_EQ(longer.visible, 8590000128.0);
  EXPECT_NEAR(longer.selected / longer.visible, 0.0310, 5e-5);
  const Pairs packed = exact_pairs(Lengths{10, 0, 3}, pools_of(1, 4));
  EXPECT_EQ(packed.visible, 55 + 6);
  EXPECT_EQ(packed.selected, 34 + 6);
}

// Row by row, as the operations see them.
TEST(Flops, PairsOfPoolsAreCountedExactly) {
  for (const std::int64_t size : {1, 2, 4, 5}) {
    for (const std::int64_t topk : {size, 4 * size, 16 * size}) {
      for (const bool tail : {false, true}) {
        for (std::int64_t length = 0; length <= 60; ++length) {
          double scored = 0, selected = 0;
          for (std::int64_t n = 1; n <= length; ++n) {
            const std::int64_t pools = n / size, kept = std::min(pools, topk / size);
            scored += static_cast<double>(pools);
            selected += static_cast<double>(size * kept + (tail ? n % size : 0));
          }
          const Pairs pairs = exact_pairs(Lengths{length}, pools_of(size, topk, tail));
          ASSERT_EQ(pairs.scored, scored) << size << " " << topk << " " << length;
          ASSERT_EQ(pairs.selected, selected) << size << " " << topk << " " << length << tail;
        }
      }
    }
  }
}

TEST(Flops, TheShareThatIsSelected) {
  for (const double length : {1.0, 7.0, 2048.0}) {  // nothing to leave out
    EXPECT_EQ(selected_share(3 * length, 3 * length * length, 2048), 1) << length;
  }
  EXPECT_EQ(selected_share(10, 100, 0), 1);
  EXPECT_EQ(selected_share(0, 0, 4), 1);
  const double share = selected_share(131072, 131072.0 * 131072.0, 2048);
  EXPECT_DOUBLE_EQ(share, 2048 * (1 - 2048.0 / (2 * 131072.0)) / 65536);
  // Up to the diagonal it is the exact share.
  const Pairs exact = exact_pairs(Lengths{131072}, pools_of(1, 2048));
  EXPECT_NEAR(share, exact.selected / exact.visible, 1e-5);
}

// Term by term as the specification of the accounting writes them.
TEST(Flops, LatentAttentionByItsFormula) {
  const PlanConfig c = tiny();
  const double h = 12, heads = 3, q = 7, latent = 6, nope = 5, rope = 4, v = 3;
  const Flops f = layer_flops(c, 1, 0, kTokens, kPairs);
  EXPECT_DOUBLE_EQ(f.attention_linear,
                   3 * 2 * kTokens *
                       (q * (h + heads * (nope + rope) + 1) +
                        latent * (h + heads * (nope + v) + 1) + h * rope + heads * v * h));
  EXPECT_DOUBLE_EQ(f.attention_core,
                   3 * 2 * (heads * (latent + rope) + heads * latent) * kPairs.selected);
  EXPECT_DOUBLE_EQ(f.mlp, 3 * 2 * 3 * h * 10 * kTokens);
  EXPECT_DOUBLE_EQ(loss_flops(c, kTokens).loss, 3 * 2 * h * 11 * kTokens);
  // With Q / 2 pairs the core is that of Megatron Core: half a product for each of Q.
  const double tokens = 64, squares = 64 * 64;
  const Flops mean = layer_flops(c, 1, 0, tokens, mean_pairs(tokens, squares, pools_of(1, 4)));
  EXPECT_DOUBLE_EQ(mean.attention_core, 3 * 2 * (heads * (latent + rope) / 2 + heads * latent / 2) *
                                            selected_share(tokens, squares, 4) * squares);
  PlanConfig plain = c;
  plain.model.attention.q_lora_rank = 0;
  EXPECT_DOUBLE_EQ(
      layer_flops(plain, 1, 0, kTokens, kPairs).attention_linear - f.attention_linear,
      3 * 2 * kTokens * (h * heads * (nope + rope) - q * (h + heads * (nope + rope) + 1)));
}

TEST(Flops, GroupedQueryAttentionByItsFormula) {
  const PlanConfig c = config_of(model::tiny_model(model::tiny_gqa()));
  const double h = 12, heads = 4, kv = 2, dim = 9, v = 3;
  const Flops f = layer_flops(c, 1, 0, kTokens, kPairs);
  EXPECT_DOUBLE_EQ(f.attention_linear,
                   6 * kTokens * (h * heads * dim + h * kv * (dim + v) + heads * v * h));
  EXPECT_DOUBLE_EQ(f.attention_core, 6 * heads * (dim + v) * kPairs.selected);
  EXPECT_DOUBLE_EQ(f.index_linear, 4 * kTokens * (h * 3 * 8 + h * 8 + h * 3));
  const PlanConfig simple = config_of(model::tiny_model(model::tiny_simplified()));
  EXPECT_DOUBLE_EQ(layer_flops(simple, 1, 0, kTokens, kPairs).index_linear,
                   4 * kTokens * (h * 8 + h * 8));
}

// Token terms 2 and 4; core 2 without the loss, 6 with the dense one, and with the sparse one 4 more
// for what is selected.
TEST(Flops, O2TheIndexersFactors) {
  const double heads = 3, dim = 8, unit = heads * dim;
  const double linear = 7 * heads * dim + 12 * dim + 12 * heads;
  const PlanConfig off = tiny(AttentionMode::kSparse, false);
  EXPECT_DOUBLE_EQ(layer_flops(off, 1, 0, kTokens, kPairs).index_linear, 2 * kTokens * linear);
  EXPECT_DOUBLE_EQ(core_of(off), 2 * unit * kPairs.scored);
  EXPECT_DOUBLE_EQ(layer_flops(tiny(), 1, 0, kTokens, kPairs).index_linear, 4 * kTokens * linear);
  EXPECT_DOUBLE_EQ(core_of(tiny()), unit * (2 * kPairs.scored + 4 * kPairs.selected));
  EXPECT_DOUBLE_EQ(core_of(tiny(AttentionMode::kWarmup)), 6 * unit * kPairs.scored);
  const Flops dense = layer_flops(tiny(AttentionMode::kDense, false), 1, 0, kTokens, kPairs);
  EXPECT_EQ(dense.index_core + dense.index_linear, 0);
  EXPECT_DOUBLE_EQ(dense.attention_core / kPairs.visible,
                   layer_flops(tiny(), 1, 0, kTokens, kPairs).attention_core / kPairs.selected);
}

// A warm-up trains the indexers alone: everything else goes forward only.
TEST(Flops, AWarmupCountsTheModelOnce) {
  const Flops warmup = layer_flops(tiny(AttentionMode::kWarmup), 1, 0, kTokens, kPairs);
  const Flops dense = layer_flops(tiny(AttentionMode::kDense, false), 1, 0, kTokens, kPairs);
  EXPECT_DOUBLE_EQ(3 * warmup.attention_core, dense.attention_core);
  EXPECT_DOUBLE_EQ(3 * warmup.mlp, dense.mlp);
  EXPECT_EQ(loss_flops(tiny(AttentionMode::kWarmup), kTokens).loss, 0);
}

TEST(Flops, O4SharingLeavesOutTheIndexersOfOtherLayers) {
  PlanConfig c = tiny();
  c.model.layers = 78;
  const Flops every = model_flops(c, kTokens, kPairs);
  c.model.sharing = {4, 3};
  const Flops shared = model_flops(c, kTokens, kPairs);
  EXPECT_DOUBLE_EQ(shared.index_core * 78, every.index_core * 21);
  EXPECT_DOUBLE_EQ(shared.index_linear * 78, every.index_linear * 21);
  EXPECT_EQ(shared.attention_core, every.attention_core);
}

TEST(Flops, DepthsOfMultiTokenPrediction) {
  PlanConfig c = tiny();
  const Flops none = model_flops(c, kTokens, kPairs);
  c.model.mtp_depths = 3;
  const Flops three = model_flops(c, kTokens, kPairs);
  const Flops layer = layer_flops(c, 3, 0, kTokens, kPairs);
  EXPECT_DOUBLE_EQ(three.total() - none.total(),
                   3 * (layer.total() + 6 * kTokens * 2 * 12 * 12 + 6 * kTokens * 12 * 11));
  // Later depths run no indexer, and project no keys.
  c.model.mtp_shared_components.sparse_attention_index = true;
  const Flops index = model_flops(c, kTokens, kPairs);
  EXPECT_DOUBLE_EQ(three.index_core - index.index_core, 2 * layer.index_core);
  EXPECT_DOUBLE_EQ(three.index_linear - index.index_linear, 2 * layer.index_linear);
  EXPECT_EQ(index.attention_linear, three.attention_linear);
  c.model.mtp_shared_components.latent_kv = true;
  const Flops both = model_flops(c, kTokens, kPairs);
  EXPECT_DOUBLE_EQ(index.attention_linear - both.attention_linear,
                   2 * 6 * kTokens * (6 * (12 + 1) + 12 * 4));
  // A layer of multi-token prediction that reuses a decoder layer's indices has no indexer at all.
  c.model.sharing = {4, 1};
  c.model.mtp_shared_components = {};
  EXPECT_EQ(layer_flops(c, 3, 0, kTokens, kPairs).index_core, 0);
}

// Depths run where they learn; in a warm-up, those that run an indexer.
TEST(Flops, DepthsThatRun) {
  PlanConfig c = tiny();
  c.model.mtp_depths = 3;
  EXPECT_EQ(depths_run(c), 3);
  c.stages[0].mtp_loss = false;
  EXPECT_EQ(depths_run(c), 0);
  PlanConfig warmup = tiny(AttentionMode::kWarmup);
  warmup.model.mtp_depths = 3;
  EXPECT_EQ(depths_run(warmup), 3);
  warmup.model.mtp_shared_components.sparse_attention_index = true;
  EXPECT_EQ(depths_run(warmup), 1);
  warmup.model.sharing = {4, 1};  // layer 3 reuses
  EXPECT_EQ(depths_run(warmup), 0);
}

TEST(Flops, PoolsAreScoredInPlaceOfKeys) {
  PlanConfig c = tiny(AttentionMode::kSparse, false);
  attention::IndexerConfig& indexer = c.model.attention.indexer;
  const Flops keys = layer_flops(c, 1, 0, 64, exact_pairs(Lengths{64}, indexer));
  indexer.pool_size = 4;
  const Flops pools = layer_flops(c, 1, 0, 64, mean_pairs(64, 64 * 64, indexer));
  indexer.pool_size = 1;
  EXPECT_DOUBLE_EQ(layer_flops(c, 1, 0, 64, mean_pairs(64, 64 * 64, indexer)).index_core,
                   4 * pools.index_core);
  EXPECT_DOUBLE_EQ(pools.index_linear - keys.index_linear, 2 * 64 * 12 * 8);  // the gate
}

// A pattern that spells the standard model out is the standard model.
TEST(Flops, AnExplicitPatternEqualsTheStandardModel) {
  PlanConfig standard = tiny();
  PlanConfig hybrid = standard;
  hybrid.layer_pattern = "D-D-";
  hybrid.model.layers = 4;
  const Flops a = model_flops(standard, kTokens, kPairs);
  const Flops b = model_flops(hybrid, kTokens, kPairs);
  EXPECT_DOUBLE_EQ(a.total(), b.total());
  EXPECT_DOUBLE_EQ(a.index_core, b.index_core);
  hybrid.layer_pattern = "D-D-/D-";
  standard.model.mtp_depths = hybrid.model.mtp_depths = 2;
  EXPECT_DOUBLE_EQ(model_flops(standard, kTokens, kPairs).total(),
                   model_flops(hybrid, kTokens, kPairs).total());
}

TEST(Flops, LettersOfAHybridModel) {
  PlanConfig c = tiny();
  c.layer_pattern = "M*DE-";
  c.model.layers = 5;
  c.moe = {8, 2, 1, 6, 0};
  c.mamba = {16, 4, 2, 2};
  const auto layer = [&](std::int64_t n) { return layer_flops(c, n, 0, kTokens, kPairs); };
  const double h = 12, inner = 24, heads = 6;
  EXPECT_DOUBLE_EQ(
      layer(1).total(),
      3 * kTokens * (2 * h * (2 * inner + 2 * 2 * 16 + heads) + 7 * inner * 16 + 2 * inner * h));
  EXPECT_EQ(layer(2).index_core, 0);  // dense attention
  EXPECT_DOUBLE_EQ(layer(2).attention_core / kPairs.visible,
                   layer(3).attention_core / kPairs.selected);
  EXPECT_GT(layer(3).index_core, 0);
  EXPECT_DOUBLE_EQ(layer(4).total(), 6 * kTokens * (3 * h * 6 * (2 + 1) + h * 8));
  EXPECT_DOUBLE_EQ(layer(5).total(), 6 * kTokens * 3 * h * 10);
  // An indexer is run where its position computes.
  c.model.sharing = {2, 1};
  EXPECT_TRUE(runs_indexer(c, 3));
  c.model.sharing = {2, 2};
  EXPECT_FALSE(runs_indexer(c, 3));
}

}  // namespace
}  // namespace winnow::plan
