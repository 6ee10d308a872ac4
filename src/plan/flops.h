// How many floating-point operations a training step does: what throughput and time are reckoned
// from.
//
// A product of an a x b by a b x c matrix counts 2 a b c. What is trained counts three times, once
// forward and twice backward, except the indexer, whose inputs are detached. With T tokens, and
// pairs of a row and a key per layer,
//
//   attention   linear    T 6 (query, key and output projections)         per layer
//               core      pairs 6 heads (dim_qk + dim_v)                  absorbed for MLA
//   indexer     linear    T (f_t) (query, key and head weights)           per layer that computes
//               core      pairs (f_c) index_heads index_dim
//
// where f_t is 2, and 4 with the loss; f_c is 2 for every scored pair, and with the loss 4 more for
// every pair that the loss looks at: all of them (dense loss), or the selected ones (sparse loss).
// With pools the indexer scores pools, and a gate projection is added. A warm-up trains the indexers
// alone: the rest counts once, and its loss looks at all pairs. Softmax, rotations, top-k and KL are
// not counted; of the norms, as Megatron Core does, the two of the latents. Nothing here depends on recomputation: it is the model's work, not
// a machine's.
#pragma once

#include <cstdint>
#include <span>

#include "plan/config.h"

namespace winnow::plan {

// Pairs of a row and what it scores or attends to, of one layer.
struct Pairs {
  double visible = 0;   // keys that a row sees: L (L + 1) / 2 of a causal sequence of L
  double scored = 0;    // what its indexer scores: keys, or whole pools
  double selected = 0;  // keys that it attends to in sparse attention
};

// Counted exactly, in closed form, for causal sequences of these lengths.
Pairs exact_pairs(std::span<const std::int64_t> lengths, const attention::IndexerConfig& indexer);

// As Megatron Core reckons them from the tokens T and the sum of squares Q of the lengths: Q / 2
// pairs, and selected_share of them selected.
Pairs mean_pairs(double tokens, double squares, const attention::IndexerConfig& indexer);
// e (1 - e / 2L) / (L / 2) with the mean length L = Q / T and e = min(topk, floor(L)); 1 without
// topk, tokens or squares.
double selected_share(double tokens, double squares, std::int64_t topk);

struct Flops {
  double loss = 0;  // output head
  double attention_linear = 0, attention_core = 0;
  double index_linear = 0, index_core = 0;
  double mlp = 0;    // of MLPs and experts
  double mamba = 0;  // state space layers
  double mtp = 0;    // what joins embedding and hidden state before each depth

  double total() const;
  Flops& operator+=(const Flops& other);
  Flops& operator*=(double factor);
};

// What a layer is made of.
struct LayerParts {
  bool attention = false, dsa = false, mlp = false, experts = false, mamba = false;
};
LayerParts layer_parts(const PlanConfig& config, std::int64_t layer);
// Whether a call of a layer scores keys. Depths of multi-token prediction count from 0; others are
// depth 0.
bool runs_indexer(const PlanConfig& config, std::int64_t layer, std::int64_t depth = 0);
// Layers of one depth of multi-token prediction: layers + 1, ...; 0 without.
std::int64_t mtp_layers(const PlanConfig& config);

// How many depths run in the stage of training that is planned: in a warm-up those whose layer runs
// an indexer, and none where it has no loss.
std::int64_t depths_run(const PlanConfig& config);

// What a call of a layer does for `tokens` tokens, in the stage of training that is planned.
Flops layer_flops(const PlanConfig& config, std::int64_t layer, std::int64_t depth, double tokens,
                  const Pairs& pairs);
// A depth of multi-token prediction before its layers, and its loss.
Flops depth_flops(const PlanConfig& config, double tokens);
// Output head and loss of the model.
Flops loss_flops(const PlanConfig& config, double tokens);

// All of it.
Flops model_flops(const PlanConfig& config, double tokens, const Pairs& pairs);

}  // namespace winnow::plan
