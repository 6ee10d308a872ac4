// The DSA layer: projections, indexer, selection, sparse attention, indexer loss; forward and
// backward.
//
// - kSparse: the indexer selects topk keys per row, attention reads those. With a loss scale the
//   indexer learns from the KL between its scores and the attention, both over the selection.
// - kDense: attention reads all visible keys; the indexer does not run.
// - kWarmup: dense attention; the indexer learns from the KL over all visible keys.
//
// A layer that reuses the indices of another (attention/forward_sharing.h) attends to what it is
// given; it runs no indexer and has no indexer loss. Whether a call reuses is said by the call, not
// by what the layer owns.
//
// With precision kMxfp8 the selection alone is scored in MXFP8; what the loss learns from is scored
// again, for the selected keys, from the inputs that were not quantised.
//
// With pools (KPool) the indexer scores one key for every pool_size tokens; a row attends to the
// tokens of the pools that it selects and, with select_tail, to those behind its last whole pool.
// Such an indexer is frozen: it has no loss.
//
// The indexer's gradient depends on nothing that comes after the layer, so the forward computes it:
// the indexer's activations need not outlive the layer, and a replay has no indexer loss to repeat.
// The backward is the language loss's alone; it never touches the indexer.
#pragma once

#include <memory>
#include <optional>
#include <string>

#include "attention/indexer.h"
#include "attention/projection.h"

namespace winnow::attention {

struct LayerOptions {
  AttentionMode mode = AttentionMode::kDense;
  bool reuses_indices = false;  // of `reused`; an indexer that the layer may own does not run
  Selection reused;             // empty where the mode selects nothing
  bool shared_keys = false;     // the cache holds the rows' keys already: those of another call
  bool index_loss = false;      // kSparse: compute the KL; kWarmup always does
  bool index_gradient = false;  // and add its gradient to the indexer's parameters
  double d_kl = 0;              // derivative of the total loss by the kl of each row
  bool measure_selection = false;
  bool hold_selection = false;  // kSparse: attend to what kept.selection holds, not to a new one
  // Tensor parallelism: the ranks that have equal parts of the heads, this layer one of them. What
  // the indexer learns from in sparse mode is the attention of all. Null: this layer has all heads.
  Communicator* head_ranks = nullptr;

  // The mode selects, or measures what would be selected.
  bool selects() const {
    return mode == AttentionMode::kSparse || (mode == AttentionMode::kWarmup && measure_selection);
  }
};

// What a replay makes again, of what was dropped after the forward.
struct LayerReplay {
  bool latents = false;  // what queries come from, and the keys
  bool query = false;
  bool core = false;  // selection and attention
};

struct LayerResult {
  double index_kl = 0;  // summed over rows
  // Mean over rows that see more keys than a selection holds; 1 without such.
  double attention_mass_caught = 0;
};

class Layer {
 public:
  // Adds its parameters under `prefix` ("model.layers.0.self_attn."). The tables must outlive it.
  // A layer that never selects owns no indexer.
  Layer(const AttentionConfig& config, const RopeTables& ropes, ParameterList& parameters,
        const std::string& prefix, DType dtype, bool owns_indexer = true);

  bool owns_indexer() const { return indexer_.has_value(); }

  // x [rows, hidden], after the input norm. output [rows, hidden] may be left out where only the
  // indexer's loss matters. x and what is kept stay as they are for the backward.
  LayerResult forward(const Tensor& x, const Rows& rows, const LayerOptions& options,
                      const Kept& kept, Memory& memory, const Tensor& output) const;

  // Fills the named groups again as the forward of the same x, rows and options left them, without
  // losses. output may be left out.
  void replay(const Tensor& x, const Rows& rows, const LayerOptions& options,
              const LayerReplay& parts, const Kept& kept, Memory& memory,
              const Tensor& output) const;

