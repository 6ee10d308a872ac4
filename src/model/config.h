// The shape of a decoder-only transformer, read from JSON.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "attention/config.h"
#include "layout/index_sharing.h"

namespace winnow::model {

// What the later depths of multi-token prediction take from the first instead of computing it.
struct MtpSharedComponents {
  bool sparse_attention_index = false;  // its selection
  bool latent_kv = false;               // its latent keys, on the gradient path
  bool any() const { return sparse_attention_index || latent_kv; }
};

struct ModelConfig {
  std::int64_t vocab_size = 256;
  std::int64_t layers = 0;
  std::int64_t intermediate_size = 0;  // of the SwiGLU MLP
  double norm_epsilon = 0;
  bool tied_embeddings = true;  // the output head is the embedding table
  // Layers that compute indices; the others own no indexer (layout/index_sharing.h). JSON keys
  // topk_freq and skip_topk_offset.
  IndexSharing sharing;
  // Multi-token prediction: one more layer, applied this many times (model/mtp.h); 0: none.
  std::int64_t mtp_depths = 0;
  MtpSharedComponents mtp_shared_components;
  attention::AttentionConfig attention;
};

// Every rule of the options above, those of the attention included.
void check(const ModelConfig& config, Rules& rules);
// Throws at the first broken one, with option, rule and value.
void validate(const ModelConfig& config);

// How many numbers a model of this shape trains.
std::int64_t parameter_count(const ModelConfig& config);
// The same of one layer's attention, and of one indexer.
std::int64_t attention_parameters(const attention::AttentionConfig& config);
std::int64_t indexer_parameters(const attention::AttentionConfig& config);

// The layers that own an indexer, from 0, ascending; the layer of multi-token prediction is number
// `layers`.
std::vector<std::int64_t> index_layers(const ModelConfig& config);

// Keys are the field names above, with "attention" and "attention.indexer" as nested objects. Every
// key that applies is required, but for vocab_size, q_lora_rank (0) and the keys of precision, pools,
// sharing and multi-token prediction; what rotates applies where a rotary width is above 0. Unknown
// keys are refused by name with the nearest valid one; keys of the other kind of attention, missing
// keys, wrong types and broken rules by name and value.
ModelConfig read_model_config(const nlohmann::json& json);
ModelConfig read_model_config(const nlohmann::json& json, Rules& rules);
nlohmann::json write_model_config(const ModelConfig& config);

}  // namespace winnow::model
