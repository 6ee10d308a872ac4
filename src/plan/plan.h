// The plan of a training step: its stages, what each computes, takes and needs, and for how long.
#pragma once

#include "plan/flops.h"
#include "plan/machine.h"
#include "plan/memory.h"
#include "plan/pipeline_layout.h"

namespace winnow::plan {

struct PlannedStage {
  Stage stage;
  std::vector<std::int64_t> computing;  // its layers that compute indices
  Flops flops;                          // of a step, on one of the ranks that hold it
  StageMemory memory;
  double seconds = 0;  // of a step: arithmetic and weights, whichever takes longer
};

struct Plan {
  PipelineLayout layout;
  std::vector<PlannedStage> stages;
  RowChunks scores;                 // of a micro-batch
  double tokens = 0;                // of a step, on all ranks
  Flops flops;                      // the same
  double mean_flops = 0;            // the total as Megatron Core reckons it
  std::int64_t ranks = 0;           // processors
  std::vector<double> rank_memory;  // bytes, of each pipeline rank
  double seconds = 0;               // of a step, with the pipeline's idle time
  double idle = 0;                  // share of it that the slowest rank waits
};

// Of a configuration that keeps every rule, with the layout that check() returned.
Plan make_plan(const PlanConfig& config, const PipelineLayout& layout);

}  // namespace winnow::plan
