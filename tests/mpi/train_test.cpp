// Runs on 1, 2 and 4 ranks that share the sequences of a step, the rows of a sequence, or both: the
// steps of one process.
#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>
#include <cstring>
#include <nlohmann/json.hpp>
#include <span>

#include "comm/agree.h"
#include "tests/mpi/world.h"
#include "tests/train_fixture.h"

namespace winnow::train {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

// A folder that all ranks see, with a text in it.
class MpiTrain : public testing::Test {
 protected:
  MpiTrain() {
    const std::string name =
        fmt::format("winnow_mpi_{}_{}",
                    testing::UnitTest::GetInstance()->current_test_info()->name(), getpid());
    folder_ = comm::text_of_first(world(), (fs::temp_directory_path() / name).string());
    if (first()) {
      fs::create_directories(folder_);
      std::ofstream(folder_ / "text.txt") << tiny_text(4000);
    }
    world().barrier();
  }
  ~MpiTrain() override {
    world().barrier();
    if (first()) fs::remove_all(folder_);
  }

  static bool first() { return world().rank() == 0; }
  static std::int64_t last() { return world().size() - 1; }

  // Four sequences a step, index sharing, a depth of multi-token prediction.
  json run_of(const std::string& output, std::int64_t cp = 1) const {
    json config = tiny_run(folder_ / "text.txt", folder_ / output);
    config["data"]["batch_sequences"] = 4;
    config["data"]["micro_batch_sequences"] = 1;
    config["data"]["validation_windows"] = 5;
    config["model"]["mtp_depths"] = 1;
    config["parallel"] = {{"cp", cp}};
    return config;
  }

  static std::vector<std::int64_t> context_sizes() {
    std::vector<std::int64_t> all;
    for (const std::int64_t cp : {1, 2, 4}) {
      if (world().size() % cp == 0) all.push_back(cp);
    }
    return all;
  }

  static bool run(const json& config, Begin begin, std::int64_t steps = 1 << 30) {
    Trainer trainer(read_train_config(config), begin, world());
    return run_steps(trainer, steps);
  }
  std::vector<json> curve(const std::string& output) const { return curve_of(folder_ / output); }

