// One step of a model by itself, and the same step by a group of ranks that share the context: what
// both have to show, laid out the same way so that it can be compared.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "comm/collectives.h"
#include "model/cut_batch.h"
#include "tests/tiny_models.h"

namespace winnow::model {

struct ContextOutcome {
  StepResult result;                                  // summed over the ranks
  std::vector<std::vector<double>> gradients;         // of every parameter, summed over the ranks
  std::vector<std::vector<std::int32_t>> selections;  // per layer, [rows, topk], as of the batch
  std::vector<double> probabilities;                  // log, [rows, vocab]
};

// What the models are asked: every loss they have.
inline StepOptions context_options(const ModelConfig& config, attention::AttentionMode mode) {
  StepOptions options;
  options.mode = mode;
  options.loss_scale = 0.7;
  const bool learns = mode != attention::AttentionMode::kDense && !config.attention.indexer.pools();
  options.index_loss_scale = learns ? 1.3 : 0;
  options.measure_selection = mode != attention::AttentionMode::kDense;
  for (std::int64_t d = 0; d < config.mtp_depths; ++d) {
    options.mtp_loss_scales.push_back(0.3 + 0.2 * static_cast<double>(d));
  }
  return options;
}

inline std::vector<std::vector<double>> gradients_of(Transformer& model) {
  std::vector<std::vector<double>> all;
  for (const auto& p : model.parameters().all()) all.push_back(numbers(p->grad));
  return all;
}

inline ContextOutcome run_alone(const ModelConfig& config, DType dtype, const Batch& batch,
                                const StepOptions& options) {
  Transformer model = shaken_model(config, dtype);
  ContextOutcome o;
  o.result = model.step(batch, options);
  o.gradients = gradients_of(model);
  for (const Tensor& ids : model.selections()) {
    o.selections.push_back(ids.empty() ? std::vector<std::int32_t>() : ids_of(ids));
  }
  if (options.mode != attention::AttentionMode::kWarmup) {
    o.probabilities = numbers(model.log_probabilities(batch, options.mode));
  }
  return o;
}

inline void sum_over(Communicator& group, std::vector<double>& values) {
  comm::sum(group, std::span(values));
}

inline void sum_gradients(Communicator& group, Transformer& model) {
  for (const auto& p : model.parameters().all()) {
    const Tensor& grad = p->grad;
    const auto size = static_cast<std::size_t>(grad.elements());
    if (grad.dtype == DType::kF64) {
      comm::sum(group, std::span(grad.as<double>(), size));
    } else {
      comm::sum(group, std::span(grad.as<float>(), size));
    }
  }
}

inline void sum_result(Communicator& group, StepResult& r) {
  std::vector<double> scalars = {r.nll, static_cast<double>(r.tokens)};
  sum_over(group, scalars);
  r.nll = scalars[0];
  r.tokens = static_cast<std::int64_t>(scalars[1]);
  sum_over(group, r.index_kl);
  sum_over(group, r.mtp_nll);
}

// On every rank of the group; all get the same outcome. `model` has what run_alone's has.
inline ContextOutcome run_shared(Transformer& model, const Batch& batch, const StepOptions& options,
                                 Communicator& group, std::int64_t local_rows = 0) {
  const Batch mine = share_batch(batch, group, local_rows);
  ContextOutcome o;
  model.parameters().zero_grad();
  o.result = model.step(mine, options);
  sum_result(group, o.result);
  sum_gradients(group, model);
  o.gradients = gradients_of(model);
  for (const Tensor& ids : model.selections()) {
    o.selections.emplace_back();
    if (!ids.empty()) o.selections.back() = ids_of(gather_selection(batch, mine, ids));
  }
  if (options.mode != attention::AttentionMode::kWarmup) {
    const Array rows = model.log_probabilities(mine, options.mode);
    o.probabilities = numbers(gather_rows(batch, mine, rows));
  }
  return o;
}

// What context parallelism may change, and by how much.
//
// Every row's forward has the same bits: products, scores, selections and attention of a row are
// chains over channels and over its keys in ascending order, and padding and cuts change neither.
// Sums over rows are formed in another order: of losses, which are sums in double, and of gradients
// of keys and parameters. A sum of n terms in another order is off by about sqrt(2 n) u of their
// magnitudes (u = 2^-53, or 2^-24 in f32; 2 n u if all roundings went one way). A gradient comes
// through at most two such sums per call of a block, of its keys and of the parameter itself. With
// n <= 64 rows and at most 5 calls, roundings that do not know of each other add up to
// sqrt(2 * 64) * sqrt(10) u = 36 u of the magnitudes, and these to at most four times the largest
// gradient of the parameter: 144 u of it, 1e-5 in f32 and 2e-14 in double. (Measured: 28 u.) A row
// or a rank that is missing, or counted twice, is off by 1e-2 and more.
inline double gradient_bound(DType dtype) { return dtype == DType::kF64 ? 2e-14 : 1e-5; }

inline void expect_same(const ContextOutcome& shared, const ContextOutcome& alone, DType dtype) {
  const double losses = 1e-13;  // sums of numbers that have the same bits, in double
  const auto near = [&](const std::vector<double>& a, const std::vector<double>& b) {
    ASSERT_EQ(a.size(), b.size());
    for (std::size_t i = 0; i < a.size(); ++i) EXPECT_NEAR(a[i], b[i], losses * std::abs(b[i]));
  };
  EXPECT_EQ(shared.result.tokens, alone.result.tokens);
  EXPECT_NEAR(shared.result.nll, alone.result.nll, losses * alone.result.nll);
  near(shared.result.index_kl, alone.result.index_kl);
  near(shared.result.mtp_nll, alone.result.mtp_nll);
  near(shared.result.attention_mass_caught, alone.result.attention_mass_caught);
  EXPECT_EQ(shared.probabilities, alone.probabilities);
  EXPECT_EQ(shared.selections, alone.selections);
  ASSERT_EQ(shared.gradients.size(), alone.gradients.size());
  for (std::size_t p = 0; p < alone.gradients.size(); ++p) {
    double largest = 0, worst = 0;
    for (std::size_t i = 0; i < alone.gradients[p].size(); ++i) {
      largest = std::max(largest, std::abs(alone.gradients[p][i]));
      worst = std::max(worst, std::abs(alone.gradients[p][i] - shared.gradients[p][i]));
    }
    EXPECT_LE(worst, gradient_bound(dtype) * largest) << "parameter " << p;
  }
}

}  // namespace winnow::model
