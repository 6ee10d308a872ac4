// The scorer's product on AMX tiles: 16 keys times 16 heads, 32 channels of bf16 at a time. Its
// counterpart in f32 is scorer_tile.h; scorer.h works over either.
//
//   keys   [16][dim up to 32] bf16, as they lie in memory: the left operand needs no transposition
//   heads  [heads up to 16 / 16][dim / 32] tiles of [16 pairs of channels][16 heads][2] bf16
//   dots   [4][16 keys][16 heads] f32, where the accumulators go for ReLU and the head weights
//
// Four accumulator tiles (64 heads) share a tile of keys: 5 tile loads (8 cycles each from L1) per
// 4 products (16 cycles each), so the tile unit bounds it. Then, per 16 keys and 64 heads, 64
// vectors of dots take ReLU, weight and sum in the vector units, beside the next products.
//
// Order: even and odd channels are two chains of multiply-adds inside 32 channels, which are added
// to the accumulator; the score sums the heads h, h + 16, ... in a chain per lane, then the 16
// lanes in a fixed tree. AMX takes subnormal numbers as zero and rounds to nearest even.
#pragma once

#include "cpu/activation.h"
#include "cpu/tile.h"

namespace winnow::cpu::WINNOW_ISA {

inline constexpr std::int64_t kGroupBytes = 32 << 10;  // tiles of rows that stay in L1
inline constexpr std::int64_t kTileDepth = 32;         // channels of a tile
inline constexpr std::int64_t kTileFloats = 256;       // of 1 KiB

WINNOW_INLINE std::int64_t padded(std::int64_t n, std::int64_t unit) {
  return (n + unit - 1) / unit * unit;
}

// The shape of all eight tiles, 16 rows of 64 bytes, in force on this thread while it lives.
class ProductState {
 public:
  ProductState() {
    struct alignas(64) {
      std::uint8_t palette = 1, start_row = 0, reserved[14] = {};
      std::uint16_t row_bytes[16] = {};
      std::uint8_t rows[16] = {};
    } shape;
    for (int t = 0; t < 8; ++t) {
      shape.row_bytes[t] = 64;
      shape.rows[t] = 16;
    }
    _tile_loadconfig(&shape);
  }
  ~ProductState() { _tile_release(); }
  ProductState(const ProductState&) = delete;
  ProductState& operator=(const ProductState&) = delete;
};

inline const char* refuse_product(DType dtype) {
  return dtype == DType::kBF16 ? "" : "AMX multiplies bf16 only";
}

// Floats of a row's heads, and of a panel of 16 keys.
inline std::int64_t heads_floats(std::int64_t heads, std::int64_t dim) {
  return padded(heads, 16) / 16 * (padded(dim, kTileDepth) / kTileDepth) * kTileFloats;
}
inline std::int64_t key_panel_floats(std::int64_t dim) {
  return kPanel * padded(dim, kTileDepth) / 2;
}

// 16 heads that lie `stride` elements apart, 32 channels of each, as a tile: 16 x 16 pairs of
// channels, transposed as numbers of 32 bits. Nothing is computed with them, so every bit pattern
// stays.
WINNOW_INLINE void pack_head_tile(const BF16* from, std::int64_t stride, float* tile) {
#pragma GCC unroll 1
  for (int head = 0; head < 16; head += 8) {
#pragma GCC unroll 2
    for (int pair = 0; pair < 16; pair += 8) {
      F8 r[8];
#pragma GCC unroll 8
      for (int i = 0; i < 8; ++i) r[i] = load_as<F8>(from + (head + i) * stride + 2 * pair);
      transpose8(r);
#pragma GCC unroll 8
      for (int i = 0; i < 8; ++i) store(tile + (pair + i) * 16 + head, r[i]);
    }
  }
}

// The heads of one row as tiles; what is padded is zero. bf16 has no scales. Whole tiles have a way
// of their own: one channel after the other, packing took a quarter of index_scores.
__attribute__((noinline)) inline void pack_heads(const Tensor& query, std::int64_t row, Tiles,
                                                 float* out, const Tensor&) {
  const std::int64_t heads = query.shape[1], dim = query.shape[2], stride = query.strides[1];
  const BF16* from = query.as<BF16>() + row * query.strides[0];
  for (std::int64_t h = 0; h < heads; h += 16) {
    for (std::int64_t d = 0; d < dim; d += kTileDepth, out += kTileFloats) {
      if (h + 16 <= heads && d + kTileDepth <= dim) {
        pack_head_tile(from + h * stride + d, stride, out);
        continue;
      }
      auto* tile = reinterpret_cast<BF16*>(out);
      __builtin_memset(static_cast<void*>(tile), 0, kTileFloats * 4);
      for (std::int64_t i = 0; i < min64(16, heads - h); ++i) {
        const BF16* head = from + (h + i) * stride + d;
        for (std::int64_t c = 0; c < min64(kTileDepth, dim - d); ++c) {
          tile[c / 2 * 32 + i * 2 + c % 2] = head[c];
        }
      }
    }
  }
}

// 16 keys side by side.
inline void pack_key_rows(const char* const* address, DType, std::int64_t dim, float* out) {
  const std::int64_t width = padded(dim, kTileDepth);
  auto* key = reinterpret_cast<BF16*>(out);
  for (int i = 0; i < kPanel; ++i, key += width) {
    __builtin_memcpy(static_cast<void*>(key), address[i],
                     static_cast<std::size_t>(dim) * sizeof(BF16));
    __builtin_memset(static_cast<void*>(key + dim), 0,
                     static_cast<std::size_t>(width - dim) * sizeof(BF16));
  }
}

// dots[t] = keys times the heads of `count` (1 to 4) head tiles from `tile` on.
template <int kCount>
WINNOW_INLINE void amx_dots(const float* tile, const float* keys, std::int64_t width, float* dots) {
  const std::int64_t head_tile = width / kTileDepth * kTileFloats;
  const auto* key = reinterpret_cast<const BF16*>(keys);
  _tile_zero(0);
  if constexpr (kCount > 1) _tile_zero(1);
  if constexpr (kCount > 2) _tile_zero(2);
  if constexpr (kCount > 3) _tile_zero(3);
  for (std::int64_t d = 0; d < width; d += kTileDepth, tile += kTileFloats) {
    _tile_loadd(4, key + d, width * 2);
    _tile_loadd(5, tile, 64);
    _tile_dpbf16ps(0, 4, 5);
    if constexpr (kCount > 1) {
      _tile_loadd(6, tile + head_tile, 64);
      _tile_dpbf16ps(1, 4, 6);
    }
    if constexpr (kCount > 2) {
      _tile_loadd(7, tile + 2 * head_tile, 64);
      _tile_dpbf16ps(2, 4, 7);
    }
    if constexpr (kCount > 3) {
      _tile_loadd(5, tile + 3 * head_tile, 64);
      _tile_dpbf16ps(3, 4, 5);
    }
  }
  _tile_stored(0, dots, 64);
  if constexpr (kCount > 1) _tile_stored(1, dots + kTileFloats, 64);
  if constexpr (kCount > 2) _tile_stored(2, dots + 2 * kTileFloats, 64);
  if constexpr (kCount > 3) _tile_stored(3, dots + 3 * kTileFloats, 64);
}

// Lane i of the result is the sum of the lanes of v[i], all in the same tree.
WINNOW_INLINE __m512 sum_rows16(__m512 (&v)[16]) {
  auto pair = [](__m512 a, __m512 b) __attribute__((always_inline)) {
    return _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
  };
  // Lane 4 q + i of w[j]: the sum of quarter q of row 4 j + i.
  __m512 w[4];
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j) {
    const __m512 a = pair(v[4 * j], v[4 * j + 2]), b = pair(v[4 * j + 1], v[4 * j + 3]);
    w[j] = pair(a, b);
  }
  // Then halves of the quarters: rows of w[0], w[0], w[1], w[1] in ab; then rows in their lanes.
  const __m512 ab0 = _mm512_shuffle_f32x4(w[0], w[1], 0x88);
  const __m512 ab1 = _mm512_shuffle_f32x4(w[0], w[1], 0xdd);
  const __m512 cd0 = _mm512_shuffle_f32x4(w[2], w[3], 0x88);
  const __m512 cd1 = _mm512_shuffle_f32x4(w[2], w[3], 0xdd);
  const __m512 ab = _mm512_add_ps(ab0, ab1), cd = _mm512_add_ps(cd0, cd1);
  return _mm512_add_ps(_mm512_shuffle_f32x4(ab, cd, 0x88), _mm512_shuffle_f32x4(ab, cd, 0xdd));
}

