#include "plan/shapes.h"

namespace winnow::plan {
namespace {

// What the two have in common.
model::ModelConfig latent_attention_model() {
  model::ModelConfig m;
  m.tied_embeddings = false;
  attention::AttentionConfig& a = m.attention;
  a.kv_lora_rank = 512;
  a.qk_rope_head_dim = 64;
  a.latent_norm_epsilon = 1e-6;
  a.rope_pairing = nn::RopePairing::kInterleaved;
  a.indexer.index_dim = 128;
  a.indexer.topk = 2048;
  a.indexer.rope_dim = 64;
  a.indexer.k_norm_epsilon = 1e-6;
  m.mtp_depths = 1;
  return m;
}

Shape glm() {
  Shape shape{"glm-5.2", latent_attention_model(), {256, 8, 1, 2048, 3}};
  model::ModelConfig& m = shape.model;
  m.vocab_size = 154880;
  m.layers = 78;
  m.intermediate_size = 12288;
  m.norm_epsilon = 1e-5;
  m.sharing = {4, 3};
  attention::AttentionConfig& a = m.attention;
  a.hidden_size = 6144;
  a.heads = 64;
  a.q_lora_rank = 2048;
  a.qk_nope_head_dim = 192;
  a.v_head_dim = 256;
  a.rope_theta = 8e6;
  a.max_positions = std::int64_t{1} << 20;
  a.indexer.index_heads = 32;
  a.indexer.rope_pairing = nn::RopePairing::kInterleaved;
  return shape;
}

Shape deepseek() {
  Shape shape{"deepseek-v3.2", latent_attention_model(), {256, 8, 1, 2048, 3}};
  model::ModelConfig& m = shape.model;
  m.vocab_size = 129280;
  m.layers = 61;
  m.intermediate_size = 18432;
  m.norm_epsilon = 1e-6;
  attention::AttentionConfig& a = m.attention;
  a.hidden_size = 7168;
  a.heads = 128;
  a.q_lora_rank = 1536;
  a.qk_nope_head_dim = 128;
  a.v_head_dim = 128;
  a.rope_theta = 1e4;
  a.max_positions = 163840;
  a.indexer.index_heads = 64;
  a.indexer.rope_pairing = nn::RopePairing::kHalfSplit;
  return shape;
}

}  // namespace

const std::vector<Shape>& shapes() {
  static const std::vector<Shape> all = {glm(), deepseek()};
  return all;
}

const Shape* find_shape(const std::string& name) {
  for (const Shape& shape : shapes()) {
    if (shape.name == name) return &shape;
  }
  return nullptr;
}

}  // namespace winnow::plan
