// The products of the indexer's backward, for one query row and keys in groups of 16.
//
//   u[h, s]     = index_query[h, :] . key[s, :]
//   gated[h, s] = g[s] where u[h, s] > 0 (everywhere without ReLU), else 0
//   d_weights[h]  += sum_s g[s] * relu(u[h, s])
//   d_query[h, :] += sum_s gated[h, s] * key[s, :]              times weights[h], at the end
//   d_key[s, :]   += sum_h gated[h, s] * (weights[h] * index_query[h, :])
//
// Layouts: gated [groups][heads][16]; channels are padded to panels of 16: weighted queries
// [channel panels][heads][16], key rows [channel panels][64][16].
// Order: u as in scorer.h; d_query one FMA chain over keys in list order, d_key one FMA chain over
// rows and heads ascending, both from +0; d_weights eight FMA chains, over the keys at a place
// congruent to the lane modulo 8, then the tree of sum8.
#pragma once

#include "cpu/columns.h"

namespace winnow::cpu::WINNOW_ISA {

inline constexpr std::int64_t kKeyBlock = 64;  // keys whose rows are copied side by side

WINNOW_INLINE std::int64_t padded16(std::int64_t n) { return (n + 15) / 16 * 16; }

// Not inlined: one copy per dtype is enough.
template <class T>
__attribute__((noinline)) void pack_key_panel(const T* const* row, std::int64_t dim, float* out) {
  pack_panel(row, dim, out);
}

// `count` rows of `dim` channels, times scale[r] where given -> out[channel panel][r], panels
// `panel_stride` floats apart, the padding 0.
template <class T>
__attribute__((noinline)) void copy_rows(const T* const* row, const float* scale,
                                         std::int64_t count, std::int64_t dim,
                                         std::int64_t panel_stride, float* out) {
  for (std::int64_t r = 0; r < count; ++r) {
    const F8 factor = splat(scale == nullptr ? 1.f : scale[r]);
    for (std::int64_t c = 0; c < dim; c += 8) {
      F8 v = zero8();
      if (c + 8 <= dim) {
        v = load(row[r] + c);
      } else {
        for (std::int64_t i = c; i < dim; ++i) v[i - c] = to_float(row[r][i]);
      }
      float* to = out + c / 16 * panel_stride + r * kPanel + c % 16;
      store(to, v * factor);
      if (c + 8 >= dim && c % 16 == 0) store(to + 8, zero8());
    }
  }
}

// What one head's dots with 16 keys pass on: gated [16] and d_weights [8]. Lanes outside `seen`
// take no part, whatever they hold.
struct Gate {
  F8 floor, g[2];
  I8 open, seen[2];
  Gate(bool relu, const F8 (&gradient)[2], const I8 (&lanes)[2])
      : floor(splat(relu ? 0.f : -__builtin_inff())),
        g{gradient[0], gradient[1]},
        open(splat(relu ? 0 : -1)),
        seen{lanes[0], lanes[1]} {}
  WINNOW_INLINE void pass(Wide u, float* gated, float* d_weights) const {
    F8 sum = load(d_weights);
#pragma GCC unroll 2
    for (int v = 0; v < 2; ++v) {
      const F8 dot = bits_as_float(bits_as_int(v == 0 ? low8(u) : high8(u)) & seen[v]);
      const F8 gradient = bits_as_float(bits_as_int(g[v]) & seen[v]);
      sum = fma(gradient, max8(floor, dot), sum);  // max8 keeps a NaN on its right
      store(gated + v * 8, bits_as_float(bits_as_int(gradient) & ((dot > zero8()) | open)));
    }
    store(d_weights, sum);
  }
};

// gated [heads][16] and d_weights [heads][8] of 16 keys.
__attribute__((noinline)) inline void gate_keys(const float* tile, Tiles tiles, std::int64_t dim,
                                                const float* panel, const Gate& gate, float* gated,
                                                float* d_weights) {
  for (int t = 0; t < tiles.count; ++t) {
    const int heads = tiles.rows(t);
    with_rows(
        heads, [&]<int kHeads>() __attribute__((always_inline)) {
          Wide u[kHeads];
#pragma GCC unroll 16
          for (int h = 0; h < kHeads; ++h) u[h] = zero16();
          multiply_tile<kHeads>(tile, kHeads, 1, panel, dim, u);
#pragma GCC unroll 16
          for (int h = 0; h < kHeads; ++h) gate.pass(u[h], gated + h * kPanel, d_weights + h * 8);
        });
    tile += heads * dim;
    gated += heads * kPanel;
    d_weights += heads * 8;
  }
}

// d_query [heads][channels] += gated * key rows, keys [lo, hi) of a block of 64.
__attribute__((noinline)) inline void add_query_gradient(const float* gated, Tiles tiles,
                                                         std::int64_t heads, const float* rows,
                                                         std::int64_t lo, std::int64_t hi,
                                                         std::int64_t channels, float* d_query) {
  for (std::int64_t c = 0; c < channels; c += kPanel) {
    const float* column = rows + c * kKeyBlock;
    for (int t = 0; t < tiles.count; ++t) {
      with_rows(
          tiles.rows(t), [&]<int kHeads>() __attribute__((always_inline)) {
            Wide sum[kHeads];
            float* out = d_query + tiles.first(t) * channels + c;
#pragma GCC unroll 16
            for (int h = 0; h < kHeads; ++h) sum[h] = load16(out + h * channels);
            for (std::int64_t s = lo; s < hi;) {
              const std::int64_t group = s / kPanel, end = min64(hi, (group + 1) * kPanel);
              const float* a = gated + (group * heads + tiles.first(t)) * kPanel + s % kPanel;
              multiply_tile<kHeads>(a, 1, kPanel, column + s * kPanel, end - s, sum);
              s = end;
            }
#pragma GCC unroll 16
            for (int h = 0; h < kHeads; ++h) store(out + h * channels, sum[h]);
          });
    }
  }
}

// d_key[key] += gated * weighted queries, for keys [lo, hi) of one group of 16; d_key[s] is where
// the gradient of key s of the group lies.
__attribute__((noinline)) inline void add_key_gradient(const float* gated, std::int64_t heads,
                                                       const float* weighted, std::int64_t lo,
                                                       std::int64_t hi, std::int64_t dim,
                                                       float* const* d_key) {
  const Tiles tiles(static_cast<int>(hi - lo));
  for (std::int64_t c = 0; c < dim; c += kPanel) {
    const float* column = weighted + c * heads;
    for (int t = 0; t < tiles.count; ++t) {
      const std::int64_t first = lo + tiles.first(t);
      with_rows(
          tiles.rows(t), [&]<int kKeys>() __attribute__((always_inline)) {
            Wide sum[kKeys];
#pragma GCC unroll 16
            for (int s = 0; s < kKeys; ++s) sum[s] = load_columns(d_key[first + s] + c, dim - c);
            multiply_tile<kKeys>(gated + first, kPanel, 1, column, heads, sum);
#pragma GCC unroll 16
            for (int s = 0; s < kKeys; ++s) store_columns(d_key[first + s] + c, dim - c, sum[s]);
          });
    }
  }
}

}  // namespace winnow::cpu::WINNOW_ISA
