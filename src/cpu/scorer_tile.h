// The scorer's product in f32: tiles of a row's heads against a panel of 16 keys (tile.h). Its
// counterpart for AMX is scorer_amx.h; scorer.h works over either.
#pragma once

#include "cpu/activation.h"
#include "cpu/scorer_scales.h"

namespace winnow::cpu::WINNOW_ISA {

inline constexpr std::int64_t kGroupBytes = 128 << 10;  // tiles of rows that share a key block

struct ProductState {};  // what a thread must hold while it multiplies: nothing

inline const char* refuse_product(DType) { return ""; }

// Floats of a row's heads, and of a panel.
inline std::int64_t heads_floats(std::int64_t heads, std::int64_t dim) {
  return (heads * dim + 15) / 16 * 16;
}
inline std::int64_t key_panel_floats(std::int64_t dim) { return kPanel * dim; }

// The heads of one row as tiles, one after the other; `scale` of MXFP8 may be left out.
__attribute__((noinline)) inline void pack_heads(const Tensor& query, std::int64_t row, Tiles tiles,
                                                 float* out, const Tensor& scale = Tensor()) {
  const std::int64_t dim = query.shape[2], stride = query.strides[1];
  with_scorer_element(query.dtype, [&]<class T>(const T*) {
    const T* heads = query.as<T>() + row * query.strides[0];
    for (int t = 0; t < tiles.count; ++t) {
      float* tile = out + tiles.first(t) * dim;
      pack_tile(heads + tiles.first(t) * stride, stride, tiles.rows(t), dim, tile);
      if (scale.empty()) continue;
      const E8M0* scales = scale.as<E8M0>() + row * scale.strides[0];
      scale_tile(scales + tiles.first(t) * scale.strides[1], scale.strides[1], tiles.rows(t), dim,
                 tile);
    }
  });
}

// 16 keys as a panel.
inline void pack_key_rows(const char* const* address, DType dtype, std::int64_t dim, float* out) {
  with_scorer_element(dtype, [&]<class T>(const T*) {
    const T* row[kPanel];
    for (int i = 0; i < kPanel; ++i) row[i] = reinterpret_cast<const T*>(address[i]);
    pack_panel(row, dim, out);
  });
}

// The dots of a row's heads with 16 keys, in registers: each.operator()<kHeads>(first, dot) takes
// dot[kHeads] of the heads first, first + 1, ..., tile by tile. `ahead` fetches the next keys
// meanwhile, `lines` cache lines per tile.
template <class Each>
WINNOW_INLINE void for_head_dots(const float* tile, Tiles tiles, std::int64_t dim,
                                 const float* panel, Prefetcher& ahead, int lines, Each&& each) {
  std::int64_t first = 0;
  for (int t = 0; t < tiles.count; ++t) {
    const int heads = tiles.rows(t);
    ahead.step(lines);
    with_rows(
        heads, [&]<int kHeads>() __attribute__((always_inline)) {
          Wide dot[kHeads];
#pragma GCC unroll 16
          for (int h = 0; h < kHeads; ++h) dot[h] = zero16();
          multiply_tile<kHeads>(tile, kHeads, 1, panel, dim, dot);
          each.template operator()<kHeads>(first, dot);
        });
    tile += heads * dim;
    first += heads;
  }
}

// 16 scores of one row.
__attribute__((noinline)) inline void score_panel(const float* tile, const float* weights,
                                                  Tiles tiles, Activation activation,
                                                  std::int64_t dim, const float* panel,
                                                  Prefetcher& ahead, int lines, float* out) {
  Wide score = zero16();
  for_head_dots(
      tile, tiles, dim, panel, ahead, lines,
      [&]<int kHeads>(std::int64_t first, Wide(&dot)[kHeads]) __attribute__((always_inline)) {
        if (activation.scale != 1) {
#pragma GCC unroll 16
          for (int h = 0; h < kHeads; ++h) dot[h] = multiply(dot[h], splat16(activation.scale));
        }
        const Wide least = splat16(activation.floor);
#pragma GCC unroll 16
        for (int h = 0; h < kHeads; ++h) {  // NaN stays: max16 gives its second operand
          score = fma(splat16(weights[first + h]), max16(least, dot[h]), score);
        }
      });
  store(out, score);
}

}  // namespace winnow::cpu::WINNOW_ISA
