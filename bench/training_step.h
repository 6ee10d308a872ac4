// The model and the batch of a training_step problem, for whoever runs steps of its own with them.
#pragma once

#include "bench/problem.h"
#include "model/transformer.h"

namespace winnow::bench {

model::ModelConfig training_step_config(const Problem& problem);
// Random bytes; every row has a target.
model::Batch training_step_batch(const Problem& problem, const model::ModelConfig& config);

}  // namespace winnow::bench
