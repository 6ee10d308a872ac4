// Sharing, multi-token prediction, recompute and the health of indexers in the training loop.
#include <gtest/gtest.h>

#include <cmath>

#include "model/safetensors.h"
#include "tests/train_fixture.h"

namespace winnow::train {
namespace {

using nlohmann::json;

class TrainSharing : public TrainTest {
 protected:
  // Layers 1 and 3 compute, 2 and 4 reuse; layer 5, of two depths, computes at the first.
  json run_of(const std::string& output) const {
    json run = tiny_run(text_, folder_ / output);
    run["model"]["layers"] = 4;
    run["model"]["topk_freq"] = 2;
    run["model"]["mtp_depths"] = 2;
    run["model"]["mtp_shared_components"] = {"sparse_attention_index", "latent_kv"};
    return run;
  }
};

TEST_F(TrainSharing, TheLossesFallAndMetricsSayWhoComputes) {
  json config = run_of("out");
  config["stages"][0]["steps"] = 30;
  config["stages"][1]["steps"] = 20;
  config["stages"][2]["steps"] = 20;
  config["stages"][2]["learning_rate"] = 0.01;
  EXPECT_TRUE(run(config, Begin::kNew));
  const std::vector<json> lines = curve("out");
  ASSERT_EQ(lines.size(), 70u);
  const auto ahead = [&](std::size_t i, std::size_t depth) {
    return lines[i]["mtp_loss"][depth].get<double>();
  };
  for (const std::size_t depth : {0, 1}) EXPECT_LT(ahead(69, depth), ahead(0, depth) - 1);
  EXPECT_FALSE(lines[0].contains("index_kl"));   // dense
  EXPECT_FALSE(lines[30].contains("mtp_loss"));  // warm-up
  const json& kl = lines[30]["index_kl"];
  ASSERT_EQ(kl.size(), 5u);
  for (const std::size_t n : {1, 3}) EXPECT_TRUE(kl[n].is_null());
  double sum = 0;
  for (const std::size_t n : {0, 2, 4}) sum += kl[n].get<double>();
  EXPECT_NEAR(lines[30]["index_loss"].get<double>(), sum / 3,
              1e-12 * sum);  // of those that compute
  EXPECT_LT(lines[49]["index_loss"].get<double>(), lines[30]["index_loss"].get<double>());

  // What the run leaves is a model that reads, with the weights of its depths.
  const model::Transformer loaded = load_model(folder_ / "out/checkpoints/step-00000070");
  EXPECT_EQ(loaded.config().mtp_depths, 2);
}

// Recompute is no part of what decides the curve: a run may go on with another choice.
TEST_F(TrainSharing, RecomputeMayChangeWithinARun) {
  json whole = run_of("whole"), parts = run_of("parts");
  whole["health_every"] = parts["health_every"] = 2;
  whole["validate_every"] = parts["validate_every"] = 6;
  EXPECT_TRUE(run(whole, Begin::kNew));
  parts["recompute"] = {"norms", "mlp", "query_up_projection"};
  EXPECT_FALSE(run(parts, Begin::kNew, 4));
  parts["recompute"] = {"full"};
  EXPECT_FALSE(run(parts, Begin::kResume, 7));  // into the sparse stage
  parts["reuse_checkpoint_topk"] = true;
  EXPECT_TRUE(run(parts, Begin::kResume));
  EXPECT_EQ(curve("parts"), curve("whole"));
  EXPECT_EQ(read(folder_ / "whole/checkpoints/step-00000013/model.safetensors"),
            read(folder_ / "parts/checkpoints/step-00000013/model.safetensors"));
}

TEST_F(TrainSharing, HealthIsMeasuredEverySoManySteps) {
  json config = run_of("out");
  config["health_every"] = 2;
  EXPECT_TRUE(run(config, Begin::kNew));
  std::vector<json> healths;
  for (const json& line : curve("out")) {
    if (line.contains("health")) healths.push_back(line);
  }
  // Steps 8 and 10 to 12 are even and not dense.
  ASSERT_EQ(healths.size(), 3u);
  for (std::size_t i = 0; i < healths.size(); ++i) {
    EXPECT_EQ(healths[i]["step"], 8 + 2 * static_cast<int>(i));
    const json& health = healths[i]["health"];
    ASSERT_EQ(health["attention_mass_caught"].size(), 4u);
    for (const json& mass : health["attention_mass_caught"]) {
      EXPECT_GT(mass.get<double>(), 0.1);
      EXPECT_LT(mass.get<double>(), 1);
    }
    ASSERT_EQ(health.contains("selection_overlap"), i > 0);
    if (i == 0) continue;
    const json& kept = health["selection_overlap"];
    ASSERT_EQ(kept.size(), 4u);
    for (const std::size_t n : {0, 2}) {
      EXPECT_GT(kept[n].get<double>(), 0.2);
      EXPECT_LE(kept[n].get<double>(), 1);
    }
    for (const std::size_t n : {1, 3}) EXPECT_TRUE(kept[n].is_null());
  }
}

// Overlap by hand: 1 for the same weights, less where the indexer is another.
TEST_F(TrainSharing, OverlapComparesSelections) {
  const TrainConfig config = read_train_config(run_of("out"));
  const TextData data(config.data);
  model::Transformer model(config.model, DType::kF32, 3);
  IndexHealth health;
  EXPECT_TRUE(health.measure(model, data).selection_overlap.empty());
  EXPECT_EQ(health.measure(model, data).selection_overlap, (std::vector<double>{1, 1}));
  const Tensor& weight =
      model.parameters().find("model.layers.2.self_attn.indexer.wq_b.weight")->value;
  for (std::int64_t i = 0; i < weight.elements(); ++i) weight.as<float>()[i] *= i % 2 == 0 ? -1 : 3;
  const std::vector<double> overlap = health.measure(model, data).selection_overlap;
  EXPECT_EQ(overlap[0], 1);
  EXPECT_LT(overlap[1], 1);
  EXPECT_GT(overlap[1], 0);
}

// L1: the cut into micro-batches changes no loss, those of the depths included.
TEST_F(TrainSharing, L1LossesDoNotDependOnMicroBatches) {
  json object = run_of("out");
  object["data"]["batch_sequences"] = 4;
  const TrainConfig config = read_train_config(object);
  const TextData data(config.data);
  std::vector<StepLosses> all;
  std::vector<std::vector<double>> gradients;
  for (const std::int64_t micro : {4, 2, 1}) {
    TrainConfig cut = config;
    cut.data.micro_batch_sequences = micro;
    model::Transformer model(cut.model, DType::kF32, 3);
    all.push_back(compute_gradients(model, data, cut, 10));
    gradients.emplace_back();
    for (const auto& p : model.parameters().all()) {
      for (std::int64_t i = 0; i < p->grad.elements(); ++i) {
        gradients.back().push_back(static_cast<double>(p->grad.as<float>()[i]));
      }
    }
  }
  for (const std::size_t cut : {1, 2}) {
    ASSERT_EQ(all[cut].mtp_loss.size(), 2u);
    ASSERT_EQ(all[cut].index_kl.size(), 3u);
    for (const std::size_t d : {0, 1}) {
      EXPECT_NEAR(all[cut].mtp_loss[d], all[0].mtp_loss[d], 1e-6 * all[0].mtp_loss[d]);
    }
    for (const std::size_t n : {0, 1, 2}) {
      EXPECT_NEAR(all[cut].index_kl[n], all[0].index_kl[n], 1e-6 * all[0].index_kl[n]);
    }
    // Sums over 96 rows, ordered otherwise: 96 * 2^-24 of the sum of their magnitudes, which stays
    // below 10 times the largest element.
    double largest = 0;
    for (const double g : gradients[0]) largest = std::max(largest, std::abs(g));
    for (std::size_t i = 0; i < gradients[0].size(); ++i) {
      ASSERT_NEAR(gradients[cut][i], gradients[0][i], 2 * 96 * 0x1p-24 * 10 * largest);
    }
  }
}

// E2: a checkpoint with index weights on the layers that compute, and on no other, loads; one that
// lacks those of such a layer, or has some of another, does not.
TEST_F(TrainSharing, E2CheckpointsHoldIndexWeightsOfComputingLayersAlone) {
  EXPECT_FALSE(run(run_of("out"), Begin::kNew, 2));
  const std::filesystem::path file = folder_ / "out/checkpoints/step-00000002/model.safetensors";
  const model::SafetensorsFile saved(file);
  std::vector<Array> arrays;
  std::vector<model::NamedTensor> tensors;
  for (const model::SafetensorsEntry& entry : saved.entries()) {
    const bool index = entry.name.find(".indexer.") != std::string::npos;
    const bool owner = entry.name.find("layers.0.") != std::string::npos ||
                       entry.name.find("layers.2.") != std::string::npos ||
                       entry.name.find("layers.4.") != std::string::npos;
    EXPECT_TRUE(!index || owner) << entry.name;
    arrays.push_back(saved.read(entry.name));
    tensors.push_back({entry.name, arrays.back()});
  }
  model::Transformer model(read_train_config(run_of("out")).model, DType::kF32, 1);
  load_parameters(file, model.parameters());

  const auto refused = [&](const std::vector<model::NamedTensor>& list) {
    model::write_safetensors(folder_ / "changed.safetensors", list);
    return error_of(Status::kCorrupt,
                    [&] { load_parameters(folder_ / "changed.safetensors", model.parameters()); });
  };
  const std::string wk = "model.layers.2.self_attn.indexer.wk.weight";
  std::vector<model::NamedTensor> fewer = tensors, more = tensors;
  std::erase_if(fewer, [&](const model::NamedTensor& t) { return t.name == wk; });
  ASSERT_EQ(fewer.size() + 1, tensors.size());
  EXPECT_TRUE(has(refused(fewer), wk));
  const std::string other = "model.layers.1.self_attn.indexer.wk.weight";
  more.push_back({other, tensors[0].tensor});
  EXPECT_TRUE(has(refused(more), other));
}

// The example of the training guide, with few and short steps.
TEST_F(TrainSharing, TheExampleTrains) {
  const std::filesystem::path source = WINNOW_SOURCE_DIR;
  json config = read_config_file(source / "examples/mtp_sharing.json");
  config["data"]["path"] = source / "data/kjv.txt";
  config["data"]["context"] = 160;
  config["data"]["validation_windows"] = 1;
  config["output"] = folder_ / "out";
  config["health_every"] = 2;
  for (json& stage : config["stages"]) {
    stage["steps"] = 2;
    stage["warmup_steps"] = 1;
  }
  EXPECT_TRUE(run(config, Begin::kNew));
  const std::vector<json> lines = curve("out");
  EXPECT_EQ(lines.back()["health"]["attention_mass_caught"].size(), 8u);
  EXPECT_EQ(lines[0]["mtp_loss"].size(), 2u);
}

}  // namespace
}  // namespace winnow::train
