// Index sharing in the model: against the same model without it, and that it engages at all.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "attention/layer.h"
#include "tests/tiny_models.h"
#include "winnow/error.h"

namespace winnow::model {
namespace {

using attention::AttentionMode;

ModelConfig shared_model(std::int64_t layers, const IndexSharing& sharing) {
  ModelConfig c = tiny_model(tiny_mla());
  c.layers = layers;
  c.sharing = sharing;
  return c;
}

StepOptions sparse_options(double index_scale = 1) {
  StepOptions options;
  options.mode = AttentionMode::kSparse;
  options.index_loss_scale = index_scale;
  return options;
}

// E2: layers that reuse own no index weights, and none are in their checkpoints.
TEST(Sharing, E2ReusingLayersOwnNoIndexer) {
  const ModelConfig config = shared_model(6, {4, 2});  // 1, 2 and 6 compute
  Transformer model = shaken_model(config);
  for (const char* name :
       {"wq_b.weight", "wk.weight", "k_norm.weight", "k_norm.bias", "weights_proj.weight"}) {
    for (std::int64_t n = 0; n < 6; ++n) {
      const bool owns = n < 2 || n == 5;
      const auto* p =
          model.parameters().find(fmt::format("model.layers.{}.self_attn.indexer.{}", n, name));
      EXPECT_EQ(p != nullptr, owns) << n << " " << name;
    }
  }
  EXPECT_EQ(model.parameters().elements(), parameter_count(config));
}

// E7: sharing engages: indexers run once per computing layer, and reusing layers attend to what
// their source selected. topk is below the rows, where reuse and recomputation differ.
TEST(Sharing, E7IndexersRunOnceForAllWhoShare) {
  const Batch batch = packed_batch({21, 17}, 11, 5);
  for (const auto& [freq, runs] : {std::pair(1, 9), {2, 5}, {4, 3}, {16, 1}}) {
    Transformer model = shaken_model(shared_model(9, {freq, 1}));
    const StepResult r = model.step(batch, sparse_options());
    EXPECT_EQ(r.index_runs.forward, runs);
    EXPECT_EQ(r.index_runs.replay, 0);
    EXPECT_EQ(r.index_kl.size(), static_cast<std::size_t>(runs));
    const std::vector<Tensor> ids = model.selections();
    for (std::int64_t n = 0; n < 9; ++n) {
      const auto source = static_cast<std::size_t>(index_source({freq, 1}, n + 1) - 1);
      EXPECT_EQ(ids[static_cast<std::size_t>(n)].data, ids[source].data) << freq << " " << n;
      if (n > 0 && source > 0) {
        EXPECT_NE(ids_of(ids[0]), ids_of(ids[source])) << freq << " " << n;
      }
    }
  }
}

// The same model without sharing, whose layers 1 and 2 are made to hold the selection of layer 0:
// every loss and every gradient of the language loss has the same bits.
TEST(Sharing, EqualsLayersThatHappenToSelectTheSame) {
  for (const DType dtype : {DType::kF32, DType::kF64}) {
    Transformer shared = shaken_model(shared_model(3, {3, 1}), dtype);
    Transformer plain = shaken_model(shared_model(3, {1, 0}), dtype);
    for (const auto& p : shared.parameters().all()) {
      const Tensor to = plain.parameters().find(p->name)->value;
      std::copy_n(p->value.as<char>(), p->value.bytes(), to.as<char>());
    }
    const Batch batch = packed_batch({21, 17}, 11, 5);
    const StepOptions options = sparse_options(0);
    const StepResult a = shared.step(batch, options);
    plain.step(batch, options);
    const std::vector<Tensor> ids = plain.selections();
    EXPECT_NE(ids_of(ids[0]), ids_of(ids[1]));
    for (const std::size_t n : {1, 2}) {
      std::copy_n(ids[0].as<std::int32_t>(), ids[0].elements(), ids[n].as<std::int32_t>());
    }
    plain.freeze_selection(true);
    plain.parameters().zero_grad();
    const StepResult b = plain.step(batch, options);
    EXPECT_EQ(a.nll, b.nll);
    for (const auto& p : shared.parameters().all()) {
      EXPECT_EQ(numbers(p->grad), numbers(plain.parameters().find(p->name)->grad)) << p->name;
    }
  }
}

// With frequency 1 no offset matters, and a model is what it was without the options.
TEST(Sharing, FrequencyOneIsTheModelWithoutSharing) {
  const Batch batch = packed_batch({21, 17}, 11, 5);
  std::vector<std::vector<double>> gradients[2];
  for (const std::size_t n : {0, 1}) {
    Transformer model = shaken_model(shared_model(3, {1, n == 0 ? 0 : 2}));
    model.step(batch, sparse_options());
    for (const auto& p : model.parameters().all()) gradients[n].push_back(numbers(p->grad));
  }
  EXPECT_EQ(gradients[0], gradients[1]);
}

// E10: a second forward is that of a fresh model, whatever ran before, an error included.
TEST(Sharing, E10NothingOfAnEarlierForwardIsLeft) {
  const ModelConfig config = shared_model(4, {2, 1});
  const Batch first = packed_batch({21, 17}, 11, 5), second = packed_batch({9, 30}, 11, 8);
  Transformer used = shaken_model(config), fresh = shaken_model(config);
  used.step(first, sparse_options());
  Batch broken = first;
  broken.mtp_tokens.clear();
  broken.tokens[3] = 99;
  EXPECT_THROW(used.step(broken, sparse_options()), Error);
  EXPECT_EQ(numbers(used.log_probabilities(second, AttentionMode::kSparse)),
            numbers(fresh.log_probabilities(second, AttentionMode::kSparse)));
}

// E1, E4: what a layer does follows from the call and not from what it owns: a layer with an
// indexer that is told to reuse runs none and leaves its own selection alone; one without an
// indexer attends to topk keys, not to all; one without either says so.
TEST(Sharing, E1TheRoleIsOfTheCall) {
  using namespace attention;
  const AttentionConfig config = tiny_mla();
  ParameterList own_parameters, bare_parameters;
  const RopeTables ropes(config, DType::kF32);
  const Layer own(config, ropes, own_parameters, "", DType::kF32);
  const Layer bare(config, ropes, bare_parameters, "", DType::kF32, false);
  for (const auto& p : own_parameters.all()) fill_normal(*p, 0.5, 1);
  for (const auto& p : bare_parameters.all()) {
    std::copy_n(own_parameters.find(p->name)->value.as<float>(), p->value.elements(),
                p->value.as<float>());
  }
  constexpr std::int64_t kRows = 12;
  const RowRanges ranges = causal_ranges(kRows);
  std::vector<std::int32_t> positions(kRows);
  std::iota(positions.begin(), positions.end(), 0);
  const attention::Rows rows = attention::rows_of(positions, ranges);
  Parameter x;
  x.value = Array(DType::kF32, {kRows, config.hidden_size});
  fill_normal(x, 1, 2);
  Activations source, with, without;
  Memory memory;
  const auto run = [&](const Layer& layer, Activations& kept, const LayerOptions& options) {
    kept.cache.fit(config, DType::kF32, kRows, layer.owns_indexer());
    Array output(DType::kF32, {kRows, config.hidden_size});
    layer.forward(x.value, rows, options, kept.kept(), memory, output);
    return numbers(output);
  };
  LayerOptions options;
  options.mode = AttentionMode::kSparse;
  const std::vector<double> sparse = run(own, source, options);
  run(own, with, options);
  const std::vector<std::int32_t> before = ids_of(with.selection.topk_indices);
  EXPECT_EQ(memory.selections, 2);

  // Somebody else's selection: one key fewer in every full row.
  Array other(DType::kI32, {kRows, 4}), lengths(DType::kI32, {kRows});
  for (std::int64_t i = 0; i < kRows; ++i) {
    lengths.as<std::int32_t>()[i] = static_cast<std::int32_t>(std::min<std::int64_t>(i + 1, 3));
    for (std::int64_t s = 0; s < 4; ++s) {
      other.as<std::int32_t>()[i * 4 + s] = s < 3 && s <= i ? static_cast<std::int32_t>(s) : -1;
    }
  }
  options.reuses_indices = true;
  EXPECT_THROW(run(own, with, options), Error);  // none was given
  options.reused = {other, lengths, rows.starts, rows.ends, true};
  const std::vector<double> reusing = run(own, with, options);
  EXPECT_NE(reusing, sparse);
  EXPECT_EQ(ids_of(with.selection.topk_indices), before);
  EXPECT_EQ(run(bare, without, options), reusing);
  EXPECT_EQ(memory.selections, 2);
  EXPECT_TRUE(without.cache.index_key.view().empty());
  options.reused = source.core.selected;
  EXPECT_EQ(run(bare, without, options), sparse);

  options.reuses_indices = false;
  try {
    run(bare, without, options);
    FAIL() << "a layer without an indexer cannot select";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("owns no indexer"), std::string::npos);
  }
}

// The certificate of a consumer is its source's word, as far as both see the same ranges; scores
// that are NaN take it away from all, and masking changes no bit where it was not needed.
TEST(Sharing, CertificatesTravelWithTheIndices) {
  for (const bool nan : {false, true}) {
    Transformer model = shaken_model(shared_model(2, {2, 1}));
    if (nan) {
      fill_constant(
          *model.parameters().find("model.layers.0.self_attn.indexer.weights_proj.weight"),
          std::numeric_limits<double>::quiet_NaN());
    }
    StepOptions options = sparse_options(0);
    model.step(packed_batch({9}, 11, 5), options);
    EXPECT_EQ(model.certificates(), (std::vector<bool>{!nan, !nan}));
    for (const auto& p : model.parameters().all()) {
      if (p->indexer) continue;
      for (const double g : numbers(p->grad)) EXPECT_TRUE(std::isfinite(g)) << p->name;
    }
  }
}

// E8: several micro-batches in flight keep their own selections.
TEST(Sharing, E8MicroBatchesInFlightAreIndependent) {
  const ModelConfig config = shared_model(4, {2, 1});
  const Batch a = packed_batch({21, 17}, 11, 5), b = packed_batch({9, 30}, 11, 8);
  Transformer model = shaken_model(config);
  StepOptions options = sparse_options();
  std::vector<std::vector<double>> alone[2];
  std::vector<std::vector<std::int32_t>> ids_alone[2];
  for (const std::size_t n : {0, 1}) {
    model.step(n == 0 ? a : b, options);
    alone[n] = take_layer_gradients(model);
    for (const Tensor& t : model.selections()) ids_alone[n].push_back(ids_of(t));
  }
  for (const bool full : {false, true}) {
    options.recompute.full = full;
    Pass first, second;
    model.forward(a, options, first);
    model.forward(b, options, second);
    take_layer_gradients(model);
    EXPECT_EQ(model.backward(second).replay, 0);  // sources are kept for those who reuse them
    EXPECT_EQ(take_layer_gradients(model), alone[1]);
    model.backward(first);
    EXPECT_EQ(take_layer_gradients(model), alone[0]);
    for (std::size_t n = 0; n < 4; ++n) {
      EXPECT_EQ(ids_of(first.selections()[n]), ids_alone[0][n]);
      EXPECT_EQ(ids_of(second.selections()[n]), ids_alone[1][n]);
    }
    EXPECT_THROW(model.backward(first), Error);  // once
  }
}

}  // namespace
}  // namespace winnow::model
