// The examples of the training guide, with shorter sequences and fewer steps: each does what the
// guide says of it.
#include <algorithm>
#include <cmath>

#include "model/safetensors.h"
#include "tests/tiny_models.h"
#include "tests/train_fixture.h"

namespace winnow::train {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

class Examples : public TrainTest {
 protected:
  static json read_example(const std::string& name) {
    return read_config_file(fs::path(WINNOW_SOURCE_DIR) / "examples" / name);
  }
  // Paths into the test's folder, sequences and stages as long as a test can wait for. What is left
  // is the example's: model, stages, coefficients, options.
  json shrunk(const std::string& name, const std::string& output,
              const std::vector<std::int64_t>& steps) const {
    json run = read_example(name);
    run["data"]["path"] = fs::path(WINNOW_SOURCE_DIR) / "data/kjv.txt";
    run["data"]["context"] = 192;
    run["data"]["validation_windows"] = 3;
    run["model"]["attention"]["indexer"]["topk"] = 24;
    run["output"] = folder_ / output;
    run["validate_every"] = run["checkpoint_every"] = run["health_every"] = 10;
    EXPECT_EQ(run["stages"].size(), steps.size());
    for (std::size_t i = 0; i < steps.size(); ++i) {
      run["stages"][i]["steps"] = steps[i];
      run["stages"][i]["warmup_steps"] = std::min<std::int64_t>(4, steps[i]);
    }
    return run;
  }
  // The values of `key` in the lines of a stage that have it.
  std::vector<double> values(const std::string& output, const std::string& stage,
                             const std::string& key) const {
    std::vector<double> all;
    for (const json& line : curve(output)) {
      if (line["stage"] == stage && line.contains(key)) all.push_back(line[key].get<double>());
    }
    return all;
  }
  static double mean(std::vector<double>::const_iterator begin, std::size_t count) {
    double sum = 0;
    for (std::size_t i = 0; i < count; ++i) sum += *(begin + static_cast<std::ptrdiff_t>(i));
    return sum / static_cast<double>(count);
  }
  // The mean of the last fifth lies below that of the first by this share at least.
  static void expect_falls(const std::vector<double>& values, double share) {
    const std::size_t fifth = values.size() / 5;
    ASSERT_GE(fifth, 2u);
    const double first = mean(values.begin(), fifth);
    const double last = mean(values.end() - static_cast<std::ptrdiff_t>(fifth), fifth);
    EXPECT_LT(last, (1 - share) * first);
  }
  json validation_at(const std::string& output, std::int64_t step) const {
    for (const json& line : curve(output)) {
      if (line["step"] == step && line.contains("validation")) return line["validation"];
    }
    ADD_FAILURE() << "no validation at step " << step;
    return {};
  }
  // Share of the dense attention that the selections catch, mean over layers, by measurement.
  std::vector<double> mass_caught(const std::string& output, const std::string& stage) const {
    std::vector<double> all;
    for (const json& line : curve(output)) {
      if (line["stage"] != stage || !line.contains("health")) continue;
      const auto masses = line["health"]["attention_mass_caught"].get<std::vector<double>>();
      all.push_back(mean(masses.begin(), masses.size()));
    }
    return all;
  }
};

TEST_F(Examples, TrainFromScratch) {
  EXPECT_TRUE(run(shrunk("demo.json", "out", {80, 40, 30}), Begin::kNew));
  expect_falls(values("out", "dense", "loss"), 0.2);
  expect_falls(values("out", "indexer warm-up", "index_loss"), 0.1);
  EXPECT_TRUE(values("out", "indexer warm-up", "loss").empty());
  expect_falls(values("out", "sparse", "loss"), 0);
  EXPECT_EQ(validation_at("out", 80)["attention"], "dense");
  EXPECT_EQ(validation_at("out", 150)["attention"], "sparse");
  EXPECT_LT(validation_at("out", 150)["bits_per_byte"], validation_at("out", 80)["bits_per_byte"]);
}

// A dense run, then another that takes its weights through a warm-up of new indexers to sparse
// attention, and loses nothing on the way.
TEST_F(Examples, AdaptADenseCheckpoint) {
  EXPECT_EQ(read_example("adapt_dense.json")["initial_checkpoint"],
            read_example("dense.json")["output"]);
  EXPECT_EQ(read_example("adapt_dense.json")["model"], read_example("dense.json")["model"]);
  EXPECT_TRUE(run(shrunk("dense.json", "dense", {80}), Begin::kNew));
  expect_falls(values("dense", "dense", "loss"), 0.2);
  json adapting = shrunk("adapt_dense.json", "adapted", {60, 40});
  adapting["initial_checkpoint"] = folder_ / "dense";
  EXPECT_FALSE(run(adapting, Begin::kNew, 60));

  // What came in is what the dense run left, and the warm-up moves nothing but the indexers.
  const json before = validation_at("adapted", 0);
  EXPECT_EQ(before["bits_per_byte"], validation_at("dense", 80)["bits_per_byte"]);
  model::Transformer dense = load_model(folder_ / "dense/checkpoints/step-00000080");
  model::Transformer warm = load_model(folder_ / "adapted/checkpoints/step-00000060");
  for (const auto& p : dense.parameters().all()) {
    const auto now = model::numbers(warm.parameters().find(p->name)->value);
    EXPECT_EQ(now == model::numbers(p->value), !p->indexer) << p->name;
  }
  expect_falls(values("adapted", "indexer warm-up", "index_loss"), 0.2);
  const std::vector<double> caught = mass_caught("adapted", "indexer warm-up");
  EXPECT_GT(caught.back(), caught.front());

  EXPECT_TRUE(run(adapting, Begin::kResume));
  const json after = validation_at("adapted", 100);
  EXPECT_EQ(before["attention"], "dense");
  EXPECT_EQ(after["attention"], "sparse");
  EXPECT_LT(after["bits_per_byte"], before["bits_per_byte"]);
}

TEST_F(Examples, PackedDocuments) {
  json config = shrunk("packed_documents.json", "out", {60, 40, 30});
  config["data"]["context"] = 384;  // of chapters of a few thousand bytes
  EXPECT_TRUE(run(config, Begin::kNew));
  expect_falls(values("out", "dense", "loss"), 0.2);
  expect_falls(values("out", "indexer warm-up", "index_loss"), 0.1);
  expect_falls(values("out", "sparse", "loss"), 0);
  double tokens = 0;
  const std::vector<double> of_dense = values("out", "dense", "tokens");
  for (const double t : of_dense) tokens += t;
  const double rows = 60.0 * 384 * config["data"]["batch_sequences"].get<double>();
  EXPECT_GT(tokens, 0.9 * rows);  // hardly a row is padding
  EXPECT_LE(tokens, rows);
}

TEST_F(Examples, MultiTokenPredictionWithSharing) {
  EXPECT_TRUE(run(shrunk("mtp_sharing.json", "out", {40, 30, 20}), Begin::kNew));
  expect_falls(values("out", "dense", "loss"), 0.2);
  expect_falls(values("out", "indexer warm-up", "index_loss"), 0.1);
  std::vector<std::vector<double>> depths(2);
  for (const json& line : curve("out")) {
    if (line["stage"] != "dense" || !line.contains("mtp_loss")) continue;
    for (const std::size_t d : {0, 1}) depths[d].push_back(line["mtp_loss"][d].get<double>());
  }
  for (const std::vector<double>& losses : depths) expect_falls(losses, 0.2);
}

}  // namespace
}  // namespace winnow::train
