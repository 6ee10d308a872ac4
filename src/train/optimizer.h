// AdamW on the parameters of a model, in f32.
//
//   g' = g * min(1, clip_norm / |g|)
//   m  = beta1 m + (1 - beta1) g'         v = beta2 v + (1 - beta2) g'^2
//   x -= rate * (m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + epsilon) + weight_decay * x)
//
// The model and the indexers are two optimisations: each has its own loss, its own gradient norm
// |g| and its own count t of steps. Decay applies where Parameter::decay says so.
#pragma once

#include <vector>

#include "base/parameters.h"
#include "model/safetensors.h"
#include "train/config.h"

namespace winnow::train {

// Which parameters a step changes; the others keep value and state.
struct Trained {
  bool model = true;
  bool indexers = true;
};

struct GradientNorms {
  double model = 0, indexers = 0;  // before clipping; 0 where nothing was trained
};

class AdamW {
 public:
  // `parameters` must outlive it.
  AdamW(ParameterList& parameters, const OptimizerConfig& config);

  // One step from the gradients, which stay as they are. A gradient that is not finite is an error
  // before anything changes.
  GradientNorms step(double learning_rate, Trained trained);

  // All of its state, by name, for checkpoints: read from and written to in place.
  std::vector<model::NamedTensor> state() const;

 private:
  struct Moments {
    Array first, second;
  };

  ParameterList& parameters_;
  OptimizerConfig config_;
  std::vector<Moments> moments_;  // one per parameter
  Array steps_;                   // i64 [2]: model, indexers
};

}  // namespace winnow::train