  // Of the last forward into `kept`, whose rows must be all keys there are, or this rank's part of
  // them. d_x is overwritten; gradients of parameters are those of this rank's rows, and add up
  // over the ranks.
  //
  // Keys on the gradient path of several calls: a call with shared_keys adds its part to
  // d_shared_keys [keys, 1, dim_qk]; the call that made the keys adds that to its own part and goes
  // on, over the ranks, into its projections. Left out: nobody shares.
  void backward(const Tensor& x, const Rows& rows, const LayerOptions& options, const Kept& kept,
                const Tensor& d_output, const Tensor& d_x, const Tensor& d_shared_keys,
                Memory& memory) const;

 private:
  struct Keys {
    Tensor key, value, index_key, index_key_data, index_key_scale;
  };
  Keys keys_of(const KeyCache& cache, const Rows& rows) const;
  void check(const Rows& rows, const LayerOptions& options) const;
  // For counted_flops(): pairs of a row and a key that it sees, or that its indexer scores, or of
  // those selected.
  static double visible_pairs(const Rows& rows);
  double scored_pairs(const Rows& rows) const;
  static double pairs(const Rows& rows, const Selection& selection);
  double logit_flops(double pairs) const;
  double attention_flops(double pairs) const;  // of logits and values
  double index_flops(double pairs) const;      // of scores
  void make_keys(const Tensor& x, const Rows& rows, const Kept& kept, Memory& memory) const;
  void make_index_keys(const Tensor& x, const Rows& rows, const LayerOptions& options,
                       const Kept& kept, Memory& memory) const;
  void make_pools(const Tensor& x, const Tensor& input, const Rows& rows,
                  const LayerOptions& options, const Kept& kept, Memory& memory) const;
  // Of the rows' own keys: d_all [keys, ...] itself, or with context parallelism the sum over the
  // ranks of what belongs to these rows, in `own`.
  static Tensor own_gradient(const Rows& rows, const Tensor& d_all, Buffer& own, Memory& memory);
  // Whether every row attends to a key; an empty selection: to all that it sees.
  static bool rows_nonempty(const Rows& rows, const Selection& selection);
  void make_selection(const Tensor& x, const Rows& rows, const LayerOptions& options,
                      const Kept& kept, Memory& memory) const;
  Selection reuse(const Selection& reused, const Rows& rows) const;
  Selection select(const Rows& rows, const Keys& keys, const LayerOptions& options,
                   SelectionMemory& into, Memory& memory) const;
  void choose(const Rows& rows, const Keys& keys, const Tensor& scores, SelectionMemory& into,
              Memory& memory) const;
  void expand(const Rows& rows, SelectionMemory& into, Memory& memory) const;
  void drop_unusable(const Tensor& scores, const SelectionMemory& selection) const;
  void core_attention(const Rows& rows, const Keys& keys, const Kept& kept, Memory& memory) const;
  void attend(const Rows& rows, const Keys& keys, const Tensor& query, const Selection& selection,
              const Tensor& attended, const Tensor& lse, Memory& memory) const;
  void targets(const Rows& rows, const Keys& keys, const LayerOptions& options, const Tensor& lse,
               const Kept& kept, Memory& memory) const;
  double sparse_loss(const Tensor& x, const Rows& rows, const Keys& keys,
                     const LayerOptions& options, const Kept& kept, Memory& memory) const;
  double dense_loss(const Tensor& x, const Rows& rows, const Keys& keys,
                    const LayerOptions& options, const Kept& kept, Memory& memory) const;
  double mass_caught(const Rows& rows, const Keys& keys, const LayerOptions& options,
                     const Kept& kept, Memory& memory) const;
  void fit_index_gradients(const Rows& rows, Memory& memory) const;
  void indexer_backward(const Tensor& x, const Rows& rows, const Kept& kept, Memory& memory) const;

  const AttentionConfig c_;
  const DType dtype_;
  std::unique_ptr<Projection> projection_;
  std::optional<Indexer> indexer_;
};

}  // namespace winnow::attention
