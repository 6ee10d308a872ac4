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

// Keys are the field names above, with "attention" and "attention.indexer" as nested objects.
// Unknown keys are refused by name with the nearest valid one; missing required keys and broken
// rules by name and value.
ModelConfig read_model_config(const nlohmann::json& json);
nlohmann::json write_model_config(const ModelConfig& config);

}  // namespace winnow::model
