// The lightning indexer: which keys a row should attend to.
//
//   index_query = rope(query_input . wq^T)         index_key = rope(norm(x . wk^T))
//   index_weights = x . weights_proj^T * index_heads^-0.5 * index_dim^-0.5
//
// Both optionally rotated by the Hadamard matrix after RoPE, and, where the selection is scored in
// MXFP8, quantised beside. RoPE turns the first rope_dim channels
// for MLA, the last for GQA. The simplified indexer has one head, no norm, and the constant weight
// index_dim^-0.5.
//
// With pools (KPool) what is scored is one key for every pool_size tokens:
//
//   gate = x . index_kpool_compress_gate^T
//   pooled = pool_keys(index_key, gate, index_kpool_compress_ape), then Hadamard, or E4M3 after it
//
// The inputs are detached: backward fills the gradients of the indexer's own parameters, and none
// of its inputs'.
#pragma once

#include <string>

#include "attention/pass.h"
#include "base/parameters.h"

namespace winnow::attention {

class Indexer {
 public:
  // Adds the parameters under `prefix` ("model.layers.0.self_attn.indexer.").
  Indexer(const AttentionConfig& config, const nn::RopeTable& rope, ParameterList& parameters,
          const std::string& prefix, DType dtype);

  // Fills memory.index_query and memory.index_weights, and the rows' index keys in the cache; all
  // quantised too where the selection needs it. With pools the rows' keys and gates are in
  // memory.index_key and memory.index_gate, and pool() follows.
  // query_input is the normed query latent, or x where there is none.
  void forward(const Tensor& x, const Tensor& query_input, const Rows& rows, KeyCache& cache,
               Memory& memory) const;

  // The pools that the pass makes, into the cache, from the keys and gates of all its tokens
  // [keys, index_dim], in the order of the keys.
  void pool(const Tensor& index_key, const Tensor& gate, const Rows& rows, KeyCache& cache,
            Memory& memory) const;

  // Right after the forward of the same rows: takes memory.d_index_query, d_index_key of the rows'
  // own keys and memory.d_index_weights to the parameters' gradients. All three are overwritten.
  void backward(const Tensor& x, const Tensor& query_input, const Rows& rows,
                const Tensor& d_index_key, Memory& memory) const;

 private:
  bool standard() const { return c_.mode == IndexerMode::kStandard; }
  // index_heads^-0.5 * index_dim^-0.5
  double weight_scale() const;
  void scale_weights(const Tensor& weights) const;
  void turn_positions(const Tensor& t, const Rows& rows, bool inverse) const;
  void turn_channels(const Tensor& t, Memory& memory) const;
  void rotate(const Tensor& t, const Rows& rows, bool inverse, Memory& memory) const;
  void quantise_query(Memory& memory) const;

  const IndexerConfig c_;
  const bool rope_first_;
  const nn::RopeTable& rope_;
  const DType dtype_;
  Parameter *query_ = nullptr, *key_ = nullptr;
  Parameter *norm_weight_ = nullptr, *norm_bias_ = nullptr, *weights_ = nullptr;  // standard
  Parameter *gate_ = nullptr, *ape_ = nullptr;                                    // pools
};

}  // namespace winnow::attention
