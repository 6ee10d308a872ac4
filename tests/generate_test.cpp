// Generation over a cache: equal to the training forward however the sequence is cut.
#include "model/generate.h"

#include <gtest/gtest.h>

#include <cmath>
#include <map>

#include "tests/tiny_models.h"
#include "winnow/error.h"

namespace winnow::model {
namespace {

using attention::AttentionMode;

// Log-probabilities after each piece, by its last position.
std::map<std::int64_t, std::vector<double>> read_pieces(Transformer& model, AttentionMode mode,
                                                        const std::vector<std::int32_t>& tokens,
                                                        const std::vector<std::size_t>& pieces) {
  Decoder decoder(model, mode, static_cast<std::int64_t>(tokens.size()));
  std::map<std::int64_t, std::vector<double>> after;
  std::size_t first = 0;
  for (const std::size_t count : pieces) {
    const Tensor row = decoder.read(std::span(tokens).subspan(first, count));
    first += count;
    after[static_cast<std::int64_t>(first) - 1] = numbers(row);
  }
  EXPECT_EQ(first, tokens.size());
  return after;
}

std::vector<std::pair<std::string, ModelConfig>> all_models() {
  auto all = tiny_models();
  for (const auto& model : pool_models()) all.push_back(model);
  return all;
}

// With pools a piece appends to the open pool of the piece before.
TEST(Generate, EveryCutGivesTheBitsOfTheTrainingForward) {
  for (const auto& [name, config] : all_models()) {
    for (const DType dtype : {DType::kF32, DType::kF64}) {
      Transformer model = shaken_model(config, dtype);
      const Batch batch = packed_batch({40}, config.vocab_size, 5);
      for (const AttentionMode mode : {AttentionMode::kDense, AttentionMode::kSparse}) {
        const Array training = model.log_probabilities(batch, mode);
        const std::vector<std::vector<std::size_t>> cuts = {
            {40}, {17, 9, 14}, {1, 38, 1}, std::vector<std::size_t>(40, 1)};
        for (const std::vector<std::size_t>& pieces : cuts) {
          for (const auto& [position, row] : read_pieces(model, mode, batch.tokens, pieces)) {
            EXPECT_EQ(row, numbers(training.view().rows(position, 1)))
                << name << " position " << position << " in " << pieces.size() << " pieces";
          }
        }
      }
    }
  }
}

class GenerateFrom : public testing::TestWithParam<const char*> {};

TEST_P(GenerateFrom, ReportedLogProbabilitiesAreThoseOfTraining) {
  ModelConfig config;
  for (const auto& [name, one] : all_models()) {
    if (name == GetParam()) config = one;
  }
  Transformer model = shaken_model(config);
  std::vector<std::int32_t> tokens = {3, 1, 4};
  std::vector<std::vector<float>> reported;
  GenerateOptions options;
  options.max_tokens = 20;
  options.on_token = [&](std::int32_t, std::span<const float> row) {
    reported.emplace_back(row.begin(), row.end());
    return true;
  };
  const std::vector<std::int32_t> generated = generate(model, tokens, options);
  ASSERT_EQ(generated.size(), 20u);
  tokens.insert(tokens.end(), generated.begin(), generated.end());
  Batch batch;
  batch.tokens = tokens;
  batch.ranges = causal_ranges(23);
  for (std::int32_t p = 0; p < 23; ++p) batch.positions.push_back(p);
  const Array training = model.log_probabilities(batch, AttentionMode::kSparse);
  for (std::size_t t = 0; t < reported.size(); ++t) {
    const float* expected = training.as<float>() + static_cast<std::int64_t>(t + 2) * 11;
    EXPECT_EQ(reported[t], std::vector<float>(expected, expected + 11)) << t;
    // Greedy: the first of the largest.
    const auto best = std::max_element(expected, expected + 11) - expected;
    EXPECT_EQ(generated[t], best);
  }
}

INSTANTIATE_TEST_SUITE_P(Models, GenerateFrom, testing::Values("mla", "gqa_plain", "pools_plain"));

TEST(Generate, GreedyTakesTheLowestTokenAtTies) {
  const ModelConfig config = tiny_model(tiny_mla());
  Transformer model = shaken_model(config);
  fill_constant(*model.parameters().find("model.norm.weight"), 0);  // all logits are zero
  GenerateOptions options;
  options.max_tokens = 3;
  const std::vector<std::int32_t> prompt = {5};
  EXPECT_EQ(generate(model, prompt, options), (std::vector<std::int32_t>{0, 0, 0}));
}

TEST(Generate, SamplesByTheProbabilities) {
  constexpr int kDraws = 600;
  const ModelConfig config = tiny_model(tiny_gqa());
  Transformer model = shaken_model(config);
  const std::vector<std::int32_t> prompt = {3, 1, 4, 1, 5};
  const auto count = [&](double temperature, double top_p, std::vector<double>* log_probabilities) {
    std::vector<double> counts(11);
    GenerateOptions options;
    options.max_tokens = 1;
    options.temperature = temperature;
    options.top_p = top_p;
    options.on_token = [&](std::int32_t, std::span<const float> row) {
      log_probabilities->assign(row.begin(), row.end());
      return true;
    };
    for (options.seed = 0; options.seed < kDraws; ++options.seed) {
      counts[static_cast<std::size_t>(generate(model, prompt, options)[0])] += 1;
    }
    return counts;
  };
  std::vector<double> log_probabilities;
  for (const double temperature : {1.0, 3.0}) {
    const std::vector<double> counts = count(temperature, 1, &log_probabilities);
    double total = 0;
    for (const double l : log_probabilities) total += std::exp(l / temperature);
    for (std::size_t t = 0; t < 11; ++t) {
      const double p = std::exp(log_probabilities[t] / temperature) / total;
      // Five deviations of a binomial of that many draws, and one draw.
      EXPECT_NEAR(counts[t], kDraws * p, 5 * std::sqrt(kDraws * p * (1 - p)) + 1) << t;
    }
  }
  // top_p keeps the fewest likeliest tokens that reach it.
  const std::vector<double> counts = count(3, 0.5, &log_probabilities);
  std::vector<std::size_t> order(11);
  std::iota(order.begin(), order.end(), 0u);
  std::sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
    return log_probabilities[a] > log_probabilities[b];
  });
  double total = 0, reached = 0;
  for (const double l : log_probabilities) total += std::exp(l / 3);
  for (const std::size_t t : order) {
    if (reached < 0.5) {
      EXPECT_GT(counts[t], 0) << t;
    } else {
      EXPECT_EQ(counts[t], 0) << t;
    }
    reached += std::exp(log_probabilities[t] / 3) / total;
  }
}

