// One channel of a pooled key: a softmax over the tokens of the pool.
//
//   a[t] = gate[t] + ape[t], e[t] = exp(a[t] - max a), w[t] = e[t] * (1 / sum e)
//   kOnce:      one FMA chain over t of (w[t], key[t]) from +0, rounded when stored
//   kKeyDtype:  w[t] rounded, w[t] * key[t] rounded, added up over t from +0, rounded when stored
//
// Order: t ascending in every sum. pool_keys and append_pools share it, so they agree to the last
// bit. Keys and gates are read up to three times, out of the cache after the first.
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

template <class T>
__device__ float round_as(float x) {
  return to_float(from_float<T>(x));
}

// Channel d; `key(t)` and `gate(t)` are the rows of the pool's tokens.
template <class T, class Key, class Gate>
__device__ T pooled_channel(const Bias& ape, PoolRounding rounding, std::int64_t d, Key&& key,
                            Gate&& gate) {
  auto logit = [&](int t) { return to_float(gate(t)[d]) + ape.data[t * ape.stride + d]; };
  float top = logit(0);
  for (int t = 1; t < ape.pool_size; ++t) {
    const float a = logit(t);
    top = a > top || a != a ? a : top;  // NaN stays
  }
  float sum = 0;
  for (int t = 0; t < ape.pool_size; ++t) sum += expf(logit(t) - top);
  const float share = __fdiv_rn(1.f, sum);
  float pooled = 0;
  for (int t = 0; t < ape.pool_size; ++t) {
    const float weight = __fmul_rn(expf(logit(t) - top), share), x = to_float(key(t)[d]);
    if (rounding == PoolRounding::kOnce) {
      pooled = fmaf(weight, x, pooled);
    } else {
      pooled = __fadd_rn(pooled, round_as<T>(__fmul_rn(round_as<T>(weight), x)));
    }
  }
  return from_float<T>(pooled);
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
