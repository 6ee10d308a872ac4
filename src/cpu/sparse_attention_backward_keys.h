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

#include "base/parallel.h"
#include "cpu/attention.h"

namespace winnow::cpu::WINNOW_ISA {

// A run of rows, with what phase 1 left for it.
//   weights   [kv_heads][held][pairs][2]: dz * scale and p of every slot
//   operands  [kv_heads]: panels of 16 channels of the rows that these multiply. Shared value:
//             [pairs][2][16], query and d_output in turn, for channels with a value part, then
//             [pairs][16]; else [pairs][16] of the query, then of d_output.
struct BackwardRun {
  std::int64_t row, held;
  int rows, pairs;
  Slots slots;
  const std::int32_t* visible;  // [rows]
  const std::int32_t* order;    // with lists: slots sorted by owner
  const std::int32_t* buckets;  // with lists: owner o has order[buckets[o] .. buckets[o + 1])
  float *weights, *operands;
  std::int64_t weights_per_head() const { return held * pairs * 2; }
};

// Slots that a run has room for: whole blocks.
WINNOW_INLINE std::int64_t slots_held(std::int64_t slots) {
  return (slots + kSlotBlock - 1) / kSlotBlock * kSlotBlock;
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

// Products for columns of a target: per pair both of its weights or one, `parts`; their operands in
// panels [pairs * parts][16].
struct Products {
  Target target;
  std::int64_t first, last;  // columns
  const float* weights;
  int parts;
  const float* operands;
};

// rows[r][c] += sum over k: a[r][k * kStep] * panel[k][c], for all columns of the products; pairs
// [skip, skip + pairs).
template <int MR, int kStep>
WINNOW_INLINE void add_columns(const Products& x, const SlotTile& tile, std::int64_t run_pairs,
                               std::int64_t skip, std::int64_t pairs) {
  float* row[MR];
  const float* a[MR];
#pragma GCC unroll 16
  for (int r = 0; r < MR; ++r) {
    row[r] = x.target.data + tile.key[r] * x.target.stride;
    a[r] = x.weights + (tile.slot[r] * run_pairs + skip) * 2;
  }
  const std::int64_t K = pairs * x.parts;
  const float* panel = x.operands + skip * x.parts * kPanel;
  for (std::int64_t c = x.first; c < x.last; c += kPanel, panel += run_pairs * x.parts * kPanel) {
    const std::int64_t valid = x.target.channels - c;
    Wide acc[MR];
#pragma GCC unroll 16
    for (int r = 0; r < MR; ++r) {
      acc[r] = load_columns(row[r] + c, valid);
      if (valid > kPanel) prefetch_l1(row[r] + c + kPanel);
    }
    const float* b = panel;
#pragma GCC unroll 4
    for (std::int64_t k = 0; k < K; ++k) {
      const Wide operand = load16(b);
#pragma GCC unroll 16
      for (int r = 0; r < MR; ++r) acc[r] = fma(splat16(a[r][k * kStep]), operand, acc[r]);
      b += kPanel;
    }
#pragma GCC unroll 16
    for (int r = 0; r < MR; ++r) store_columns(row[r] + c, valid, acc[r]);
  }
}

// One tile. Without lists, rows that see equally many of its keys, its first ones, go together.
inline __attribute__((noinline)) void add_tile(const BackwardRun& run, int group, const Products& x,
                                               const SlotTile& tile) {
  auto seen = [&](int r) {
    return static_cast<int>(max64(0, min64(tile.size, run.visible[r] - tile.slot[0])));
  };
  for (int first = 0, last; first < run.rows; first = last) {
    const int size = tile.whole ? tile.size : seen(first);
    for (last = first + 1; last < run.rows && (tile.whole || seen(last) == size);) ++last;
    if (size == 0) continue;
    const std::int64_t skip = static_cast<std::int64_t>(first) * group;
    const std::int64_t pairs = static_cast<std::int64_t>(last - first) * group;
    with_rows(
        size, [&]<int MR>() __attribute__((always_inline)) {
          if (x.parts == 2) {
            add_columns<MR, 1>(x, tile, run.pairs, skip, pairs);
          } else {
            add_columns<MR, 2>(x, tile, run.pairs, skip, pairs);
          }
        });
  }
}

// All products of some tiles of one run and key head; as many columns at a time as have their
// operands in a quarter of L1.
inline void add_tiles(const AttentionShape& shape, const BackwardRun& run, std::int64_t g,
                      const Target& d_key, const Target* d_value, const SlotTile* tiles,
                      int count) {
  const float* weights = run.weights + g * run.weights_per_head();
  const std::int64_t panels = shape.key_panels() + shape.value_panels();
  const float* operands = run.operands + g * run.pairs * panels * kPanel;
  auto add = [&](const Target& target, std::int64_t first, std::int64_t last, const float* w,
                 int parts) {
    const std::int64_t floats = static_cast<std::int64_t>(run.pairs) * parts * kPanel;
    const std::int64_t step = max64(1, 2048 / floats) * kPanel;
    for (std::int64_t c = first; c < last; c += step) {
      const Products x = {target, c, min64(last, c + step), w, parts, operands};
      for (int t = 0; t < count; ++t) add_tile(run, shape.group, x, tiles[t]);
      operands += ceil_div(x.last - c, kPanel) * floats;
    }
  };
  const std::int64_t both =
      d_value == nullptr ? min64(shape.value_panels() * kPanel, shape.dim_qk) : 0;
  add(d_key, 0, both, weights, 2);
  add(d_key, both, shape.dim_qk, weights, 1);
  if (d_value != nullptr) add(*d_value, 0, shape.dim_v, weights + 1, 1);
}

// Adds what a run gives to the keys [first, last) of owner `owner`. Some tiles at a time, so that
// the weights of the tiles (18 KiB) and an operand panel stay in L1 together.
inline void add_run(const AttentionShape& shape, const BackwardRun& run, std::int64_t g,
                    const Target& d_key, const Target* d_value, std::int64_t owner,
                    std::int64_t first, std::int64_t last) {
  constexpr std::int64_t kTiles = 8, kWeights = 4608;
  const std::int64_t most = max64(1, min64(kTiles, kWeights / (2 * run.pairs * kTileRows)));
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
      if (++count == most) flush();
    }
    if (count > 0) flush();
    return;
  }
  std::int64_t at = run.buckets[owner];
  const std::int64_t end = run.buckets[owner + 1], in_all = ceil_div(end - at, kTileRows);
  const std::int64_t even = ceil_div(in_all, max64(1, ceil_div(in_all, most)));
  while (at < end) {
    SlotTile& tile = tiles[count];
    tile.whole = true;
    const int size = Tiles(static_cast<int>(end - at)).rows(0);
    for (tile.size = 0; tile.size < size; ++at, ++tile.size) {
      const std::int64_t slot = run.order[at], key = run.slots.ids[slot];
      bool twice = false;
      for (int r = 0; r < tile.size; ++r) twice |= tile.key[r] == key;
      if (twice) break;
      tile.slot[tile.size] = slot;
      tile.key[tile.size] = key;
      prefetch_l1(d_key.data + key * d_key.stride);
    }
    if (++count == even) flush();
  }
  if (count > 0) flush();
}

}  // namespace winnow::cpu::WINNOW_ISA
