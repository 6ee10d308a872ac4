// Training on packed documents: documents see themselves alone, and losses and gradients depend neither
// on the packing nor on the cut into micro-batches. What is read: tests/packed_data_test.cpp.
#include <cmath>

#include "tests/packed_documents.h"
#include "tests/tiny_models.h"
#include "winnow/threads.h"

namespace winnow::train {
namespace {

using attention::AttentionMode;
using nlohmann::json;

class PackedTraining : public PackedDocumentsTest {};

std::vector<std::vector<double>> gradients_of(model::Transformer& model) {
  std::vector<std::vector<double>> all;
  for (const auto& p : model.parameters().all()) all.push_back(model::numbers(p->grad));
  return all;
}

// Each rounding of a sum of n terms errs by 2^-24 of the sum of their magnitudes, which for these
// gradients stays below 10 times the largest element: 20 n 2^-24, on both sides.
void expect_near(const std::vector<std::vector<double>>& a,
                 const std::vector<std::vector<double>>& b, double bound) {
  ASSERT_EQ(a.size(), b.size());
  for (std::size_t k = 0; k < a.size(); ++k) {
    double largest = 0;
    for (const double g : b[k]) largest = std::max(largest, std::abs(g));
    for (std::size_t i = 0; i < a[k].size(); ++i) {
      ASSERT_NEAR(a[k][i], b[k][i], bound * largest) << "parameter " << k << " element " << i;
    }
  }
}
double bound_of(std::int64_t rows) { return 20 * static_cast<double>(rows) * 0x1p-24; }

// F5: a row sees its own document, no id crosses a boundary, and padding selects nothing.
TEST_F(PackedTraining, F5NoIdCrossesABoundary) {
  json run = run_of("out");
  run["data"]["documents"]["length_multiple"] = 4;
  const TrainConfig config = read_train_config(run);
  const TextData data(config.data);
  model::Transformer model(config.model, DType::kF32, 3);
  model::StepOptions options;
  options.mode = AttentionMode::kSparse;
  options.index_loss_scale = 1;
  std::int64_t padding = 0;
  for (std::int64_t step = 0; step < 8; ++step) {
    const model::Batch batch = data.training_batch(7, step, 0, 2);
    model.step(batch, options);
    for (const Tensor& selection : model.selections()) {
      for (std::size_t g = 0; g + 1 < batch.cu_seqlens.size(); ++g) {
        for (std::int64_t row = batch.cu_seqlens[g]; row < batch.cu_seqlens[g + 1]; ++row) {
          const std::int32_t* ids = selection.as<std::int32_t>() + row * selection.strides[0];
          const bool real = batch.targets[static_cast<std::size_t>(row)] >= 0;
          padding += real ? 0 : 1;
          const std::int64_t seen = real ? row - batch.cu_seqlens[g] + 1 : 0;
          for (std::int64_t j = 0; j < selection.shape[1]; ++j) {
            if (j >= seen) {
              EXPECT_EQ(ids[j], -1);
            } else {
              EXPECT_GE(ids[j], batch.cu_seqlens[g]);
              EXPECT_LE(ids[j], row);
            }
          }
        }
      }
    }
  }
  EXPECT_GT(padding, 0);
}

// A document in a pack gives the bits that it gives alone.
TEST_F(PackedTraining, ADocumentGivesWhatItGivesAlone) {
  const TrainConfig config = read_train_config(run_of("out"));
  const TextData data(config.data);
  model::Transformer model(config.model, DType::kF32, 3);
  model::shake(model, 4);
  const model::Batch batch = data.training_batch(7, 1, 0, 2);
  for (const AttentionMode mode : {AttentionMode::kDense, AttentionMode::kSparse}) {
    const std::vector<double> packed = model::numbers(model.log_probabilities(batch, mode));
    for (std::size_t g = 0; g + 1 < batch.cu_seqlens.size(); ++g) {
      const auto begin = static_cast<std::int32_t>(batch.cu_seqlens[g]);
      std::int32_t rows = 0;
      while (begin + rows < batch.cu_seqlens[g + 1] &&
             batch.targets[static_cast<std::size_t>(begin + rows)] >= 0) {
        ++rows;
      }
      if (rows == 0) continue;
      const std::vector<double> alone =
          model::numbers(model.log_probabilities(model::part_of(batch, begin, rows), mode));
      const auto first = packed.begin() + std::ptrdiff_t{256} * begin;
      EXPECT_TRUE(std::equal(alone.begin(), alone.end(), first)) << "document at row " << begin;
    }
  }
}

// The losses of a step are means over its real tokens, whatever the documents' lengths, and a depth's
// target never lies in another document.
TEST_F(PackedTraining, LossesAreSumsOverRealTokensDividedByTheirNumber) {
  json run = run_of("out");
  run["model"]["mtp_depths"] = 2;
  run["data"]["documents"]["length_multiple"] = 4;
  const TrainConfig config = read_train_config(run);
  const TextData data(config.data);
  double padding = 0;
  for (const std::int64_t step : {2, 7, 10}) {  // one of each stage
    SCOPED_TRACE(step);
    model::Transformer model(config.model, DType::kF32, 3);
    model::shake(model, 4);
    const StepLosses losses = compute_gradients(model, data, config, step);
    const std::vector<std::vector<double>> gradients = gradients_of(model);

    const StageConfig& stage = config.stages[stage_position(config, step).stage];
    const model::Batch batch = data.training_batch(config.seed, step, 0, 2);
    const std::vector<std::string> texts = read_back(batch);
    double rows = 0, ahead[2] = {};
    for (const std::string& text : texts) {
      const auto n = static_cast<double>(text.size());
      rows += n - 1;
      for (const int d : {0, 1}) ahead[d] += std::max(0.0, n - 2 - d);
    }
    padding += 48 - rows;
    model::StepOptions options;
    options.mode = stage.attention;
    options.loss_scale = 1 / rows;
    options.index_loss_scale = stage.index_loss_coefficient / rows;
    if (stage.mtp_loss_coefficient > 0) {
      for (const double n : ahead) {
        options.mtp_loss_scales.push_back(stage.mtp_loss_coefficient / 2 / n);
      }
    }
    model.parameters().zero_grad();
    double nll = 0, mtp[2] = {};
    std::vector<double> kl(losses.index_kl.size());
    for (const std::string& text : texts) {
      model::Batch alone;
      for (std::size_t t = 0; t + 1 < text.size(); ++t) {
        alone.tokens.push_back(static_cast<unsigned char>(text[t]));
        alone.targets.push_back(static_cast<unsigned char>(text[t + 1]));
        alone.positions.push_back(static_cast<std::int32_t>(t));
      }
      alone.ranges = causal_ranges(std::ssize(alone.tokens));
      add_mtp_tokens(alone, 2);
      const model::StepResult result = model.step(alone, options);
      nll += result.nll;
      for (std::size_t n = 0; n < kl.size(); ++n) kl[n] += result.index_kl[n];
      for (std::size_t d = 0; d < result.mtp_nll.size(); ++d) mtp[d] += result.mtp_nll[d];
    }
    // Rows have the same bits; their sums are taken in doubles.
    if (losses.loss) {
      EXPECT_NEAR(*losses.loss, nll / rows, 1e-12 * nll);
    }
    EXPECT_EQ(losses.loss.has_value(), stage.attention != AttentionMode::kWarmup);
    EXPECT_EQ(losses.index_kl.empty(), stage.attention == AttentionMode::kDense);
    for (std::size_t n = 0; n < kl.size(); ++n) {
      EXPECT_NEAR(losses.index_kl[n], kl[n] / rows, 1e-12 * kl[n]);
    }
    EXPECT_EQ(losses.mtp_loss.size(), stage.attention == AttentionMode::kWarmup ? 0u : 2u);
    for (std::size_t d = 0; d < losses.mtp_loss.size(); ++d) {
      EXPECT_NEAR(losses.mtp_loss[d], mtp[d] / ahead[d], 1e-12 * mtp[d]);
    }
    expect_near(gradients_of(model), gradients, bound_of(48));
  }
  EXPECT_GT(padding, 0);
}

// L1: the same 8 tokens, four documents of two rows, as 1 x 8, 2 x 4 and 4 x 2, each cut into every
// number of micro-batches: the same losses and gradients, in every kind of stage.
TEST_F(PackedTraining, L1TheSameTokensGiveTheSameGradientInEveryShape) {
  json base = run_of("out");
  base["data"]["path"] = write("four.txt", "ab|bc|ca|bb|aa|").string();
  base["data"]["documents"] = {{"separator", "|"}};
  base["data"]["validation_fraction"] = 0.2;
  base["model"]["mtp_depths"] = 1;
  base["stages"][2]["index_loss_coefficient"] = 0.01;
  struct Shape {
    std::int64_t context, sequences, at_once;
  };
  // A document of "abc|" has three rows; its last is a target of its own. 12 rows in all.
  // The last two leave rows that are padding.
  const std::vector<Shape> shapes = {{8, 1, 1}, {4, 2, 2}, {4, 2, 1}, {2, 4, 4},
                                     {2, 4, 2}, {2, 4, 1}, {3, 4, 2}, {40, 1, 1}};
  for (const std::int64_t step : {0, 7, 10}) {
    SCOPED_TRACE(step);
    std::optional<StepLosses> losses;
    std::vector<std::vector<double>> gradients;
    for (const Shape& shape : shapes) {
      json run = base;
      run["data"]["context"] = shape.context;
      run["data"]["batch_sequences"] = shape.sequences;
      run["data"]["micro_batch_sequences"] = shape.at_once;
      const TrainConfig config = read_train_config(run);
      const TextData data(config.data);
      EXPECT_EQ(data.training_targets(config.seed, step, 0), 8);
      EXPECT_EQ(data.training_targets(config.seed, step, 1), 4);
      model::Transformer model(config.model, DType::kF32, 3);
      model::shake(model, 4);
      const StepLosses now = compute_gradients(model, data, config, step);
      if (!losses) {
        losses = now;
        gradients = gradients_of(model);
        continue;
      }
      // The packs of an epoch come in another order: sums of the same rows.
      ASSERT_EQ(now.loss.has_value(), losses->loss.has_value());
      if (now.loss) {
        EXPECT_NEAR(*now.loss, *losses->loss, 1e-12);
      }
      ASSERT_EQ(now.index_kl.size(), losses->index_kl.size());
      for (std::size_t n = 0; n < now.index_kl.size(); ++n) {
        EXPECT_NEAR(now.index_kl[n], losses->index_kl[n], 1e-12);
      }
      ASSERT_EQ(now.mtp_loss.size(), losses->mtp_loss.size());
      for (std::size_t d = 0; d < now.mtp_loss.size(); ++d) {
        EXPECT_NEAR(now.mtp_loss[d], losses->mtp_loss[d], 1e-12);
      }
      expect_near(gradients_of(model), gradients, bound_of(8));
    }
  }
}

// L5: rows without a key add nothing, and two documents give one total as one batch or two.
TEST_F(PackedTraining, L5InvalidRowsAddNothingAndTotalsDoNotDependOnThePacking) {
  const model::ModelConfig config = read_train_config(run_of("out")).model;
  model::Transformer model(config, DType::kF32, 3);
  model::shake(model, 4);
  const PackShape shape = {13, 4};
  const auto batch_of = [&](const std::vector<std::int64_t>& lengths, std::int32_t salt) {
    const Pack pack = lay_out_pack(lengths, shape);
    model::Batch batch;
    batch.positions = pack.positions;
    batch.ranges = pack.ranges;
    batch.cu_seqlens = pack.cu_seqlens;
    for (std::size_t row = 0; row < pack.real.size(); ++row) {
      const bool real = pack.real[row] != 0;
      batch.tokens.push_back(real ? (pack.positions[row] * 37 + salt) % 256 : 0);
      batch.targets.push_back(real ? (pack.positions[row] * 11 + salt) % 256 : -1);
    }
    return batch;
  };
  for (const AttentionMode mode :
       {AttentionMode::kDense, AttentionMode::kWarmup, AttentionMode::kSparse}) {
    model::StepOptions options;
    options.mode = mode;
    options.index_loss_scale = mode == AttentionMode::kDense ? 0 : 0.5;
    const auto run = [&](const std::vector<model::Batch>& batches) {
      model.parameters().zero_grad();
      model::StepResult sum;
      for (const model::Batch& batch : batches) {
        const model::StepResult result = model.step(batch, options);
        sum.nll += result.nll;
        sum.tokens += result.tokens;
        sum.index_kl.resize(result.index_kl.size());
        for (std::size_t n = 0; n < sum.index_kl.size(); ++n) {
          sum.index_kl[n] += result.index_kl[n];
        }
      }
      return std::pair(sum, gradients_of(model));
    };
    const model::Batch both = batch_of({6, 6}, 3), one = batch_of({6}, 3);
    const auto [together, of_together] = run({both});
    const auto [apart, of_apart] = run({one, one});
    EXPECT_EQ(together.tokens, 12);
    EXPECT_EQ(apart.tokens, 12);
    EXPECT_NEAR(together.nll, apart.nll, 1e-12 * (1 + apart.nll));
    for (std::size_t n = 0; n < apart.index_kl.size(); ++n) {
      EXPECT_GT(apart.index_kl[n], 0);
      EXPECT_NEAR(together.index_kl[n], apart.index_kl[n], 1e-12 * apart.index_kl[n]);
    }
    expect_near(of_together, of_apart, bound_of(26));
    // Rows of padding, seven or none: the same losses to the bit.
    const auto [padded, of_padded] = run({one});
    const auto [bare, of_bare] = run({model::part_of(one, 0, 6)});
    EXPECT_EQ(padded.nll, bare.nll);
    EXPECT_EQ(padded.index_kl, bare.index_kl);
    expect_near(of_padded, of_bare, bound_of(13));
    // D2, D7: nothing but padding is no loss, no gradient and no error.
    const auto [nothing, of_nothing] = run({batch_of({}, 0)});
    EXPECT_EQ(nothing.tokens, 0);
    EXPECT_EQ(nothing.nll, 0);
    for (const double kl : nothing.index_kl) EXPECT_EQ(kl, 0);
    for (const auto& gradient : of_nothing) {
      for (const double g : gradient) ASSERT_EQ(g, 0);
    }
  }
}

TEST_F(PackedTraining, TheLossFallsAndMetricsCountRealTokens) {
  json config = run_of("out");
  config["stages"][0]["steps"] = 40;
  config["stages"][1]["steps"] = 20;
  config["stages"][2]["steps"] = 20;
  config["validate_every"] = 40;
  config["health_every"] = 20;
  EXPECT_TRUE(run(config, Begin::kNew));
  const TextData data = data_of(config);
  std::vector<json> steps;
  int validations = 0, healths = 0;
  for (const json& line : curve("out")) {
    if (line.contains("tokens")) steps.push_back(line);
    if (line.contains("health")) {
      ++healths;
      for (const json& mass : line["health"]["attention_mass_caught"]) {
        EXPECT_GT(mass.get<double>(), 0.1);
        EXPECT_LT(mass.get<double>(), 1);  // the longest document has more keys than topk
      }
    }
    if (!line.contains("validation")) continue;
    ++validations;
    EXPECT_TRUE(std::isfinite(line["validation"]["bits_per_byte"].get<double>()));
  }
  EXPECT_EQ(validations, 2);
  EXPECT_EQ(healths, 2);
  ASSERT_EQ(steps.size(), 80u);
  for (std::int64_t step = 0; step < 80; ++step) {
    EXPECT_EQ(steps[static_cast<std::size_t>(step)]["tokens"], data.training_targets(7, step, 0));
  }
  EXPECT_LT(steps[79]["loss"].get<double>(), steps[0]["loss"].get<double>() - 2);
  EXPECT_LT(steps[59]["index_loss"].get<double>(), steps[40]["index_loss"].get<double>());
}

// 13 steps of two packs are an epoch and a part of the next: stops lie inside both.
TEST_F(PackedTraining, AResumedRunReadsWhatAnUnbrokenOneReads) {
  json whole = run_of("whole"), parts = run_of("parts");
  whole["health_every"] = parts["health_every"] = 2;
  for (json* config : {&whole, &parts}) (*config)["data"]["micro_batch_sequences"] = 1;
  set_num_threads(1);
  EXPECT_TRUE(run(whole, Begin::kNew));
  set_num_threads(2);
  EXPECT_FALSE(run(parts, Begin::kNew, 3));
  EXPECT_FALSE(run(parts, Begin::kResume, 5));
  EXPECT_TRUE(run(parts, Begin::kResume));
  EXPECT_EQ(curve("parts"), curve("whole"));
  EXPECT_EQ(read(folder_ / "whole/checkpoints/step-00000013/model.safetensors"),
            read(folder_ / "parts/checkpoints/step-00000013/model.safetensors"));
  // What would change the order is refused by name.
  parts["data"]["documents"]["max_documents"] = 5;
  EXPECT_TRUE(has(error_of(Status::kInvalidArgument, [&] { run(parts, Begin::kResume); }),
                  "data.documents.max_documents"));
  parts["data"].erase("documents");
  EXPECT_TRUE(
      has(error_of(Status::kInvalidArgument, [&] { run(parts, Begin::kResume); }), "documents"));
}

TEST_F(PackedTraining, EvaluationIsOverDocuments) {
  const TrainConfig config = read_train_config(run_of("out"));
  const TextData data(config.data);
  model::Transformer model(config.model, DType::kF32, 1);
  model::shake(model, 4);
  const Evaluation sparse = evaluate(model, data, AttentionMode::kSparse, 1000, true);
  double nll = 0, tokens = 0, rows = 0, read_mean = 0, read_last = 0, documents = 0, caught = 0,
         above = 0;
  for (const std::string& text : read_back(data.validation_batch(0, data.validation_windows()))) {
    model::Batch alone;
    for (std::size_t t = 0; t + 1 < text.size(); ++t) {
      alone.tokens.push_back(static_cast<unsigned char>(text[t]));
      alone.targets.push_back(static_cast<unsigned char>(text[t + 1]));
      alone.positions.push_back(static_cast<std::int32_t>(t));
      read_mean +=
          static_cast<double>(std::min<std::size_t>(6, t + 1)) / (static_cast<double>(t) + 1);
      ++rows;
    }
    const auto length = static_cast<double>(alone.tokens.size());
    read_last += std::min(6.0, length) / length;
    ++documents;
    alone.ranges = causal_ranges(std::ssize(alone.tokens));
    model::StepOptions options;
    options.mode = AttentionMode::kSparse;
    options.backward = false;
    options.measure_selection = true;
    const model::StepResult result = model.step(alone, options);
    nll += result.nll;
    tokens += static_cast<double>(result.tokens);
    if (length > 6) {
      caught += result.attention_mass_caught[0] * (length - 6);
      above += length - 6;
    }
  }
  EXPECT_NEAR(sparse.bits_per_byte, nll / tokens / std::log(2), 1e-12);
  EXPECT_NEAR(sparse.keys_read_mean, read_mean / rows, 1e-12);
  EXPECT_NEAR(sparse.keys_read_fraction, read_last / documents, 1e-12);
  EXPECT_NEAR(sparse.attention_mass_caught[0], caught / above, 1e-12);
}

}  // namespace
}  // namespace winnow::train
