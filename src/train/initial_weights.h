// The weights that a run begins with, where they are those of another run's checkpoint: how a dense
// model gets its indexers, and how any model goes on with other data, stages or rates.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "model/transformer.h"

namespace winnow::train {

struct InitialWeights {
  std::filesystem::path checkpoint;  // whose weights they are
  std::int64_t new_indexers = 0;     // layers whose indexer stays as it was initialised
  std::vector<std::string> damaged;  // newer checkpoints that were passed over
};

// `place` is a run's output folder, whose newest whole checkpoint is taken, or a checkpoint's.
//
// Every weight of the model must be there, in its shape, and nothing else; the first that is not is
// named. Indexers are the exception: where the checkpoint has none for a layer, or its run had only
// dense stages so far, the model's own stay, whatever their shape. What decides the meaning of
// weights without showing in their shapes (angles of the rotation, epsilons) must be the same.
InitialWeights load_initial_weights(const std::filesystem::path& place, model::Transformer& model);

}  // namespace winnow::train
