// The inside of a Pass: what one micro-batch keeps from forward to backward.
#pragma once

#include <vector>

#include "attention/forward_sharing.h"
#include "attention/pools.h"
#include "model/mtp.h"
#include "model/transformer.h"

namespace winnow::model {

// One call of a block: of layer n, or of a depth of multi-token prediction. It holds a copy of its
// own of all that its replay and its backward read, whatever becomes of the sharing state.
struct BlockCall {
  Buffer input;  // [rows, hidden]
  BlockActivations kept;
  attention::KeyCache* cache = nullptr;  // that it filled or, of a depth, found filled
  attention::LayerOptions options;       // with the selection that it reused
  attention::Selection selected;         // what it attended to, unless recomputation dropped that
};

struct PassState {
  const Batch* batch = nullptr;
  std::shared_ptr<const attention::ContextGroup> context;  // of the forward
  std::int64_t context_version = 0;                        // of its tables
  attention::Rows rows;
  attention::PoolTables pools;  // of indexers of pools; `rows` shows them
  std::int64_t capacity = 0;    // keys that caches have room for
  bool keep_caches = false;     // every call has a cache of its own, whatever is recomputed
  StepOptions options;
  Recompute recompute;            // in force
  attention::LayerOptions layer;  // what all calls have in common
  attention::ForwardSharing sharing;
  std::vector<BlockCall> calls;  // the layers, then the depths
  Buffer end;                    // [rows, hidden] after the last layer
  Buffer normed, scale;          // its norm: [rows, hidden], [rows]
  std::vector<MtpActivations> depths;
  std::vector<Buffer> d_normed;  // [rows, hidden] of the end and of every depth
  Buffer d_stream;               // [rows, hidden], of the call that goes backward
  Buffer d_shared_keys;          // [keys, 1, dim_qk], of all depths but the first
  std::size_t depths_ran = 0;
  bool ran = false;  // forward, and not yet backward

  // The layers whose selections there are to see.
  std::size_t selecting_layers() const {
    return layer.selects() ? calls.size() - depths.size() : 0;
  }
};

}  // namespace winnow::model
