// The DSA layer: projections, indexer, selection, sparse attention, indexer loss; forward and
// backward.
//
// - kSparse: the indexer selects topk keys per row, attention reads those. With a loss scale the
//   indexer learns from the KL between its scores and the attention, both over the selection.
// - kDense: attention reads all visible keys; the indexer does not run.
// - kWarmup: dense attention; the indexer learns from the KL over all visible keys.
//
// With precision kMxfp8 the selection alone is scored in MXFP8; what the loss learns from is scored
// again, for the selected keys, from the inputs that were not quantised.
//
// The indexer's gradient depends on nothing that comes after the layer, so the forward computes it:
// the indexer's activations need not outlive the layer. The backward is the language loss's alone;
// it never touches the indexer.
#pragma once

#include <memory>
#include <string>

#include "attention/indexer.h"
#include "attention/projection.h"

namespace winnow::attention {

struct LayerOptions {
  AttentionMode mode = AttentionMode::kDense;
  bool index_loss = false;      // kSparse: compute the KL; kWarmup always does
  bool index_gradient = false;  // and add its gradient to the indexer's parameters
  double d_kl = 0;              // derivative of the total loss by the kl of each row
  bool measure_selection = false;
  bool reuse_selection = false;  // kSparse: attend to the last selection instead of a new one
};

struct LayerResult {
  double index_kl = 0;               // summed over rows
  double attention_mass_caught = 0;  // mean over rows that see more than topk keys; 1 without such
};

class Layer {
 public:
  // Adds its parameters under `prefix` ("model.layers.0.self_attn."). The tables must outlive it.
  Layer(const AttentionConfig& config, const RopeTables& ropes, ParameterList& parameters,
        const std::string& prefix, DType dtype);

  // x [rows, hidden], after the input norm. output [rows, hidden] may be left out where only the
  // indexer's loss matters. x and cache are kept as they are for the backward.
  LayerResult forward(const Tensor& x, const Rows& rows, const LayerOptions& options,
                      KeyCache& cache, Memory& memory, const Tensor& output);

  // Of the last forward, whose rows must be all keys there are. d_x is overwritten.
  void backward(const Tensor& x, const Rows& rows, const KeyCache& cache, const Tensor& d_output,
                const Tensor& d_x, Memory& memory);

  // Whether each of the rows of the last forward attends to a key: what the backward certifies to
  // sparse_attention_backward. Read from the selection, where there is one: the ranges cannot prove
  // it where scores are NaN, or where a selection is reused under other ranges.
  bool rows_nonempty(const Rows& rows) const;

  // int32 [rows, topk], of the last forward in which the indexer selected; empty before.
  const Tensor& selection() const { return topk_indices_; }

 private:
  struct Keys {
    Tensor key, value, index_key, index_key_data, index_key_scale;
  };
  Keys keys_of(const KeyCache& cache, std::int64_t keys) const;
  void select(const Rows& rows, const Keys& keys, Memory& memory, bool reuse, bool with_scores);
  void drop_unusable(const Tensor& scores);
  void attend(const Rows& rows, const Keys& keys, bool sparse, const Tensor& attended,
              const Tensor& lse, Memory& memory) const;
  void targets(const Rows& rows, const Keys& keys, const Tensor& lse, Memory& memory) const;
  double sparse_loss(const Tensor& x, const Rows& rows, const Keys& keys,
                     const LayerOptions& options, Memory& memory);
  double dense_loss(const Tensor& x, const Rows& rows, const Keys& keys,
                    const LayerOptions& options, Memory& memory);
  double mass_caught(const Rows& rows, const Keys& keys, const Tensor& dense_lse,
                     Memory& memory) const;
  void fit_index_gradients(const Rows& rows, Memory& memory) const;

  const AttentionConfig c_;
  const DType dtype_;
  std::unique_ptr<Projection> projection_;
  Indexer indexer_;
  bool sparse_ = false;  // the last forward attended to a selection
  Buffer topk_indices_, topk_lengths_;
  Buffer attended_, lse_;  // [rows, heads, dim_v], [rows, heads]
};

}  // namespace winnow::attention
