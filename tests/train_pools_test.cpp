// Runs of models whose indexers score pools, and of models without rotary channels: they learn, their
// indexers stand still, they resume, and generation reads their checkpoints.
#include <cmath>

#include "model/generate.h"
#include "tests/train_fixture.h"
#include "winnow/error.h"

namespace winnow::train {
namespace {

using json = nlohmann::json;

class TrainPools : public TrainTest {
 protected:
  json run_of(const std::string& output, bool rotates = true) const {
    json run = tiny_run(text_, (folder_ / output).string());
    json& attention = run["model"]["attention"];
    json& indexer = attention["indexer"];
    indexer["pool_size"] = 3;
    indexer["topk"] = 6;
    if (!rotates) {
      attention["qk_rope_head_dim"] = indexer["rope_dim"] = 0;
      for (const char* key : {"rope_theta", "rope_pairing"}) attention.erase(key);
      indexer.erase("rope_pairing");
    }
    run["stages"] = json::array({run["stages"][0], run["stages"][2]});
    run["stages"][1]["index_loss_coefficient"] = 0;
    run["stages"][1]["steps"] = 12;
    run["checkpoint_every"] = 4;
    run["health_every"] = 4;
    return run;
  }
};

TEST_F(TrainPools, LearnsThroughPoolsWhileTheIndexersStandStill) {
  for (const bool rotates : {true, false}) {
    const json config = run_of(rotates ? "rope" : "nope", rotates);
    ASSERT_TRUE(run(config, Begin::kNew));
    Trainer trainer(read_train_config(config), Begin::kResume);
    model::Transformer fresh(trainer.config().model, DType::kF32, 7);
    for (const auto& p : trainer.model().parameters().all()) {
      const Tensor before = fresh.parameters().find(p->name)->value;
      const bool same = std::equal(p->value.as<float>(), p->value.as<float>() + p->value.elements(),
                                   before.as<float>());
      EXPECT_EQ(same, p->indexer) << p->name;
    }
    double first = 0, last = 0;
    int healths = 0;
    for (const json& line : curve(rotates ? "rope" : "nope")) {
      if (line.contains("loss")) last = line["loss"].get<double>();
      if (first == 0) first = last;
      EXPECT_FALSE(line.contains("index_kl") || line.contains("index_grad_norm"));
      healths += line.contains("health") ? 1 : 0;
    }
    EXPECT_LT(last, first - 0.1);
    EXPECT_GE(healths, 2);
  }
}

TEST_F(TrainPools, AResumedRunIsTheUnbrokenOne) {
  EXPECT_TRUE(run(run_of("whole"), Begin::kNew));
  json parts = run_of("parts");
  EXPECT_FALSE(run(parts, Begin::kNew, 9));
  parts["recompute"] = {"full"};
  EXPECT_TRUE(run(parts, Begin::kResume));
  EXPECT_EQ(curve("parts"), curve("whole"));
  EXPECT_EQ(read(folder_ / "whole/checkpoints/step-00000018/model.safetensors"),
            read(folder_ / "parts/checkpoints/step-00000018/model.safetensors"));
}

// What generation says of each token is what the training forward says of the whole text.
TEST_F(TrainPools, GenerationReadsTheCheckpoint) {
  const json config = run_of("out", false);
  ASSERT_TRUE(run(config, Begin::kNew));
  Trainer trainer(read_train_config(config), Begin::kResume);
  std::vector<std::int32_t> tokens = {'t', 'h', 'e', ' '};
  std::vector<std::vector<float>> reported;
  model::GenerateOptions options;
  options.max_tokens = 40;
  options.on_token = [&](std::int32_t, std::span<const float> row) {
    reported.emplace_back(row.begin(), row.end());
    return true;
  };
  for (const std::int32_t token : generate(trainer.model(), tokens, options)) {
    tokens.push_back(token);
  }
  model::Batch batch;
  batch.tokens = tokens;
  const auto rows = static_cast<std::int64_t>(tokens.size());
  batch.ranges = causal_ranges(rows);
  for (std::int32_t p = 0; p < static_cast<std::int32_t>(rows); ++p) batch.positions.push_back(p);
  const Array training =
      trainer.model().log_probabilities(batch, attention::AttentionMode::kSparse);
  ASSERT_EQ(reported.size(), 40u);
  for (std::size_t t = 0; t < reported.size(); ++t) {
    const float* expected = training.as<float>() + static_cast<std::int64_t>(t + 3) * 256;
    EXPECT_EQ(reported[t], std::vector<float>(expected, expected + 256)) << t;
  }
}

TEST_F(TrainPools, StagesThatWouldTrainTheIndexersAreRefused) {
  const auto refusal = [](const json& config) -> std::string {
    try {
      read_train_config(config);
    } catch (const Error& error) {
      return error.what();
    }
    return "";
  };
  json config = run_of("out");
  EXPECT_EQ(refusal(config), "");
  config["stages"][1]["index_loss_coefficient"] = 0.5;
  EXPECT_EQ(refusal(config),
            "[config] stages[1].index_loss_coefficient must be 0 with attention.indexer.pool_size "
            "= 3: indexers of pools do not learn, got 0.5");
  config["stages"][1]["attention"] = "warmup";
  EXPECT_NE(refusal(config).find("stages[1].attention must not be a warm-up"), std::string::npos);
  config = run_of("out");
  config["recompute"] = {"full"};
  config["reuse_checkpoint_topk"] = true;
  EXPECT_NE(refusal(config).find("reuse_checkpoint_topk must not be combined with "
                                 "attention.indexer.pool_size = 3"),
            std::string::npos);
}

// Without a loss of their own indexers of keys stand still, too: no weight decay reaches them.
TEST_F(TrainPools, AnIndexerWithoutLossIsFrozen) {
  json config = run_of("out");
  config["model"]["attention"]["indexer"].erase("pool_size");
  ASSERT_TRUE(run(config, Begin::kNew));
  Trainer trainer(read_train_config(config), Begin::kResume);
  model::Transformer fresh(trainer.config().model, DType::kF32, 7);
  for (const auto& p : trainer.model().parameters().all()) {
    if (!p->indexer) continue;
    const Tensor before = fresh.parameters().find(p->name)->value;
    EXPECT_TRUE(std::equal(p->value.as<float>(), p->value.as<float>() + p->value.elements(),
                           before.as<float>()))
        << p->name;
  }
}

}  // namespace
}  // namespace winnow::train
