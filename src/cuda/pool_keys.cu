// pool_keys on GPUs: a block for each pool, a thread for each channel (pool.h).
//
// Bytes: a pool reads pool_size keys and gates once and writes one key; an exponential for every
// token and channel, twice. Bound by memory, with pools of 4 near the exponentials' rate.
#include "winnow/pool_keys.h"

#include "base/implementation.h"
#include "cuda/kernel.h"
#include "cuda/pool.h"
#include "cuda/rows.h"

namespace winnow::cuda {
namespace {

constexpr int kThreads = 128;

template <class T>
struct Pooling {
  const T *index_key, *gate;
  std::int64_t key_stride, gate_stride;
  Bias ape;
  IntRows pool_bases;
  std::int64_t keys;
  int dim;
  PoolRounding rounding;
  T* pooled_key;
  std::int64_t pooled_stride;
};

template <class T>
__global__ void __launch_bounds__(kThreads) pool_kernel(Pooling<T> p) {
  const std::int64_t pool = blockIdx.x, base = p.pool_bases[pool];
  const bool absent = base < 0 || base + p.ape.pool_size > p.keys;
  T* pooled = p.pooled_key + pool * p.pooled_stride;
  const T* key = p.index_key + (absent ? 0 : base) * p.key_stride;
  const T* gate = p.gate + (absent ? 0 : base) * p.gate_stride;
  for (int d = threadIdx.x; d < p.dim; d += kThreads) {
    pooled[d] = absent ? T{}
                       : pooled_channel<T>(
                             p.ape, p.rounding, d, [&](int t) { return key + t * p.key_stride; },
                             [&](int t) { return gate + t * p.gate_stride; });
  }
}

template <class T>
const Kernel kPool{pool_kernel<T>};

Refusal refuse(const PoolKeysArgs& a) {
  return refuse_pool(a.index_key, a.gate, a.ape, a.pooled_key);
}

std::int64_t workspace_bytes(const PoolKeysArgs&) { return 0; }

void run(const PoolKeysArgs& a, Workspace workspace) {
  with_element(a.index_key.dtype, [&]<class T>(T) {
    const Pooling<T> p{a.index_key.as<T>(),
                       a.gate.as<T>(),
                       a.index_key.strides[0],
                       a.gate.strides[0],
                       Bias(a.ape),
                       IntRows(a.pool_bases),
                       a.index_key.shape[0],
                       static_cast<int>(a.index_key.shape[1]),
                       a.rounding,
                       a.pooled_key.as<T>(),
                       a.pooled_key.strides[0]};
    kPool<T>.launch("pool_keys",
                    {.grid = dim3(static_cast<unsigned>(a.pool_bases.shape[0])),
                     .block = dim3(kThreads),
                     .stream = stream_of(workspace)},
                    p);
  });
}

}  // namespace

extern const Implementation<PoolKeysArgs> pool_keys_implementation;
const Implementation<PoolKeysArgs> pool_keys_implementation = {"cuda.portable", refuse,
                                                               workspace_bytes, run};

}  // namespace winnow::cuda
