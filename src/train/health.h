// How well the indexers do while they train, on one held-out window that stays the same: how much
// of the dense attention their selection catches, and how much of it is still the selection of the
// last measurement. One forward of one window: cheap enough to leave on every some steps.
#pragma once

#include <filesystem>
#include <optional>
#include <vector>

#include "model/safetensors.h"
#include "model/transformer.h"
#include "train/data.h"
#include "train/ranks.h"

namespace winnow::train {

struct Health {
  // Share of the dense attention's probability on the selected keys, per layer; mean over rows with
  // more keys than topk.
  std::vector<double> attention_mass_caught;
  // Share of the selected keys that were selected at the last measurement, too, over the same rows;
  // per layer that owns an indexer (model::index_layers). Empty at the first.
  std::vector<double> selection_overlap;
};

class IndexHealth {
 public:
  // By the ranks of a context group, between which the window is cut. An overlap is found by those
  // that have the last measurement.
  Health measure(model::Transformer& model, const TextData& data, const Ranks& ranks = Ranks());

  // The selections of the last measurement, for checkpoints: a resumed run measures what an
  // unbroken one does. Empty before the first.
  std::vector<model::NamedTensor> state() const;
  void restore(const std::filesystem::path& file, const model::ModelConfig& config);

 private:
  std::vector<Array> last_;  // int32 [rows, topk], per layer that owns an indexer
};

}  // namespace winnow::train
