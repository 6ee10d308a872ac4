// One block of the transformer, on a residual stream x:
//
//   middle = x + attention(rms(x))
//   y = middle + down(silu(gate(n)) * up(n)),  n = rms(middle)
#pragma once

#include <string>

#include "attention/layer.h"
#include "model/config.h"

namespace winnow::model {

// Temporaries of the blocks' backward, shared by all.
using attention::Buffer;

struct BlockMemory {
  attention::Memory attention;
  Buffer d_normed, d_activated, d_gate, d_up;
};

class Block {
 public:
  // Adds its parameters under `prefix` ("model.layers.0.").
  Block(const ModelConfig& config, const attention::RopeTables& ropes, ParameterList& parameters,
        const std::string& prefix, DType dtype);

  // x and y [rows, hidden]; y may be left out where only the indexer's loss matters. x and the
  // cache must stay as they are until the backward.
  attention::LayerResult forward(const Tensor& x, const attention::Rows& rows,
                                 const attention::LayerOptions& options, attention::KeyCache& cache,
                                 BlockMemory& memory, const Tensor& y);

  // d_stream [rows, hidden]: the gradient of y comes in, that of x goes out.
  void backward(const Tensor& x, const attention::Rows& rows, const attention::KeyCache& cache,
                const Tensor& d_stream, BlockMemory& memory);

  const Tensor& selection() const { return attention_.selection(); }

 private:
  void mlp_forward(const Tensor& y);
  void mlp_backward(const Tensor& d_stream, BlockMemory& memory);

  const double epsilon_;
  const std::int64_t intermediate_size_;
  const DType dtype_;
  Parameter* input_norm_;
  attention::Layer attention_;
  Parameter *middle_norm_, *gate_, *up_, *down_;
  // Kept for the backward.
  Buffer normed_input_, input_scale_;             // [rows, hidden], [rows]
  Buffer middle_, normed_middle_, middle_scale_;  // [rows, hidden] twice, [rows]
  Buffer gate_out_, up_out_, activated_;          // [rows, intermediate]
};

}  // namespace winnow::model
