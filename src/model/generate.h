// Text from a model, one token at a time, over a cache of latents (or keys and values) and index
// keys.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "model/transformer.h"

namespace winnow::model {

struct GenerateOptions {
  attention::AttentionMode mode = attention::AttentionMode::kSparse;
  std::int64_t max_tokens = 128;
  double temperature = 0;  // 0: greedy, lowest token at ties
  double top_p = 1;
  std::uint64_t seed = 1;
  // Sees each token and its log-probabilities [vocab] as it comes; false ends the generation.
  std::function<bool(std::int32_t token, std::span<const float> log_probabilities)> on_token;
};

// The generated tokens, prompt not included. The prompt is at least one token; prompt and
// generation together at most config.attention.max_positions.
std::vector<std::int32_t> generate(Transformer& model, std::span<const std::int32_t> prompt,
                                   const GenerateOptions& options);

}  // namespace winnow::model
