// The training loop on a tiny model: it learns, and its loss curve is a function of the
// configuration alone: not of threads, interruptions, kills, or the cut into micro-batches.
#include <signal.h>
#include <sys/wait.h>

#include <algorithm>
#include <cmath>

#include "tests/train_fixture.h"
#include "winnow/threads.h"

namespace winnow::train {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

class Train : public TrainTest {
 protected:
  json run_of(const std::string& output) const { return tiny_run(text_, folder_ / output); }
};

TEST_F(Train, TheLossFallsAndTheStagesTrainWhatTheyShould) {
  json config = run_of("out");
  config["stages"][0]["steps"] = 40;
  config["stages"][1]["steps"] = 30;
  config["stages"][2]["steps"] = 10;
  Trainer trainer(read_train_config(config), Begin::kNew);
  std::vector<Array> before;
  const auto& all = trainer.model().parameters().all();
  for (const auto& p : all) before.push_back(p->value.clone());
  Observer observer;
  observer.on_step = [&](const StepReport& report) {
    EXPECT_EQ(report.losses.loss.has_value(), report.stage != "warm-up");
    EXPECT_EQ(report.losses.index_kl.size(), report.stage == "dense" ? 0u : 2u);
    for (std::size_t i = 0; i < all.size(); ++i) {
      const auto bytes = static_cast<std::size_t>(before[i].bytes());
      const bool moved = std::memcmp(before[i].as<char>(), all[i]->value.as<char>(), bytes) != 0;
      const bool trained = report.stage == "sparse" || all[i]->indexer == (report.stage != "dense");
      EXPECT_EQ(moved, trained) << all[i]->name << " at step " << report.step;
      std::memcpy(before[i].as<char>(), all[i]->value.as<char>(), bytes);
    }
  };
  EXPECT_TRUE(trainer.run(observer));
  const std::vector<json> lines = curve("out");
  ASSERT_EQ(lines.size(), 80u);
  EXPECT_LT(lines[39]["loss"].get<double>(), lines[0]["loss"].get<double>() - 1.5);
  const auto kl = [&](std::size_t i) {
    return lines[i]["index_kl"][0].get<double>() + lines[i]["index_kl"][1].get<double>();
  };
  EXPECT_LT(kl(69), 0.7 * kl(40));
  EXPECT_LT(lines[79]["loss"].get<double>(), lines[39]["loss"].get<double>() + 0.3);
}

TEST_F(Train, AnInterruptedRunReproducesTheCurveExactly) {
  json whole = run_of("whole"), parts = run_of("parts");
  whole["validate_every"] = parts["validate_every"] = 4;
  EXPECT_TRUE(run(whole, Begin::kNew));
  EXPECT_FALSE(run(parts, Begin::kNew, 4));     // inside the dense stage, at a validation
  EXPECT_FALSE(run(parts, Begin::kResume, 2));  // at its end
  EXPECT_FALSE(run(parts, Begin::kResume, 2));  // inside the warm-up
  EXPECT_FALSE(run(parts, Begin::kResume, 3));  // inside the sparse stage
  EXPECT_TRUE(run(parts, Begin::kResume));
  EXPECT_EQ(curve("parts"), curve("whole"));
  ASSERT_EQ(curve("whole").size(), 13u + 3u);
  EXPECT_EQ(read(folder_ / "whole/checkpoints/step-00000013/model.safetensors"),
            read(folder_ / "parts/checkpoints/step-00000013/model.safetensors"));
  EXPECT_TRUE(run(whole, Begin::kResume));  // done already: nothing happens
  EXPECT_EQ(curve("parts"), curve("whole"));
}

TEST_F(Train, AKilledRunReproducesTheCurveExactly) {
  EXPECT_TRUE(run(run_of("whole"), Begin::kNew));
  json config = run_of("killed");
  config["checkpoint_every"] = 2;
  for (int attempt = 0; attempt < 20; ++attempt) {
    const pid_t child = ::fork();
    ASSERT_GE(child, 0);
    if (child == 0) {  // dies at the third step of each attempt, with no time to say farewell
      set_num_threads(1);
      Trainer trainer(read_train_config(config), attempt > 0 ? Begin::kResume : Begin::kNew);
      Observer observer;
      int steps = 0;
      observer.on_step = [&](const StepReport&) {
        if (++steps == 3) ::kill(::getpid(), SIGKILL);
      };
      trainer.run(observer);
      ::_exit(0);
    }
    int status = 0;
    ::waitpid(child, &status, 0);
    if (WIFEXITED(status)) {
      EXPECT_EQ(WEXITSTATUS(status), 0);
      EXPECT_GE(attempt, 5);
      break;
    }
  }
  EXPECT_EQ(curve("killed"), curve("whole"));
}

TEST_F(Train, BitwiseEqualForEveryThreadCount) {
  for (int threads : {1, 2, 3}) {
    set_num_threads(threads);
    EXPECT_TRUE(run(run_of(fmt::format("threads{}", threads)), Begin::kNew));
  }
  EXPECT_EQ(curve("threads2"), curve("threads1"));
  EXPECT_EQ(curve("threads3"), curve("threads1"));
}

// The kind: a loss that is divided once per micro-batch, or not at all.
TEST_F(Train, GradientsDoNotDependOnTheCutIntoMicroBatches) {
  json config = run_of("out");
  config["data"]["batch_sequences"] = 4;
  const TrainConfig base = read_train_config(config);
  const TextData data(base.data);
  for (const std::int64_t step : {0, 6, 9}) {  // one of each stage
    std::vector<std::vector<double>> whole;
    std::optional<StepLosses> losses;
    for (const std::int64_t micro : {4, 2, 1}) {
      TrainConfig cut = base;
      cut.data.micro_batch_sequences = micro;
      model::Transformer model(cut.model, DType::kF32, 3);
      const StepLosses now = compute_gradients(model, data, cut, step);
      const auto& all = model.parameters().all();
      if (!losses) {
        losses = now;
        for (const auto& p : all) {
          whole.emplace_back(p->grad.as<float>(), p->grad.as<float>() + p->grad.elements());
        }
        continue;
      }
      // Rows are the same bit for bit; only sums over rows (96 of them) are ordered otherwise.
      // A sum of n terms errs by at most n * 2^-24 of the sum of their magnitudes, which for these
      // gradients stays below 10 times the largest element.
      for (std::size_t k = 0; k < all.size(); ++k) {
        double largest = 0;
        for (double g : whole[k]) largest = std::max(largest, std::abs(g));
        const double bound = 2 * 96 * 0x1p-24 * 10 * largest;
        for (std::size_t i = 0; i < whole[k].size(); ++i) {
          ASSERT_NEAR(all[k]->grad.as<float>()[i], whole[k][i], bound) << all[k]->name << " " << i;
        }
      }
      if (now.loss) {
        EXPECT_NEAR(*now.loss, *losses->loss, 1e-6 * *losses->loss);
      }
      for (std::size_t i = 0; i < now.index_kl.size(); ++i) {
        EXPECT_NEAR(now.index_kl[i], losses->index_kl[i], 1e-6 * losses->index_kl[i]);
      }
    }
  }
}

TEST_F(Train, ResumeRefusesWhatWouldChangeTheCurve) {
  json config = run_of("out");
  EXPECT_FALSE(run(config, Begin::kNew, 2));
  const auto refused = [&](const json& changed, Begin begin) {
    return error_of(Status::kInvalidArgument, [&] { run(changed, begin); });
  };
  EXPECT_TRUE(has(refused(config, Begin::kNew), "continue it with --resume"));
  json changed = config;
  changed["stages"][2]["index_loss_coefficient"] = 0.4;
  EXPECT_TRUE(has(refused(changed, Begin::kResume), "stages[2].index_loss_coefficient"));
  EXPECT_TRUE(has(error_of(Status::kIo, [&] { run(run_of("nothing"), Begin::kResume); }),
                  "no whole checkpoint"));
  std::string other = read(text_);
  other[17] = static_cast<char>(other[17] ^ 1);
  write("text.txt", other);
  EXPECT_TRUE(has(refused(config, Begin::kResume), "the text in"));
}

TEST_F(Train, TwoProcessesDoNotShareAnOutputFolder) {
  const TrainConfig config = read_train_config(run_of("out"));
  const Trainer first(config, Begin::kNew);
  EXPECT_TRUE(has(error_of(Status::kIo, [&] { Trainer(config, Begin::kNew); }), "another process"));
}

// Another process's run is refused before anything of it is removed.
TEST_F(Train, BeginningOverLeavesARunningOneAlone) {
  const json config = run_of("out");
  EXPECT_FALSE(run(config, Begin::kNew, 2));
  {
    const Trainer running(read_train_config(config), Begin::kResume);
    EXPECT_TRUE(has(error_of(Status::kIo, [&] { run(config, Begin::kOver); }), "another process"));
    EXPECT_TRUE(holds_run(folder_ / "out"));
  }
  const Trainer over(read_train_config(config), Begin::kOver);
  EXPECT_EQ(over.state().step, 0);
  EXPECT_FALSE(holds_run(folder_ / "out"));
}

TEST_F(Train, EvaluationCountsWhatTheSelectionReads) {
  const TrainConfig config = read_train_config(run_of("out"));
  model::Transformer model(config.model, DType::kF32, 1);
  const TextData data(config.data);
  using attention::AttentionMode;
  const Evaluation dense = evaluate(model, data, AttentionMode::kDense, 1000, false);
  const Evaluation sparse = evaluate(model, data, AttentionMode::kSparse, 1000, true);
  EXPECT_EQ(dense.windows, data.validation_windows());
  EXPECT_NEAR(dense.bits_per_byte, 8, 0.5);  // a model that knows nothing
  // topk 6 of 24 keys: rows see 1 to 24 and read at most 6.
  EXPECT_DOUBLE_EQ(sparse.keys_read_fraction, 6.0 / 24);
  double mean = 0;
  for (int visible = 1; visible <= 24; ++visible) mean += std::min(6, visible) / (24.0 * visible);
  EXPECT_NEAR(sparse.keys_read_mean, mean, 1e-12);
  ASSERT_EQ(sparse.attention_mass_caught.size(), 2u);
  for (double mass : sparse.attention_mass_caught) {
    EXPECT_GT(mass, 0);
    EXPECT_LT(mass, 1);
  }
}

}  // namespace
}  // namespace winnow::train
