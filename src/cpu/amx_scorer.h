// The scorer's product on AMX tiles: 16 keys times 16 heads, 32 channels of bf16 at a time.
//
//   keys   [16][dim up to 32] bf16, as they lie in memory: the left operand needs no transposition
//   heads  [heads up to 16 / 16][dim / 32] tiles of [16 pairs of channels][16 heads][2] bf16
//   dots   [4][16 keys][16 heads] f32, where the accumulators go for ReLU and the head weights
//
// Four accumulator tiles (64 heads) share a tile of keys: 5 tile loads (8 cycles each from L1) per 4
// products (16 cycles each), so the tile unit bounds it. Then, per 16 keys and 64 heads, 64 vectors
// of dots take ReLU, weight and sum in the vector units, beside the next products.
//
// Order: even and odd channels are two chains of multiply-adds inside 32 channels, which are added
// to the accumulator; the score sums the heads h, h + 16, ... in a chain per lane, then the 16 lanes
// in a fixed tree. AMX takes subnormal numbers as zero and rounds to nearest even.
#pragma once

#include "base/row_range.h"
#include "cpu/tile.h"

namespace winnow::cpu::WINNOW_ISA {

inline constexpr std::int64_t kTileDepth = 32;    // channels of a tile
inline constexpr std::int64_t kTileFloats = 256;  // of 1 KiB

WINNOW_INLINE std::int64_t padded(std::int64_t n, std::int64_t unit) {
  return (n + unit - 1) / unit * unit;
}

// The shape of all eight tiles, 16 rows of 64 bytes, while it lives. One per thread and task.
class AmxTiles {
 public:
  AmxTiles() {
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
  ~AmxTiles() { _tile_release(); }
  AmxTiles(const AmxTiles&) = delete;
  AmxTiles& operator=(const AmxTiles&) = delete;
};

// Floats that the tiles of one row's heads take.
WINNOW_INLINE std::int64_t amx_row_floats(std::int64_t heads, std::int64_t dim) {
  return padded(heads, 16) / 16 * (padded(dim, kTileDepth) / kTileDepth) * kTileFloats;
}

// The heads of one row as tiles; what is padded is zero.
__attribute__((noinline)) inline void amx_pack_heads(const Tensor& query, std::int64_t row,
                                                     float* out) {
  const std::int64_t heads = query.shape[1], dim = query.shape[2];
  const BF16* from = query.as<BF16>() + row * query.strides[0];
  auto* tile = reinterpret_cast<BF16*>(out);
  for (std::int64_t h = 0; h < heads; h += 16) {
    for (std::int64_t d = 0; d < dim; d += kTileDepth, tile += 2 * kTileFloats) {
      __builtin_memset(tile, 0, kTileFloats * 4);
      for (std::int64_t i = 0; i < min64(16, heads - h); ++i) {
        const BF16* head = from + (h + i) * query.strides[1] + d;
        for (std::int64_t c = 0; c < min64(kTileDepth, dim - d); ++c) {
          tile[c / 2 * 32 + i * 2 + c % 2] = head[c];
        }
      }
    }
  }
}

// 16 keys side by side.
__attribute__((noinline)) inline void amx_pack_keys(const BF16* const* row, std::int64_t dim,
                                                    float* out) {
  const std::int64_t width = padded(dim, kTileDepth);
  auto* key = reinterpret_cast<BF16*>(out);
  for (int i = 0; i < 16; ++i, key += width) {
    __builtin_memcpy(key, row[i], static_cast<std::size_t>(dim) * sizeof(BF16));
    __builtin_memset(key + dim, 0, static_cast<std::size_t>(width - dim) * sizeof(BF16));
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
  // After two steps, lane 4 q + i of w[j] is a quarter q of the sum of row {0, 2, 1, 3}[i] + 4 j.
  __m512 w[4];
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j) {
    const __m512 a = pair(v[4 * j], v[4 * j + 2]), b = pair(v[4 * j + 1], v[4 * j + 3]);
    w[j] = pair(a, b);
  }
  // Rows 4 j + i lie in lane i of each quarter; now the quarters: lane 4 q + i of row 4 j + i.
  const __m512 ab0 = _mm512_shuffle_f32x4(w[0], w[1], 0x88);
  const __m512 ab1 = _mm512_shuffle_f32x4(w[0], w[1], 0xdd);
  const __m512 cd0 = _mm512_shuffle_f32x4(w[2], w[3], 0x88);
  const __m512 cd1 = _mm512_shuffle_f32x4(w[2], w[3], 0xdd);
  const __m512 ab = _mm512_add_ps(ab0, ab1), cd = _mm512_add_ps(cd0, cd1);
  return _mm512_add_ps(_mm512_shuffle_f32x4(ab, cd, 0x88), _mm512_shuffle_f32x4(ab, cd, 0xdd));
}

// 16 scores of one row. `weights` is padded to a multiple of 16 heads, with anything. `floor`: 0 for
// ReLU, -inf for none. dots: 4 KiB, aligned to 64 bytes.
__attribute__((noinline)) inline void amx_score_panel(const float* tile, const float* weights,
                                                      std::int64_t heads, float scale, float floor,
                                                      std::int64_t dim, const float* keys,
                                                      float* dots, float* out) {
  const std::int64_t width = padded(dim, kTileDepth);
  const std::int64_t head_tile = width / kTileDepth * kTileFloats;
  const __m512 least = _mm512_set1_ps(floor), factor = _mm512_set1_ps(scale);
  __m512 score[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) score[i] = _mm512_setzero_ps();
  for (std::int64_t h = 0; h < heads; h += 64) {
    const std::int64_t count = (min64(64, heads - h) + 15) / 16;
    const float* first = tile + h / 16 * head_tile;
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
        if (scale != 1) dot = _mm512_mul_ps(dot, factor);
        score[i] = _mm512_fmadd_ps(weight, _mm512_max_ps(least, dot), score[i]);
      }
    }
  }
  _mm512_storeu_ps(out, sum_rows16(score));
}

}  // namespace winnow::cpu::WINNOW_ISA
