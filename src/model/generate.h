// Text from a model, one token at a time, over a cache of latents (or keys and values) and index
// keys.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "attention/pass.h"
#include "model/transformer.h"

namespace winnow::model {

// Reads a sequence piece by piece. Every piece is a list of rows over the keys cached so far, its
// own included, and runs through the operations of training; a row's result does not depend on the
// pieces, so log-probabilities are those of the training forward, bit for bit.
class Decoder {
 public:
  // The model must outlive the decoder and keep its weights. capacity: tokens of the sequence.
  Decoder(Transformer& model, attention::AttentionMode mode, std::int64_t capacity);

  // Appends the tokens; returns log-probabilities [vocab] of what follows the last of them, valid
  // until the next call.
  Tensor read(std::span<const std::int32_t> tokens);

  std::int64_t length() const { return length_; }

 private:
  Transformer& model_;
  const std::int64_t capacity_;
  std::int64_t length_ = 0;
  Pass pass_;  // holds the caches of all layers
  std::vector<std::int32_t> positions_;
  Array log_probabilities_;
};

struct GenerateOptions {
  attention::AttentionMode mode = attention::AttentionMode::kSparse;
  std::int64_t max_tokens = 128;
  double temperature = 0;  // 0: greedy, lowest token at ties
  double top_p = 1;        // sample among the likeliest tokens that together reach this probability
  std::uint64_t seed = 1;
  // Sees each token and its log-probabilities [vocab] as it comes; false ends the generation.
  std::function<bool(std::int32_t token, std::span<const float> log_probabilities)> on_token;
};

// The generated tokens, prompt not included. The prompt is at least one token; prompt and
// generation together at most config.attention.max_positions.
std::vector<std::int32_t> generate(Transformer& model, std::span<const std::int32_t> prompt,
                                   const GenerateOptions& options);

}  // namespace winnow::model
