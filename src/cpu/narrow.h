// Eight f32 lanes to the narrow types, rounded to nearest even: stored, or kept in f32.
#pragma once

#include "cpu/simd.h"

namespace winnow::cpu::WINNOW_ISA {

using U8x8 = std::uint8_t __attribute__((vector_size(8)));
using U16x8 = std::uint16_t __attribute__((vector_size(16)));
using U8 = std::uint32_t __attribute__((vector_size(32)));  // lanes that nobody keeps may wrap

WINNOW_INLINE I8 select(I8 mask, I8 yes, I8 no) { return (mask & yes) | (~mask & no); }
WINNOW_INLINE I8 magnitude_bits(F8 x) { return bits_as_int(x) & splat(0x7fffffff); }

// The bits of x as bf16, in the upper halves; the lower ones are 0. NaN stays NaN.
WINNOW_INLINE U8 bf16_bits(F8 x) {
  const I8 is_nan = magnitude_bits(x) > splat(0x7f800000);
  const U8 u = load_as<U8>(&x), nan = load_as<U8>(&is_nan);
  const U8 rounded = u + 0x7fffu + ((u >> 16) & 1u);
  return ((nan & (u | 0x400000u)) | (~nan & rounded)) & 0xffff0000u;
}

WINNOW_INLINE void store_as(float* p, F8 x) { store(p, x); }
WINNOW_INLINE void store_as(BF16* p, F8 x) {
  store(&p->bits, __builtin_convertvector(bf16_bits(x) >> 16, U16x8));
}
WINNOW_INLINE void store_as(F16* p, F8 x) {
#if defined(__AVX2__)
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p),
                   _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#else
#pragma GCC unroll 1
  for (int i = 0; i < 8; ++i) p[i] = to_f16(x[i]);
#endif
}
// x rounded to the type T.
WINNOW_INLINE F8 round_as(F8 x, const float*) { return x; }
WINNOW_INLINE F8 round_as(F8 x, const BF16*) {
  const U8 bits = bf16_bits(x);
  return load_as<F8>(&bits);
}
WINNOW_INLINE F8 round_as(F8 x, const F16*) {
  F16 half[8];
  store_as(half, x);
  return load(half);
}

// As to_e4m3 of base/numbers.h, for numbers: NaN becomes 448.
WINNOW_INLINE void store_as(E4M3* p, F8 x) {
  const I8 u = magnitude_bits(x), most = splat(0x43e00000);  // 448
  const I8 magnitude = select(u > most, most, u);
  const I8 rounded = magnitude + splat(0x7ffff) + ((magnitude >> 20) & splat(1));
  const I8 normal = (rounded - splat(120 << 23)) >> 20;
  const I8 tiny = bits_as_int(bits_as_float(magnitude) + splat(0x1p14f)) - splat(0x46800000);
  const I8 code = select(magnitude < splat(0x3c800000), tiny, normal);
  const I8 sign = (bits_as_int(x) >> 24) & splat(0x80);
  store(&p->bits, __builtin_convertvector(code | sign, U8x8));
}

}  // namespace winnow::cpu::WINNOW_ISA
