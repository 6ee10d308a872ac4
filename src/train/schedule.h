// Where a run stands in its stages, and the learning rate there.
#pragma once

#include "train/config.h"

namespace winnow::train {

struct StagePosition {
  std::size_t stage = 0;
  std::int64_t step = 0;  // steps of the stage already done
};

// `step` in [0, total_steps): the number of steps already done.
StagePosition stage_position(const TrainConfig& config, std::int64_t step);

// Of step `step` (from 0) of the stage: rises linearly over warmup_steps to learning_rate, then
// falls along half a cosine to final_learning_rate at the last step.
double learning_rate(const StageConfig& stage, std::int64_t step);

}  // namespace winnow::train