// 16 scores of one row. `ahead` fetches the next keys meanwhile, `lines` cache lines per four
// tiles.
__attribute__((noinline)) inline void score_panel(const float* tile, const float* weights,
                                                  Tiles tiles, Activation activation,
                                                  std::int64_t dim, const float* keys,
                                                  Prefetcher& ahead, int lines, float* out) {
  alignas(64) float dots[4 * kTileFloats];
  const std::int64_t heads = tiles.total();
  const std::int64_t width = padded(dim, kTileDepth);
  const std::int64_t head_tile = width / kTileDepth * kTileFloats;
  const __m512 least = _mm512_set1_ps(activation.floor);
  const __m512 factor = _mm512_set1_ps(activation.scale);
  __m512 score[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) score[i] = _mm512_setzero_ps();
  for (std::int64_t h = 0; h < heads; h += 64) {
    const std::int64_t count = (min64(64, heads - h) + 15) / 16;
    const float* first = tile + h / 16 * head_tile;
    ahead.step(4 * lines);
    switch (count) {
      case 1: amx_dots<1>(first, keys, width, dots); break;
      case 2: amx_dots<2>(first, keys, width, dots); break;
      case 3: amx_dots<3>(first, keys, width, dots); break;
      default: amx_dots<4>(first, keys, width, dots); break;
    }
    for (std::int64_t t = 0; t < count; ++t) {
      const std::int64_t valid = min64(16, heads - h - t * 16);
      const auto lanes = static_cast<__mmask16>((1u << valid) - 1);  // a padded head may be inf * 0
      const __m512 weight = _mm512_maskz_loadu_ps(lanes, weights + h + t * 16);
#pragma GCC unroll 16
      for (int i = 0; i < 16; ++i) {
        __m512 dot = _mm512_maskz_loadu_ps(lanes, dots + t * kTileFloats + i * 16);
        if (activation.scale != 1) dot = _mm512_mul_ps(dot, factor);
        score[i] = _mm512_fmadd_ps(weight, _mm512_max_ps(least, dot), score[i]);
      }
    }
  }
  _mm512_storeu_ps(out, sum_rows16(score));
}

}  // namespace winnow::cpu::WINNOW_ISA
