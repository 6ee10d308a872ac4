// Gradients of the whole model against finite differences in double, for every kind of attention,
// indexer, sharing and mode, with the selection held fixed.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cmath>

#include "tests/tiny_models.h"

namespace winnow::model {
namespace {

using attention::AttentionMode;

constexpr double kLossScale = 0.7, kIndexScale = 1.3;

// What the two kinds of parameters are trained on. The indexer's loss does not reach the others
// (the target and the indexer's inputs are detached), and the language loss does not reach the
// indexer (the selection is held).
struct Losses {
  double language = 0, index = 0;
};

Losses losses(Transformer& model, const Batch& batch, StepOptions options) {
  options.backward = false;
  const StepResult r = model.step(batch, options);
  Losses l;
  l.language = kLossScale * r.nll;
  for (std::size_t d = 0; d < r.mtp_nll.size(); ++d) {
    l.language += options.mtp_loss_scales[d] * r.mtp_nll[d];
  }
  for (const double kl : r.index_kl) l.index += kIndexScale * kl;
  return l;
}

// Five elements of every tensor, or all of a small one. f(x + h) - f(x - h) over 2 h has an error
// of h^2 f'''/6 from the truncation and of 2^-53 f / h from rounding. With h = 1e-4 and losses
// below 100, the second is below 1e-10. The first is below 1e-8 |f'''|; one step of Richardson,
// (4 d(h) - d(2h)) / 3, takes it to h^4. So 1e-6 of the gradient's size plus 1e-8 would hide no
// wrong term, and leaves room for third derivatives in the hundreds.
void check_gradients(Transformer& model, const Batch& batch, const StepOptions& options) {
  constexpr double kStep = 1e-4;
  const auto parameters = [&]() -> auto& { return model.parameters().all(); };
  const bool warmup = options.mode == AttentionMode::kWarmup;
  model.parameters().zero_grad();
  model.step(batch, options);
  int compared = 0, clearly_nonzero = 0;
  for (const auto& p : parameters()) {
    const std::int64_t size = p->value.elements(), samples = std::min<std::int64_t>(size, 5);
    for (std::int64_t s = 0; s < samples; ++s) {
      const std::int64_t i = s * size / samples;
      double& x = p->value.as<double>()[i];
      const double held = x;
      const auto value = [&](double offset) {
        x = held + offset;
        const Losses l = losses(model, batch, options);
        x = held;
        return p->indexer ? l.index : l.language;
      };
      const double near = (value(kStep) - value(-kStep)) / (2 * kStep);
      const double far = (value(2 * kStep) - value(-2 * kStep)) / (4 * kStep);
      const double expected = p->indexer || !warmup ? (4 * near - far) / 3 : 0;
      const double actual = p->grad.as<double>()[i];
      EXPECT_NEAR(actual, expected, 1e-6 * std::abs(expected) + 1e-8)
          << p->name << " element " << i;
      ++compared;
      clearly_nonzero += std::abs(expected) > 1e-5 ? 1 : 0;
    }
  }
  EXPECT_GT(compared, 50);
  EXPECT_GT(clearly_nonzero, warmup ? 10 : 50);
}

struct Case {
  std::string name;
  ModelConfig config;
  AttentionMode mode;
};

std::vector<Case> cases() {
  std::vector<Case> all;
  for (const auto& [name, config] : tiny_models()) {
    all.push_back({name + "_dense", config, AttentionMode::kDense});
    all.push_back({name + "_warmup", config, AttentionMode::kWarmup});
    all.push_back({name + "_sparse", config, AttentionMode::kSparse});
  }
  for (const auto& [name, config] : pool_models()) {
    all.push_back({name + "_sparse", config, AttentionMode::kSparse});
  }
  ModelConfig ahead = pool_models()[0].second;  // depths that attend to the pools of the first
  ahead.mtp_depths = 2;
  ahead.mtp_shared_components = {true, true};
  all.push_back({"mtp_pools_sparse", ahead, AttentionMode::kSparse});
  for (const auto& [name, config] : mtp_models()) {
    all.push_back({"mtp_" + name + "_sparse", config, AttentionMode::kSparse});
  }
  const auto both = mtp_models()[4];
  all.push_back({"mtp_" + both.first + "_dense", both.second, AttentionMode::kDense});
  for (const std::size_t n : {1, 4}) {
    const auto [name, config] = mtp_models()[n];
    all.push_back({"mtp_" + name + "_warmup", config, AttentionMode::kWarmup});
  }
  return all;
}

class Gradients : public testing::TestWithParam<Case> {};

TEST_P(Gradients, MatchFiniteDifferences) {
  Transformer model(GetParam().config, DType::kF64, 3);
  shake(model, 4);
  const Batch batch = packed_batch({9, 6}, GetParam().config.vocab_size, 5);
  StepOptions options;
  options.mode = GetParam().mode;
  options.loss_scale = kLossScale;
  const bool frozen = model.config().attention.indexer.pools();
  options.index_loss_scale = options.mode == AttentionMode::kDense || frozen ? 0 : kIndexScale;
  for (std::int64_t d = 0; d < model.config().mtp_depths; ++d) {
    options.mtp_loss_scales.push_back(0.3 + 0.2 * static_cast<double>(d));
  }
  if (options.mode == AttentionMode::kSparse) {
    model.step(batch, options);
    model.freeze_selection(true);
  }
  check_gradients(model, batch, options);
}

INSTANTIATE_TEST_SUITE_P(Models, Gradients, testing::ValuesIn(cases()),
                         [](const auto& test) { return test.param.name; });

// The indexer learns from the KL alone, and nothing else does.
TEST(Gradients, TheTwoLossesReachDifferentParameters) {
  for (const auto& [name, config] : tiny_models()) {
    Transformer model(config, DType::kF64, 3);
    shake(model, 4);
    const Batch batch = packed_batch({9, 6}, config.vocab_size, 5);
    for (const bool language : {true, false}) {
      StepOptions options;
      options.mode = AttentionMode::kSparse;
      options.loss_scale = language ? 1 : 0;
      options.index_loss_scale = language ? 0 : 1;
      model.parameters().zero_grad();
      model.step(batch, options);
      for (const auto& p : model.parameters().all()) {
        double largest = 0;
        for (const double g : numbers(p->grad)) largest = std::max(largest, std::abs(g));
        if (p->indexer == language) {
          EXPECT_EQ(largest, 0) << name << " " << p->name;
        } else {
          EXPECT_GT(largest, 1e-6) << name << " " << p->name;
        }
      }
    }
  }
}

// Gradients are added, so micro-batches sum up; and a step without backward leaves them alone.
TEST(Gradients, AreAddedAndLeftAloneWithoutBackward) {
  const ModelConfig config = tiny_model(tiny_mla());
  Transformer model(config, DType::kF64, 3);
  shake(model, 4);
  const Batch batch = packed_batch({9, 6}, config.vocab_size, 5);
  StepOptions options;
  options.mode = AttentionMode::kSparse;
  options.index_loss_scale = 1;
  const auto gradients = [&] {
    std::vector<double> all;
    for (const auto& p : model.parameters().all()) {
      const std::vector<double> g = numbers(p->grad);
      all.insert(all.end(), g.begin(), g.end());
    }
    return all;
  };
  model.step(batch, options);
  const std::vector<double> once = gradients();
  options.backward = false;
  model.step(batch, options);
  EXPECT_EQ(gradients(), once);
  options.backward = true;
  model.step(part_of(batch, 0, 9), options);
  model.step(part_of(batch, 9, 6), options);
  const std::vector<double> twice = gradients();
  for (std::size_t i = 0; i < once.size(); ++i) {
    EXPECT_NEAR(twice[i], 2 * once[i], 1e-12 * (1 + std::abs(once[i])));
  }
}

}  // namespace
}  // namespace winnow::model
