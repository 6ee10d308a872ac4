// What a stage of the pipeline takes of its rank's memory, in bytes: the tensors of a training step
// by what they are for. The trainer's own (model/pass.h, attention/pass.h) are listed one by one, so
// that on one rank the sum is what a step really allocates.
#pragma once

#include "plan/config.h"
#include "plan/pipeline_layout.h"
#include "winnow/chunks.h"

namespace winnow::plan {

struct StageMemory {
  double parameters = 0;       // how many there are
  double weights = 0;          // in the model's dtype
  double gradients = 0;        // f32
  double optimizer = 0;        // two moments, and weights in f32 where the model's are not
  double activations = 0;      // kept from forward to backward, of all micro-batches in flight
  double selections = 0;       // ids that the backward, a replay or other layers attend to again
  double temporaries = 0;      // what every layer uses while it runs
  double workspace = 0;        // of the operation that asks for the most
  double tables = 0;           // rotations; context parallel order of rows and keys
  std::int64_t in_flight = 0;  // micro-batches between forward and backward, at the most

  double total() const {
    return weights + gradients + optimizer + activations + selections + temporaries + workspace +
           tables;
  }
};

// Micro-batches of a virtual stage that are between forward and backward at a time: one forward and
// one backward in turns, as soon as there is one to do; virtual stages in groups of `ranks`
// micro-batches.
std::int64_t micro_batches_in_flight(std::int64_t ranks, std::int64_t virtual_stages,
                                     std::int64_t micro_batches, std::int64_t rank,
                                     std::int64_t virtual_stage);

// Scores of a micro-batch's rows against all keys, as many rows at a time as the budget holds.
RowChunks score_chunks(const PlanConfig& config);

// Trained numbers of a layer, of what a depth of multi-token prediction has beside its layers, and
// of a stage. Experts count once for each rank that holds them.
double layer_parameters(const PlanConfig& config, std::int64_t layer);
double stage_parameters(const PlanConfig& config, const Stage& stage);

StageMemory stage_memory(const PlanConfig& config, const PipelineLayout& layout,
                         const Stage& stage);

}  // namespace winnow::plan