  fs::path folder_;
};

std::string group_error(const std::function<void()>& body) {
  try {
    body();
  } catch (const comm::GroupError& error) {
    return error.what();
  }
  ADD_FAILURE() << "no GroupError";
  return "";
}

// What `mine` may differ from `whole`, in elements of a gradient that is a sum over `sums` sums, one
// after the other, of n = 4 x 24 rows in f32. Every row's part has the same bits; what differs is the
// order in which parts are added up. A sum is off from the true one by at most (n - 1) 2^-24 of the
// parts' magnitudes, whatever the order, so two orders differ by twice that at most, and the
// magnitudes add up to less than 20 times the largest element of these gradients.
void expect_near(const Parameter& mine, const Parameter& whole, std::int64_t sums) {
  const auto elements = static_cast<std::size_t>(whole.grad.elements());
  const std::span<const float> a(mine.grad.as<float>(), elements),
      b(whole.grad.as<float>(), elements);
  double largest = 0, worst = 0;
  for (std::size_t i = 0; i < elements; ++i) {
    largest = std::max(largest, std::abs(static_cast<double>(b[i])));
    worst = std::max(worst, std::abs(static_cast<double>(a[i]) - static_cast<double>(b[i])));
  }
  EXPECT_LE(worst, static_cast<double>(sums) * 2 * 96 * 0x1p-24 * 20 * largest) << whole.name;
}

// Sums in double of numbers that have the same bits.
void expect_near(const std::vector<double>& a, const std::vector<double>& b) {
  ASSERT_EQ(a.size(), b.size());
  for (std::size_t i = 0; i < a.size(); ++i) EXPECT_NEAR(a[i], b[i], 1e-12 * std::abs(b[i]));
}

// The kinds: an indexer's loss that is divided by the ranks or the micro-batches (L1, F17), and
// metrics that a rank reduces in another size than others (D4).
TEST_F(MpiTrain, L1D4F17StepsAreThoseOfOneProcess) {
  const TrainConfig alone = for_ranks(read_train_config(run_of("out")), 1);
  const TextData data(alone.data);
  for (const std::int64_t cp : context_sizes()) {
    const TrainConfig config = for_ranks(read_train_config(run_of("out", cp)), world().size());
    const Ranks ranks(world(), config.parallel);
    // Keys' gradients of the blocks above lie between rows and parameters: two sums for each of
    // three calls of a block (two layers, one depth).
    const std::int64_t sums = cp == 1 ? 1 : 6;
    for (const std::int64_t step : {0, 6, 9}) {  // one of each stage
      SCOPED_TRACE(fmt::format("cp {}, step {}", cp, step));
      model::Transformer whole(config.model, DType::kF32, 3), shared(config.model, DType::kF32, 3);
      const StepLosses expected = compute_gradients(whole, data, alone, step);
      const StepLosses losses = compute_gradients(shared, data, config, step, ranks);
      ASSERT_EQ(losses.loss.has_value(), expected.loss.has_value());
      if (losses.loss) expect_near({*losses.loss}, {*expected.loss});
      expect_near(losses.index_kl, expected.index_kl);
      expect_near(losses.mtp_loss, expected.mtp_loss);
      const auto mode = config.stages[stage_position(config, step).stage].attention;
      for (std::size_t k = 0; k < whole.parameters().all().size(); ++k) {
        const Parameter& p = *whole.parameters().all()[k];
        const auto untrained =
            p.indexer ? attention::AttentionMode::kDense : attention::AttentionMode::kWarmup;
        if (mode != untrained) expect_near(*shared.parameters().all()[k], p, sums);
      }
    }
  }
}

TEST_F(MpiTrain, EvaluationIsThatOfOneProcess) {
  for (const std::int64_t cp : context_sizes()) {
    const TrainConfig config = for_ranks(read_train_config(run_of("out", cp)), world().size());
    const Ranks ranks(world(), config.parallel);
    const TextData data(config.data);
    model::Transformer model(config.model, DType::kF32, 3);
    for (const auto mode : {attention::AttentionMode::kDense, attention::AttentionMode::kSparse}) {
      const bool measured = mode == attention::AttentionMode::kSparse;
      const Evaluation alone = evaluate(model, data, mode, 7, measured);
      const Evaluation all = evaluate(model, data, mode, 7, measured, ranks);
      expect_near({all.bits_per_byte}, {alone.bits_per_byte});
      expect_near(all.mtp_bits_per_byte, alone.mtp_bits_per_byte);
      expect_near(all.attention_mass_caught, alone.attention_mass_caught);
      if (cp > 1) continue;  // whole windows: the same bits
      EXPECT_EQ(all.bits_per_byte, alone.bits_per_byte);
      EXPECT_EQ(all.mtp_bits_per_byte, alone.mtp_bits_per_byte);
      EXPECT_EQ(all.attention_mass_caught, alone.attention_mass_caught);
      EXPECT_EQ(all.keys_read_mean, alone.keys_read_mean);
      EXPECT_EQ(all.keys_read_fraction, alone.keys_read_fraction);
    }
  }
}

TEST_F(MpiTrain, HealthIsThatOfOneProcess) {
  for (const std::int64_t cp : context_sizes()) {
    const TrainConfig config = for_ranks(read_train_config(run_of("out", cp)), world().size());
    const Ranks ranks(world(), config.parallel);
    const TextData data(config.data);
    IndexHealth alone, shared;
    for (const std::uint64_t seed : {3, 4}) {  // other weights, other selections
      model::Transformer model(config.model, DType::kF32, seed);
      const Health expected = alone.measure(model, data);
      const Health health = shared.measure(model, data, ranks);
      expect_near(health.attention_mass_caught, expected.attention_mass_caught);
      EXPECT_EQ(health.selection_overlap, expected.selection_overlap);
      EXPECT_EQ(health.selection_overlap.empty(), seed == 3);
    }
  }
}

TEST_F(MpiTrain, TheCurveIsTheSameInEveryRunAndFromAnyCheckpoint) {
  for (const std::int64_t cp : {context_sizes().front(), context_sizes().back()}) {
    const std::string one = fmt::format("whole{}", cp), other = fmt::format("parts{}", cp);
    if (world().size() == 1 && first() && fs::exists(folder_ / one)) break;  // the same twice
    json whole = run_of(one, cp), parts = run_of(other, cp);
    whole["validate_every"] = parts["validate_every"] = 5;
    whole["health_every"] = parts["health_every"] = 3;
    EXPECT_TRUE(run(whole, Begin::kNew));
    EXPECT_FALSE(run(parts, Begin::kNew, 4));     // inside the dense stage
    EXPECT_FALSE(run(parts, Begin::kResume, 4));  // inside the warm-up
    EXPECT_FALSE(run(parts, Begin::kResume, 3));  // inside the sparse stage
    EXPECT_TRUE(run(parts, Begin::kResume));
    if (!first()) continue;
    EXPECT_EQ(curve(other), curve(one));
    EXPECT_EQ(curve(one).size(), 13u + 2u + 2u);  // health: steps 9 and 12, dense is without
    const auto bytes = [&](const std::string& run) {
      std::ifstream file(folder_ / run / "checkpoints/step-00000013/model.safetensors");
      return std::string(std::istreambuf_iterator<char>(file), {});
    };
    EXPECT_GT(bytes(one).size(), 1000u);
    EXPECT_EQ(bytes(one), bytes(other));
  }
}

// Rank 0 alone reads the weights of another run, and all go on from them: the curve repeats, and a
// warm-up leaves what came in on every rank.
TEST_F(MpiTrain, WeightsOfAnotherRunAreThoseOfAllRanks) {
  json dense = run_of("dense");
  dense["stages"].erase(2);
  dense["stages"].erase(1);
  dense["validate_every"] = 6;
  EXPECT_TRUE(run(dense, Begin::kNew));
  json adapting = run_of("adapted", context_sizes().back());
  adapting["stages"].erase(0);
  adapting["seed"] = 8;
  // A place that is rank 0's alone: what others would find there does not matter.
  adapting["initial_checkpoint"] = folder_ / "of_first";
  if (first()) fs::rename(folder_ / "dense", folder_ / "of_first");
  json stopped = adapting;
  stopped["output"] = folder_ / "parts";
  EXPECT_TRUE(run(adapting, Begin::kNew));
  EXPECT_FALSE(run(stopped, Begin::kNew, 3));  // the warm-up
  Trainer trainer(read_train_config(stopped), Begin::kResume, world());
  model::Transformer before = load_model(folder_ / "of_first/checkpoints/step-00000006");
  for (const auto& p : before.parameters().all()) {
    const Tensor was = p->value, now = trainer.model().parameters().find(p->name)->value;
    const auto bytes = static_cast<std::size_t>(now.elements()) * sizeof(float);
    EXPECT_EQ(std::memcmp(now.data, was.data, bytes) == 0, !p->indexer) << p->name;
  }
  EXPECT_TRUE(trainer.run({}));
  if (!first()) return;
  EXPECT_EQ(curve("parts"), curve("adapted"));
  EXPECT_EQ(curve("adapted")[0]["step"], 0);
  const json left = curve("of_first").back(), came = curve("adapted")[0];
  EXPECT_NEAR(came["validation"]["bits_per_byte"].get<double>(),
              left["validation"]["bits_per_byte"].get<double>(), 1e-12);
}

TEST_F(MpiTrain, OneRankIsEnoughToStopAll) {
  Trainer trainer(read_train_config(run_of("out")), Begin::kNew, world());
  Observer observer;
  std::int64_t steps = 0;
  observer.stop = [&] { return ++steps == 3 && world().rank() == last(); };
  EXPECT_FALSE(trainer.run(observer));
  EXPECT_EQ(trainer.state().step, 3);
  if (first()) {
    std::vector<std::string> damaged;
    EXPECT_EQ(newest_checkpoint(folder_ / "out", damaged)->state.step, 3);
  }
}

TEST_F(MpiTrain, RanksThatDoNotFitAreAnErrorThatNamesAllThree) {
  const std::int64_t ranks = world().size();
  json config = run_of("out");
  config["parallel"]["dp"] = 8;
  config["data"]["batch_sequences"] = 8;
  const std::string error = error_of(Status::kInvalidArgument, [&] { run(config, Begin::kNew); });
  EXPECT_TRUE(has(
      error, fmt::format("parallel.cp x parallel.dp = 1 x 8 needs 8 processes, got {}", ranks)));
  config["parallel"] = {{"cp", 3}};
  EXPECT_TRUE(
      has(error_of(Status::kInvalidArgument, [&] { run(config, Begin::kNew); }),
          fmt::format("parallel.cp must divide the {} processes that were started, got 3", ranks)));
  if (ranks == 1) return;
  config.erase("parallel");
  config["data"]["batch_sequences"] = 5;
  EXPECT_TRUE(has(error_of(Status::kInvalidArgument, [&] { run(config, Begin::kNew); }),
                  "data.batch_sequences must be a multiple of parallel.dp"));
}

TEST_F(MpiTrain, TheRankThatDiffersIsNamedOnAll) {
  if (world().size() == 1) GTEST_SKIP() << "needs two ranks";
  const bool differs = world().rank() == last();
  const std::string name = fmt::format("rank {} of {}: [train] ", last(), world().size());
  json config = run_of("out");
  config["stages"][1]["steps"] = differs ? 4 : 3;
  EXPECT_TRUE(has(group_error([&] { run(config, Begin::kNew); }),
                  name + "stages[1].steps differs from that of rank 0"));
  config = run_of("out");
  config["checkpoint_every"] = differs ? 4 : 3;
  EXPECT_TRUE(
      has(group_error([&] { run(config, Begin::kNew); }), name + "checkpoint_every differs"));

  config = run_of("out");
  EXPECT_TRUE(has(group_error([&] { run(config, differs ? Begin::kResume : Begin::kNew); }),
                  name + "--resume differs"));
  if (differs) {
    std::ofstream(folder_ / "other.txt") << tiny_text(4000) << "!";
    config["data"]["path"] = folder_ / "other.txt";
  }
  EXPECT_TRUE(
      has(group_error([&] { run(config, Begin::kNew); }), name + "the text of data.path differs"));
  if (differs) config["data"]["path"] = folder_ / "none.txt";
  EXPECT_TRUE(has(group_error([&] { run(config, Begin::kNew); }),
                  fmt::format("rank {} of {}: [data] ", last(), world().size())));
}

TEST_F(MpiTrain, ResumingOnOtherRanksIsRefusedUnlessAskedFor) {
  json config = run_of("out");
  EXPECT_FALSE(run(config, Begin::kNew, 2));
  world().barrier();
  if (first()) {  // as a run of three processes would have left it
    const fs::path file = folder_ / "out/checkpoints/step-00000002/trainer.json";
    json state = json::parse(std::ifstream(file));
    state["config"]["parallel"]["dp"] = 3;
    state["config"]["data"]["batch_sequences"] = 12;
    std::ofstream(file) << state.dump();
  }
  config["data"]["batch_sequences"] = 12;
  world().barrier();
  EXPECT_TRUE(
      has(error_of(Status::kInvalidArgument, [&] { run(config, Begin::kResume); }),
          fmt::format("has 3 processes (cp 1 x dp 3), these are {} (cp 1", world().size())));
  EXPECT_TRUE(run(config, Begin::kResumeOnOtherRanks));
  if (first()) {
    EXPECT_EQ(curve("out").size(), 13u);
  }
}

TEST_F(MpiTrain, WhatRankZeroCannotWriteIsEverybodysError) {
  json config = run_of("out");
  if (first()) std::ofstream(folder_ / "out") << "no folder";
  world().barrier();
  EXPECT_TRUE(has(error_of(Status::kIo, [&] { run(config, Begin::kNew); }), "cannot"));
}

}  // namespace
}  // namespace winnow::train
