// swiglu, its backward and softmax sums over one row, eight elements at a time.
//
// An element does not depend on its place: the last n % 8 go through the same vector code. Bound by
// exp8 (about 20 operations for eight elements), far above a core's share of memory bandwidth only
// for rows in cache.
#include "cpu/rows.h"

#include "cpu/simd.h"

namespace winnow::cpu::WINNOW_ISA {
namespace {

// body(load, store) for each run of eight; the rest is copied through a vector padded with zeros.
// load(p) and store(p, v) take the address of the row's first element.
template <class Body>
WINNOW_INLINE void for_eights(std::int64_t n, Body&& body) {
  std::int64_t j = 0;
  for (; j + 8 <= n; j += 8) {
    body(
        [j](const float* p) __attribute__((always_inline)) { return load(p + j); },
        [j](float* p, F8 v) __attribute__((always_inline)) { store(p + j, v); });
  }
  if (j == n) return;
  const auto bytes = static_cast<std::size_t>(n - j) * sizeof(float);
  body(
      [ j, bytes ](const float* p) __attribute__((always_inline)) {
        F8 v = zero8();
        __builtin_memcpy(&v, p + j, bytes);
        return v;
      },
      [ j, bytes ](float* p, F8 v)
          __attribute__((always_inline)) { __builtin_memcpy(p + j, &v, bytes); });
}

// 1 / (1 + exp(-x)); exp8 saturates at infinity, hence 0 for very negative x.
WINNOW_INLINE F8 sigmoid8(F8 x) { return splat(1.f) / (splat(1.f) + exp8(-x)); }

void swiglu(const float* gate, const float* up, float* y, std::int64_t n) {
  for_eights(
      n, [&](auto get, auto put) __attribute__((always_inline)) {
        const F8 x = get(gate);
        put(y, x * sigmoid8(x) * get(up));
      });
}

void swiglu_backward(const float* gate, const float* up, const float* d_y, float* d_gate,
                     float* d_up, std::int64_t n) {
  for_eights(
      n, [&](auto get, auto put) __attribute__((always_inline)) {
        const F8 x = get(gate), u = get(up), d = get(d_y), s = sigmoid8(x);
        put(d_gate, d * u * s * (splat(1.f) + x * (splat(1.f) - s)));
        put(d_up, d * x * s);
      });
}

float maximum(const float* x, std::int64_t n) {
  if (n < 8) {
    float m = x[0];
    for (std::int64_t j = 1; j < n; ++j) m = x[j] > m ? x[j] : m;
    return m;
  }
  F8 m = load(x + n - 8);  // overlaps the last full eight: a maximum does not mind
  for (std::int64_t j = 0; j + 8 <= n; j += 8) m = max8(load(x + j), m);
  return maximum8(m);
}

double sum_of_exp(const float* x, float top, float* terms, std::int64_t n) {
  using F4 = float __attribute__((vector_size(16)));
  using D4 = double __attribute__((vector_size(32)));
  D4 low{}, high{};
  std::int64_t j = 0;
  auto add = [&](F8 e) __attribute__((always_inline)) {
    F4 halves[2];
    std::memcpy(halves, &e, sizeof e);
    low += __builtin_convertvector(halves[0], D4);
    high += __builtin_convertvector(halves[1], D4);
  };
  for (; j + 8 <= n; j += 8) {
    const F8 e = exp8(load(x + j) - splat(top));
    if (terms != nullptr) store(terms + j, e);
    add(e);
  }
  if (j < n) {
    const auto bytes = static_cast<std::size_t>(n - j) * sizeof(float);
    F8 last = splat(-__builtin_inff());  // exp of it is 0: no part of the sum
    __builtin_memcpy(&last, x + j, bytes);
    const F8 e = exp8(last - splat(top));
    if (terms != nullptr) __builtin_memcpy(terms + j, &e, bytes);
    add(e);
  }
  const D4 sum = low + high;
  return (sum[0] + sum[2]) + (sum[1] + sum[3]);
}

}  // namespace

extern const RowFunctions row_functions;
const RowFunctions row_functions = {swiglu, swiglu_backward, maximum, sum_of_exp};

}  // namespace winnow::cpu::WINNOW_ISA
