// AdamW against the same formulas in double, its two groups, and its independence of threads.
#include "train/optimizer.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>

#include "tests/files.h"
#include "train/schedule.h"
#include "winnow/threads.h"

namespace winnow::train {
namespace {

// A matrix and a norm of the model, a matrix of an indexer; sizes beyond one block of work.
struct Toy {
  ParameterList list;
  Toy() {
    list.add("matrix", {150, 301}, DType::kF32);
    list.add("norm", {37}, DType::kF32);
    list.add("index", {9, 11}, DType::kF32).indexer = true;
    fill(1);
    for (const auto& p : list.all()) {
      for (std::int64_t i = 0; i < p->value.elements(); ++i) {
        p->value.as<float>()[i] = static_cast<float>(std::sin(0.7 * static_cast<double>(i)));
      }
    }
  }
  void fill(int step) {
    for (const auto& p : list.all()) {
      for (std::int64_t i = 0; i < p->grad.elements(); ++i) {
        p->grad.as<float>()[i] =
            static_cast<float>(0.01 * std::cos(1.3 * static_cast<double>(i) + step));
      }
    }
  }
};

double norm_of(const Toy& toy, bool indexers) {
  double sum = 0;
  for (const auto& p : toy.list.all()) {
    if (p->indexer != indexers) continue;
    for (std::int64_t i = 0; i < p->grad.elements(); ++i) {
      sum += static_cast<double>(p->grad.as<float>()[i]) * p->grad.as<float>()[i];
    }
  }
  return std::sqrt(sum);
}

TEST(AdamW, FollowsTheFormulasOfDoublePrecision) {
  OptimizerConfig config;
  config.clip_norm = 0.05;  // the model's gradient is clipped, the indexer's is not quite
  Toy toy;
  AdamW adam(toy.list, config);
  std::vector<std::vector<double>> value(3), m(3), v(3);
  for (std::size_t k = 0; k < 3; ++k) {
    const Array& a = toy.list.all()[k]->value;
    value[k].assign(a.as<float>(), a.as<float>() + a.elements());
    m[k].assign(value[k].size(), 0);
    v[k] = m[k];
  }
  const int kSteps = 20;
  const double rate = 0.01;
  for (int t = 1; t <= kSteps; ++t) {
    toy.fill(t);
    const GradientNorms norms = adam.step(rate, {});
    EXPECT_NEAR(norms.model, norm_of(toy, false), 1e-12 * norms.model);
    EXPECT_NEAR(norms.indexers, norm_of(toy, true), 1e-12 * norms.indexers);
    for (std::size_t k = 0; k < 3; ++k) {
      const Parameter& p = *toy.list.all()[k];
      const double norm = p.indexer ? norms.indexers : norms.model;
      const double clip = std::min(1.0, config.clip_norm / norm);
      for (std::size_t i = 0; i < value[k].size(); ++i) {
        const double g = p.grad.as<float>()[i] * clip;
        m[k][i] = config.beta1 * m[k][i] + (1 - config.beta1) * g;
        v[k][i] = config.beta2 * v[k][i] + (1 - config.beta2) * g * g;
        const double up = m[k][i] / (1 - std::pow(config.beta1, t));
        const double down = std::sqrt(v[k][i] / (1 - std::pow(config.beta2, t))) + config.epsilon;
        const double decay = k == 1 ? 0 : config.weight_decay;  // not on the norm
        value[k][i] -= rate * (up / down + decay * value[k][i]);
      }
    }
  }
  // A step moves by about `rate`, and its f32 arithmetic (under 16 roundings of 2^-24; the first
  // moment may cancel to a tenth of its terms) errs by at most 10 * 16 * 2^-24 of that; the value,
  // at most 1.2, adds one rounding.
  const double bound = kSteps * (rate * 160 * 0x1p-24 + 1.2 * 0x1p-24);
  for (std::size_t k = 0; k < 3; ++k) {
    for (std::size_t i = 0; i < value[k].size(); ++i) {
      ASSERT_NEAR(toy.list.all()[k]->value.as<float>()[i], value[k][i], bound) << k << " " << i;
    }
  }
}

TEST(AdamW, OnlyTheTrainedGroupChangesAndItsStateBeginsThen) {
  Toy toy, late;
  AdamW adam(toy.list, {}), fresh(late.list, {});
  const Array index_before = toy.list.find("index")->value.clone();
  adam.step(0.01, {true, false});
  EXPECT_EQ(std::memcmp(toy.list.find("index")->value.as<char>(), index_before.as<char>(),
                        static_cast<std::size_t>(index_before.bytes())),
            0);
  const Array matrix_before = toy.list.find("matrix")->value.clone();
  adam.step(0.01, {false, true});
  EXPECT_EQ(std::memcmp(toy.list.find("matrix")->value.as<char>(), matrix_before.as<char>(),
                        static_cast<std::size_t>(matrix_before.bytes())),
            0);
  // The indexer moved as if this were its first step.
  fresh.step(0.01, {false, true});
  EXPECT_EQ(std::memcmp(toy.list.find("index")->value.as<char>(),
                        late.list.find("index")->value.as<char>(),
                        static_cast<std::size_t>(index_before.bytes())),
            0);
}

TEST(AdamW, BitwiseEqualForEveryThreadCount) {
  std::vector<Array> results;
  for (int threads : {1, 2, 5}) {
    set_num_threads(threads);
    Toy toy;
    AdamW adam(toy.list, {});
    for (int t = 0; t < 3; ++t) {
      toy.fill(t);
      adam.step(0.01, {});
    }
    results.push_back(toy.list.find("matrix")->value.clone());
    EXPECT_EQ(std::memcmp(results[0].as<char>(), results.back().as<char>(),
                          static_cast<std::size_t>(results[0].bytes())),
              0);
  }
}

TEST(AdamW, AGradientThatIsNotFiniteChangesNothing) {
  Toy toy;
  AdamW adam(toy.list, {});
  const Array before = toy.list.find("matrix")->value.clone();
  toy.list.find("index")->grad.as<float>()[3] = std::numeric_limits<float>::quiet_NaN();
  const std::string message = error_of(Status::kInvalidArgument, [&] { adam.step(0.01, {}); });
  EXPECT_TRUE(has(message, "lower the learning rate"));
  EXPECT_EQ(std::memcmp(toy.list.find("matrix")->value.as<char>(), before.as<char>(),
                        static_cast<std::size_t>(before.bytes())),
            0);
  EXPECT_EQ(adam.state()[0].tensor.as<std::int64_t>()[0], 0);
}

TEST(Schedule, RisesThenFallsAlongACosineToTheEnd) {
  StageConfig stage;
  stage.steps = 11;
  stage.warmup_steps = 4;
  stage.learning_rate = 1;
  stage.final_learning_rate = 0.1;
  EXPECT_DOUBLE_EQ(learning_rate(stage, 0), 0.25);
  EXPECT_DOUBLE_EQ(learning_rate(stage, 3), 1);
  EXPECT_DOUBLE_EQ(learning_rate(stage, 4), 1);
  EXPECT_DOUBLE_EQ(learning_rate(stage, 7), 0.55);  // half way: the middle
  EXPECT_DOUBLE_EQ(learning_rate(stage, 10), 0.1);
}

TEST(Schedule, StepsFallIntoTheirStages) {
  TrainConfig config;
  config.stages.resize(3);
  for (std::size_t i = 0; i < 3; ++i) config.stages[i].steps = static_cast<std::int64_t>(2 + i);
  std::vector<std::pair<std::size_t, std::int64_t>> seen;
  for (std::int64_t step = 0; step < total_steps(config); ++step) {
    const StagePosition p = stage_position(config, step);
    seen.emplace_back(p.stage, p.step);
  }
  const std::vector<std::pair<std::size_t, std::int64_t>> expected = {
      {0, 0}, {0, 1}, {1, 0}, {1, 1}, {1, 2}, {2, 0}, {2, 1}, {2, 2}, {2, 3}};
  EXPECT_EQ(seen, expected);
  error_of(Status::kInvalidArgument, [&] { stage_position(config, 9); });
}

}  // namespace
}  // namespace winnow::train
