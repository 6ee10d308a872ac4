// Eight-lane vectors, and sixteen lanes for products, the same source for every instruction set.
//
// Each file of src/cpu is compiled once per instruction set, in the namespace
// winnow::cpu::WINNOW_ISA (portable, avx2, avx512). Rules that keep the copies apart: all code
// lives in that namespace, and nothing from the standard library that is more than a trivial inline
// is used, so that no function compiled for AVX2 can be picked by the linker where a plain one is
// meant.
//
// Arithmetic is written out: the build has -ffp-contract=off, and `fma` is one fused operation
// where the processor has it (AVX2 and later) and a multiplication and an addition in portable
// code.
#pragma once

#include <cstdint>
#include <cstring>

#include "base/numbers.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#ifndef WINNOW_ISA
#error "src/cpu is compiled with -DWINNOW_ISA=portable, avx2 or avx512"
#endif
#define WINNOW_STRING_(x) #x
#define WINNOW_STRING(x) WINNOW_STRING_(x)
#define WINNOW_IMPLEMENTATION_NAME "cpu." WINNOW_STRING(WINNOW_ISA)
#define WINNOW_INLINE __attribute__((always_inline)) inline

namespace winnow::cpu::WINNOW_ISA {

using F8 = float __attribute__((vector_size(32)));
using I8 =
    std::int32_t __attribute__((vector_size(32)));  // also the result of comparing F8: 0 or -1

WINNOW_INLINE F8 zero8() { return F8{}; }
WINNOW_INLINE F8 splat(float x) { return F8{x, x, x, x, x, x, x, x}; }
WINNOW_INLINE I8 splat(std::int32_t x) { return I8{x, x, x, x, x, x, x, x}; }
WINNOW_INLINE I8 iota8() { return I8{0, 1, 2, 3, 4, 5, 6, 7}; }
// Eight ids from `first` on; lanes past the largest int32 stand for no key and wrap.
WINNOW_INLINE I8 ids8(std::int64_t first) {
  using U8 = std::uint32_t __attribute__((vector_size(32)));
  const auto x = static_cast<std::uint32_t>(first);
  return reinterpret_cast<I8>(U8{x, x, x, x, x, x, x, x} + U8{0, 1, 2, 3, 4, 5, 6, 7});
}

template <class V, class T>
WINNOW_INLINE V load_as(const T* p) {
  V v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
template <class V, class T>
WINNOW_INLINE void store(T* p, V v) {
  std::memcpy(p, &v, sizeof v);
}
WINNOW_INLINE I8 load(const std::int32_t* p) { return load_as<I8>(p); }
WINNOW_INLINE F8 load(const float* p) { return load_as<F8>(p); }
WINNOW_INLINE F8 bits_as_float(I8 x) { return load_as<F8>(&x); }
WINNOW_INLINE I8 bits_as_int(F8 x) { return load_as<I8>(&x); }

#if defined(__AVX2__)
WINNOW_INLINE F8 load(const BF16* p) {
  const __m128i h = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16));
}
WINNOW_INLINE F8 load(const F16* p) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
// The four bits of exponent and the fraction of E4M3 are those of F16 with the bias 15 for 7.
WINNOW_INLINE F8 load(const E4M3* p) {
  const __m128i u = _mm_cvtepu8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
  const __m128i magnitude = _mm_and_si128(u, _mm_set1_epi16(0x7f));
  const __m128i nan =
      _mm_and_si128(_mm_cmpeq_epi16(magnitude, _mm_set1_epi16(0x7f)), _mm_set1_epi16(0x7e00));
  const __m128i sign = _mm_slli_epi16(_mm_andnot_si128(_mm_set1_epi16(0x7f), u), 8);
  const __m128i half = _mm_or_si128(_mm_or_si128(sign, nan), _mm_slli_epi16(magnitude, 7));
  return _mm256_cvtph_ps(half) * splat(256.f);
}
WINNOW_INLINE F8 fma(F8 a, F8 b, F8 c) { return _mm256_fmadd_ps(a, b, c); }
WINNOW_INLINE float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
WINNOW_INLINE F8 max8(F8 a, F8 b) { return _mm256_max_ps(a, b); }  // b where either is NaN
WINNOW_INLINE F8 min8(F8 a, F8 b) { return _mm256_min_ps(a, b); }  // b where either is NaN
WINNOW_INLINE F8 round8(F8 x) {
  return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
WINNOW_INLINE I8 to_int8(F8 x) { return reinterpret_cast<I8>(_mm256_cvtps_epi32(x)); }
WINNOW_INLINE unsigned lane_mask(I8 x) {
  return static_cast<unsigned>(
      _mm256_movemask_ps(_mm256_castsi256_ps(reinterpret_cast<__m256i>(x))));
}
WINNOW_INLINE void prefetch_l1(const void* p) {
  _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0);
}
WINNOW_INLINE void prefetch_l2(const void* p) {
  _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T1);
}
#else
template <class T>
WINNOW_INLINE F8 load_converted(const T* p) {
  float v[8];
#pragma GCC unroll 1
  for (int i = 0; i < 8; ++i) v[i] = to_float(p[i]);
  return load(v);
}
WINNOW_INLINE F8 load(const BF16* p) { return load_converted(p); }
WINNOW_INLINE F8 load(const F16* p) { return load_converted(p); }
WINNOW_INLINE F8 load(const E4M3* p) { return load_converted(p); }
WINNOW_INLINE F8 fma(F8 a, F8 b, F8 c) { return a * b + c; }
WINNOW_INLINE float fma(float a, float b, float c) { return a * b + c; }
WINNOW_INLINE F8 max8(F8 a, F8 b) { return a > b ? a : b; }
WINNOW_INLINE F8 min8(F8 a, F8 b) { return a < b ? a : b; }
WINNOW_INLINE F8
round8(F8 x) {  // |x| < 2^22: adding 1.5 * 2^23 leaves no fraction bit, round to even
  const F8 magic = splat(12582912.f);
  return (x + magic) - magic;
}
WINNOW_INLINE I8 to_int8(F8 x) { return __builtin_convertvector(round8(x), I8); }
WINNOW_INLINE unsigned lane_mask(I8 x) {
  unsigned mask = 0;
  for (int i = 0; i < 8; ++i) mask |= static_cast<unsigned>(x[i] < 0) << i;
  return mask;
}
WINNOW_INLINE void prefetch_l1(const void* p) { __builtin_prefetch(p, 0, 3); }
WINNOW_INLINE void prefetch_l2(const void* p) { __builtin_prefetch(p, 0, 2); }
#endif

