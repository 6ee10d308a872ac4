// A decoder-only transformer with DSA layers: embedding, blocks of RMSNorm -> DSA and RMSNorm ->
// SwiGLU with residuals, RMSNorm, output head. Explicit forward and backward, in f32, or in f64 for
// tests.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "base/parameters.h"
#include "model/recompute.h"
#include "winnow/layout.h"
#include "winnow/pools.h"

namespace winnow::model {

// Rows of one micro-batch: packed sequences; what a row sees is said by `ranges`, whose keys are
// the same rows. With context parallelism they are one rank's part of them (model/cut_batch.h), and
// the keys of the ranges are the rows of all ranks, in order of position.
struct Batch {
  std::vector<std::int32_t> tokens;     // [rows]
  std::vector<std::int32_t> targets;    // [rows], the next token; -1: no loss
  std::vector<std::int32_t> positions;  // [rows], inside the row's sequence
  RowRanges ranges;                     // empty: a row of padding, which adds 0 to everything
  // [sequences + 1]: where each begins; they fill the rows, and some may be empty. For who cuts a
  // batch: a model reads `ranges` alone.
  std::vector<std::int64_t> cu_seqlens;
  // Where the pools of a sequence begin, among the keys. Left out: where the sequence does, as the
  // ranges say; all of its rows must then see it from its first key on.
  TokenSpans spans;
  // For multi-token prediction, [depths][rows]: the token that depth d reads beside the row's
  // state, and the one that it is to predict (-1: no loss).
  std::vector<std::vector<std::int32_t>> mtp_tokens, mtp_targets;
  // Who holds the other rows; null: nobody. A pass goes backward with the group of its forward,
  // whatever the batch says by then.
  std::shared_ptr<const attention::ContextGroup> context;
};

// Fills mtp_tokens and mtp_targets from the targets: depth d of a row reads the target of the row d
// places on and predicts the one d + 1 places on. What would lie in another sequence, or has no
// target, is token 0 without loss; such rows end a sequence, so no row with a loss sees them.
void add_mtp_tokens(Batch& batch, std::int64_t depths);

struct StepOptions {
  attention::AttentionMode mode = attention::AttentionMode::kDense;
  bool backward = true;
  double loss_scale = 1;        // d(total loss)/d(nll of a row): 1 / tokens for a mean
  double index_loss_scale = 0;  // d(total loss)/d(kl of a row and layer); 0: no indexer loss
  // d(total loss)/d(nll of a row) of each depth of multi-token prediction; empty: it does not run.
  // In the warm-up it runs where its layer owns an indexer, whatever stands here.
  std::vector<double> mtp_loss_scales;
  bool measure_selection = false;  // fill attention_mass_caught: costs a dense attention per layer
  Recompute recompute;             // of a pass with backward; changes no bit
};

// How often indexers scored all keys and selected, and the time of all that they do.
struct IndexRuns {
  std::int64_t forward = 0;
  std::int64_t replay = 0;  // again, in replays
  double seconds = 0;
};

// With context parallelism: of this rank's rows. Sums add up over the ranks, and so do the gradients
// of parameters; attention_mass_caught is that of all ranks' rows on every rank.
struct StepResult {
  double nll = 0;           // summed over rows with a target
  std::int64_t tokens = 0;  // rows with a target
  // Per layer that owns an indexer and ran (index_layers of the configuration), summed over rows,
  // and over the depths in which it computed; empty without the loss.
  std::vector<double> index_kl;
  // Per layer, then per depth that ran; mean over rows with more keys than topk.
  std::vector<double> attention_mass_caught;
  std::vector<double> mtp_nll;           // per depth, summed over rows with a target
  std::vector<std::int64_t> mtp_tokens;  // per depth, rows with a target
  IndexRuns index_runs;
  double flops = 0;  // counted (base/arithmetic.h), those of replays included
};

// One micro-batch between its forward and its backward: what its layers keep, and what they share.
class Pass {
 public:
  Pass();
  ~Pass();
  Pass(Pass&&) noexcept;
  Pass& operator=(Pass&&) noexcept;

  // As those of Transformer, of this pass.
  std::vector<Tensor> selections() const;
  std::vector<bool> certificates() const;

 private:
  friend class Transformer;
  friend class Decoder;
  std::unique_ptr<struct PassState> state_;
};

class Transformer {
 public:
  // Weights from N(0, 0.02) (residual projections / sqrt(2 layers)), gates of pools from
  // N(0, 0.01), norms 1, by `seed`.
  Transformer(const ModelConfig& config, DType dtype, std::uint64_t seed);
  ~Transformer();
  Transformer(Transformer&&) noexcept;
  Transformer& operator=(Transformer&&) noexcept;

  const ModelConfig& config() const;
  ParameterList& parameters();

  // Forward, and with options.backward also the backward: gradients are added to the parameters'.
  // In the warm-up mode only the indexers get gradients, and no logits are computed (nll 0).
  StepResult step(const Batch& batch, const StepOptions& options);

  // The same in two halves, with as many micro-batches in flight as there are passes: the losses
  // and the gradients of output head and indexers come with the forward, the rest with the
  // backward, which must find the batch and the weights as they were. A backward ends the pass, and
  // says what indexers did again in its replays.
  StepResult forward(const Batch& batch, const StepOptions& options, Pass& pass);
  IndexRuns backward(Pass& pass);

  // Log-probabilities [rows, vocab_size] of the next token for every row: the training forward.
  Array log_probabilities(const Batch& batch, attention::AttentionMode mode);

  // The selection that each layer attended to in the last step or call, int32 [rows, topk]; layers
  // that reuse one show that of their source. No tensors where nothing was selected (dense mode,
  // and a warm-up that does not measure); empty ones where recomputation dropped them.
  std::vector<Tensor> selections() const;
  // What each layer certified of them: that every row attends to a key.
  std::vector<bool> certificates() const;

  // Holds the selection of the last sparse step for all later ones, which must have as many rows:
  // for finite differences.
  void freeze_selection(bool frozen);

 private:
  friend class Decoder;
  struct Network;
  std::unique_ptr<Network> network_;
};

}  // namespace winnow::model
