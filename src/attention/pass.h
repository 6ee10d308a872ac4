// What one pass through the layers has in common: its rows, the keys they add, shared memory.
#pragma once

#include <chrono>
#include <span>

#include "attention/buffer.h"
#include "attention/config.h"
#include "attention/context_group.h"
#include "nn/rope.h"
#include "winnow/layout.h"

namespace winnow::attention {

// The pools of KPool in a pass, and what its rows see of them (attention/pools.h). Views.
struct Pools {
  Tensor starts, ends;     // int32 [rows]: the pools that a row selects among
  std::int64_t first = 0;  // the pools [first, count) are made in this pass
  std::int64_t count = 0;
  Tensor bases;                       // int32 [count]: first key of each; none where they grow
  Tensor cu_seqlens, context, slots;  // of a sequence that grows, as append_pools has them

  bool grows() const { return !slots.empty(); }
};

// The rows of a pass. They become the keys [first_key, first_key + count) of every layer's cache:
// all of it in training, the newest part of it in generation. With context parallelism the cache
// holds the keys of all ranks' rows, and where this rank's are among them is the group's to know.
struct Rows {
  std::span<const std::int32_t> positions;  // [rows], inside the row's sequence
  Tensor starts, ends;                      // int32 [rows], over the keys of the cache
  std::int64_t first_key = 0;
  const ContextGroup* context = nullptr;  // with whom the keys are shared; null: with nobody
  Pools pools;                            // of indexers with a pool_size above 1

  std::int64_t count() const { return static_cast<std::int64_t>(positions.size()); }
  std::int64_t keys() const { return context != nullptr ? context->keys() : first_key + count(); }
};

// A view of them: all keys there are, no pools.
Rows rows_of(std::span<const std::int32_t> positions, const RowRanges& ranges);

// What a layer keeps of the rows it has seen, as later rows need it: after norms and RoPE.
struct KeyCache {
  Buffer key;    // [capacity, kv_heads, dim_qk]; MLA: [capacity, 1, kv_lora_rank + rope]
  Buffer value;  // [capacity, kv_heads, v_head_dim]; MLA: none, it is part of the key
  // What the indexer scores: keys of tokens or, with pools, [capacity / pool_size, index_dim].
  Buffer index_key;  // [capacity, index_dim]
  // The same quantised, where the indexer selects with that.
  Buffer index_key_data;   // e4m3, the shape of index_key
  Buffer index_key_scale;  // MXFP8: e8m0 [capacity, index_dim / 32]; E4M3: f32 [pools, 1]
  // Of a sequence that grows: the tokens of its last pool, until that is whole (append_pools.h).
  Buffer open_key, open_gate;  // [1, pool_size - 1, index_dim]

  // Without an indexer the layer caches no index keys.
  void fit(const AttentionConfig& config, DType dtype, std::int64_t capacity, bool indexer = true);
};

// Rotation tables of a model: the attention's and the indexer's.
struct RopeTables {
  nn::RopeTable attention, indexer;
  RopeTables(const AttentionConfig& config, DType dtype);
};

// What a layer needs of context parallelism while it runs.
struct ContextMemory {
  KeyCache own;  // the rows' keys, until those of all ranks are gathered
  Buffer exchanged;
  Buffer d_key, d_value, d_index_key;  // of the rows' keys, from the queries of all ranks
  Buffer index_key, index_gate;        // KPool: of all ranks, before they are pooled
};

// Workspace and temporaries that all layers share, since a layer needs them only while it runs.
struct Memory {
  Scratch scratch;
  // Gradients of the attention: of its inputs and output, then of what they come from.
  Buffer d_query, d_key, d_value, d_attended;
  Buffer d_q, d_q_latent, d_q_down, d_latent, d_heads;
  // The indexer's activations: its gradient is complete within the layer's forward.
  Buffer index_query, index_weights, k_projected, k_mean, k_scale;
  Buffer index_query_data, index_query_scale, selection_scores, rotated;  // MXFP8 and E4M3
  // KPool: keys and gates of the rows, before they are pooled; selected pools.
  Buffer index_key, index_gate, pool_indices, pool_lengths;
  Buffer topk_scores, target, kl, d_scores, d_index_query, d_index_key, d_index_weights, d_k;
  // What indexers have done: scored and selected, so often; and the time of that, of their
  // projections and of their losses with gradients.
  std::int64_t selections = 0;
  double index_seconds = 0;
  // A second, dense attention that measures what the selection catches.
  Buffer dense_attended, dense_lse;
  ContextMemory context;
};

// Adds the time that it lives to a sum.
class Timed {
 public:
  explicit Timed(double& seconds) : seconds_(seconds), begin_(Clock::now()) {}
  ~Timed() { seconds_ += std::chrono::duration<double>(Clock::now() - begin_).count(); }
  Timed(const Timed&) = delete;
  Timed& operator=(const Timed&) = delete;

 private:
  using Clock = std::chrono::steady_clock;
  double& seconds_;
  const Clock::time_point begin_;
};

// Calls an operation with a workspace from `scratch`.
template <class Args>
void call(void (*operation)(const Args&, Workspace), std::int64_t (*workspace_bytes)(const Args&),
          const Args& args, Scratch& scratch) {
  operation(args, scratch.get(workspace_bytes(args)));
}

}  // namespace winnow::attention