// Sixteen lanes, what products accumulate in: one register on AVX-512, two elsewhere. Lane by lane
// the same operations as on F8, so the same bits.
#if defined(__AVX512F__)
struct Wide {
  __m512 lanes;
};
WINNOW_INLINE Wide zero16() { return {_mm512_setzero_ps()}; }
WINNOW_INLINE Wide splat16(float x) { return {_mm512_set1_ps(x)}; }
WINNOW_INLINE Wide join(F8 low, F8 high) {
  return {_mm512_insertf32x8(_mm512_castps256_ps512(low), high, 1)};
}
WINNOW_INLINE F8 low8(Wide x) { return _mm512_castps512_ps256(x.lanes); }
WINNOW_INLINE F8 high8(Wide x) { return _mm512_extractf32x8_ps(x.lanes, 1); }
WINNOW_INLINE Wide load16(const float* p) { return {_mm512_loadu_ps(p)}; }
WINNOW_INLINE void store(float* p, Wide x) { _mm512_storeu_ps(p, x.lanes); }
WINNOW_INLINE Wide fma(Wide a, Wide b, Wide c) {
  return {_mm512_fmadd_ps(a.lanes, b.lanes, c.lanes)};
}
WINNOW_INLINE Wide multiply(Wide a, Wide b) { return {_mm512_mul_ps(a.lanes, b.lanes)}; }
WINNOW_INLINE Wide max16(Wide a, Wide b) { return {_mm512_max_ps(a.lanes, b.lanes)}; }  // as max8
#else
struct Wide {
  F8 low, high;
};
WINNOW_INLINE Wide zero16() { return {zero8(), zero8()}; }
WINNOW_INLINE Wide splat16(float x) { return {splat(x), splat(x)}; }
WINNOW_INLINE Wide join(F8 low, F8 high) { return {low, high}; }
WINNOW_INLINE F8 low8(Wide x) { return x.low; }
WINNOW_INLINE F8 high8(Wide x) { return x.high; }
WINNOW_INLINE Wide load16(const float* p) { return {load(p), load(p + 8)}; }
WINNOW_INLINE void store(float* p, Wide x) {
  store(p, x.low);
  store(p + 8, x.high);
}
WINNOW_INLINE Wide fma(Wide a, Wide b, Wide c) {
  return {fma(a.low, b.low, c.low), fma(a.high, b.high, c.high)};
}
WINNOW_INLINE Wide multiply(Wide a, Wide b) { return {a.low * b.low, a.high * b.high}; }
WINNOW_INLINE Wide max16(Wide a, Wide b) { return {max8(a.low, b.low), max8(a.high, b.high)}; }
#endif

// Sum and maximum over lanes. The sum in one fixed tree:
// (0+4, 1+5, 2+6, 3+7), then pairs two apart, then one.
WINNOW_INLINE float sum8(F8 v) {
  const float a = v[0] + v[4], b = v[1] + v[5], c = v[2] + v[6], d = v[3] + v[7];
  return (a + c) + (b + d);
}
WINNOW_INLINE float maximum8(F8 v) {
  float m = v[0];
  for (int i = 1; i < 8; ++i) m = v[i] > m ? v[i] : m;
  return m;
}

// exp(x) = fraction * 2^n for x between -104 and 89: x = n ln 2 + r, degree-6 polynomial in r.
struct Exponential {
  F8 fraction;
  I8 n;
  WINNOW_INLINE explicit Exponential(F8 x) {
    const F8 whole = round8(x * splat(1.44269504088896341f));
    F8 r = fma(whole, splat(-0.693145751953125f), x);
    r = fma(whole, splat(-1.42860682030941723e-6f), r);
    F8 p = splat(1.9875691500e-4f);
    p = fma(p, r, splat(1.3981999507e-3f));
    p = fma(p, r, splat(8.3334519073e-3f));
    p = fma(p, r, splat(4.1665795894e-2f));
    p = fma(p, r, splat(1.6666665459e-1f));
    p = fma(p, r, splat(5.0000001201e-1f));
    fraction = fma(p, r * r, r) + splat(1.f);
    n = to_int8(whole);
  }
};

// exp for any float, with the power of two as two exact scalings, so
// subnormal results are kept. Largest error 1 ulp (+ double rounding among subnormals). exp(-inf) =
// 0 up to the smallest subnormal's half; NaN stays NaN.
WINNOW_INLINE F8 exp8(F8 x) {
  const Exponential e(min8(splat(89.f), max8(splat(-104.f), x)));  // second operand survives NaN
  const I8 half = e.n >> 1, rest = e.n - half, bias = splat(127);
  return e.fraction * bits_as_float((half + bias) << 23) * bits_as_float((rest + bias) << 23);
}

}  // namespace winnow::cpu::WINNOW_ISA
