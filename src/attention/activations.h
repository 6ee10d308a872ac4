// What a layer keeps of a pass from its forward to its backward. Layers hold weights and nothing of
// a pass, so one layer may serve several: micro-batches in flight, depths of multi-token
// prediction, the replay of a recomputed layer.
//
// The groups are what recomputation may drop: a pass then lends all layers one and the same group,
// and fills it again before a layer's backward (Layer::replay).
#pragma once

#include "attention/pass.h"

namespace winnow::attention {

// The keys that each row attends to, and the certificate that belongs to them. Views.
struct Selection {
  Tensor topk_indices, topk_lengths;  // int32 [rows, topk], [rows]; empty: all visible keys
  Tensor starts, ends;                // the ranges that it was made for
  // Every row attends to a key. True lets the backward skip the masking of empty rows, which
  // changes no bit; false is always right.
  bool rows_nonempty = false;

  bool empty() const { return topk_indices.empty(); }
};

struct SelectionMemory {
  Buffer topk_indices, topk_lengths;
};

struct LatentActivations {               // MLA
  Buffer q_down_out, q_latent, q_scale;  // [rows, q_lora_rank] twice, [rows]
  Buffer latent_in, latent_scale;        // [rows, kv_lora_rank] before the norm, [rows]
};

struct QueryActivations {
  Buffer q;      // MLA: [rows, heads, nope + rope], rotated
  Buffer query;  // [rows, heads, dim_qk]
};

struct CoreActivations {
  Selection selected;   // made or reused in this pass
  bool sparse = false;  // attention read it, and not all visible keys
  Buffer attended;      // [rows, heads, dim_v]
  Buffer lse;           // [rows, heads]
  Buffer heads;         // MLA: [rows, heads, v_head_dim]
};

// Where a layer keeps them in this pass.
struct Kept {
  KeyCache& cache;
  LatentActivations& latents;
  QueryActivations& query;
  CoreActivations& core;
  SelectionMemory& selection;  // of a layer that selects
};

// All groups of one layer.
struct Activations {
  KeyCache cache;
  LatentActivations latents;
  QueryActivations query;
  CoreActivations core;
  SelectionMemory selection;

  Kept kept() { return {cache, latents, query, core, selection}; }
};

}  // namespace winnow::attention
