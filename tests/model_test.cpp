// The transformer as a whole: equalities between modes, packings and thread counts.
#include <gtest/gtest.h>

#include <cmath>
#include <thread>

#include "tests/tiny_models.h"
#include "winnow/error.h"
#include "winnow/implementations.h"
#include "winnow/threads.h"

namespace winnow::model {
namespace {

using attention::AttentionMode;

TEST(Model, SparseEqualsDenseWhereTopkCoversTheRow) {
  for (auto [name, config] : tiny_models()) {
    for (const std::int64_t topk : {12, 13, 40}) {
      config.attention.indexer.topk = topk;
      for (const DType dtype : {DType::kF32, DType::kF64}) {
        Transformer model = shaken_model(config, dtype);
        const Batch batch = packed_batch({12, 7, 1}, config.vocab_size, 5);
        const Array sparse = model.log_probabilities(batch, AttentionMode::kSparse);
        const Array dense = model.log_probabilities(batch, AttentionMode::kDense);
        EXPECT_EQ(numbers(sparse), numbers(dense)) << name << " topk " << topk;
      }
    }
    config.attention.indexer.topk = 4;  // and differs where it does not
    Transformer model = shaken_model(config, DType::kF32);
    const Batch batch = packed_batch({12, 7, 1}, config.vocab_size, 5);
    EXPECT_NE(numbers(model.log_probabilities(batch, AttentionMode::kSparse)),
              numbers(model.log_probabilities(batch, AttentionMode::kDense)));
  }
}

TEST(Model, ResultsDoNotDependOnThePacking) {
  for (const auto& [name, config] : tiny_models()) {
    for (const AttentionMode mode :
         {AttentionMode::kDense, AttentionMode::kWarmup, AttentionMode::kSparse}) {
      Transformer model = shaken_model(config, DType::kF32);
      const Batch packed = packed_batch({12, 7}, config.vocab_size, 5);
      StepOptions options;
      options.mode = mode;
      options.index_loss_scale = mode == AttentionMode::kDense ? 0 : 1;
      options.backward = false;
      const StepResult together = model.step(packed, options);
      const StepResult first = model.step(part_of(packed, 0, 12), options);
      const StepResult second = model.step(part_of(packed, 12, 7), options);
      EXPECT_EQ(together.tokens, first.tokens + second.tokens);
      EXPECT_EQ(together.tokens, 17);
      // The rows' losses are equal floats; their sums in double may be ordered differently.
      EXPECT_NEAR(together.nll, first.nll + second.nll, 1e-12 * together.nll) << name;
      ASSERT_EQ(together.index_kl.size(),
                mode == AttentionMode::kDense ? 0u : index_layers(config).size());
      for (std::size_t n = 0; n < together.index_kl.size(); ++n) {
        EXPECT_GT(together.index_kl[n], 0);
        EXPECT_NEAR(together.index_kl[n], first.index_kl[n] + second.index_kl[n],
                    1e-12 * together.index_kl[n])
            << name;
      }
    }
  }
}

TEST(Model, LogProbabilitiesOfASequenceAreThoseOfThePack) {
  for (const auto& [name, config] : tiny_models()) {
    Transformer model = shaken_model(config, DType::kF32);
    const Batch packed = packed_batch({12, 7}, config.vocab_size, 5);
    const Array together = model.log_probabilities(packed, AttentionMode::kSparse);
    const Array second = model.log_probabilities(part_of(packed, 12, 7), AttentionMode::kSparse);
    EXPECT_EQ(numbers(together.view().rows(12, 7)), numbers(second)) << name;
  }
}

// P1: a sparse forward really runs the indexer's selection and sparse attention, on every kind of
// model, and a dense one no indexer. What ran is known per thread, so each asks on one of its own.
TEST(Model, P1ASparseForwardRunsSelectionAndAttention) {
  for (const auto& [name, config] : tiny_models()) {
    for (const DType dtype : {DType::kF32, DType::kF64}) {
      Transformer model = shaken_model(config, dtype);
      const Batch batch = packed_batch({12, 7}, config.vocab_size, 5);
      const auto ran = [&](AttentionMode mode, const char* operation) {
        std::string who;
        std::thread([&] {
          EXPECT_EQ(last_implementation(operation), "");
          model.log_probabilities(batch, mode);
          who = last_implementation(operation);
        }).join();
        return who;
      };
      const std::string want = dtype == DType::kF64 ? "reference" : "cpu.";
      for (const char* operation : {"index_topk", "sparse_attention"}) {
        const std::string who = ran(AttentionMode::kSparse, operation);
        EXPECT_EQ(who.substr(0, want.size()), want) << name << " " << operation;
      }
      EXPECT_EQ(ran(AttentionMode::kDense, "index_topk"), "") << name;
      EXPECT_NE(ran(AttentionMode::kDense, "sparse_attention"), "") << name;
    }
  }
}

TEST(Model, NoSelectedIdCrossesAPackedBoundary) {
  for (const auto& [name, config] : tiny_models()) {
    Transformer model = shaken_model(config, DType::kF32);
    const Batch packed = packed_batch({12, 7, 1, 3}, config.vocab_size, 5);
    StepOptions options;
    options.mode = AttentionMode::kSparse;
    model.step(packed, options);
    const std::vector<Tensor> selections = model.selections();
    ASSERT_EQ(selections.size(), 2u);
    for (const Tensor& ids : selections) {
      for (std::int64_t i = 0; i < 23; ++i) {
        const auto at = static_cast<std::size_t>(i);
        const std::int32_t start = packed.ranges.starts[at], end = packed.ranges.ends[at];
        int valid = 0;
        for (std::int64_t s = 0; s < 4; ++s) {
          const std::int32_t id = ids.as<std::int32_t>()[i * 4 + s];
          if (id < 0) continue;
          EXPECT_TRUE(id >= start && id < end) << name << " row " << i << " id " << id;
          ++valid;
        }
        EXPECT_EQ(valid, std::min(4, end - start)) << name << " row " << i;
      }
    }
    options.mode = AttentionMode::kDense;
    model.step(packed, options);
    EXPECT_TRUE(model.selections().empty());
  }
}

TEST(Model, EveryBitIsTheSameForEveryThreadCount) {
  const int before = num_threads();
  for (const auto& [name, config] : tiny_models()) {
    for (const AttentionMode mode :
         {AttentionMode::kDense, AttentionMode::kWarmup, AttentionMode::kSparse}) {
      std::vector<std::vector<double>> gradients;
      std::vector<double> losses;
      for (const int threads : {1, 2, 5}) {
        set_num_threads(threads);
        Transformer model = shaken_model(config, DType::kF32);
        StepOptions options;
        options.mode = mode;
        options.index_loss_scale = mode == AttentionMode::kDense ? 0 : 1;
        const StepResult r =
            model.step(packed_batch({60, 41, 1, 33}, config.vocab_size, 5), options);
        losses.push_back(r.nll);
        gradients.emplace_back(r.index_kl);
        for (const auto& p : model.parameters().all()) {
          const std::vector<double> g = numbers(p->grad);
          gradients.back().insert(gradients.back().end(), g.begin(), g.end());
        }
      }
      EXPECT_EQ(gradients[0], gradients[1]) << name;
      EXPECT_EQ(gradients[0], gradients[2]) << name;
      EXPECT_EQ(losses[0], losses[1]) << name;
      EXPECT_EQ(losses[0], losses[2]) << name;
    }
  }
  set_num_threads(before);
}

TEST(Model, FloatsFollowTheDoubles) {
  for (const auto& [name, config] : tiny_models()) {
    Transformer narrow = shaken_model(config, DType::kF32),
                wide = shaken_model(config, DType::kF64);
    for (const auto& p : wide.parameters().all()) {  // the same weights, exactly
      const Tensor from = narrow.parameters().find(p->name)->value;
      for (std::int64_t i = 0; i < from.elements(); ++i) {
        p->value.as<double>()[i] = static_cast<double>(from.as<float>()[i]);
      }
    }
    const Batch batch = packed_batch({12, 7}, config.vocab_size, 5);
    const std::vector<double> f32 =
        numbers(narrow.log_probabilities(batch, AttentionMode::kSparse));
    const std::vector<double> f64 = numbers(wide.log_probabilities(batch, AttentionMode::kSparse));
    // Two layers of some 20 roundings of numbers of size 10 at 2^-24, amplified by norms and
    // softmax.
    for (std::size_t i = 0; i < f32.size(); ++i) EXPECT_NEAR(f32[i], f64[i], 1e-4) << name;
  }
}

TEST(Model, AttentionMassCaughtIsOneWhereAllIsReadAndLessElsewhere) {
  for (auto [name, config] : tiny_models()) {
    Transformer model = shaken_model(config, DType::kF32);
    StepOptions options;
    options.mode = AttentionMode::kSparse;
    options.measure_selection = true;
    options.backward = false;
    const StepResult some = model.step(packed_batch({12, 7}, config.vocab_size, 5), options);
    const StepResult all = model.step(packed_batch({4, 3}, config.vocab_size, 5), options);
    ASSERT_EQ(some.attention_mass_caught.size(), 2u);
    for (std::size_t n = 0; n < 2; ++n) {
      EXPECT_GT(some.attention_mass_caught[n], 0.05) << name;
      EXPECT_LT(some.attention_mass_caught[n], 1) << name;
      EXPECT_EQ(all.attention_mass_caught[n], 1) << name;
    }
    // The warm-up measures the same: its attention is dense, its selection that of the same weights
    // as long as the layers before attend alike, hence in the first layer.
    options.mode = AttentionMode::kWarmup;
    options.index_loss_scale = 1;
    const StepResult warm = model.step(packed_batch({12, 7}, config.vocab_size, 5), options);
    EXPECT_EQ(warm.attention_mass_caught[0], some.attention_mass_caught[0]) << name;
    EXPECT_EQ(warm.nll, 0);
  }
}

TEST(Model, FrozenSelectionIsHeldWhenTheIndexerChanges) {
  const ModelConfig config = tiny_model(tiny_mla());
  Transformer model = shaken_model(config, DType::kF32);
  const Batch batch = packed_batch({12, 7}, config.vocab_size, 5);
  const Array before = model.log_probabilities(batch, AttentionMode::kSparse);
  const auto turn = [&](std::uint64_t seed) {
    for (const auto& p : model.parameters().all()) {
      if (p->indexer && p->value.view().rank == 2) fill_normal(*p, 0.4, seed);
    }
  };
  model.freeze_selection(true);
  turn(77);
  EXPECT_EQ(numbers(model.log_probabilities(batch, AttentionMode::kSparse)), numbers(before));
  EXPECT_THROW(model.log_probabilities(part_of(batch, 0, 12), AttentionMode::kSparse), Error);
  model.freeze_selection(false);
  EXPECT_NE(numbers(model.log_probabilities(batch, AttentionMode::kSparse)), numbers(before));
}

TEST(Model, BuffersStayWhereTheyAre) {
  const ModelConfig config = tiny_model(tiny_mla());
  Transformer model = shaken_model(config, DType::kF32);
  StepOptions options;
  options.mode = AttentionMode::kSparse;
  options.index_loss_scale = 1;
  model.step(packed_batch({12, 7}, config.vocab_size, 5), options);
  const void* first = model.selections()[1].data;
  model.step(packed_batch({7, 12}, config.vocab_size, 6), options);
  EXPECT_EQ(model.selections()[1].data, first);
  model.step(packed_batch({3}, config.vocab_size, 6), options);
  EXPECT_EQ(model.selections()[1].data, first);
}

TEST(Model, InitialWeightsAreAFunctionOfTheSeed) {
  const ModelConfig config = tiny_model(tiny_mla());
  const auto first_weights = [&](std::uint64_t seed) {
    Transformer model(config, DType::kF32, seed);
    return numbers(model.parameters().find("model.layers.1.self_attn.q_b_proj.weight")->value);
  };
  EXPECT_EQ(first_weights(1), first_weights(1));
  EXPECT_NE(first_weights(1), first_weights(2));

  ModelConfig wide = config;
  wide.intermediate_size = 4000;
  Transformer model(wide, DType::kF64, 1);
  const auto moments = [&](const char* name) {
    const std::vector<double> w = numbers(model.parameters().find(name)->value);
    double sum = 0, squares = 0;
    for (const double x : w) sum += x, squares += x * x;
    const auto n = static_cast<double>(w.size());
    return std::pair(sum / n, std::sqrt(squares / n));
  };
  // 48000 numbers: the mean's deviation is 0.02 / 219, the deviation's 0.02 / 310; five of each.
  const auto [up_mean, up_deviation] = moments("model.layers.0.mlp.up_proj.weight");
  EXPECT_NEAR(up_mean, 0, 4.6e-4);
  EXPECT_NEAR(up_deviation, 0.02, 3.3e-4);
  const auto [down_mean, down_deviation] = moments("model.layers.0.mlp.down_proj.weight");
  EXPECT_NEAR(down_mean, 0, 2.3e-4);
  EXPECT_NEAR(down_deviation, 0.01, 1.7e-4);  // / sqrt(2 * 2 layers)
}

TEST(Model, NamesAreThoseOfCheckpoints) {
  Transformer model(tiny_model(tiny_mla()), DType::kF32, 1);
  const char* names[] = {"model.embed_tokens.weight",
                         "model.layers.0.input_layernorm.weight",
                         "model.layers.0.self_attn.q_a_proj.weight",
                         "model.layers.0.self_attn.q_a_layernorm.weight",
                         "model.layers.0.self_attn.q_b_proj.weight",
                         "model.layers.0.self_attn.kv_a_proj_with_mqa.weight",
                         "model.layers.0.self_attn.kv_a_layernorm.weight",
                         "model.layers.0.self_attn.kv_b_proj.weight",
                         "model.layers.0.self_attn.o_proj.weight",
                         "model.layers.0.self_attn.indexer.wq_b.weight",
                         "model.layers.0.self_attn.indexer.wk.weight",
                         "model.layers.0.self_attn.indexer.k_norm.weight",
                         "model.layers.0.self_attn.indexer.k_norm.bias",
                         "model.layers.0.self_attn.indexer.weights_proj.weight",
                         "model.layers.0.post_attention_layernorm.weight",
                         "model.layers.0.mlp.gate_proj.weight",
                         "model.layers.0.mlp.up_proj.weight",
                         "model.layers.0.mlp.down_proj.weight"};
  const auto& all = model.parameters().all();
  for (std::size_t i = 0; i < std::size(names); ++i) EXPECT_EQ(all[i]->name, names[i]);
  EXPECT_EQ(all.back()->name, "model.norm.weight");
  for (const auto& p : all) {
    EXPECT_EQ(p->indexer, p->name.find(".indexer.") != std::string::npos);
    EXPECT_EQ(p->decay, p->value.view().rank == 2);
  }
  for (const auto& [name, config] : tiny_models()) {
    Transformer any(config, DType::kF32, 1);
    EXPECT_EQ(any.parameters().elements(), parameter_count(config)) << name;
  }
}

TEST(Model, RefusesBrokenBatches) {
  const ModelConfig config = tiny_model(tiny_mla());
  Transformer model = shaken_model(config, DType::kF32);
  const auto refused = [&](auto&& breaking) {
    Batch batch = packed_batch({5}, config.vocab_size, 5);
    breaking(batch);
    EXPECT_THROW(model.step(batch, {}), Error);
  };
  refused([](Batch& b) { b = Batch(); });
  refused([](Batch& b) { b.tokens[2] = 11; });
  refused([](Batch& b) { b.tokens[2] = -1; });
  refused([](Batch& b) { b.targets[2] = 11; });
  refused([](Batch& b) { b.targets[2] = -2; });
  refused([](Batch& b) { b.positions[4] = 64; });
  refused([](Batch& b) { b.positions.pop_back(); });
  refused([](Batch& b) { b.targets.pop_back(); });
  refused([](Batch& b) { b.ranges.ends.pop_back(); });
  StepOptions options;
  options.measure_selection = true;
  EXPECT_THROW(model.step(packed_batch({5}, config.vocab_size, 5), options), Error);
}

}  // namespace
}  // namespace winnow::model
