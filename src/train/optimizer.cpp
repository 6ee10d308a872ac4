#include "train/optimizer.h"

#include <algorithm>
#include <cmath>

#include "base/check.h"
#include "base/parallel.h"

namespace winnow::train {
namespace {

constexpr const char* kOperation = "optimizer";
constexpr std::int64_t kBlock = 1 << 14;  // elements of a task

struct Coefficients {
  float beta1, beta2, epsilon, clip, rate, decay, correction1, correction2;
};

void update(const Coefficients& c, std::int64_t n, const float* grad, float* first, float* second,
            float* value) {
  for (std::int64_t i = 0; i < n; ++i) {
    const float g = grad[i] * c.clip;
    first[i] = c.beta1 * first[i] + (1 - c.beta1) * g;
    second[i] = c.beta2 * second[i] + (1 - c.beta2) * (g * g);
    const float direction =
        first[i] * c.correction1 / (std::sqrt(second[i] * c.correction2) + c.epsilon);
    value[i] -= c.rate * (direction + c.decay * value[i]);
  }
}

// Calls body(i, first, count) for blocks of all parameters that `wanted` accepts.
template <class Wanted, class Body>
void for_blocks(const ParameterList& parameters, const Wanted& wanted, const Body& body) {
  struct Block {
    std::size_t parameter;
    std::int64_t first, count;
  };
  std::vector<Block> blocks;
  for (std::size_t i = 0; i < parameters.all().size(); ++i) {
    const Parameter& p = *parameters.all()[i];
    if (!wanted(p)) continue;
    const std::int64_t elements = p.value.elements();
    for (std::int64_t first = 0; first < elements; first += kBlock) {
      blocks.push_back({i, first, std::min(kBlock, elements - first)});
    }
  }
  parallel_for(static_cast<std::int64_t>(blocks.size()), [&](std::int64_t task, int) {
    const Block& b = blocks[static_cast<std::size_t>(task)];
    body(task, b.parameter, b.first, b.count);
  });
}

// In double; block by block, then the blocks in order: the same for every thread count.
double gradient_norm(const ParameterList& parameters, bool indexers) {
  std::int64_t blocks = 0;
  for (const auto& p : parameters.all()) blocks += ceil_div(p->value.elements(), kBlock);
  std::vector<double> squares(static_cast<std::size_t>(blocks));
  for_blocks(
      parameters, [&](const Parameter& p) { return p.indexer == indexers; },
      [&](std::int64_t task, std::size_t i, std::int64_t first, std::int64_t count) {
        const float* grad = parameters.all()[i]->grad.as<float>() + first;
        double sum = 0;
        for (std::int64_t j = 0; j < count; ++j) {
          sum += static_cast<double>(grad[j]) * static_cast<double>(grad[j]);
        }
        squares[static_cast<std::size_t>(task)] = sum;
      });
  double total = 0;
  for (double square : squares) total += square;
  return std::sqrt(total);
}

}  // namespace

AdamW::AdamW(ParameterList& parameters, const OptimizerConfig& config)
    : parameters_(parameters), config_(config), steps_(DType::kI64, {2}) {
  for (const auto& p : parameters.all()) {
    WINNOW_CHECK(kOperation, p->value.view().dtype == DType::kF32,
                 "parameters must be f32, got {} for {}", dtype_name(p->value.view().dtype),
                 p->name);
    moments_.push_back({p->value.clone(), p->value.clone()});
    moments_.back().first.zero();
    moments_.back().second.zero();
  }
}

GradientNorms AdamW::step(double learning_rate, Trained trained) {
  GradientNorms norms;
  if (trained.model) norms.model = gradient_norm(parameters_, false);
  if (trained.indexers) norms.indexers = gradient_norm(parameters_, true);
  if (!std::isfinite(norms.model) || !std::isfinite(norms.indexers)) {
    fail(Status::kInvalidArgument, kOperation,
         "the gradient must be finite, got a norm of {} (model) and {} (indexers): lower the "
         "learning rate or warm up longer",
         norms.model, norms.indexers);
  }
  for (const bool indexers : {false, true}) {
    if (!(indexers ? trained.indexers : trained.model)) continue;
    const double norm = indexers ? norms.indexers : norms.model;
    const auto t = static_cast<double>(++steps_.as<std::int64_t>()[indexers ? 1 : 0]);
    Coefficients c{};
    c.beta1 = static_cast<float>(config_.beta1);
    c.beta2 = static_cast<float>(config_.beta2);
    c.epsilon = static_cast<float>(config_.epsilon);
    c.clip = norm > config_.clip_norm ? static_cast<float>(config_.clip_norm / norm) : 1.0f;
    c.rate = static_cast<float>(learning_rate);
    c.correction1 = static_cast<float>(1 / (1 - std::pow(config_.beta1, t)));
    c.correction2 = static_cast<float>(1 / (1 - std::pow(config_.beta2, t)));
    for_blocks(
        parameters_, [&](const Parameter& p) { return p.indexer == indexers; },
        [&](std::int64_t, std::size_t i, std::int64_t first, std::int64_t count) {
          const Parameter& p = *parameters_.all()[i];
          Coefficients own = c;
          own.decay = p.decay ? static_cast<float>(config_.weight_decay) : 0.0f;
          update(own, count, p.grad.as<float>() + first, moments_[i].first.as<float>() + first,
                 moments_[i].second.as<float>() + first, p.value.as<float>() + first);
        });
  }
  return norms;
}

std::vector<model::NamedTensor> AdamW::state() const {
  std::vector<model::NamedTensor> all{{"steps", steps_}};
  for (std::size_t i = 0; i < moments_.size(); ++i) {
    const std::string& name = parameters_.all()[i]->name;
    all.push_back({"first_moment." + name, moments_[i].first});
    all.push_back({"second_moment." + name, moments_[i].second});
  }
  return all;
}

}  // namespace winnow::train
