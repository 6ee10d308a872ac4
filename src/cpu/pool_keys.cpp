// pool_keys on CPUs: one task per 64 pools, each pool by pool.h.
//
// Bytes: a pool reads pool_size keys and gates once and writes one key. Arithmetic: an exponential
// (about 20 operations on eight channels) and a division per token. The floor is the memory's.
#include "winnow/pool_keys.h"

#include "base/implementation.h"
#include "base/parallel.h"
#include "cpu/pool.h"

namespace winnow::cpu::WINNOW_ISA {
namespace {

constexpr std::int64_t kTaskPools = 64;

Refusal refuse(const PoolKeysArgs& a) {
  Refusal refusal = refuse_pool(a.index_key, a.gate, a.ape, a.pooled_key);
  return refusal;
}

std::int64_t workspace_bytes(const PoolKeysArgs&) { return 0; }

template <class T>
void pool_one(const PoolKeysArgs& a, std::int64_t pool) {
  const std::int64_t keys = a.index_key.shape[0], dim = a.index_key.shape[1],
                     pool_size = a.ape.shape[0];
  const std::int64_t base = a.pool_bases.as<std::int32_t>()[pool * a.pool_bases.strides[0]];
  T* pooled = a.pooled_key.as<T>() + pool * a.pooled_key.strides[0];
  if (base < 0 || base + pool_size > keys) {  // absent
    for (std::int64_t d = 0; d < dim; ++d) pooled[d] = T{};
    return;
  }
  PoolTokens<T> tokens;
  for (std::int64_t t = 0; t < pool_size; ++t) {
    tokens.key[t] = a.index_key.as<T>() + (base + t) * a.index_key.strides[0];
    tokens.gate[t] = a.gate.as<T>() + (base + t) * a.gate.strides[0];
  }
  pool_tokens(tokens, a.ape, a.rounding, dim, pooled);
}

void run(const PoolKeysArgs& a, Workspace) {
  const std::int64_t pools = a.pool_bases.shape[0];
  parallel_for(ceil_div(pools, kTaskPools), [&](std::int64_t task, int) {
    with_element(a.index_key.dtype, [&]<class T>(const T*) {
      const std::int64_t last = min64(pools, (task + 1) * kTaskPools);
      for (std::int64_t pool = task * kTaskPools; pool < last; ++pool) pool_one<T>(a, pool);
    });
  });
}

}  // namespace

extern const Implementation<PoolKeysArgs> pool_keys_implementation;
const Implementation<PoolKeysArgs> pool_keys_implementation = {WINNOW_IMPLEMENTATION_NAME, refuse,
                                                               workspace_bytes, run};

}  // namespace winnow::cpu::WINNOW_ISA
