// Configurations of training: what is read comes back, what is wrong is named with key, rule and
// value.
#include <cmath>
#include <functional>

#include "tests/files.h"
#include "tests/tiny_run.h"
#include "train/config.h"

namespace winnow::train {
namespace {

using nlohmann::json;

json run() { return tiny_run("text.txt", "out"); }

TEST(TrainConfig, ReadsTheThreeStages) {
  const TrainConfig c = read_train_config(run());
  ASSERT_EQ(c.stages.size(), 3u);
  EXPECT_EQ(c.stages[0].attention, attention::AttentionMode::kDense);
  EXPECT_EQ(c.stages[1].attention, attention::AttentionMode::kWarmup);
  EXPECT_EQ(c.stages[2].attention, attention::AttentionMode::kSparse);
  EXPECT_EQ(c.stages[2].index_loss_coefficient, 0.5);
  EXPECT_EQ(c.stages[1].final_learning_rate, 0.01);  // default: constant
  EXPECT_EQ(c.data.micro_batch_sequences, 2);        // default: the whole step
  EXPECT_EQ(total_steps(c), 13);
  EXPECT_EQ(c.seed, 7u);
}

TEST(TrainConfig, DepthsAreTrainedUnlessTheStageSaysOtherwise) {
  json j = run();
  EXPECT_EQ(read_train_config(j).stages[0].mtp_loss_coefficient, 0);
  j["model"]["mtp_depths"] = 2;
  j["stages"][2]["mtp_loss_coefficient"] = 0.3;
  j["recompute"] = {"mlp", "core_attention"};
  j["reuse_checkpoint_topk"] = true;
  const TrainConfig c = read_train_config(j);
  EXPECT_EQ(c.stages[0].mtp_loss_coefficient, 0.1);
  EXPECT_EQ(c.stages[1].mtp_loss_coefficient, 0);
  EXPECT_EQ(c.stages[2].mtp_loss_coefficient, 0.3);
  EXPECT_TRUE(c.recompute.mlp && c.recompute.core_attention && c.recompute.reuse_checkpoint_topk);
  EXPECT_FALSE(c.recompute.full || c.recompute.norms || c.recompute.query_up_projection);
  const json written = write_train_config(c);
  EXPECT_EQ(write_train_config(read_train_config(written)), written);
  TrainConfig other = c;
  other.recompute = {};
  EXPECT_EQ(first_difference(c, other), "");
  other.stages[2].mtp_loss_coefficient = 0.2;
  EXPECT_EQ(first_difference(c, other), "stages[2].mtp_loss_coefficient");
}

// A plan needs no text, no folder and no rates, and may have any vocabulary.
TEST(TrainConfig, APlanMayLeaveOutWhatOnlyARunNeeds) {
  json changed = run();
  changed.erase("output");
  changed["data"].erase("path");
  changed["model"]["vocab_size"] = 300;
  changed["plan"] = {{"pp", 2}};
  for (json& stage : changed["stages"]) {
    stage.erase("steps");
    stage.erase("learning_rate");
    stage.erase("final_learning_rate");
    stage.erase("warmup_steps");
  }
  Rules plan(Rules::Mode::kCollect), all(Rules::Mode::kCollect);
  EXPECT_EQ(read_train_config(changed, Purpose::kPlan, plan).stages.size(), 3u);
  EXPECT_TRUE(plan.kept());
  read_train_config(changed, Purpose::kRun, all);
  EXPECT_EQ(all.violations().size(), 4u + 2 * 3);
}

// What lies inside an object that is not there is not missed, too.
TEST(TrainConfig, AMissingObjectIsSaidOnce) {
  const auto broken = [](const json& object) {
    Rules all(Rules::Mode::kCollect);
    read_train_config(object, Purpose::kRun, all);
    std::string texts;
    for (const Violation& v : all.violations()) texts += v.text() + "\n";
    return texts;
  };
  for (const char* key : {"model", "data", "stages"}) {
    json changed = run();
    changed.erase(key);
    EXPECT_EQ(broken(changed), fmt::format("{} is required and has no default\n", key));
  }
  json changed = run();
  changed["model"] = 3;
  EXPECT_EQ(broken(changed), "model must be an object, got 3\n");
  EXPECT_EQ(broken(json::array({1})), "the configuration must be a JSON object, got [...]\n");
}

TEST(TrainConfig, WrittenAndReadAgainIsTheSame) {
  const TrainConfig c = read_train_config(run());
  const json written = write_train_config(c);
  EXPECT_EQ(write_train_config(read_train_config(written)), written);
  EXPECT_EQ(first_difference(c, read_train_config(written)), "");
}

TEST(TrainConfig, DocumentsHaveDefaultsAndComeBack) {
  json j = run();
  EXPECT_FALSE(read_train_config(j).data.documents);
  j["data"]["documents"] = json::object();
  TrainConfig c = read_train_config(j);
  ASSERT_TRUE(c.data.documents);
  EXPECT_EQ(c.data.documents->separator, "");
  EXPECT_EQ(c.data.documents->max_documents, 24);  // default: a document of one row each
  EXPECT_EQ(c.data.documents->length_multiple, 1);
  c.data.documents = {"\n\n", 5, 8};
  const json written = write_train_config(c);
  EXPECT_EQ(write_train_config(read_train_config(written)), written);
  TrainConfig other = c;
  other.data.documents->separator = "\n";
  EXPECT_EQ(first_difference(c, other), "data.documents.separator");
  other.data.documents.reset();
  EXPECT_EQ(first_difference(c, other), "data.documents");
  EXPECT_EQ(first_difference(other, c), "data.documents");
}

struct Wrong {
  const char* name;
  std::function<void(json&)> change;
  const char* message;
};

const std::vector<Wrong> kWrong = {
    {"unknown_key", [](json& j) { j["checkpoint_evry"] = 3; }, "did you mean checkpoint_every?"},
    {"unknown_data_key", [](json& j) { j["data"]["contxt"] = 3; }, "did you mean data.context?"},
    {"unknown_stage_key", [](json& j) { j["stages"][1]["step"] = 3; },
     "did you mean stages[1].steps?"},
    {"unknown_optimizer_key", [](json& j) { j["optimizer"]["beta3"] = 3; },
     "did you mean optimizer.beta"},
    {"no_model", [](json& j) { j.erase("model"); }, "model is required"},
    {"no_data", [](json& j) { j.erase("data"); }, "data is required"},
    {"unknown_documents_key",
     [](json& j) {
       j["data"]["documents"] = {{"seperator", "x"}};
     },
     "did you mean data.documents.separator?"},
    {"separator_number",
     [](json& j) {
       j["data"]["documents"] = {{"separator", 1}};
     },
     "data.documents.separator must be a string, got 1"},
    {"no_documents",
     [](json& j) {
       j["data"]["documents"] = {{"max_documents", 0}};
     },
     "data.documents.max_documents must be from 1 to"},
    {"length_multiple",
     [](json& j) {
       j["data"]["documents"] = {{"length_multiple", 16}};
     },
     "data.documents.length_multiple must divide data.context = 24, got 16"},
    {"length_multiple_0",
     [](json& j) {
       j["data"]["documents"] = {{"length_multiple", 0}};
     },
     "data.documents.length_multiple must be from 1 to"},
    {"documents_list", [](json& j) { j["data"]["documents"] = {1}; },
     "data.documents must be an object"},
    {"no_path", [](json& j) { j["data"].erase("path"); }, "data.path is required"},
    {"no_context", [](json& j) { j["data"].erase("context"); }, "data.context is required"},
    {"no_stages", [](json& j) { j.erase("stages"); }, "stages is required"},
    {"no_output", [](json& j) { j.erase("output"); }, "output is required"},
    {"no_steps", [](json& j) { j["stages"][0].erase("steps"); }, "stages[0].steps is required"},
    {"empty_stages", [](json& j) { j["stages"] = json::array(); }, "at least one stage"},
    {"stages_object", [](json& j) { j["stages"] = json::object(); }, "must be a list"},
    {"stage_text", [](json& j) { j["stages"][0] = "dense"; }, "stages[0] must be a JSON object"},
    {"data_list", [](json& j) { j["data"] = json::array(); }, "data must be an object"},
    {"nesting_without_end",
     [](json& j) {
       j["data"] = json::parse(std::string(1 << 20, '[') + std::string(1 << 20, ']'));
     },
     "data must be an object, got [...]"},
    {"path_number", [](json& j) { j["data"]["path"] = 3; }, "data.path must be a string, got 3"},
    {"unknown_mode", [](json& j) { j["stages"][0]["attention"] = "sprase"; }, "\"sprase\""},
    {"context_0", [](json& j) { j["data"]["context"] = 0; }, "data.context must be from 1"},
    {"context_text", [](json& j) { j["data"]["context"] = "24"; }, "got \"24\""},
    {"context_fraction", [](json& j) { j["data"]["context"] = 24.5; }, "got 24.5"},
    {"context_beyond_model", [](json& j) { j["data"]["context"] = 65; },
     "at most model.attention.max_positions = 64, got 65"},
    {"fraction_0", [](json& j) { j["data"]["validation_fraction"] = 0; }, "to 0.999999, got 0"},
    {"fraction_1", [](json& j) { j["data"]["validation_fraction"] = 1; }, "to 0.999999, got 1"},
    {"fraction_of_no_file", [](json& j) { j["data"]["validation_fraction"] = 1e-30; },
     "from 1e-06 to"},
    {"batch_0", [](json& j) { j["data"]["batch_sequences"] = 0; },
     "batch_sequences must be from 1"},
    {"micro_3", [](json& j) { j["data"]["micro_batch_sequences"] = 3; }, "must divide"},
    {"micro_0", [](json& j) { j["data"]["micro_batch_sequences"] = 0; }, "must divide"},
    {"batch_of_2^31_rows", [](json& j) { j["data"]["batch_sequences"] = std::int64_t{1} << 28; },
     "at most 2147483647"},
    {"step_of_2^63_tokens",
     [](json& j) {
       j["data"]["context"] = 64;
       j["data"]["batch_sequences"] = std::int64_t{1} << 40;
       j["data"]["micro_batch_sequences"] = 1;
     },
     "data.batch_sequences x data.context must be at most 68719476736, got 1099511627776 x 64"},
    {"beta_1", [](json& j) { j["optimizer"]["beta1"] = 1.0; }, "beta1 must be in [0, 1), got 1"},
    {"epsilon_0", [](json& j) { j["optimizer"]["epsilon"] = 0; }, "epsilon must be positive"},
    {"decay_negative", [](json& j) { j["optimizer"]["weight_decay"] = -1; }, "got -1"},
    {"clip_0", [](json& j) { j["optimizer"]["clip_norm"] = 0; }, "clip_norm must be positive"},
    {"steps_0", [](json& j) { j["stages"][2]["steps"] = 0; }, "stages[2].steps must be from 1"},
    {"steps_overflow",
     [](json& j) {
       for (json& stage : j["stages"]) stage["steps"] = std::int64_t{1} << 40;
     },
     "sum of all steps"},
    {"steps_of_nine_digits", [](json& j) { j["stages"][0]["steps"] = 100'000'000; },
     "the sum of all steps must be at most 99999999, got 1000000"},
    {"rate_0", [](json& j) { j["stages"][0]["learning_rate"] = 0; }, "learning_rate must be pos"},
    {"rate_rises", [](json& j) { j["stages"][0]["final_learning_rate"] = 1; }, "got 1"},
    {"warmup_beyond", [](json& j) { j["stages"][0]["warmup_steps"] = 7; }, "steps = 6, got 7"},
    {"dense_with_index_loss", [](json& j) { j["stages"][0]["index_loss_coefficient"] = 1; },
     "must be 0 in a dense stage"},
    {"warmup_without_index_loss", [](json& j) { j["stages"][1]["index_loss_coefficient"] = 0; },
     "must be positive in a warmup"},
    {"warmup_with_mxfp8",
     [](json& j) {
       j["model"]["attention"]["indexer"]["index_dim"] = 32;
       j["model"]["attention"]["indexer"]["precision"] = "mxfp8";
     },
     "\"mxfp8\" in stages[1] needs the sparse loss"},
    {"recompute_text", [](json& j) { j["recompute"] = "full"; }, "recompute must be a list"},
    {"recompute_unknown", [](json& j) { j["recompute"] = {"mlps"}; }, "got \"mlps\""},
    {"recompute_twice",
     [](json& j) {
       j["recompute"] = {"mlp", "mlp"};
     },
     "got \"mlp\" twice"},
    {"recompute_full_and_part",
     [](json& j) {
       j["recompute"] = {"full", "mlp"};
     },
     "name it alone"},
    {"reuse_of_nothing", [](json& j) { j["reuse_checkpoint_topk"] = true; },
     "reuse_checkpoint_topk needs recompute"},
    {"core_with_latent_kv",
     [](json& j) {
       j["model"]["mtp_depths"] = 2;
       j["model"]["mtp_shared_components"] = {"latent_kv"};
       j["recompute"] = {"core_attention"};
     },
     "must not be combined with mtp_shared_components"},
    {"mtp_loss_without_depths", [](json& j) { j["stages"][0]["mtp_loss_coefficient"] = 0.1; },
     "must be 0 for a model without mtp_depths"},
    {"mtp_loss_in_a_warmup",
     [](json& j) {
       j["model"]["mtp_depths"] = 1;
       j["stages"][1]["mtp_loss_coefficient"] = 0.1;
     },
     "must be 0 in a warmup stage"},
    {"depths_beyond_the_context", [](json& j) { j["model"]["mtp_depths"] = 24; },
     "data.context must be above model.mtp_depths = 24"},
    {"health_negative", [](json& j) { j["health_every"] = -1; }, "health_every must be from 0"},
    {"checkpoint_negative", [](json& j) { j["checkpoint_every"] = -1; }, "got -1"},
    {"seed_negative", [](json& j) { j["seed"] = -1; }, "seed must be from 0"},
    {"initial_is_output",
     [](json& j) {
       j["initial_checkpoint"] = fmt::format("./{}/", j["output"].get<std::string>());
     },
     "initial_checkpoint must lie outside output"},
    {"initial_in_output",
     [](json& j) {
       j["initial_checkpoint"] = j["output"].get<std::string>() + "/checkpoints/step-00000004";
     },
     "initial_checkpoint must lie outside output"},
    {"output_empty", [](json& j) { j["output"] = ""; }, "output must name a folder"},
    {"plan", [](json& j) { j["plan"] = json::object(); }, "plan is read by winnow plan alone"},
    {"vocabulary", [](json& j) { j["model"]["vocab_size"] = 300; }, "must be 256"},
};

TEST(TrainConfig, WhatIsWrongIsNamedWithKeyRuleAndValue) {
  for (const Wrong& wrong : kWrong) {
    SCOPED_TRACE(wrong.name);
    json changed = run();
    wrong.change(changed);
    const std::string message =
        error_of(Status::kInvalidArgument, [&] { read_train_config(changed); });
    EXPECT_TRUE(has(message, wrong.message));
    EXPECT_EQ(message.rfind("[config] ", 0), 0u);
  }
}

TEST(TrainConfig, TheDifferenceThatMattersIsNamed) {
  const TrainConfig a = read_train_config(run());
  const auto difference = [&](const std::function<void(json&)>& change) {
    json changed = run();
    change(changed);
    return first_difference(a, read_train_config(changed));
  };
  EXPECT_EQ(difference([](json& j) { j["stages"][1]["steps"] = 4; }), "stages[1].steps");
  EXPECT_EQ(difference([](json& j) { j["stages"].erase(2); }), "stages");
  EXPECT_EQ(difference([](json& j) { j["seed"] = 8; }), "seed");
  EXPECT_EQ(difference([](json& j) { j["data"]["context"] = 8; }), "data.context");
  EXPECT_EQ(difference([](json& j) { j["model"]["attention"]["indexer"]["topk"] = 5; }),
            "model.attention.indexer.topk");
  EXPECT_EQ(difference([](json& j) { j["optimizer"]["beta1"] = 0.8; }), "optimizer.beta1");
  // These decide nothing about the loss curve.
  EXPECT_EQ(difference([](json& j) { j["output"] = "elsewhere"; }), "");
  EXPECT_EQ(difference([](json& j) { j["checkpoint_every"] = 5; }), "");
}

// What the demo promises (README).
TEST(TrainConfig, TheDemoIsWhatItSays) {
  const TrainConfig c = read_train_config_file(WINNOW_SOURCE_DIR "/examples/demo.json");
  EXPECT_GE(c.data.context, 1024);
  EXPECT_LE(8 * c.model.attention.indexer.topk, c.data.context);
  EXPECT_GE(c.model.attention.indexer.index_heads, 16);
  EXPECT_GE(model::parameter_count(c.model), 1'000'000);
  EXPECT_LE(model::parameter_count(c.model), 2'000'000);
}

class TrainConfigFile : public FolderTest {};

TEST_F(TrainConfigFile, ErrorsNameTheFile) {
  const auto refused = [&](const std::string& text) {
    const auto path = write("c.json", text);
    return error_of(Status::kInvalidArgument, [&] { read_train_config_file(path); });
  };
  EXPECT_TRUE(has(refused("{\n\"model\": 3,\n]"), "breaks in line 3"));
  EXPECT_TRUE(has(refused(""), "breaks in line 1"));
  EXPECT_TRUE(has(refused("[]"), "c.json: the configuration must be a JSON object"));
  EXPECT_TRUE(has(refused("{}"), "c.json: model is required"));
  EXPECT_TRUE(has(error_of(Status::kIo, [&] { read_train_config_file(folder_ / "no.json"); }),
                  "No such file"));
  EXPECT_EQ(first_difference(read_train_config_file(write("c.json", run().dump())),
                             read_train_config(run())),
            "");
}

}  // namespace
}  // namespace winnow::train
