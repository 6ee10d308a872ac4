// What is planned: a model, the steps that train it, and how they are spread over processors.
//
// The model and the stages are those of a training configuration; everything else is the object
// "plan" beside them, whose keys are the fields below.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "model/config.h"
#include "model/recompute.h"

namespace winnow::plan {

// Layers whose MLP is a mixture of experts. experts 0: there are none.
struct MoeConfig {
  std::int64_t experts = 0, experts_per_token = 0, shared_experts = 0;
  std::int64_t intermediate_size = 0;  // of one expert
  std::int64_t dense_layers = 0;       // the first layers, which have a plain MLP
};

// State space layers (letter M): the sizes of Mamba 2.
struct MambaConfig {
  std::int64_t state_dim = 128, head_dim = 64, groups = 8, expand = 2;
};

enum class GraphScope {
  kNone,   // operations are launched one by one
  kLayer,  // one graph for parts of a layer
  kStep,   // one graph for the whole step
};

struct StepGraph {
  GraphScope scope = GraphScope::kNone;
  std::vector<std::string> modules;  // kLayer: "attention", "mlp"; none named: all
  bool captures_attention() const;
};

// One stage of training: what it attends to and learns.
struct StageMode {
  std::string name;
  attention::AttentionMode attention = attention::AttentionMode::kSparse;
  bool index_loss = true;
  bool mtp_loss = true;  // depths of multi-token prediction learn; they do not run if not
};

struct PlanConfig {
  model::ModelConfig model;
  MoeConfig moe;
  MambaConfig mamba;
  // A letter per layer: M state space, * dense attention, D DSA, - MLP, E experts; then "/" and the
  // letters of one depth of multi-token prediction, for every depth. "": every layer is DSA and an
  // MLP (or experts).
  std::string layer_pattern;

  std::vector<StageMode> stages;
  std::size_t stage = 0;  // the one that is planned
  std::int64_t context = 0, batch_sequences = 1, micro_batch_sequences = 1;
  // Documents packed into each sequence of `context` tokens; none: one of the whole length.
  std::vector<std::int64_t> lengths;

  model::Recompute recompute;
  StepGraph step_graph;
  std::int64_t pp = 1, cp = 1, dp = 1, ep = 1;  // ranks: pipeline, context, data, experts
  std::int64_t virtual_stages = 0;              // 0: as the layout says, or 1
  std::string layout;                           // pipeline_layout.h; "": even
  DType dtype = DType::kF32;     // of weights and activations; the optimizer is in f32
  bool shard_optimizer = false;  // over the dp x cp ranks
  double score_budget_gib = 2;   // for scores that wait for their selection
  std::string machine = "h200";  // machine.h
  double efficiency = 1;         // share of the machine's peak that is reached; 1: the least time

  const StageMode& mode() const { return stages[stage]; }
  std::int64_t rows() const;           // of a micro-batch on one rank
  std::int64_t micro_batches() const;  // of a step on one rank
  bool hybrid() const { return !layer_pattern.empty(); }
  // Layers count from 1, and multi-token prediction is layer layers + 1; in a hybrid model its
  // letters are layers + 1, layers + 2, ...
  std::string letters() const;      // of the layers alone
  std::string mtp_letters() const;  // of one depth
  bool is_dsa(std::int64_t layer) const;
  bool is_moe(std::int64_t layer) const;  // of models that are not hybrid
};

// Reads the object "plan" into what the training configuration says already.
void read_plan_options(const nlohmann::json& json, PlanConfig& config, Rules& rules);

}  // namespace winnow::plan
