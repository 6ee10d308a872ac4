// The shape of a decoder-only transformer, read from JSON.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>

#include "attention/config.h"

namespace winnow::model {

struct ModelConfig {
  std::int64_t vocab_size = 256;
  std::int64_t layers = 0;
  std::int64_t intermediate_size = 0;  // of the SwiGLU MLP
  double norm_epsilon = 0;
  bool tied_embeddings = true;  // the output head is the embedding table
  attention::AttentionConfig attention;
};

// Throws with option, rule and value.
void validate(const ModelConfig& config);

// How many numbers a model of this shape trains.
std::int64_t parameter_count(const ModelConfig& config);

// Keys are the field names above, with "attention" and "attention.indexer" as nested objects. Every
// key that applies is required, but for vocab_size and q_lora_rank (0). Unknown keys are refused by
// name with the nearest valid one; keys of the other kind of attention, missing keys, wrong types
// and broken rules by name and value.
ModelConfig read_model_config(const nlohmann::json& json);
nlohmann::json write_model_config(const ModelConfig& config);

}  // namespace winnow::model
