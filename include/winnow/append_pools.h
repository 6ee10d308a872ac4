// append_pools: pool_keys for sequences that grow. Each request keeps the keys and gates of its
// open pool, at most pool_size - 1 tokens; a token that completes a pool gives its pooled key.
//
// - Request r brings the tokens [cu_seqlens[r], cu_seqlens[r + 1]) of the call, none or many; they
//   are the positions context[r], context[r] + 1, ... of the request. Pools begin at position 0.
// - The token of position p belongs to place p % pool_size of its pool. The open pool's tokens
//   stand at slot p % pool_size of the request's ring; the last place needs no slot. Nothing else
//   of the ring is read, and only slots of new tokens of the open pool are written.
// - Where new token i completes a pool, the pooled key goes to slot pool_slots[i]: row i of a
//   pooled_key [slots, index_dim]; row s % n of page s / n if it is [pages, n, index_dim]. Other
//   entries are not read. A slot outside is a pool that nobody keeps.
// - Padding: a request whose ring lies outside [0, rings) or whose context is negative, and tokens
//   of no request, are neither read nor written.
// - Bit for bit what pool_keys gives over the whole sequence, however it was cut into calls.
// - Two requests of one call must not share a ring, nor two pools a slot.
// - Source: pool_keys.h, for decoding.
// - Errors, questions before memory exists: implementations.h.
#pragma once

#include "winnow/pool_keys.h"

namespace winnow {

struct AppendPoolsArgs {
  Tensor index_key;   // [tokens, index_dim] f64 | f32 | bf16 | f16: new tokens of all requests
  Tensor gate;        // [tokens, index_dim], dtype of index_key
  Tensor ape;         // [pool_size, index_dim] f32 (f64 with f64)
  Tensor cu_seqlens;  // int32 [requests + 1]
  Tensor context;     // int32 [requests]: tokens that the request had before
  Tensor rings;       // int32 [requests]: the request's ring; left out: request r has ring r
  Tensor pool_slots;  // int32 [tokens]: where the pool goes that this token completes (pools.h)
  std::int64_t page_size = 0;  // tokens of a page where pooled_key is paged
  PoolRounding rounding = PoolRounding::kOnce;
  Tensor open_key;    // in and out: [rings, pool_size - 1, index_dim], dtype of index_key
  Tensor open_gate;   // in and out: as open_key
  Tensor pooled_key;  // out: [slots, index_dim] or [pages, page_size / pool_size, index_dim]
};

void append_pools(const AppendPoolsArgs& args, Workspace workspace);
std::int64_t append_pools_workspace_bytes(const AppendPoolsArgs& args);
Explanation explain(const AppendPoolsArgs& args);

}  // namespace winnow
