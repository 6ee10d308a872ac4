// The shape and the conventions of one DSA layer. Conventions that differ between models have no
// default here: readers of configurations fill them.
#pragma once

#include <cstdint>
#include <string>

#include "base/rules.h"
#include "nn/rope.h"
#include "winnow/pool_keys.h"

namespace winnow::attention {

enum class AttentionKind {
  kMla,  // absorbed multi-head latent attention: one latent key for all heads
  kGqa,  // grouped-query attention: separate keys and values
};

enum class IndexerMode {
  kStandard,    // index_heads queries, ReLU, head weights, LayerNorm on the key
  kSimplified,  // one head, no weights, no ReLU, no norm; MLA has no such indexer
};

enum class OutputPrecision {
  kFull,  // as computed
  kBf16,  // rounded to BF16
};

enum class SelectionPrecision {
  kFull,   // the model's dtype
  kMxfp8,  // E4M3 with a power of two per 32 channels, queries and keys
  kE4m3,   // pools: E4M3 with a power of two per query head and per pool, after a Hadamard rotation
};
const char* precision_name(SelectionPrecision precision);  // "full", "mxfp8", "e4m3"

struct IndexerConfig {
  IndexerMode mode = IndexerMode::kStandard;
  std::int64_t index_heads = 0;  // simplified: 1
  std::int64_t index_dim = 0;
  std::int64_t topk = 0;
  std::int64_t rope_dim = 0;  // rotated channels: the first (MLA) or the last (GQA); 0: none
  nn::RopePairing rope_pairing{};
  bool relu = true;
  bool hadamard = false;      // rotate index queries and keys after RoPE; index_dim a power of two
  double k_norm_epsilon = 0;  // of the LayerNorm on the index key

  // Roundings of training in BF16, for parity with models that had them. The norm and the
  // projection themselves are computed in the model's dtype; gradients pass the roundings as if
  // there were none.
  OutputPrecision k_norm_output = OutputPrecision::kFull;  // of the normed index key
  OutputPrecision weights_output =
      OutputPrecision::kFull;  // of the projection, and of its scalings
  // What the selection is scored in. The loss always scores in the model's dtype.
  SelectionPrecision precision = SelectionPrecision::kFull;

  // KPool: the indexer scores pools of so many consecutive tokens in place of tokens, and a row
  // attends to the tokens of the topk / pool_size best. Such an indexer does not learn. 1: none.
  std::int64_t pool_size = 1;
  bool select_tail = true;  // the tokens behind a row's last whole pool are always attended to
  PoolRounding pool_rounding = PoolRounding::kOnce;
  // As Hugging Face's glm5_next: the projection of the weights is scaled by index_heads^-0.5 alone
  // and not rounded again; index_dim^-0.5 is on the dot product, before the ReLU.
  bool hf_scoring = false;

  bool pools() const { return pool_size > 1; }
  std::int64_t selection_width() const {  // most tokens that a row attends to
    return topk + (pools() && select_tail ? pool_size - 1 : 0);
  }
};

// What the layer attends to.
enum class AttentionMode {
  kDense,   // all visible keys; the indexer does not run
  kWarmup,  // all visible keys; the indexer learns from the dense loss
  kSparse,  // the indexer's selection; it learns from the sparse loss
};

struct AttentionConfig {
  AttentionKind kind = AttentionKind::kMla;
  std::int64_t hidden_size = 0;
  std::int64_t heads = 0;
  std::int64_t kv_heads = 1;  // GQA

  std::int64_t q_lora_rank = 0;  // MLA; 0: queries straight from the hidden state
  std::int64_t kv_lora_rank = 0;
  std::int64_t qk_nope_head_dim = 0;  // channels of a head that are not rotated
  std::int64_t qk_rope_head_dim = 0;  // channels that are; they come last in a head; 0: NoPE
  std::int64_t v_head_dim = 0;
  double latent_norm_epsilon = 0;  // MLA: RMSNorm of both latents

  double rope_theta = 0;
  nn::RopePairing rope_pairing{};
  std::int64_t max_positions = 0;
  IndexerConfig indexer;

  // Whether positions turn anything.
  bool rotates() const { return qk_rope_head_dim > 0 || indexer.rope_dim > 0; }
  // Channels of a head as the attention reads them, latent ones for MLA: of query and key, of value.
  std::int64_t dim_qk() const {
    return (kind == AttentionKind::kMla ? kv_lora_rank : qk_nope_head_dim) + qk_rope_head_dim;
  }
  std::int64_t dim_v() const { return kind == AttentionKind::kMla ? kv_lora_rank : v_head_dim; }
  // (qk_nope_head_dim + qk_rope_head_dim)^-0.5
  double softmax_scale() const;
};

// Every rule of the options above.
void check(const AttentionConfig& config, Rules& rules);
// Throws at the first broken one, with option, rule and value.
void validate(const AttentionConfig& config);

// Everything that keeps a call from selecting with scores of the configured precision, in one
// sentence; "" if nothing does. There is no other precision to fall back to in silence.
std::string missing_for_precision(const IndexerConfig& config, DType dtype, AttentionMode mode);

}  // namespace winnow::attention