TEST(Generate, SeedsDecideTheText) {
  const ModelConfig config = tiny_model(tiny_simplified());
  Transformer model = shaken_model(config);
  const std::vector<std::int32_t> prompt = {2, 7};
  GenerateOptions options;
  options.max_tokens = 30;
  options.temperature = 3;
  const std::vector<std::int32_t> first = generate(model, prompt, options);
  EXPECT_EQ(generate(model, prompt, options), first);
  options.seed = 2;
  EXPECT_NE(generate(model, prompt, options), first);
}

TEST(Generate, StopsWhenToldTo) {
  const ModelConfig config = tiny_model(tiny_mla());
  Transformer model = shaken_model(config);
  GenerateOptions options;
  int seen = 0;
  options.max_tokens = 10;
  options.on_token = [&](std::int32_t, std::span<const float>) { return ++seen < 4; };
  const std::vector<std::int32_t> prompt = {2, 7};
  EXPECT_EQ(generate(model, prompt, options).size(), 4u);
  options.max_tokens = 0;
  EXPECT_TRUE(generate(model, prompt, options).empty());
}

TEST(Generate, FillsTheContextToTheLastPositionAndNoFurther) {
  const ModelConfig config = tiny_model(tiny_mla());
  Transformer model = shaken_model(config);
  const std::vector<std::int32_t> prompt(60, 1);
  GenerateOptions options;
  options.max_tokens = 4;
  EXPECT_EQ(generate(model, prompt, options).size(), 4u);
  options.max_tokens = 5;
  EXPECT_THROW(generate(model, prompt, options), Error);
  options.max_tokens = std::int64_t{1} << 62;
  EXPECT_THROW(generate(model, prompt, options), Error);
}

TEST(Generate, RefusesBadOptions) {
  const ModelConfig config = tiny_model(tiny_mla());
  Transformer model = shaken_model(config);
  const auto refused = [&](auto&& breaking) {
    std::vector<std::int32_t> prompt = {2, 7};
    GenerateOptions options;
    options.max_tokens = 2;
    breaking(prompt, options);
    EXPECT_THROW(generate(model, prompt, options), Error);
  };
  refused([](auto& prompt, auto&) { prompt.clear(); });
  refused([](auto& prompt, auto&) { prompt[1] = 11; });
  refused([](auto& prompt, auto&) { prompt[0] = -1; });
  refused([](auto&, auto& options) { options.max_tokens = -1; });
  refused([](auto&, auto& options) { options.temperature = -0.5; });
  refused([](auto&, auto& options) { options.temperature = std::nan(""); });
  refused([](auto&, auto& options) { options.top_p = 0; });
  refused([](auto&, auto& options) { options.top_p = 1.5; });
  refused([](auto&, auto& options) { options.mode = AttentionMode::kWarmup; });
}

TEST(Generate, RefusesAModelWithWeightsThatAreNotFinite) {
  const ModelConfig config = tiny_model(tiny_mla());
  Transformer model = shaken_model(config);
  model.parameters().find("model.norm.weight")->value.as<float>()[0] = std::nanf("");
  const std::vector<std::int32_t> prompt = {2, 7};
  GenerateOptions options;
  options.max_tokens = 2;
  for (const double temperature : {0.0, 1.0}) {
    options.temperature = temperature;
    options.top_p = 0.5;
    EXPECT_THROW(generate(model, prompt, options), Error);
  }
}

}  // namespace
}  // namespace winnow::model
