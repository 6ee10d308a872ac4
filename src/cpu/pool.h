// One pooled key: a softmax over the tokens of a pool in each channel, eight channels at a time.
//
//   a[t] = gate[t] + ape[t], e[t] = exp(a[t] - max a), w[t] = e[t] * (1 / sum e)
//   kOnce:      one FMA chain over t of (w[t], key[t]) from +0, rounded when stored
//   kKeyDtype:  w[t] rounded, w[t] * key[t] rounded, added up over t from +0, rounded when stored
//
// Order: t ascending in every sum; a channel reads no other channel. So a pooled key depends on its
// tokens alone, and pool_keys and append_pools agree to the last bit.
//
// Bytes: 2 pool_size + 1 numbers a channel, once. Arithmetic: 17 operations for the exponential of
// eight channels of a token, 10 for the rest: about 60 cycles for eight channels of 4 tokens.
#pragma once

#include "cpu/narrow.h"
#include "cpu/tile.h"
#include "winnow/pool_keys.h"

namespace winnow::cpu::WINNOW_ISA {

inline constexpr std::int64_t kMostPool = 64;  // tokens: their weights stay on the stack

// Where the tokens of one pool lie.
template <class T>
struct PoolTokens {
  const T *key[kMostPool], *gate[kMostPool];
};

// exp8 of x <= 0 that scales once: below the normal range, -87.3, it is 0. 17 operations, not 24.
WINNOW_INLINE F8 exp_of_difference(F8 x) {
  const Exponential e(max8(splat(-88.f), x));  // NaN survives
  return e.fraction * bits_as_float((e.n + splat(127)) << 23);
}

// Eight channels; `get` loads them from the start of a row. kSize: tokens of a pool; 0: any number.
template <int kSize, class T, class Get>
WINNOW_INLINE F8 pooled_channels(const PoolTokens<T>& tokens, const Tensor& ape,
                                 PoolRounding rounding, Get&& get) {
  const std::int64_t pool_size = kSize > 0 ? kSize : ape.shape[0], stride = ape.strides[0];
  const float* bias = ape.as<float>();
  F8 weight[kSize > 0 ? kSize : kMostPool];
  F8 top = weight[0] = get(tokens.gate[0]) + get(bias);
#pragma GCC unroll 8
  for (std::int64_t t = 1; t < pool_size; ++t) {
    weight[t] = get(tokens.gate[t]) + get(bias + t * stride);
    top = max8(weight[t], top);
  }
  F8 sum = zero8();
#pragma GCC unroll 8
  for (std::int64_t t = 0; t < pool_size; ++t) {
    weight[t] = exp_of_difference(weight[t] - top);
    sum = sum + weight[t];
  }
  const F8 share = splat(1.f) / sum;
  F8 pooled = zero8();
  if (rounding == PoolRounding::kOnce) {
#pragma GCC unroll 8
    for (std::int64_t t = 0; t < pool_size; ++t)
      pooled = fma(weight[t] * share, get(tokens.key[t]), pooled);
  } else {
    constexpr const T* kType = nullptr;
#pragma GCC unroll 8
    for (std::int64_t t = 0; t < pool_size; ++t)
      pooled = pooled + round_as(round_as(weight[t] * share, kType) * get(tokens.key[t]), kType);
  }
  return round_as(pooled, static_cast<const T*>(nullptr));
}

// The channels from d on, fewer than eight.
template <class T>
__attribute__((noinline)) inline void pool_rest(const PoolTokens<T>& tokens, const Tensor& ape,
                                                PoolRounding rounding, std::int64_t d,
                                                std::int64_t dim, T* pooled) {
  const auto rest = static_cast<int>(dim - d);
  const F8 last = pooled_channels<0>(
      tokens, ape, rounding, [ d, rest ](const auto* row) __attribute__((always_inline)) {
        float v[8] = {};
        for (int i = 0; i < rest; ++i) v[i] = to_float(row[d + i]);
        return load(v);
      });
  T cells[8];
  store_as(cells, last);
  for (int i = 0; i < rest; ++i) pooled[d + i] = cells[i];
}

// The pooled key of `tokens`, [dim], which may begin anywhere.
template <int kSize, class T>
__attribute__((noinline)) inline void pool_tokens(const PoolTokens<T>& tokens, const Tensor& ape,
                                                  PoolRounding rounding, std::int64_t dim,
                                                  T* pooled) {
  std::int64_t d = 0;
  for (; d + 8 <= dim; d += 8) {
    store_as(pooled + d,
             pooled_channels<kSize>(
                 tokens, ape, rounding, [d](const auto* row) __attribute__((always_inline)) {
                   return load(row + d);
                 }));
  }
  if (d < dim) pool_rest(tokens, ape, rounding, d, dim, pooled);
}
template <class T>
WINNOW_INLINE void pool_tokens(const PoolTokens<T>& tokens, const Tensor& ape,
                               PoolRounding rounding, std::int64_t dim, T* pooled) {
  if (ape.shape[0] == 4) {
    pool_tokens<4>(tokens, ape, rounding, dim, pooled);
  } else {
    pool_tokens<0>(tokens, ape, rounding, dim, pooled);
  }
}

// "" if these kernels take the tensors.
inline const char* refuse_pool(const Tensor& index_key, const Tensor& gate, const Tensor& ape,
                               const Tensor& pooled_key) {
  if (index_key.dtype == DType::kF64) return "f64 is left to the reference";
  if (ape.shape[0] > kMostPool) return "pool_size must be at most 64";
  if (!has_unit_stride(index_key) || !has_unit_stride(gate) || !has_unit_stride(ape) ||
      !has_unit_stride(pooled_key)) {
    return "index_key, gate, ape and pooled_key must have stride 1 on their last axis";
  }
  return "";
}

}  // namespace winnow::cpu::WINNOW_ISA
