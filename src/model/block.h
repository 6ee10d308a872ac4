// One block of the transformer, on a residual stream x:
//
//   middle = x + attention(rms(x))
//   y = middle + down(silu(gate(n)) * up(n)),  n = rms(middle)
#pragma once

#include <string>

#include "attention/layer.h"
#include "model/recompute.h"

namespace winnow::model {

// Temporaries that all blocks share.
struct BlockMemory {
  attention::Memory attention;
  BlockActivations lent;  // what is dropped after a forward and made again before its backward
  Buffer d_normed, d_activated, d_gate, d_up;
};

class Block {
 public:
  // Adds its parameters under `prefix` ("model.layers.0.").
  Block(const ModelConfig& config, const attention::RopeTables& ropes, ParameterList& parameters,
        const std::string& prefix, DType dtype, bool owns_indexer);

  bool owns_indexer() const { return attention_.owns_indexer(); }

  // x and y [rows, hidden]; y may be left out where only the indexer's loss matters. x must stay as
  // it is until the backward.
  attention::LayerResult forward(const Tensor& x, const attention::Rows& rows,
                                 const attention::LayerOptions& options, const BlockKept& kept,
                                 BlockMemory& memory, const Tensor& y) const;

  // Makes what `recompute` drops again, as the forward of the same x, rows and options left it.
  void replay(const Tensor& x, const attention::Rows& rows, const attention::LayerOptions& options,
              const Recompute& recompute, const BlockKept& kept, BlockMemory& memory) const;

  // d_stream [rows, hidden]: the gradient of y comes in, that of x goes out. d_shared_keys: as in
  // attention::Layer.
  void backward(const Tensor& x, const attention::Rows& rows,
                const attention::LayerOptions& options, const BlockKept& kept,
                const Tensor& d_stream, const Tensor& d_shared_keys, BlockMemory& memory) const;

 private:
  void norm_input(const Tensor& x, const BlockKept& kept) const;
  void norm_middle(const BlockKept& kept) const;
  void activate(const BlockKept& kept) const;
  void mlp_backward(const BlockKept& kept, const Tensor& d_stream, BlockMemory& memory) const;

  const double epsilon_;
  const std::int64_t intermediate_size_;
  const DType dtype_;
  Parameter* input_norm_;
  attention::Layer attention_;
  Parameter *middle_norm_, *gate_, *up_, *down_;
};

}  // namespace winnow::model
