// The inside of a Transformer, for training steps (transformer.cpp) and for generation
// (generate.cpp).
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "model/output_head.h"
#include "model/pass.h"

namespace winnow::model {

struct Transformer::Network {
  Network(const ModelConfig& config, DType dtype, std::uint64_t seed);
  Network(const Network&) = delete;
  Network& operator=(const Network&) = delete;

  // The calls below belong to a forward that has begun: `pass` has its rows and options.

  // The residual stream through all layers: [rows, hidden] at its end. Where `to_the_end` is not
  // set, the last layer ends with its indexer's loss, and nothing comes out.
  Tensor run_layers(std::span<const std::int32_t> tokens, PassState& pass, bool to_the_end,
                    std::vector<attention::LayerResult>& results);
  // One depth, from the normed state before it; ends with a normed state of its own, or with its
  // indexer's loss.
  void run_depth(std::size_t depth, PassState& pass, bool to_the_end,
                 std::vector<attention::LayerResult>& results);

  // Call n of a block, from its input to y (may be left out).
  attention::LayerResult call_block(std::size_t n, PassState& pass, const Tensor& y);
  // d_stream: the gradient of its y comes in, that of its input goes out.
  void call_block_backward(std::size_t n, PassState& pass, const Tensor& d_stream);
  void run_depth_backward(std::size_t depth, PassState& pass);

  // Who call n is.
  std::size_t layers() const { return blocks.size(); }
  bool is_depth(std::size_t n) const { return n >= layers(); }
  std::int64_t number(std::size_t n) const {  // from 1
    return static_cast<std::int64_t>(std::min(n, layers())) + 1;
  }
  const Block& block(std::size_t n) const { return is_depth(n) ? mtp->block() : *blocks[n]; }
  const Tensor& previous(std::size_t depth, const PassState& pass) const;  // h_depth

  const ModelConfig config;
  const DType dtype;
  ParameterList parameters;
  const attention::RopeTables ropes;
  Parameter& embedding;
  std::vector<std::unique_ptr<Block>> blocks;
  std::optional<Mtp> mtp;
  std::unique_ptr<OutputHead> head;

  BlockMemory memory;
  MtpMemory mtp_memory;
  Pass own_pass;        // of Transformer::step
  bool frozen = false;  // calls hold their selections

 private:
  attention::LayerOptions options_of(std::size_t n, const PassState& pass) const;
  attention::KeyCache& cache_of(std::size_t n, PassState& pass);
  BlockKept kept_of(std::size_t n, PassState& pass);
  bool keeps_selection(std::size_t n, const PassState& pass) const;
  bool has_consumers(std::size_t n) const;
  bool shares_keys(std::size_t n) const;  // gives or takes them
};

}  // namespace winnow::model
