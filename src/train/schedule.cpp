#include "train/schedule.h"

#include <cmath>
#include <numbers>

#include "base/check.h"

namespace winnow::train {

StagePosition stage_position(const TrainConfig& config, std::int64_t step) {
  StagePosition position{0, step};
  while (position.stage < config.stages.size()) {
    const std::int64_t steps = config.stages[position.stage].steps;
    if (position.step < steps) return position;
    position.step -= steps;
    ++position.stage;
  }
  fail(Status::kInvalidArgument, "schedule", "step must be below {}, got {}", total_steps(config),
       step);
}

double learning_rate(const StageConfig& stage, std::int64_t step) {
  if (step < stage.warmup_steps) {
    return stage.learning_rate * static_cast<double>(step + 1) /
           static_cast<double>(stage.warmup_steps);
  }
  const std::int64_t falling = stage.steps - stage.warmup_steps;
  const double done = falling > 1 ? static_cast<double>(step - stage.warmup_steps) /
                                        static_cast<double>(falling - 1)
                                  : 1;
  const double height = 0.5 * (1 + std::cos(std::numbers::pi * done));
  return stage.final_learning_rate + (stage.learning_rate - stage.final_learning_rate) * height;
}

}  // namespace winnow::train
