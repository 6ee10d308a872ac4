// The rules between options: everything that makes a configuration impossible, said before a device
// is touched. The rules of the model, its data, stages and recomputation are those of their readers.
#pragma once

#include "plan/config.h"
#include "plan/pipeline_layout.h"

namespace winnow::plan {

// Notes every broken rule, and returns the layout: without stages where there is none to be had.
PipelineLayout check(const PlanConfig& config, Rules& rules);

}  // namespace winnow::plan
