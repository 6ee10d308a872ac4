// Runs that begin with the weights of another run's checkpoint: adapting a dense model.
#include "train/initial_weights.h"

#include <cstring>
#include <functional>

#include "model/safetensors.h"
#include "tests/tiny_models.h"
#include "tests/train_fixture.h"

namespace winnow::train {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

class InitialWeightsTest : public TrainTest {
 protected:
  json run_of(const std::string& output) const { return tiny_run(text_, folder_ / output); }
  json dense_run() const {
    json run = run_of("dense");
    run["stages"].erase(2);
    run["stages"].erase(1);
    return run;
  }
  // Warm-up and sparse stage, on the dense run's weights.
  json adapting_run() const {
    json run = run_of("adapted");
    run["stages"].erase(0);
    run["initial_checkpoint"] = folder_ / "dense";
    return run;
  }
  // The message with which another model refuses the checkpoint of the dense run.
  std::string refused(const std::function<void(json&)>& change) const {
    json run = adapting_run();
    change(run["model"]);
    model::Transformer model(read_train_config(run).model, DType::kF32, 1);
    return error_of(Status::kInvalidArgument,
                    [&] { load_initial_weights(folder_ / "dense", model); });
  }
};

bool same(const Tensor& a, const Tensor& b) {
  return a.elements() == b.elements() &&
         std::memcmp(a.data, b.data, static_cast<std::size_t>(a.elements()) * sizeof(float)) == 0;
}

TEST_F(InitialWeightsTest, AWarmUpChangesTheIndexersAlone) {
  EXPECT_TRUE(run(dense_run(), Begin::kNew));
  json adapting = adapting_run();
  adapting["seed"] = 8;
  adapting["stages"].erase(1);
  EXPECT_TRUE(run(adapting, Begin::kNew));
  model::Transformer dense = load_model(folder_ / "dense/checkpoints/step-00000006");
  model::Transformer adapted = load_model(folder_ / "adapted/checkpoints/step-00000003");
  for (const auto& p : dense.parameters().all()) {
    const Tensor& now = adapted.parameters().find(p->name)->value;
    EXPECT_EQ(same(now, p->value), !p->indexer) << p->name;
  }
  // Before it the model reads as the dense run left it.
  const std::vector<json> lines = curve("adapted");
  ASSERT_FALSE(lines.empty());
  EXPECT_EQ(lines[0]["step"], 0);
  EXPECT_EQ(lines[0]["validation"]["attention"], "dense");
  const TextData data(read_train_config(adapting).data);
  EXPECT_EQ(lines[0]["validation"]["bits_per_byte"],
            evaluate(dense, data, attention::AttentionMode::kDense, 2, false).bits_per_byte);
}

TEST_F(InitialWeightsTest, MessagesSayWhatIsNew) {
  EXPECT_TRUE(run(dense_run(), Begin::kNew));
  Trainer trainer(read_train_config(adapting_run()), Begin::kNew);
  std::string messages;
  Observer observer;
  observer.on_message = [&](const std::string& text) { messages += text + "\n"; };
  EXPECT_TRUE(trainer.run(observer));
  EXPECT_TRUE(has(messages, "the weights are those of"));
  EXPECT_TRUE(has(messages, "step-00000006; 2 of 2 indexers are new"));
  EXPECT_TRUE(has(messages, "step 0: "));
}

// The seed makes what the dense model lacks, and the indexer may have any shape.
TEST_F(InitialWeightsTest, IndexersOfADenseRunAreNewInAnyShape) {
  EXPECT_TRUE(run(dense_run(), Begin::kNew));
  json run = adapting_run();
  run["model"]["attention"]["indexer"]["index_heads"] = 5;
  run["model"]["attention"]["indexer"]["topk"] = 4;
  run["model"]["attention"]["max_positions"] = 128;
  run["model"]["topk_freq"] = 2;  // layer 2 owns none
  const model::ModelConfig config = read_train_config(run).model;
  model::Transformer model(config, DType::kF32, 9), fresh(config, DType::kF32, 9);
  model::Transformer dense = load_model(folder_ / "dense/checkpoints/step-00000006");
  EXPECT_EQ(load_initial_weights(folder_ / "dense", model).new_indexers, 1);
  for (const auto& p : model.parameters().all()) {
    EXPECT_TRUE(same(p->value, (p->indexer ? fresh : dense).parameters().find(p->name)->value))
        << p->name;
  }
}

TEST_F(InitialWeightsTest, TrainedIndexersAreTaken) {
  EXPECT_FALSE(run(run_of("sparse"), Begin::kNew, 8));  // inside the warm-up
  model::Transformer trained = load_model(folder_ / "sparse/checkpoints/step-00000008");
  model::Transformer model(trained.config(), DType::kF32, 9);
  EXPECT_EQ(load_initial_weights(folder_ / "sparse", model).new_indexers, 0);
  for (const auto& p : model.parameters().all()) {
    EXPECT_TRUE(same(p->value, trained.parameters().find(p->name)->value)) << p->name;
  }
  // Their shapes and conventions count now.
  model::ModelConfig other = trained.config();
  other.attention.indexer.index_heads = 5;
  model::Transformer wide(other, DType::kF32, 1);
  EXPECT_TRUE(has(
      error_of(Status::kInvalidArgument, [&] { load_initial_weights(folder_ / "sparse", wide); }),
      "indexer"));
  other = trained.config();
  other.attention.indexer.relu = false;
  model::Transformer linear(other, DType::kF32, 1);
  EXPECT_TRUE(has(
      error_of(Status::kInvalidArgument, [&] { load_initial_weights(folder_ / "sparse", linear); }),
      "model.attention.indexer.relu differs"));
}

// A model of another origin: config.json and model.safetensors, with no word of indexers.
TEST_F(InitialWeightsTest, ACheckpointWithoutIndexersServes) {
  model::Transformer source(read_train_config(dense_run()).model, DType::kF32, 5);
  std::vector<model::NamedTensor> tensors;
  for (const auto& p : source.parameters().all()) {
    if (!p->indexer) tensors.push_back({p->name, p->value});
  }
  fs::create_directories(folder_ / "foreign");
  write("foreign/config.json", model::write_model_config(source.config()).dump());
  model::write_safetensors(folder_ / "foreign/model.safetensors", tensors);
  model::Transformer model(source.config(), DType::kF32, 9);
  EXPECT_EQ(load_initial_weights(folder_ / "foreign", model).new_indexers, 2);
  EXPECT_TRUE(same(model.parameters().all()[0]->value, source.parameters().all()[0]->value));

  // Half an indexer is none.
  for (const auto& p : source.parameters().all()) {
    if (p->name == "model.layers.1.self_attn.indexer.wk.weight")
      tensors.push_back({p->name, p->value});
  }
  model::write_safetensors(folder_ / "foreign/model.safetensors", tensors);
  EXPECT_TRUE(has(
      error_of(Status::kInvalidArgument, [&] { load_initial_weights(folder_ / "foreign", model); }),
      "has no tensor model.layers.1.self_attn.indexer."));
}

TEST_F(InitialWeightsTest, WhatDoesNotFitIsNamed) {
  EXPECT_TRUE(run(dense_run(), Begin::kNew));
  EXPECT_TRUE(has(refused([](json& m) { m["layers"] = 3; }),
                  "has no tensor model.layers.2.input_layernorm.weight, which this model needs"));
  EXPECT_TRUE(has(refused([](json& m) { m["layers"] = 1; }), "holds tensor model.layers.1."));
  EXPECT_TRUE(has(refused([](json& m) { m["intermediate_size"] = 20; }),
                  "tensor model.layers.0.mlp.gate_proj.weight of"));
  EXPECT_TRUE(has(refused([](json& m) { m["intermediate_size"] = 20; }),
                  "must be f32 [20, 16] as in this model, got f32 [24, 16]"));
  EXPECT_TRUE(
      has(refused([](json& m) { m["tied_embeddings"] = false; }), "has no tensor lm_head.weight"));
  EXPECT_TRUE(has(refused([](json& m) { m["mtp_depths"] = 1; }),
                  "has no tensor model.layers.2.enorm.weight"));
  EXPECT_TRUE(has(refused([](json& m) { m["attention"]["rope_theta"] = 5000; }),
                  "model.attention.rope_theta differs from"));
  // Nothing of the model has changed by then.
  json changed = adapting_run();
  changed["model"]["attention"]["rope_theta"] = 5000;
  const model::ModelConfig config = read_train_config(changed).model;
  model::Transformer model(config, DType::kF32, 9), untouched(config, DType::kF32, 9);
  error_of(Status::kInvalidArgument, [&] { load_initial_weights(folder_ / "dense", model); });
  for (const auto& p : model.parameters().all()) {
    EXPECT_TRUE(same(p->value, untouched.parameters().find(p->name)->value));
  }
  json nowhere = adapting_run();
  nowhere["initial_checkpoint"] = folder_ / "nowhere";
  EXPECT_TRUE(
      has(error_of(Status::kIo, [&] { run(nowhere, Begin::kNew); }), "there is no checkpoint in"));
}

// What is there already goes once its successor can begin, not before.
TEST_F(InitialWeightsTest, ARunThatCannotBeginLeavesTheOldOne) {
  EXPECT_TRUE(run(dense_run(), Begin::kNew));
  json over = dense_run();
  over["initial_checkpoint"] = folder_ / "nowhere";
  EXPECT_TRUE(
      has(error_of(Status::kIo, [&] { run(over, Begin::kOver); }), "there is no checkpoint in"));
  EXPECT_TRUE(fs::exists(folder_ / "dense/checkpoints/step-00000006/model.safetensors"));
  EXPECT_EQ(curve("dense").back()["step"], 6);
}

// Where a run begins is part of what it is; what it began with may be gone when it goes on.
TEST_F(InitialWeightsTest, AnAdaptingRunResumesWithoutItsOrigin) {
  EXPECT_TRUE(run(dense_run(), Begin::kNew));
  json parts = adapting_run();
  EXPECT_TRUE(run(parts, Begin::kNew));
  const std::vector<json> whole = curve("adapted");
  parts["output"] = folder_ / "parts";
  EXPECT_FALSE(run(parts, Begin::kNew, 4));
  fs::rename(folder_ / "dense", folder_ / "moved");
  EXPECT_TRUE(run(parts, Begin::kResume));
  EXPECT_EQ(curve("parts"), whole);
  parts["initial_checkpoint"] = folder_ / "moved";
  EXPECT_TRUE(has(error_of(Status::kInvalidArgument, [&] { run(parts, Begin::kResume); }),
                  "initial_checkpoint of the configuration differs"));
}

}  // namespace
}  // namespace winnow::train
