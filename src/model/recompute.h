// What a training step does not keep from forward to backward but makes again, and where the parts
// of a block lie then. Gradients have the same bits with any choice.
//
// The first call of a block (FIRST_FORWARD) makes everything, the indexer's loss and its gradient
// included; the replay before its backward (REPLAY) makes again what was dropped, and never a loss.
#pragma once

#include "attention/activations.h"
#include "model/config.h"

namespace winnow::model {

using attention::Buffer;

struct Recompute {
  bool full = false;                 // all of a block: only its input is kept
  bool core_attention = false;       // selection and attention
  bool norms = false;                // outputs of a block's two norms
  bool mlp = false;                  // what lies inside the MLP
  bool query_up_projection = false;  // the queries, from their latent
  // The selection of the first call is kept and the replay attends to it: its indexer does not run.
  bool reuse_checkpoint_topk = false;

  bool any() const { return full || core_attention || norms || mlp || query_up_projection; }
  bool replays_selection() const { return full || core_attention; }
};

// Which combinations are supported.
void check(const Recompute& recompute, const ModelConfig& config, Rules& rules);
// Throws where one is not, with option, rule and what to do.
void validate(const Recompute& recompute, const ModelConfig& config);

struct NormActivations {
  Buffer normed_input, input_scale;    // [rows, hidden], [rows]
  Buffer normed_middle, middle_scale;  // [rows, hidden], [rows]
};

struct MlpActivations {
  Buffer gate, up, activated;  // [rows, intermediate]
};

// What a block keeps of a pass.
struct BlockActivations {
  attention::Activations attention;
  Buffer middle;  // [rows, hidden], between the halves of the block
  NormActivations norms;
  MlpActivations mlp;
};

// The same, each group where it lies in this pass.
struct BlockKept {
  attention::Kept attention;
  Buffer& middle;
  NormActivations& norms;
  MlpActivations& mlp;
};

// Groups that are dropped lie in `lent`, which all blocks write over. `cache` holds the keys of the
// pass; a selection that others need for longer stays the block's own.
BlockKept place(const Recompute& recompute, attention::KeyCache& cache, bool own_selection,
                BlockActivations& own, BlockActivations& lent);

}  // namespace winnow::model
