// Multi-token prediction: what depths read and predict, and what they share, against the same model
// without it.
#include <gtest/gtest.h>

#include "tests/tiny_models.h"
#include "winnow/error.h"
#include "winnow/threads.h"

namespace winnow::model {
namespace {

using attention::AttentionMode;
using Ids = std::vector<std::int32_t>;

StepOptions options_of(const ModelConfig& config, AttentionMode mode = AttentionMode::kSparse) {
  StepOptions options;
  options.mode = mode;
  options.index_loss_scale = mode == AttentionMode::kDense ? 0 : 1;
  options.mtp_loss_scales.assign(static_cast<std::size_t>(config.mtp_depths), 0.4);
  return options;
}

ModelConfig depths(std::int64_t n, MtpSharedComponents shared = {}) {
  ModelConfig c = tiny_model(tiny_mla());
  c.mtp_depths = n;
  c.mtp_shared_components = shared;
  return c;
}

std::vector<double> gradient(Transformer& model, const std::string& name) {
  return numbers(model.parameters().find(name)->grad);
}

TEST(Mtp, DepthsReadAheadWithinASequence) {
  Batch batch;
  batch.tokens = {1, 2, 3, 4, 5, 6, 7};
  batch.targets = {2, 3, 4, -1,
                   6, 7, 8};  // sequences of 4 and 3; the second goes on beyond its end
  batch.positions = {0, 1, 2, 3, 0, 1, 2};
  add_mtp_tokens(batch, 3);
  EXPECT_EQ(
      batch.mtp_tokens,
      (std::vector<Ids>{{2, 3, 4, 0, 6, 7, 8}, {3, 4, 0, 0, 7, 8, 0}, {4, 0, 0, 0, 8, 0, 0}}));
  EXPECT_EQ(batch.mtp_targets, (std::vector<Ids>{{3, 4, -1, -1, 7, 8, -1},
                                                 {4, -1, -1, -1, 8, -1, -1},
                                                 {-1, -1, -1, -1, -1, -1, -1}}));
}

TEST(Mtp, NamesAreThoseOfCheckpoints) {
  for (const auto& [name, config] : mtp_models()) {
    Transformer model(config, DType::kF32, 1);
    EXPECT_EQ(model.parameters().elements(), parameter_count(config)) << name;
    for (const char* part :
         {"enorm.weight", "hnorm.weight", "eh_proj.weight", "shared_head.norm.weight",
          "input_layernorm.weight", "self_attn.o_proj.weight", "mlp.down_proj.weight"}) {
      EXPECT_NE(model.parameters().find(std::string("model.layers.2.") + part), nullptr) << part;
    }
    EXPECT_EQ(model.parameters().find("model.layers.3.enorm.weight"), nullptr);
    EXPECT_EQ(model.parameters().find("model.layers.2.self_attn.indexer.wk.weight") != nullptr ||
                  model.parameters().find("model.layers.2.self_attn.indexer.wq.weight") != nullptr,
              computes_indices(config.sharing, 3))
        << name;
  }
}

// Without the loss of its depths a model is the one without them, bit for bit.
TEST(Mtp, WithoutItsLossTheModelIsTheOneWithoutIt) {
  const Batch batch = packed_batch({14, 9}, 11, 5);
  for (const AttentionMode mode : {AttentionMode::kDense, AttentionMode::kSparse}) {
    Transformer plain = shaken_model(depths(0)), more = shaken_model(depths(2));
    StepOptions options = options_of(depths(0), mode);
    const StepResult a = plain.step(batch, options), b = more.step(batch, options);
    EXPECT_EQ(a.nll, b.nll);
    EXPECT_EQ(a.index_kl, b.index_kl);
    EXPECT_TRUE(b.mtp_nll.empty());
    for (const auto& p : plain.parameters().all()) {
      EXPECT_EQ(numbers(p->grad), gradient(more, p->name)) << p->name;
    }
    for (const double g : gradient(more, "model.layers.2.eh_proj.weight")) EXPECT_EQ(g, 0);
    // With the loss, the model's own losses stay what they are; the gradient does not.
    options = options_of(depths(2), mode);
    const StepResult c = more.step(batch, options);
    EXPECT_EQ(a.nll, c.nll);
    EXPECT_EQ(c.mtp_nll.size(), 2u);
    EXPECT_NE(gradient(more, "model.embed_tokens.weight"),
              gradient(plain, "model.embed_tokens.weight"));
  }
}

// The first depth does not know how many follow.
TEST(Mtp, TheFirstDepthIsThatOfAModelWithOne) {
  const Batch batch = packed_batch({14, 9}, 11, 5);
  const auto results = [&](const ModelConfig& config) {
    Transformer model = shaken_model(config);
    return model.step(batch, options_of(config));
  };
  const StepResult one = results(depths(1)), three = results(depths(3));
  EXPECT_EQ(one.mtp_nll[0], three.mtp_nll[0]);
  EXPECT_EQ(three.mtp_tokens, (std::vector<std::int64_t>{19, 17, 15}));
}

// E5, E7: the first depth runs its own indexer where the schedule says so, later ones reuse it, and
// the loss is counted once: it is that of the model with one depth.
TEST(Mtp, E7SharedIndicesAreComputedAndLearntOnce) {
  const Batch batch = packed_batch({14, 9}, 11, 5);
  const auto results = [&](const ModelConfig& config) {
    Transformer model = shaken_model(config);
    return model.step(batch, options_of(config));
  };
  const StepResult one = results(depths(1)), own = results(depths(3)),
                   shared = results(depths(3, {true, false})),
                   both = results(depths(3, {true, true})),
                   keys = results(depths(3, {false, true}));
  EXPECT_EQ(one.index_runs.forward, 3);
  EXPECT_EQ(own.index_runs.forward, 5);
  EXPECT_EQ(shared.index_runs.forward, 3);
  EXPECT_EQ(both.index_runs.forward, 3);
  EXPECT_EQ(keys.index_runs.forward, 5);
  EXPECT_EQ(shared.index_kl, one.index_kl);
  EXPECT_EQ(both.index_kl, one.index_kl);
  ASSERT_EQ(own.index_kl.size(), 3u);  // the layer's entry is the sum over its depths
  EXPECT_GT(own.index_kl[2], one.index_kl[2]);
  // What is shared changes what later depths see, since topk is below the rows.
  EXPECT_EQ(shared.mtp_nll[0], own.mtp_nll[0]);
  EXPECT_NE(shared.mtp_nll[1], own.mtp_nll[1]);
  EXPECT_NE(both.mtp_nll[1], shared.mtp_nll[1]);
  EXPECT_NE(keys.mtp_nll[1], own.mtp_nll[1]);

  // A layer that reuses those of an earlier layer gives them on; nobody runs an indexer.
  ModelConfig skipping = depths(3, {true, false});
  skipping.sharing = {4, 1};
  EXPECT_EQ(results(skipping).index_runs.forward, 1);
  skipping.mtp_shared_components = {};
  EXPECT_EQ(results(skipping).index_runs.forward, 1);
}

// Where topk covers the rows every selection is all there is, so sharing indices changes no bit.
TEST(Mtp, SharedIndicesThatCoverTheRowsChangeNothing) {
  const Batch batch = packed_batch({14, 9}, 11, 5);
  for (const bool keys : {false, true}) {
    ModelConfig own = depths(3, {false, keys}), shared = depths(3, {true, keys});
    own.attention.indexer.topk = shared.attention.indexer.topk = 14;
    Transformer a = shaken_model(own), b = shaken_model(shared);
    StepOptions options = options_of(own);
    options.index_loss_scale = 0;
    const StepResult x = a.step(batch, options), y = b.step(batch, options);
    EXPECT_EQ(x.nll, y.nll);
    EXPECT_EQ(x.mtp_nll, y.mtp_nll);
    for (const auto& p : a.parameters().all()) {
      EXPECT_EQ(numbers(p->grad), gradient(b, p->name)) << p->name;
    }
  }
}

TEST(Mtp, ResultsDoNotDependOnThePackingOrTheThreads) {
  const int before = num_threads();
  for (const auto& [name, config] : mtp_models()) {
    const Batch batch = packed_batch({14, 9}, 11, 5);
    Transformer model = shaken_model(config);
    StepOptions options = options_of(config);
    std::vector<std::vector<double>> bits[2];
    for (const int threads : {1, 3}) {
      set_num_threads(threads);
      model.parameters().zero_grad();
      const StepResult r = model.step(batch, options);
      std::vector<std::vector<double>>& all = bits[threads == 1 ? 0 : 1];
      all = {{r.nll}, r.mtp_nll, r.index_kl};
      for (const auto& p : model.parameters().all()) all.push_back(numbers(p->grad));
    }
    EXPECT_EQ(bits[0], bits[1]) << name;
    options.backward = false;
    const StepResult together = model.step(batch, options);
    const StepResult first = model.step(part_of(batch, 0, 14), options);
    const StepResult second = model.step(part_of(batch, 14, 9), options);
    for (std::size_t d = 0; d < together.mtp_nll.size(); ++d) {
      // The rows' losses are equal floats; their sums in double may be ordered differently.
      EXPECT_NEAR(together.mtp_nll[d], first.mtp_nll[d] + second.mtp_nll[d],
                  1e-12 * together.mtp_nll[d])
          << name;
    }
  }
  set_num_threads(before);
}

// A warm-up trains every indexer there is, that of the depths included, and nothing else.
TEST(Mtp, AWarmUpTrainsTheIndexerOfTheDepths) {
  const Batch batch = packed_batch({14, 9}, 11, 5);
  for (const auto& [name, config] : mtp_models()) {
    Transformer model = shaken_model(config);
    StepOptions options = options_of(config, AttentionMode::kWarmup);
    options.mtp_loss_scales.clear();
    const StepResult r = model.step(batch, options);
    EXPECT_EQ(r.index_kl.size(), index_layers(config).size()) << name;
    for (const auto& p : model.parameters().all()) {
      double sum = 0;
      for (const double g : numbers(p->grad)) sum += g * g;
      EXPECT_EQ(sum > 0, p->indexer) << name << " " << p->name;
    }
  }
}

TEST(Mtp, RefusesBrokenBatchesAndOptions) {
  const ModelConfig config = depths(2);
  Transformer model = shaken_model(config);
  const auto refusal = [&](auto&& breaking) -> std::string {
    Batch batch = packed_batch({9}, 11, 5);
    StepOptions options = options_of(config);
    breaking(batch, options);
    try {
      model.step(batch, options);
    } catch (const Error& error) {
      return error.what();
    }
    return "";
  };
  const auto expect = [&](const char* says, auto&& breaking) {
    const std::string text = refusal(breaking);
    EXPECT_NE(text.find(says), std::string::npos) << text;
  };
  expect("needs their tokens (add_mtp_tokens)",
         [](Batch& b, StepOptions&) { b.mtp_tokens.clear(); });
  expect("mtp_tokens[1] must have one entry per token, 9, got 8",
         [](Batch& b, StepOptions&) { b.mtp_tokens[1].pop_back(); });
  expect("mtp_tokens[0] must be from 0 to 10, got -1",
         [](Batch& b, StepOptions&) { b.mtp_tokens[0][3] = -1; });
  expect("mtp_targets[1] must be from -1 to 10, got 11",
         [](Batch& b, StepOptions&) { b.mtp_targets[1][3] = 11; });
  expect("one entry per depth, 2, or none, got 1",
         [](Batch&, StepOptions& o) { o.mtp_loss_scales = {1}; });
  EXPECT_EQ(refusal([](Batch& b, StepOptions& o) {
              o.mtp_loss_scales.clear();
              b.mtp_tokens.clear();
            }),
            "");
}

}  // namespace
}  // namespace winnow::model
