// Models whose indexers score pools: names and first weights, packing, threads, sharing, depths,
// recomputation. Gradients by finite differences: model_gradient_test.cpp; generation:
// generate_test.cpp.
#include <gtest/gtest.h>

#include <cmath>

#include "tests/tiny_models.h"
#include "winnow/error.h"
#include "winnow/threads.h"

namespace winnow::model {
namespace {

using attention::AttentionMode;

constexpr char kGate[] = "model.layers.0.self_attn.indexer.index_kpool_compress_gate";
constexpr char kApe[] = "model.layers.0.self_attn.indexer.index_kpool_compress_ape";

StepOptions sparse_options(const ModelConfig& config = {}) {
  StepOptions options;
  options.mode = AttentionMode::kSparse;
  options.mtp_loss_scales.assign(static_cast<std::size_t>(config.mtp_depths), 0.4);
  return options;
}

ModelConfig with_depths(MtpSharedComponents shared) {
  ModelConfig c = pool_models()[0].second;
  c.mtp_depths = 3;
  c.mtp_shared_components = shared;
  return c;
}

// The names of the public checkpoints, which have no ".weight" here; gates start from N(0, 0.01),
// places in a pool from nothing. The other weights are those of the model without pools.
TEST(ModelPools, ParametersAreThoseOfPublicModels) {
  ModelConfig config = pool_models()[0].second;
  config.attention.hidden_size = 400;
  Transformer pools(config, DType::kF64, 1);
  config.attention.indexer.pool_size = 1;
  Transformer plain(config, DType::kF64, 1);
  const Parameter *gate = pools.parameters().find(kGate), *ape = pools.parameters().find(kApe);
  ASSERT_TRUE(gate != nullptr && ape != nullptr);
  EXPECT_EQ(gate->value.view().shape[0], 8);
  EXPECT_EQ(gate->value.view().shape[1], 400);
  EXPECT_EQ(ape->value.view().shape[0], 2);
  EXPECT_EQ(ape->value.view().shape[1], 8);
  EXPECT_TRUE(gate->indexer && ape->indexer);
  double squares = 0;
  for (const double x : numbers(gate->value)) squares += x * x / 3200;
  EXPECT_NEAR(std::sqrt(squares), 0.01, 7e-4);  // five deviations of 3200 numbers
  for (const double x : numbers(ape->value)) EXPECT_EQ(x, 0);
  for (const auto& p : plain.parameters().all()) {
    EXPECT_EQ(numbers(p->value), numbers(pools.parameters().find(p->name)->value)) << p->name;
  }
  for (const auto& [name, c] : pool_models()) {
    Transformer model(c, DType::kF32, 1);
    EXPECT_EQ(model.parameters().elements(), parameter_count(c)) << name;
  }
  const ModelConfig shared = pool_models()[3].second;  // layer 1 owns no indexer
  Transformer model(shared, DType::kF32, 1);
  EXPECT_EQ(model.parameters().find("model.layers.1.self_attn.indexer.index_kpool_compress_gate"),
            nullptr);
}

TEST(ModelPools, AStepTrainsAllButTheIndexers) {
  for (const auto& [name, config] : pool_models()) {
    Transformer model = shaken_model(config, DType::kF64);
    const StepResult result = model.step(packed_batch({12, 7}, 11, 5), sparse_options());
    EXPECT_GT(result.nll, 0);
    EXPECT_TRUE(result.index_kl.empty());
    for (const auto& p : model.parameters().all()) {
      double largest = 0;
      for (const double g : numbers(p->grad)) largest = std::max(largest, std::abs(g));
      if (p->indexer) {
        EXPECT_EQ(largest, 0) << name << " " << p->name;
      } else {
        EXPECT_GT(largest, 1e-6) << name << " " << p->name;
      }
    }
    StepOptions options = sparse_options();
    options.index_loss_scale = 1;
    EXPECT_THROW(model.step(packed_batch({12}, 11, 5), options), Error) << name;
    options.mode = AttentionMode::kWarmup;
    EXPECT_THROW(model.step(packed_batch({12}, 11, 5), options), Error) << name;
  }
}

// Where the budget covers the row the model is the dense one, bit for bit.
TEST(ModelPools, SparseEqualsDenseWithinTheBudget) {
  for (auto [name, config] : pool_models()) {
    if (!config.attention.indexer.select_tail) continue;
    config.attention.indexer.topk = 12;
    Transformer model = shaken_model(config);
    const std::int64_t most = 12 + config.attention.indexer.pool_size - 1;
    const Batch batch = packed_batch({static_cast<std::int32_t>(most), 7, 1}, 11, 5);
    EXPECT_EQ(numbers(model.log_probabilities(batch, AttentionMode::kSparse)),
              numbers(model.log_probabilities(batch, AttentionMode::kDense)))
        << name;
    const Batch longer = packed_batch({40}, 11, 5);
    EXPECT_NE(numbers(model.log_probabilities(longer, AttentionMode::kSparse)),
              numbers(model.log_probabilities(longer, AttentionMode::kDense)))
        << name;
  }
}

TEST(ModelPools, ASequenceOfAPackIsTheSequenceAlone) {
  for (const auto& [name, config] : pool_models()) {
    Transformer model = shaken_model(config);
    const Batch packed = packed_batch({13, 1, 6, 22}, 11, 5);
    const Array together = model.log_probabilities(packed, AttentionMode::kSparse);
    std::int32_t first = 0;
    for (const std::int32_t length : {13, 1, 6, 22}) {
      const Array alone =
          model.log_probabilities(part_of(packed, first, length), AttentionMode::kSparse);
      EXPECT_EQ(numbers(together.view().rows(first, length)), numbers(alone)) << name << first;
      first += length;
    }
    // Sequences that the batch names itself.
    Batch named = packed;
    named.spans = packed_spans(std::vector<std::int32_t>{0, 13, 14, 20, 42});
    EXPECT_EQ(numbers(model.log_probabilities(named, AttentionMode::kSparse)), numbers(together));
    named.spans = packed_spans(std::vector<std::int32_t>{0, 10, 42});  // pools begin elsewhere
    EXPECT_THROW(model.log_probabilities(named, AttentionMode::kSparse), Error);
  }
}

TEST(ModelPools, EveryBitIsTheSameForEveryThreadCount) {
  const int before = num_threads();
  for (const auto& [name, config] : pool_models()) {
    std::vector<std::vector<double>> all[2];
    for (const std::size_t n : {0, 1}) {
      set_num_threads(n == 0 ? 1 : 5);
      Transformer model = shaken_model(config);
      model.step(packed_batch({60, 41, 1, 33}, 11, 5), sparse_options());
      for (const auto& p : model.parameters().all()) all[n].push_back(numbers(p->grad));
    }
    EXPECT_EQ(all[0], all[1]) << name;
  }
  set_num_threads(before);
}

// The same model whose second layer computes, made to hold what the first selected.
TEST(ModelPools, LayersThatShareAttendToTheSamePools) {
  Transformer shared = shaken_model(pool_models()[3].second),
              plain = shaken_model(pool_models()[0].second);
  const Batch batch = packed_batch({21, 17}, 11, 5);
  const StepResult a = shared.step(batch, sparse_options());
  EXPECT_EQ(a.index_runs.forward, 1);
  EXPECT_EQ(shared.selections()[0].data, shared.selections()[1].data);
  EXPECT_EQ(shared.selections()[0].shape[1], 4 + 1);  // the tail
  EXPECT_EQ(shared.certificates(), (std::vector<bool>{true, true}));
  for (const auto& p : shared.parameters().all()) {
    const Tensor to = plain.parameters().find(p->name)->value;
    std::copy_n(p->value.as<char>(), p->value.bytes(), to.as<char>());
  }
  plain.step(batch, sparse_options());
  const std::vector<Tensor> ids = plain.selections();
  EXPECT_NE(ids_of(ids[0]), ids_of(ids[1]));
  std::copy_n(ids[0].as<std::int32_t>(), ids[0].elements(), ids[1].as<std::int32_t>());
  plain.freeze_selection(true);
  plain.parameters().zero_grad();
  const StepResult b = plain.step(batch, sparse_options());
  EXPECT_EQ(a.nll, b.nll);
  for (const auto& p : shared.parameters().all()) {
    EXPECT_EQ(numbers(p->grad), numbers(plain.parameters().find(p->name)->grad)) << p->name;
  }
}

// Without the tail nothing is certified, by who selects and by who reuses.
TEST(ModelPools, WithoutTailNobodyCertifies) {
  ModelConfig config = pool_models()[3].second;
  config.attention.indexer.select_tail = false;
  Transformer model = shaken_model(config);
  model.step(packed_batch({21, 17}, 11, 5), sparse_options());
  EXPECT_EQ(model.certificates(), (std::vector<bool>{false, false}));
  for (const auto& p : model.parameters().all()) {
    for (const double g : numbers(p->grad)) EXPECT_TRUE(std::isfinite(g)) << p->name;
  }
}

// E7: depths that share run one indexer for all of them; others one each.
TEST(ModelPools, E7DepthsShareThePoolsOfTheFirst) {
  const Batch batch = packed_batch({21, 17}, 11, 5);
  for (const bool indices : {false, true}) {
    const ModelConfig config = with_depths({indices, true});
    Transformer model = shaken_model(config);
    const StepResult r = model.step(batch, sparse_options(config));
    EXPECT_EQ(r.index_runs.forward, 2 + (indices ? 1 : 3));
    EXPECT_EQ(r.mtp_nll.size(), 3u);
  }
}

std::vector<std::vector<double>> outcome(const ModelConfig& config, const Recompute& recompute,
                                         std::int64_t* again) {
  Transformer model = shaken_model(config);
  StepOptions options = sparse_options(config);
  options.recompute = recompute;
  model.step(packed_batch({5, 22}, 11, 9), options);  // what it leaves must not be read
  model.parameters().zero_grad();
  const StepResult r = model.step(packed_batch({14, 9}, 11, 5), options);
  *again = r.index_runs.replay;
  std::vector<std::vector<double>> all = {{r.nll}, r.mtp_nll};
  for (const auto& p : model.parameters().all()) all.push_back(numbers(p->grad));
  return all;
}

// A replay selects pools again, and gives the same bits; those that are shared are kept.
TEST(ModelPools, ReplaysHaveTheSameBits) {
  std::vector<std::pair<std::string, ModelConfig>> models = pool_models();
  models.emplace_back("depths", with_depths({false, false}));
  models.emplace_back("depths_share", with_depths({true, true}));
  for (const auto& [name, config] : models) {
    std::int64_t again = 0;
    const auto kept = outcome(config, {}, &again);
    for (const Recompute& r :
         {Recompute{true}, Recompute{false, true}, Recompute{false, true, true, true, true},
          Recompute{false, false, true, true, true}}) {
      if (r.core_attention && config.mtp_shared_components.latent_kv) continue;
      EXPECT_EQ(outcome(config, r, &again), kept) << name;
      const bool selects = r.replays_selection() && config.sharing.topk_freq == 1;
      EXPECT_EQ(again > 0, selects) << name;
    }
  }
  Recompute reuse;
  reuse.full = reuse.reuse_checkpoint_topk = true;
  try {
    validate(reuse, models[0].second);
    FAIL() << "pools cannot be replayed";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("attention.indexer.pool_size = 2"), std::string::npos);
  }
}

// E8: two micro-batches between forward and backward have pools of their own.
TEST(ModelPools, E8MicroBatchesInFlightAreIndependent) {
  const Batch a = packed_batch({21, 17}, 11, 5), b = packed_batch({9, 30, 4}, 11, 8);
  for (const bool full : {false, true}) {
    Transformer model = shaken_model(pool_models()[0].second);
    StepOptions options = sparse_options();
    options.recompute.full = full;
    std::vector<std::vector<double>> alone[2];
    for (const std::size_t n : {0, 1}) {
      model.step(n == 0 ? a : b, options);
      alone[n] = take_layer_gradients(model);
    }
    Pass first, second;
    model.forward(a, options, first);
    model.forward(b, options, second);
    take_layer_gradients(model);
    model.backward(first);
    EXPECT_EQ(take_layer_gradients(model), alone[0]);
    model.backward(second);
    EXPECT_EQ(take_layer_gradients(model), alone[1]);
  }
}

TEST(ModelPools, MassCaughtCountsTheTail) {
  const ModelConfig config = pool_models()[1].second;  // topk 4 in pools of 4, and 3 of the tail
  Transformer model = shaken_model(config);
  StepOptions options = sparse_options();
  options.measure_selection = true;
  options.backward = false;
  const StepResult some = model.step(packed_batch({30, 20}, 11, 5), options);
  const StepResult all = model.step(packed_batch({7, 5}, 11, 5), options);
  for (std::size_t n = 0; n < 2; ++n) {
    EXPECT_GT(some.attention_mass_caught[n], 0.05);
    EXPECT_LT(some.attention_mass_caught[n], 1);
    EXPECT_EQ(all.attention_mass_caught[n], 1);
  }
}

}  // namespace
}  // namespace winnow::model
