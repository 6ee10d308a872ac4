// The gradients by key and value, from the weights of a chunk of runs.
//
// Keys are cut into ranges; a range has one owner, which goes through the runs in ascending order
// and adds to a tile of 6 keys x 16 channels that it reads into registers and writes back:
//   d_key[key] += sum over the pairs that see the key: dz[pair] * query[pair] (+ p * d_output)
// The slots of a row that fall into a range come from a stable sort by owner, so that a list in any
// order works; a tile never holds one key twice. Without lists the pairs of a whole run are chained
// in registers. Order per element: rows ascending, within a row heads ascending, dz before p; one
// FMA chain through the stored f32 value, whatever the runs, chunks and threads.
#pragma once

#include "cpu/attention.h"

namespace winnow::cpu::WINNOW_ISA {

// A run of rows, with what phase 1 left for it.
//   weights   [kv_heads][pairs][2][stride]: dz * scale, then p, of every slot
//   operands  [kv_heads]: panels of 16 channels of the rows that these multiply. Shared value:
//             [pairs][2][16], query and d_output in turn, for channels with a value part, then
//             [pairs][16]; else [pairs][16] of the query, then of d_output.
struct BackwardRun {
  std::int64_t row, stride;
  int rows, pairs;
  Slots slots;
  const std::int32_t* visible;  // [rows]
  const std::int32_t* order;    // with lists: slots sorted by owner
  const std::int32_t* buckets;  // with lists: owner o has order[buckets[o] .. buckets[o + 1])
  float *weights, *operands;
  std::int64_t weights_per_head() const { return pairs * 2 * stride; }
};

// An odd number of cache lines, so that the rows of weights do not share L1 sets.
WINNOW_INLINE std::int64_t weights_stride(std::int64_t slots) {
  return ((slots + kPanel - 1) / kPanel | 1) * kPanel;
}

// Where a product is added: columns of 16 of d_key or d_value.
struct Target {
  float* data;
  std::int64_t stride, channels;
};

// Up to six slots and their keys. `whole`: every row of the run sees all of them.
struct SlotTile {
  int size;
  bool whole;
  std::int64_t slot[kTileRows], key[kTileRows];
};

// rows[r][0..16) += sum_k a[r][k * a_k] * b[k][16].
template <int MR>
WINNOW_INLINE void add_tile(float* const (&rows)[kTileRows], std::int64_t valid,
                            const float* const (&a)[kTileRows], std::int64_t a_k, const float* b,
                            std::int64_t K) {
  F8 acc[MR][2];
#pragma GCC unroll 8
  for (int r = 0; r < MR; ++r) load_columns(rows[r], valid, acc[r][0], acc[r][1]);
  const float* row[MR];
#pragma GCC unroll 8
  for (int r = 0; r < MR; ++r) row[r] = a[r];
  std::int64_t at = 0;
#pragma GCC unroll 2
  for (std::int64_t k = 0; k < K; ++k) {
    const F8 b0 = load(b), b1 = load(b + 8);
#pragma GCC unroll 8
    for (int r = 0; r < MR; ++r) {
      const F8 x = splat(row[r][at]);
      acc[r][0] = fma(x, b0, acc[r][0]);
      acc[r][1] = fma(x, b1, acc[r][1]);
    }
    at += a_k;
    b += kPanel;
  }
#pragma GCC unroll 8
  for (int r = 0; r < MR; ++r) store_columns(rows[r], valid, acc[r][0], acc[r][1]);
}

// One column panel of one tile. Per pair: `parts` products in turn, weights `a_k` floats apart.
inline __attribute__((noinline)) void add_to_tile(const BackwardRun& run, int group,
                                                  const Target& target, std::int64_t column,
                                                  const SlotTile& tile, const float* weights,
                                                  std::int64_t a_k, int parts,
                                                  const float* operands) {
  const std::int64_t valid = target.channels - column;
  float* rows[kTileRows];
  const float* a[kTileRows];
  for (int r = 0; r < tile.size; ++r) {
    rows[r] = target.data + tile.key[r] * target.stride + column;
    a[r] = weights + tile.slot[r];
    if (valid > kPanel) prefetch_l1(rows[r] + kPanel);
  }
  if (tile.whole) {
    with_rows(
        tile.size, [&]<int MR>() __attribute__((always_inline)) {
          add_tile<MR>(rows, valid, a, a_k, operands, static_cast<std::int64_t>(run.pairs) * parts);
        });
    return;
  }
  // Without lists: rows that see equally many of the tile's keys, its first ones, go together.
  auto seen = [&](int r) {
    return static_cast<int>(max64(0, min64(tile.size, run.visible[r] - tile.slot[0])));
  };
  for (int first = 0, last; first < run.rows; first = last) {
    const int size = seen(first);
    for (last = first + 1; last < run.rows && seen(last) == size;) ++last;
    const std::int64_t skip = static_cast<std::int64_t>(first) * group * parts;
    const float* from[kTileRows];
    for (int r = 0; r < size; ++r) from[r] = a[r] + skip * a_k;
    with_rows(
        size, [&]<int MR>() __attribute__((always_inline)) {
          add_tile<MR>(rows, valid, from, a_k, operands + skip * kPanel,
                       static_cast<std::int64_t>(last - first) * group * parts);
        });
  }
}

// All products of some tiles of one run and key head, column panel by column panel.
inline void add_tiles(const AttentionShape& shape, const BackwardRun& run, std::int64_t g,
                      const Target& d_key, const Target* d_value, const SlotTile* tiles,
                      int count) {
  const float* weights = run.weights + g * run.weights_per_head();
  const std::int64_t panels = shape.key_panels() + shape.value_panels();
  const float* operands = run.operands + g * run.pairs * panels * kPanel;
  auto panel = [&](const Target& target, std::int64_t column, const float* w, bool both) {
    for (int t = 0; t < count; ++t) {
      add_to_tile(run, shape.group, target, column, tiles[t], w, both ? run.stride : 2 * run.stride,
                  both ? 2 : 1, operands);
    }
    operands += static_cast<std::int64_t>(run.pairs) * kPanel * (both ? 2 : 1);
  };
  for (std::int64_t c = 0; c < shape.dim_qk; c += kPanel)
    panel(d_key, c, weights, d_value == nullptr && c < shape.dim_v);
  if (d_value == nullptr) return;
  for (std::int64_t c = 0; c < shape.dim_v; c += kPanel)
    panel(*d_value, c, weights + run.stride, false);
}

// Adds what a run gives to the keys [first, last) of owner `owner`. Some tiles at a time, so that
// the weights of the tiles and an operand panel stay in L1 together.
inline void add_run(const AttentionShape& shape, const BackwardRun& run, std::int64_t g,
                    const Target& d_key, const Target* d_value, std::int64_t owner,
                    std::int64_t first, std::int64_t last) {
  constexpr int kTiles = 4;
  SlotTile tiles[kTiles];
  int count = 0;
  auto flush = [&] {
    add_tiles(shape, run, g, d_key, d_value, tiles, count);
    count = 0;
  };
  if (shape.dense) {
    std::int64_t fewest = run.slots.count;
    for (int r = 0; r < run.rows; ++r) fewest = min64(fewest, run.visible[r]);
    const std::int64_t begin = max64(first - run.slots.first, 0);
    const std::int64_t end = min64(last - run.slots.first, run.slots.count);
    for (std::int64_t s = begin; s < end; s += kTileRows) {
      SlotTile& tile = tiles[count];
      tile.size = static_cast<int>(min64(kTileRows, end - s));
      tile.whole = s + tile.size <= fewest;
      for (int r = 0; r < tile.size; ++r) {
        tile.slot[r] = s + r;
        tile.key[r] = run.slots.first + s + r;
      }
      if (++count == kTiles) flush();
    }
    if (count > 0) flush();
    return;
  }
  std::int64_t at = run.buckets[owner];
  const std::int64_t end = run.buckets[owner + 1];
  while (at < end) {
    SlotTile& tile = tiles[count];
    tile.whole = true;
    for (tile.size = 0; at < end && tile.size < kTileRows; ++at, ++tile.size) {
      const std::int64_t slot = run.order[at], key = run.slots.ids[slot];
      bool twice = false;
      for (int r = 0; r < tile.size; ++r) twice |= tile.key[r] == key;
      if (twice) break;
      tile.slot[tile.size] = slot;
      tile.key[tile.size] = key;
    }
    if (++count == kTiles) flush();
  }
  if (count > 0) flush();
}

}  // namespace winnow::cpu::WINNOW_ISA
