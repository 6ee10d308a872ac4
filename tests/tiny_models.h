// Small models of every kind, batches for them, and weights that are not near zero.
#pragma once

#include <numeric>
#include <string>
#include <vector>

#include "base/numbers.h"
#include "model/initialise.h"
#include "model/transformer.h"

namespace winnow::model {

inline attention::AttentionConfig tiny_mla() {
  attention::AttentionConfig c;
  c.kind = attention::AttentionKind::kMla;
  c.hidden_size = 12;
  c.heads = 3;
  c.q_lora_rank = 7;
  c.kv_lora_rank = 6;
  c.qk_nope_head_dim = 5;
  c.qk_rope_head_dim = 4;
  c.v_head_dim = 3;
  c.latent_norm_epsilon = 1e-6;
  c.rope_theta = 100;
  c.rope_pairing = nn::RopePairing::kInterleaved;
  c.max_positions = 64;
  c.indexer.index_heads = 3;
  c.indexer.index_dim = 8;
  c.indexer.topk = 4;
  c.indexer.rope_dim = 4;
  c.indexer.rope_pairing = nn::RopePairing::kHalfSplit;
  c.indexer.hadamard = true;
  c.indexer.k_norm_epsilon = 1e-6;
  return c;
}

inline attention::AttentionConfig tiny_gqa() {
  attention::AttentionConfig c = tiny_mla();
  c.kind = attention::AttentionKind::kGqa;
  c.heads = 4;
  c.kv_heads = 2;
  c.q_lora_rank = 0;
  c.kv_lora_rank = 0;
  c.latent_norm_epsilon = 0;
  c.rope_pairing = nn::RopePairing::kHalfSplit;
  c.indexer.rope_pairing = nn::RopePairing::kInterleaved;
  c.indexer.hadamard = false;
  return c;
}

inline attention::AttentionConfig tiny_simplified() {
  attention::AttentionConfig c = tiny_gqa();
  c.indexer.mode = attention::IndexerMode::kSimplified;
  c.indexer.index_heads = 1;
  c.indexer.relu = false;
  c.indexer.k_norm_epsilon = 0;
  return c;
}

inline ModelConfig tiny_model(const attention::AttentionConfig& attention) {
  ModelConfig c;
  c.vocab_size = 11;
  c.layers = 2;
  c.intermediate_size = 10;
  c.norm_epsilon = 1e-5;
  c.tied_embeddings = attention.kind == attention::AttentionKind::kMla;
  c.attention = attention;
  return c;
}

// The models whose gradients and outputs are tested, by name.
inline std::vector<std::pair<std::string, ModelConfig>> tiny_models() {
  attention::AttentionConfig plain = tiny_mla();  // no query latent, no rotation anywhere
  plain.q_lora_rank = 0;
  plain.qk_rope_head_dim = 0;
  plain.indexer.rope_dim = 0;
  plain.indexer.hadamard = false;
  attention::AttentionConfig still = tiny_gqa();  // no rotation here, either
  still.qk_rope_head_dim = 0;
  still.indexer.rope_dim = 0;
  ModelConfig shared = tiny_model(tiny_mla());  // layer 1 reuses the indices of layer 0
  shared.sharing.topk_freq = 2;
  return {{"mla", tiny_model(tiny_mla())},  {"mla_plain", tiny_model(plain)},
          {"mla_shared", shared},           {"gqa", tiny_model(tiny_gqa())},
          {"gqa_plain", tiny_model(still)}, {"gqa_simplified", tiny_model(tiny_simplified())}};
}

// Models whose indexers score pools.
inline std::vector<std::pair<std::string, ModelConfig>> pool_models() {
  const auto with = [](attention::AttentionConfig c, std::int64_t pool_size, std::int64_t topk,
                       bool tail) {
    c.indexer.pool_size = pool_size;
    c.indexer.topk = topk;
    c.indexer.select_tail = tail;
    return tiny_model(c);
  };
  attention::AttentionConfig plain = tiny_mla();  // as glm5_next has it: no rotation anywhere
  plain.qk_rope_head_dim = 0;
  plain.indexer.rope_dim = 0;
  plain.indexer.hadamard = false;
  ModelConfig shared = with(tiny_mla(), 2, 4, true);
  shared.sharing.topk_freq = 2;
  return {{"pools", with(tiny_mla(), 2, 4, true)},
          {"pools_plain", with(plain, 4, 4, true)},
          {"pools_no_tail", with(tiny_mla(), 3, 6, false)},
          {"pools_shared", shared},
          {"pools_gqa", with(tiny_gqa(), 4, 8, true)},
          {"pools_simplified", with(tiny_simplified(), 3, 3, true)}};
}

// Models with multi-token prediction, in every combination of what its depths share.
inline std::vector<std::pair<std::string, ModelConfig>> mtp_models() {
  std::vector<std::pair<std::string, ModelConfig>> all;
  ModelConfig c = tiny_model(tiny_mla());
  c.mtp_depths = 1;
  all.emplace_back("one_depth", c);
  c.mtp_depths = 3;
  all.emplace_back("nothing_shared", c);
  c.mtp_shared_components = {true, false};
  all.emplace_back("indices_shared", c);
  c.mtp_shared_components = {false, true};
  all.emplace_back("keys_shared", c);
  c.mtp_shared_components = {true, true};
  all.emplace_back("both_shared", c);
  c.sharing = {4, 1};  // layer 3 reuses the indices of layer 1 at depth 0, too
  all.emplace_back("both_shared_from_a_layer", c);
  c.mtp_shared_components = {false, true};
  all.emplace_back("keys_shared_indices_from_a_layer", c);
  ModelConfig gqa = tiny_model(tiny_gqa());
  gqa.mtp_depths = 2;
  all.emplace_back("gqa_nothing_shared", gqa);
  gqa.mtp_shared_components = {true, false};
  all.emplace_back("gqa_indices_shared", gqa);
  return all;
}

// Weights large enough that every part matters: matrices N(0, 0.4), vectors 1 + N(0, 0.2).
inline void shake(Transformer& model, std::uint64_t seed) {
  for (const auto& p : model.parameters().all()) {
    const bool vector = p->value.view().rank == 1;
    fill_normal(*p, vector ? 0.2 : 0.4, seed);
    if (!vector) continue;
    for (std::int64_t i = 0; i < p->value.elements(); ++i) {
      store_double(p->value.view().data, p->value.view().dtype, i,
                   1 + load_double(p->value.view().data, p->value.view().dtype, i));
    }
  }
}

inline Transformer shaken_model(const ModelConfig& config, DType dtype = DType::kF32) {
  Transformer model(config, dtype, 3);
  shake(model, 4);
  return model;
}

// Packed sequences of these lengths; the last row of each has no target.
inline Batch packed_batch(const std::vector<std::int32_t>& lengths, std::int64_t vocab,
                          std::uint64_t seed) {
  Batch batch;
  std::vector<std::int32_t> cu_seqlens = {0};
  for (const std::int32_t length : lengths) {
    for (std::int32_t p = 0; p < length; ++p) {
      const auto at = static_cast<std::uint64_t>(cu_seqlens.back() + p);
      const auto token = [&](std::uint64_t counter) {
        return static_cast<std::int32_t>(random_bits(seed, counter) %
                                         static_cast<std::uint64_t>(vocab));
      };
      batch.tokens.push_back(token(at));
      batch.targets.push_back(p + 1 < length ? token(at + 1) : -1);
      batch.positions.push_back(p);
    }
    cu_seqlens.push_back(cu_seqlens.back() + length);
  }
  batch.cu_seqlens.assign(cu_seqlens.begin(), cu_seqlens.end());
  batch.ranges = packed_ranges(cu_seqlens, cu_seqlens.back());
  add_mtp_tokens(batch, 3);
  return batch;
}

// Rows [first, first + count) of a batch, which must be whole sequences.
inline Batch part_of(const Batch& batch, std::int32_t first, std::int32_t count) {
  const auto cut = [&](const std::vector<std::int32_t>& v, std::int32_t shift) {
    std::vector<std::int32_t> part(v.begin() + first, v.begin() + first + count);
    for (std::int32_t& x : part) x -= shift;
    return part;
  };
  Batch part;
  part.tokens = cut(batch.tokens, 0);
  part.targets = cut(batch.targets, 0);
  part.positions = cut(batch.positions, 0);
  part.ranges.starts = cut(batch.ranges.starts, first);
  part.ranges.ends = cut(batch.ranges.ends, first);
  for (const auto& tokens : batch.mtp_tokens) part.mtp_tokens.push_back(cut(tokens, 0));
  for (const auto& targets : batch.mtp_targets) part.mtp_targets.push_back(cut(targets, 0));
  return part;
}

inline std::vector<double> numbers(const Tensor& t) {
  std::vector<double> all;
  for (std::int64_t i = 0; i < t.elements(); ++i) all.push_back(load_double(t.data, t.dtype, i));
  return all;
}

// Of what is in the layers and not in their indexers; the gradients begin anew.
inline std::vector<std::vector<double>> take_layer_gradients(Transformer& model) {
  std::vector<std::vector<double>> all;
  for (const auto& p : model.parameters().all()) {
    if (p->name.find(".layers.") != std::string::npos && !p->indexer)
      all.push_back(numbers(p->grad));
  }
  model.parameters().zero_grad();
  return all;
}

inline std::vector<std::int32_t> ids_of(const Tensor& t) {
  return {t.as<std::int32_t>(), t.as<std::int32_t>() + t.elements()};
}

}  // namespace winnow::model
