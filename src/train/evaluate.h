// How well a model predicts the held-out text, densely or through its indexers' selection, and how
// much of the text that selection reads.
#pragma once

#include <vector>

#include "model/transformer.h"
#include "train/data.h"
#include "train/ranks.h"

namespace winnow::train {

struct Evaluation {
  std::int64_t windows = 0;
  double bits_per_byte = 0;               // mean over all tokens of all windows
  std::vector<double> mtp_bits_per_byte;  // per depth of multi-token prediction, over its tokens

  // Of a sparse evaluation; means over layers.
  double keys_read_fraction = 0;  // selected / visible keys, at the last row of each document
  double keys_read_mean = 0;      // the same, mean over all rows
  // Share of the dense attention's probability that falls on the selected keys, per layer and then
  // per depth, mean over rows with more keys than topk. Empty unless measured.
  std::vector<double> attention_mass_caught;
};

// Over the first `windows` windows of the held-out text (train/data.h). A stretch of text counts as
// a document; each is read by itself from its first token.
//
// By all ranks together, and by any number of shares with the same bits. Where windows are cut
// between ranks (parallel.cp), what the selection reads is not counted.
Evaluation evaluate(model::Transformer& model, const TextData& data, attention::AttentionMode mode,
                    std::int64_t windows, bool measure_selection, const Ranks& ranks = Ranks());

}  // namespace winnow::train
