// A model and a run small enough for tests, and text for them.
#pragma once

#include <nlohmann/json.hpp>
#include <string>

namespace winnow::train {

inline nlohmann::json tiny_model() {
  return nlohmann::json::parse(R"({
    "layers": 2, "intermediate_size": 24, "norm_epsilon": 1e-6, "tied_embeddings": true,
    "attention": {
      "kind": "mla", "hidden_size": 16, "heads": 2, "q_lora_rank": 12, "kv_lora_rank": 8,
      "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 4, "latent_norm_epsilon": 1e-6,
      "rope_theta": 10000, "rope_pairing": "interleaved", "max_positions": 64,
      "indexer": {"mode": "standard", "index_heads": 3, "index_dim": 8, "topk": 6, "rope_dim": 4,
                  "rope_pairing": "half_split", "relu": true, "hadamard": false,
                  "k_norm_epsilon": 1e-6}
    }
  })");
}

inline nlohmann::json tiny_run(const std::string& text, const std::string& output) {
  nlohmann::json run = nlohmann::json::parse(R"({
    "data": {"validation_fraction": 0.2, "context": 24, "batch_sequences": 2,
             "validation_windows": 2},
    "optimizer": {"weight_decay": 0.1, "clip_norm": 1.0},
    "stages": [
      {"name": "dense", "attention": "dense", "steps": 6, "learning_rate": 0.01,
       "final_learning_rate": 0.005, "warmup_steps": 2},
      {"name": "warm-up", "attention": "warmup", "steps": 3, "learning_rate": 0.01,
       "index_loss_coefficient": 1.0},
      {"name": "sparse", "attention": "sparse", "steps": 4, "learning_rate": 0.005,
       "index_loss_coefficient": 0.5}
    ],
    "seed": 7
  })");
  run["model"] = tiny_model();
  run["data"]["path"] = text;
  run["output"] = output;
  return run;
}

// Text with something to learn: words of a short list in an order that looks random.
inline std::string tiny_text(std::size_t bytes) {
  const char* words[] = {"the ", "grain ", "and ", "chaff ", "are ", "parted ", "by ", "wind. "};
  std::string text;
  unsigned state = 1;
  while (text.size() < bytes) text += words[(state = state * 1664525u + 1013904223u) >> 29];
  text.resize(bytes);
  return text;
}

}  // namespace winnow::train
