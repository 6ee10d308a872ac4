// A decoder-only transformer with DSA layers: embedding, blocks of RMSNorm -> DSA and RMSNorm ->
// SwiGLU with residuals, RMSNorm, output head. Explicit forward and backward, in f32, or in f64 for
// tests.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "base/parameters.h"
#include "model/config.h"
#include "winnow/layout.h"

namespace winnow::model {

// Rows of one step: packed sequences; what a row sees is said by `ranges`, whose keys are the same
// rows.
struct Batch {
  std::vector<std::int32_t> tokens;     // [rows]
  std::vector<std::int32_t> targets;    // [rows], the next token; -1: no loss
  std::vector<std::int32_t> positions;  // [rows], inside the row's sequence
  RowRanges ranges;
};

struct StepOptions {
  attention::AttentionMode mode = attention::AttentionMode::kDense;
  bool backward = true;
  double loss_scale = 1;           // d(total loss)/d(nll of a row): 1 / tokens for a mean
  double index_loss_scale = 0;     // d(total loss)/d(kl of a row and layer); 0: no indexer loss
  bool measure_selection = false;  // fill attention_mass_caught: costs a dense attention per layer
};

struct StepResult {
  double nll = 0;                             // summed over rows with a target
  std::int64_t tokens = 0;                    // rows with a target
  std::vector<double> index_kl;               // per layer, summed over rows; empty without the loss
  std::vector<double> attention_mass_caught;  // per layer, mean over rows with more keys than topk
};

class Transformer {
 public:
  // Weights from N(0, 0.02) (residual projections / sqrt(2 layers)), norms 1, by `seed`.
  Transformer(const ModelConfig& config, DType dtype, std::uint64_t seed);
  ~Transformer();
  Transformer(Transformer&&) noexcept;
  Transformer& operator=(Transformer&&) noexcept;

  const ModelConfig& config() const;
  ParameterList& parameters();

  // Forward, and with options.backward also the backward: gradients are added to the parameters'.
  // In the warm-up mode only the indexers get gradients, and no logits are computed (nll 0).
  StepResult step(const Batch& batch, const StepOptions& options);

  // Log-probabilities [rows, vocab_size] of the next token for every row: the training forward.
  Array log_probabilities(const Batch& batch, attention::AttentionMode mode);

  // The selection of the last step or call, one int32 [rows, topk] tensor per layer; no tensors
  // where nothing was selected (dense mode, and a warm-up that does not measure).
  std::vector<Tensor> selections() const;

  // Holds the selection of the last sparse step for all later ones, which must have as many rows:
  // for finite differences and replays.
  void freeze_selection(bool frozen);

 private:
  friend class Decoder;
  struct Network;
  std::unique_ptr<Network> network_;
};

}  // namespace winnow::model
