// The new tokens one by one: the last of a pool gives the pooled key, the others go into the ring.
// All pools come first, since a ring holds the open pool as it was before the call.
#include "winnow/append_pools.h"

#include <algorithm>

#include "ref/implementations.h"
#include "ref/pool.h"

namespace winnow::ref {
namespace {

std::int64_t number(const Tensor& t, std::int64_t i) {
  return t.as<std::int32_t>()[i * t.strides[0]];
}

// A new token: where its request's tokens begin, its ring, its position in the request, and the
// position at which the request's open pool begins after the call.
struct NewToken {
  std::int64_t first, ring, position, open;
};

// body(i, token) for every new token of every request that is not padding.
template <class Body>
void for_tokens(const AppendPoolsArgs& a, Body&& body) {
  const std::int64_t tokens = a.index_key.shape[0], pool_size = a.ape.shape[0];
  for (std::int64_t r = 0; r < a.context.shape[0]; ++r) {
    const std::int64_t ring = a.rings.empty() ? r : number(a.rings, r);
    const std::int64_t first = number(a.cu_seqlens, r), context = number(a.context, r);
    const std::int64_t last = std::min(tokens, number(a.cu_seqlens, r + 1));
    if (ring < 0 || ring >= a.open_key.shape[0] || context < 0 || first < 0) continue;
    const std::int64_t open = (context + last - first) / pool_size * pool_size;
    for (std::int64_t i = first; i < last; ++i)
      body(i, NewToken{first, ring, context + i - first, open});
  }
}

void finish(const AppendPoolsArgs& a, std::int64_t i, const NewToken& token) {
  const std::int64_t pool_size = a.ape.shape[0], slot = number(a.pool_slots, i);
  const Tensor& out = a.pooled_key;
  const bool paged = out.rank == 3;
  const std::int64_t per_page = paged ? out.shape[1] : 1;
  if (slot < 0 || slot >= out.shape[0] * per_page) return;
  const auto channel = [&](const Tensor& fresh, const Tensor& open, std::int64_t t,
                           std::int64_t d) {
    const std::int64_t j = i - (pool_size - 1 - t);  // where place t would be among the new tokens
    return j >= token.first ? get(fresh, j, d) : get(open, token.ring, t, d);
  };
  for (std::int64_t d = 0; d < a.index_key.shape[1]; ++d) {
    const double pooled = pooled_channel(
        a.ape, d, a.index_key.dtype, a.rounding,
        [&](std::int64_t t) { return channel(a.index_key, a.open_key, t, d); },
        [&](std::int64_t t) { return channel(a.gate, a.open_gate, t, d); });
    if (paged) {
      set(out, slot / per_page, slot % per_page, d, pooled);
    } else {
      set(out, slot, d, pooled);
    }
  }
}

void run(const AppendPoolsArgs& a, Workspace) {
  const std::int64_t pool_size = a.ape.shape[0], dim = a.index_key.shape[1];
  for_tokens(a, [&](std::int64_t i, const NewToken& token) {
    if (token.position % pool_size == pool_size - 1) finish(a, i, token);
  });
  for_tokens(a, [&](std::int64_t i, const NewToken& token) {
    if (token.position < token.open) return;
    const std::int64_t slot = token.position % pool_size;
    for (std::int64_t d = 0; d < dim; ++d) {
      set(a.open_key, token.ring, slot, d, get(a.index_key, i, d));
      set(a.open_gate, token.ring, slot, d, get(a.gate, i, d));
    }
  });
}

}  // namespace

const Implementation<AppendPoolsArgs> append_pools_implementation = {"reference", accept,
                                                                     no_workspace, run};

}  // namespace winnow::ref
