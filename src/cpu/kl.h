// The indexer loss of one row, KL(target || softmax of the scores), and its gradient.
//
// Order: sums run over vectors of 8 lanes in blocks of 64 elements, f32 within a block (one
// addition chain per lane, then the tree of sum8), double between blocks. An element's place
// in the row decides, nothing else. A row may come in pieces: where the maximum grows, the sum so
// far is multiplied with exp(old - new) in double.
#pragma once

#include "cpu/tile.h"

namespace winnow::cpu::WINNOW_ISA {

// Natural logarithm of positive normal floats, largest error 1 ulp: x = m 2^e with m in
// [sqrt(1/2), sqrt(2)), a polynomial in m - 1, and e ln 2 in two parts.
WINNOW_INLINE F8 log8(F8 x) {
  const I8 bits = bits_as_int(x);
  const I8 e = (bits - splat(0x3f3504f3)) >> 23;
  const F8 f = bits_as_float(bits - (e << 23)) - splat(1.f);
  const F8 n = __builtin_convertvector(e, F8);
  const F8 z = f * f;
  F8 p = splat(7.0376836292e-2f);
  p = fma(p, f, splat(-1.1514610310e-1f));
  p = fma(p, f, splat(1.1676998740e-1f));
  p = fma(p, f, splat(-1.2420140846e-1f));
  p = fma(p, f, splat(1.4249322787e-1f));
  p = fma(p, f, splat(-1.6668057665e-1f));
  p = fma(p, f, splat(2.0000714765e-1f));
  p = fma(p, f, splat(-2.4999993993e-1f));
  p = fma(p, f, splat(3.3333331174e-1f));
  F8 y = p * f * z;
  y = fma(n, splat(-2.12194440e-4f), y);
  y = fma(splat(-0.5f), z, y);
  return fma(n, splat(0.693359375f), f + y);
}

// The first `count` floats of 8, the rest `fill`.
WINNOW_INLINE F8 load_part(const float* p, std::int64_t count, float fill) {
  if (count >= 8) return load(p);
  F8 v = splat(fill);
  for (std::int64_t i = 0; i < count; ++i) v[i] = p[i];
  return v;
}
WINNOW_INLINE void store_part(float* p, std::int64_t count, F8 v) {
  if (count >= 8) {
    store(p, v);
    return;
  }
  for (std::int64_t i = 0; i < count; ++i) p[i] = v[i];
}

// What the loss of a row needs of the whole row, gathered piece by piece.
struct RowSums {
  float maximum = -__builtin_inff();  // of the scores; NaN never is the maximum
  double sum = 0;                     // of exp(score - maximum); NaN with a NaN score
  double mass = 0;                    // of the target

  bool weightless() const { return sum == 0; }  // no score above -inf

  // The next n elements; pieces before the last are whole blocks of 64.
  void add(const float* target, const float* score, std::int64_t n) {
    constexpr std::int64_t kBlock = 64;
    const float inf = __builtin_inff();
    F8 top = splat(-inf);
    for (std::int64_t s = 0; s < n; s += 8) top = max8(load_part(score + s, n - s, -inf), top);
    const float before = maximum, piece = maximum8(top);
    if (piece > maximum) maximum = piece;
    if (sum != 0 && maximum > before) {
      sum *= __builtin_exp(static_cast<double>(before) - static_cast<double>(maximum));
    }
    const F8 base = splat(maximum == -inf ? 0 : maximum);  // exp gives 0 then, and NaN stays
    for (std::int64_t b = 0; b < n; b += kBlock) {
      F8 block_sum = zero8(), block_mass = zero8();
      for (std::int64_t s = b; s < min64(n, b + kBlock); s += 8) {
        block_sum += exp8(load_part(score + s, n - s, -inf) - base);
        block_mass += load_part(target + s, n - s, 0);
      }
      sum += static_cast<double>(sum8(block_sum));
      mass += static_cast<double>(sum8(block_mass));
    }
  }
};

// The loss of eight keys of a row whose sums are known, and its derivative by their scores.
struct RowTerms {
  float base = 0, log_sum = 0, inverse = 0, d_kl = 0;
  RowTerms() = default;
  RowTerms(const RowSums& row, float derivative)
      : base(row.maximum),
        log_sum(static_cast<float>(__builtin_log(row.sum))),
        inverse(static_cast<float>(1 / (row.mass < 1e-10 ? 1e-10 : row.mass))),
        d_kl(derivative) {}

  WINNOW_INLINE F8 kl(F8 target, F8 score, F8& gradient) const {
    const F8 log_p = (score - splat(base)) - splat(log_sum), t = target * splat(inverse);
    const F8 term = t * (log8(max8(splat(1e-10f), t)) - log_p);
    gradient = (exp8(log_p) - t) * splat(d_kl);
    return t == zero8() ? zero8() : term;  // 0 ln 0 = 0, also where p is 0
  }
};

// Returns kl and writes gradient[s] = (p - t) * d_kl for n keys. `gradient` may be `score`.
inline float row_loss(const float* target, const float* score, std::int64_t n, float d_kl,
                      float* gradient) {
  constexpr std::int64_t kBlock = 64;
  RowSums row;
  row.add(target, score, n);
  if (row.weightless()) {
    for (std::int64_t s = 0; s < n; ++s) gradient[s] = 0;
    return 0;
  }
  const RowTerms terms(row, d_kl);
  double kl = 0;
  for (std::int64_t b = 0; b < n; b += kBlock) {
    F8 block = zero8(), g;
    for (std::int64_t s = b; s < min64(n, b + kBlock); s += 8) {
      block += terms.kl(load_part(target + s, n - s, 0),
                        load_part(score + s, n - s, -__builtin_inff()), g);
      store_part(gradient + s, n - s, g);
    }
    kl += static_cast<double>(sum8(block));
  }
  return static_cast<float>(kl);
}

}  // namespace winnow::cpu::WINNOW_ISA
