#include "plan/flops.h"

#include <algorithm>
#include <cmath>

namespace winnow::plan {
namespace {

using attention::AttentionConfig;
using attention::AttentionKind;
using attention::AttentionMode;
using attention::IndexerConfig;
using attention::IndexerMode;

double number(std::int64_t n) { return static_cast<double>(n); }

// A product counts 2; trained weights and inputs count it three times.
double trained(const PlanConfig& c) { return c.mode().attention == AttentionMode::kWarmup ? 2 : 6; }

// sum of floor(n / size) over n = 1 ... length
double floors(std::int64_t length, std::int64_t size) {
  const double whole = number(length / size), rest = number(length % size);
  return number(size) * whole * (whole - 1) / 2 + whole * (rest + 1);
}

double selected_pairs(std::int64_t length, const IndexerConfig& indexer) {
  const double n = number(length);
  if (!indexer.pools()) {
    const double full = number(std::min(length, indexer.topk));
    return full * (full + 1) / 2 + (n - full) * number(indexer.topk);
  }
  const std::int64_t size = indexer.pool_size, budget = indexer.topk / size;
  const std::int64_t below = std::min(length, std::max<std::int64_t>(budget * size - 1, 0));
  double pairs = number(size) * (floors(below, size) + number(length - below) * number(budget));
  if (indexer.select_tail) {
    const double whole = number(length / size), rest = number(length % size);
    pairs += whole * number(size) * number(size - 1) / 2 + rest * (rest + 1) / 2;
  }
  return pairs;
}

// Products for each token, of the projections around the attention.
double attention_products(const AttentionConfig& a, bool shares_keys) {
  const double h = number(a.hidden_size), heads = number(a.heads),
               nope = number(a.qk_nope_head_dim), rope = number(a.qk_rope_head_dim),
               v = number(a.v_head_dim);
  if (a.kind == AttentionKind::kGqa) {
    return h * heads * (nope + rope) + h * number(a.kv_heads) * (nope + rope + v) + heads * v * h;
  }
  const double q = number(a.q_lora_rank), latent = number(a.kv_lora_rank);
  const double query = q > 0 ? q * (h + heads * (nope + rope) + 1) : h * heads * (nope + rope);
  const double keys = shares_keys ? 0 : latent * (h + 1) + h * rope;
  return query + keys + latent * heads * (nope + v) + heads * v * h;
}

double index_products(const PlanConfig& c) {
  const AttentionConfig& a = c.model.attention;
  const double h = number(a.hidden_size), heads = number(a.indexer.index_heads),
               dim = number(a.indexer.index_dim);
  const bool latent = a.kind == AttentionKind::kMla && a.q_lora_rank > 0;
  double products = (latent ? number(a.q_lora_rank) : h) * heads * dim + h * dim;
  if (a.indexer.mode == IndexerMode::kStandard) products += h * heads;
  if (a.indexer.pools()) products += h * dim;  // the gate
  return products;
}

// Products for each pair of a row and a key: logit and value.
double core_products(const AttentionConfig& a) {
  if (a.kind == AttentionKind::kMla) {
    return number(a.heads) * number(2 * a.kv_lora_rank + a.qk_rope_head_dim);
  }
  return number(a.heads) * number(a.qk_nope_head_dim + a.qk_rope_head_dim + a.v_head_dim);
}

double expert_products(const PlanConfig& c) {
  const double h = number(c.model.attention.hidden_size);
  return 3 * h * number(c.moe.intermediate_size) *
             number(c.moe.experts_per_token + c.moe.shared_experts) +
         h * number(c.moe.experts);
}

// Projections in and out, and the scan, which counts 7 operations for each channel and state.
double mamba_products(const PlanConfig& c) {
  const double h = number(c.model.attention.hidden_size), state = number(c.mamba.state_dim),
               inner = h * number(c.mamba.expand), heads = inner / number(c.mamba.head_dim);
  return h * (2 * inner + 2 * number(c.mamba.groups) * state + heads) + inner * h +
         3.5 * inner * state;
}

}  // namespace

double selected_share(double tokens, double squares, std::int64_t topk) {
  if (topk <= 0 || tokens <= 0 || squares <= 0) return 1;
  const double mean = squares / tokens;
  const double kept = std::min(number(topk), std::floor(mean));
  return kept * (1 - kept / (2 * mean)) / (mean / 2);
}

Pairs exact_pairs(std::span<const std::int64_t> lengths, const IndexerConfig& indexer) {
  Pairs pairs;
  for (const std::int64_t length : lengths) {
    pairs.visible += number(length) * number(length + 1) / 2;
    pairs.scored += floors(length, indexer.pool_size);
    pairs.selected += selected_pairs(length, indexer);
  }
  return pairs;
}

Pairs mean_pairs(double tokens, double squares, const IndexerConfig& indexer) {
  return {squares / 2, squares / 2 / number(indexer.pool_size),
          squares / 2 * selected_share(tokens, squares, indexer.topk)};
}

double Flops::total() const {
  return loss + attention_linear + attention_core + index_linear + index_core + mlp + mamba + mtp;
}

Flops& Flops::operator+=(const Flops& other) {
  loss += other.loss;
  attention_linear += other.attention_linear;
  attention_core += other.attention_core;
  index_linear += other.index_linear;
  index_core += other.index_core;
  mlp += other.mlp;
  mamba += other.mamba;
  mtp += other.mtp;
  return *this;
}

Flops& Flops::operator*=(double factor) {
  for (double* part : {&loss, &attention_linear, &attention_core, &index_linear, &index_core, &mlp,
                       &mamba, &mtp}) {
    *part *= factor;
  }
  return *this;
}

LayerParts layer_parts(const PlanConfig& c, std::int64_t layer) {
  LayerParts parts;
  if (!c.hybrid()) {
    parts.attention = parts.dsa = true;
    (c.is_moe(layer) ? parts.experts : parts.mlp) = true;
    return parts;
  }
  const std::string all = c.letters() + c.mtp_letters();
  const char letter = all[static_cast<std::size_t>(layer - 1)];
  parts.dsa = letter == 'D';
  parts.attention = parts.dsa || letter == '*';
  parts.mlp = letter == '-';
  parts.experts = letter == 'E';
  parts.mamba = letter == 'M';
  return parts;
}

bool runs_indexer(const PlanConfig& c, std::int64_t layer, std::int64_t depth) {
  if (c.mode().attention == AttentionMode::kDense || !c.is_dsa(layer)) return false;
  if (depth > 0 && c.model.mtp_shared_components.sparse_attention_index) return false;
  return computes_indices(c.model.sharing, layer);
}

std::int64_t mtp_layers(const PlanConfig& c) {
  if (c.model.mtp_depths == 0) return 0;
  return c.hybrid() ? static_cast<std::int64_t>(c.mtp_letters().size()) : 1;
}

std::int64_t depths_run(const PlanConfig& c) {
  if (c.mode().attention != AttentionMode::kWarmup) {
    return c.mode().mtp_loss ? c.model.mtp_depths : 0;
  }
  std::int64_t depths = 0;
  for (std::int64_t d = 0; d < c.model.mtp_depths; ++d) {
    for (std::int64_t n = 1; n <= mtp_layers(c); ++n) {
      if (runs_indexer(c, c.model.layers + n, d)) depths = d + 1;
    }
  }
  return depths;
}

Flops layer_flops(const PlanConfig& c, std::int64_t layer, std::int64_t depth, double tokens,
                  const Pairs& pairs) {
  const AttentionConfig& a = c.model.attention;
  const LayerParts parts = layer_parts(c, layer);
  const double factor = trained(c);
  const bool sparse = c.mode().attention == AttentionMode::kSparse;
  Flops flops;
  if (parts.attention) {
    const bool shares_keys = depth > 0 && c.model.mtp_shared_components.latent_kv;
    const double read = parts.dsa && sparse ? pairs.selected : pairs.visible;
    flops.attention_linear = factor * tokens * attention_products(a, shares_keys);
    flops.attention_core = factor * read * core_products(a);
  }
  if (runs_indexer(c, layer, depth)) {
    const double learned = c.mode().index_loss ? (sparse ? pairs.selected : pairs.scored) : 0;
    flops.index_linear = (c.mode().index_loss ? 4 : 2) * tokens * index_products(c);
    flops.index_core = (2 * pairs.scored + 4 * learned) * number(a.indexer.index_heads) *
                       number(a.indexer.index_dim);
  }
  if (parts.mlp) {
    flops.mlp = factor * tokens * 3 * number(a.hidden_size) * number(c.model.intermediate_size);
  }
  if (parts.experts) flops.mlp = factor * tokens * expert_products(c);
  if (parts.mamba) flops.mamba = factor * tokens * mamba_products(c);
  return flops;
}

Flops loss_flops(const PlanConfig& c, double tokens) {
  Flops flops;
  if (c.mode().attention == AttentionMode::kWarmup) return flops;  // it has no language loss
  flops.loss =
      trained(c) * tokens * number(c.model.attention.hidden_size) * number(c.model.vocab_size);
  return flops;
}

Flops depth_flops(const PlanConfig& c, double tokens) {
  Flops flops = loss_flops(c, tokens);
  const double h = number(c.model.attention.hidden_size);
  flops.mtp = trained(c) * tokens * 2 * h * h;
  return flops;
}

Flops model_flops(const PlanConfig& c, double tokens, const Pairs& pairs) {
  Flops flops = loss_flops(c, tokens);
  for (std::int64_t n = 1; n <= c.model.layers; ++n) flops += layer_flops(c, n, 0, tokens, pairs);
  for (std::int64_t d = 0; d < depths_run(c); ++d) {
    flops += depth_flops(c, tokens);
    for (std::int64_t n = 1; n <= mtp_layers(c); ++n) {
      flops += layer_flops(c, c.model.layers + n, d, tokens, pairs);
    }
  }
  return flops;
}

}  // namespace winnow::plan
