// The inside of a Transformer, for training steps (transformer.cpp) and for generation
// (generate.cpp).
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "model/block.h"
#include "model/output_head.h"
#include "model/transformer.h"

namespace winnow::model {

struct Transformer::Network {
  Network(const ModelConfig& config, DType dtype, std::uint64_t seed);
  Network(const Network&) = delete;
  Network& operator=(const Network&) = delete;

  // One pass of the residual stream through all blocks: [rows, hidden] at its end. Of a warm-up
  // nothing comes out but the results.
  Tensor forward(std::span<const std::int32_t> tokens, const attention::Rows& rows,
                 const attention::LayerOptions& options, std::vector<attention::KeyCache>& caches,
                 std::vector<attention::LayerResult>* results = nullptr);
  // Of the last forward: `d_stream` holds the gradient of its end.
  void backward(std::span<const std::int32_t> tokens, const attention::Rows& rows,
                const std::vector<attention::KeyCache>& caches);

  const ModelConfig config;
  const DType dtype;
  ParameterList parameters;
  const attention::RopeTables ropes;
  Parameter& embedding;
  std::vector<std::unique_ptr<Block>> blocks;
  std::unique_ptr<OutputHead> head;

  std::vector<attention::KeyCache> caches;  // of training: one per layer, holding a step's rows
  std::vector<Buffer> streams;              // [rows, hidden] before each block and at the end
  Buffer d_stream;
  BlockMemory memory;
  bool selected = false;  // the last forward made (or held) a selection
  bool frozen = false;    // later ones hold it
};

}  // namespace winnow::model
