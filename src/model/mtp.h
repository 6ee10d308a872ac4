// Multi-token prediction: one more layer that looks one token further each time it is applied.
//
//   h_0 = normed end of the last layer
//   x = eh_proj . [enorm(embedding of the token d + 1 ahead) | hnorm(h_d)]     depth d = 0, 1, ...
//   h_(d+1) = norm(block(x))
//   logits = output head of h_(d+1), for the token d + 2 ahead
//
// Embedding table and output head are the model's. Weights have the names of DeepSeek's
// checkpoints: model.layers.N.{enorm, hnorm, eh_proj, shared_head.norm} beside those of a block, N
// = layers.
#pragma once

#include "model/block.h"
#include "model/transformer.h"

namespace winnow::model {

// What joining embedding and hidden state keeps for its backward.
struct MtpJoin {
  Buffer embedded, embedded_scale, hidden_scale;  // [rows, hidden], [rows], [rows]
  Buffer joined;                                  // [rows, 2 hidden]
};

// What one depth keeps of a pass, beside what its block keeps.
struct MtpActivations {
  MtpJoin join;
  Buffer output;         // [rows, hidden] of the block
  Buffer normed, scale;  // [rows, hidden], [rows] of the norm after it
};

struct MtpMemory {
  MtpJoin lent;  // of depths that are recomputed
  Buffer d_joined, d_embedded;
};

class Mtp {
 public:
  Mtp(const ModelConfig& config, const attention::RopeTables& ropes, Parameter& embedding,
      ParameterList& parameters, DType dtype);

  const Block& block() const { return block_; }

  // previous [rows, hidden]: h_d, normed.
  void join(const Tensor& previous, std::span<const std::int32_t> tokens, MtpJoin& join) const;
  // x [rows, hidden]: what the block reads.
  void project(const MtpJoin& join, const Tensor& x) const;
  // Adds to d_previous.
  void join_backward(const Tensor& previous, std::span<const std::int32_t> tokens,
                     const MtpJoin& join, const Tensor& d_x, const Tensor& d_previous,
                     MtpMemory& memory) const;

  // The norm after the block, of kept.output; d_output is overwritten.
  void normalise(MtpActivations& kept) const;
  void normalise_backward(const MtpActivations& kept, const Tensor& d_normed,
                          const Tensor& d_output) const;

 private:
  const double epsilon_;
  const DType dtype_;
  Parameter& embedding_;
  Parameter *embedding_norm_, *hidden_norm_, *projection_;
  Block block_;
  Parameter* output_norm_;
};

}  // namespace winnow::model
