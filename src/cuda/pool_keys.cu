// pool_keys on GPUs: a warp for each pool (pool.h).
//
// Bytes: a pool reads pool_size keys and gates once and writes one key; an exponential for every
// token and channel. Bound by memory, with pools of 4 near the exponentials' rate.
#include "base/implementation.h"
#include "cuda/kernel.h"
#include "cuda/pool.h"
#include "cuda/rows.h"
#include "winnow/pool_keys.h"

namespace winnow::cuda {
namespace {

constexpr int kWarps = 8;  // of a block, a pool each

template <class T>
struct Pooling {
  const T *index_key, *gate;
  std::int64_t key_stride, gate_stride;
  Bias ape;
  IntRows pool_bases;
  std::int64_t keys, pools;
  int dim;
  PoolRounding rounding;
  T* pooled_key;
  std::int64_t pooled_stride;
};

template <class T>
__global__ void __launch_bounds__(32 * kWarps) pool_kernel(Pooling<T> p) {
  const std::int64_t pool = static_cast<std::int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  if (pool >= p.pools) return;
  const std::int64_t base = p.pool_bases[pool];
  T* pooled = p.pooled_key + pool * p.pooled_stride;
  if (base < 0 || base + p.ape.pool_size > p.keys) {  // absent
    for (int d = threadIdx.x % 32; d < p.dim; d += 32) pooled[d] = T{};
    return;
  }
  pool_tokens<T>(
      p.ape, p.rounding, p.dim, [&](int t) { return p.index_key + (base + t) * p.key_stride; },
      [&](int t) { return p.gate + (base + t) * p.gate_stride; }, pooled);
}

template <class T>
const Kernel kPool{pool_kernel<T>};

Refusal refuse(const PoolKeysArgs& a) {
  return refuse_pool(a.index_key, a.gate, a.ape, a.pooled_key);
}

std::int64_t workspace_bytes(const PoolKeysArgs&) { return 0; }

void run(const PoolKeysArgs& a, Workspace workspace) {
  with_element(a.index_key.dtype, [&]<class T>(T) {
    const Pooling<T> p{
        a.index_key.as<T>(),  a.gate.as<T>(),        a.index_key.strides[0],
        a.gate.strides[0],    Bias(a.ape),           IntRows(a.pool_bases),
        a.index_key.shape[0], a.pool_bases.shape[0], static_cast<int>(a.index_key.shape[1]),
        a.rounding,           a.pooled_key.as<T>(),  a.pooled_key.strides[0]};
    kPool<T>.launch("pool_keys",
                    {.grid = dim3(static_cast<unsigned>(ceil_div(p.pools, kWarps))),
                     .block = dim3(32 * kWarps),
                     .stream = stream_of(workspace)},
                    p);
  });
}

}  // namespace

extern const Implementation<PoolKeysArgs> pool_keys_implementation;
const Implementation<PoolKeysArgs> pool_keys_implementation = {"cuda.portable", refuse,
                                                               workspace_bytes, run};

}  // namespace winnow::cuda
