// Four channels of a pooled key: in each a softmax over the tokens of the pool.
//
//   a[t] = gate[t] + ape[t], e[t] = exp(a[t] - max a), w[t] = e[t] * (1 / sum e)
//   kOnce:      one FMA chain over t of (w[t], key[t]) from +0, rounded when stored
//   kKeyDtype:  w[t] rounded, w[t] * key[t] rounded, added up over t from +0, rounded when stored
//
// Order: t ascending in every sum. pool_keys and append_pools share it, so they agree to the last
// bit. Pools of 4 tokens stay in registers; others read keys and gates up to three times, out of
// the cache after the first.
#pragma once

#include "base/refusal.h"
#include "cuda/elements.h"
#include "winnow/pool_keys.h"

namespace winnow::cuda {

// ape as the kernels read it.
struct Bias {
  const float* data;
  std::int64_t stride;
  int pool_size;

  explicit Bias(const Tensor& ape)
      : data(ape.as<float>()), stride(ape.strides[0]), pool_size(static_cast<int>(ape.shape[0])) {}
};

inline constexpr int kPoolChunk = 4;  // channels of a thread

template <class T>
__device__ float round_as(float x) {
  return to_float(from_float<T>(x));
}

// Channels [d, d + 4) of which `limit` exist; `key(t)` and `gate(t)` are the rows of the pool's
// tokens. kSize: tokens of a pool; 0: any number.
template <class T, int kSize, class Key, class Gate>
__device__ void pool_channels(const Bias& ape, PoolRounding rounding, int d, int limit, Key&& key,
                              Gate&& gate, T* pooled) {
  constexpr DType kType = std::is_same_v<T, float>  ? DType::kF32
                          : std::is_same_v<T, BF16> ? DType::kBF16
                                                    : DType::kF16;
  const int size = kSize > 0 ? kSize : ape.pool_size;
  auto load_logits = [&](int t, float(&a)[kPoolChunk]) {
    float bias[kPoolChunk];
    load_floats(gate(t), kType, d, limit, a);
    load_floats(ape.data, DType::kF32, t * ape.stride + d, limit, bias);
#pragma unroll
    for (int c = 0; c < kPoolChunk; ++c) a[c] += bias[c];
  };
  constexpr int kKept = kSize > 0 ? kSize : 1;
  float logit[kKept][kPoolChunk], top[kPoolChunk], sum[kPoolChunk] = {}, out[kPoolChunk] = {};
#pragma unroll
  for (int t = 0; t < size; ++t) {
    float(&a)[kPoolChunk] = logit[kSize > 0 ? t : 0];
    load_logits(t, a);
#pragma unroll
    for (int c = 0; c < kPoolChunk; ++c)
      top[c] = t == 0 || a[c] > top[c] || a[c] != a[c] ? a[c] : top[c];  // NaN stays
  }
#pragma unroll
  for (int t = 0; t < size; ++t) {
    float(&a)[kPoolChunk] = logit[kSize > 0 ? t : 0];
    if (kSize == 0) load_logits(t, a);
#pragma unroll
    for (int c = 0; c < kPoolChunk; ++c) {
      a[c] = expf(a[c] - top[c]);
      sum[c] += a[c];
    }
  }
#pragma unroll
  for (int t = 0; t < size; ++t) {
    float(&a)[kPoolChunk] = logit[kSize > 0 ? t : 0];
    float x[kPoolChunk];
    load_floats(key(t), kType, d, limit, x);
    if (kSize == 0) load_logits(t, a);
#pragma unroll
    for (int c = 0; c < kPoolChunk; ++c) {
      const float e = kSize == 0 ? expf(a[c] - top[c]) : a[c];
      const float weight = __fmul_rn(e, __fdiv_rn(1.f, sum[c]));
      if (rounding == PoolRounding::kOnce) {
        out[c] = fmaf(weight, x[c], out[c]);
      } else {
        out[c] = __fadd_rn(out[c], round_as<T>(__fmul_rn(round_as<T>(weight), x[c])));
      }
    }
  }
  store_floats(pooled, kType, d, limit, out);
}

// The channels of one pool that this lane of a warp takes.
template <class T, class Key, class Gate>
__device__ void pool_tokens(const Bias& ape, PoolRounding rounding, int dim, Key&& key, Gate&& gate,
                            T* pooled) {
  for (int d = threadIdx.x % 32 * kPoolChunk; d < dim; d += 32 * kPoolChunk) {
    if (ape.pool_size == 4) {
      pool_channels<T, 4>(ape, rounding, d, dim - d, key, gate, pooled);
    } else {
      pool_channels<T, 0>(ape, rounding, d, dim - d, key, gate, pooled);
    }
  }
}

// None if these kernels take the tensors.
inline Refusal refuse_pool(const Tensor& index_key, const Tensor& gate, const Tensor& ape,
                           const Tensor& pooled_key) {
  if (index_key.dtype == DType::kF64) return "f64 is left to CPUs";
  if (!has_unit_stride(index_key) || !has_unit_stride(gate) || !has_unit_stride(ape) ||
      !has_unit_stride(pooled_key)) {
    return "index_key, gate, ape and pooled_key must have stride 1 on their last axis";
  }
  return {};
}

}  // namespace winnow::cuda
