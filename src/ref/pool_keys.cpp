// pooled_key[m, d] = sum_t softmax_t(gate[base + t, d] + ape[t, d]) * index_key[base + t, d].
#include "winnow/pool_keys.h"

#include "ref/implementations.h"
#include "ref/pool.h"

namespace winnow::ref {
namespace {

void run(const PoolKeysArgs& a, Workspace) {
  const std::int64_t keys = a.index_key.shape[0], dim = a.index_key.shape[1],
                     pool_size = a.ape.shape[0];
  for (std::int64_t m = 0; m < a.pool_bases.shape[0]; ++m) {
    const std::int64_t base = a.pool_bases.as<std::int32_t>()[m * a.pool_bases.strides[0]];
    for (std::int64_t d = 0; d < dim; ++d) {
      if (base < 0 || base + pool_size > keys) {
        set(a.pooled_key, m, d, 0);
        continue;
      }
      set(a.pooled_key, m, d,
          pooled_channel(
              a.ape, d, a.index_key.dtype, a.rounding,
              [&](std::int64_t t) { return get(a.index_key, base + t, d); },
              [&](std::int64_t t) { return get(a.gate, base + t, d); }));
    }
  }
}

}  // namespace

const Implementation<PoolKeysArgs> pool_keys_implementation = {"reference", accept, no_workspace,
                                                               run};

}  // namespace winnow::ref
