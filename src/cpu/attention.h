// The pieces that sparse attention and its backward are made of.
//
// The unit is a run: rows that share one list of slots, of which row r sees the first visible[r].
// With index lists a run is one row; without, it is several rows with the same start, so that they
// share packed keys. Its tile rows are pairs (row, head) of one key head: pair p is head p % group
// of row p / group. Every sum is one FMA chain per pair and element, over channels ascending or
// over slots in list order, and takes in the slots a pair sees and no others; so runs, tiles and
// heads leave no trace in the bits.
#pragma once

#include "base/row_range.h"
#include "cpu/columns.h"
#include "cpu/slots.h"

namespace winnow::cpu::WINNOW_ISA {

inline constexpr std::int64_t kSlotBlock = 64;  // slots whose values are copied side by side
// Floats of a panel of values; 64 bytes more than it needs, since the panels of a row lie this far
// apart and 4 KiB would put them all into one L1 set.
inline constexpr std::int64_t kValuePanel = (kSlotBlock + 1) * kPanel;
inline constexpr std::int64_t kDepthStep = 288;  // channels of a panel that stay in L1: 18 KiB

// The rows [channels] of the pairs of a run, of a tensor [rows, heads, channels].
template <class T>
struct PairRows {
  T* data;
  std::int64_t row_stride, head_stride;
  int group;
  PairRows(const Tensor& t, std::int64_t row, std::int64_t first_head, int heads_of_key)
      : data(t.as<T>() + row * t.strides[0] + first_head * t.strides[1]),
        row_stride(t.strides[0]),
        head_stride(t.strides[1]),
        group(heads_of_key) {}
  T* operator[](int pair) const {
    return data + pair / group * row_stride + pair % group * head_stride;
  }
};

// All pairs as tiles [depth][mr], tile t at out + tiles.first(t) * depth. Needs kTileSlack floats.
template <class T>
void pack_pairs(const PairRows<T>& rows, const Tiles& tiles, std::int64_t depth, float* out) {
  for (int t = 0; t < tiles.count; ++t) {
    const int mr = tiles.rows(t), first = tiles.first(t);
    const T* row[kTileSlack] = {};
    for (int i = 0; i < mr; ++i) row[i] = rows[first + i];
    pack_tile(row, mr, depth, out + first * depth);
  }
}

// Slots [s, s + 16) as a panel [depth][16]; spare lanes repeat the last slot.
template <class T>
void pack_slots(const KeyRows<T>& keys, const Slots& slots, std::int64_t s, std::int64_t depth,
                float* panel) {
  const T* row[kPanel];
  slot_rows(keys, slots, s, row);
  pack_panel(row, depth, panel);
}

// One row of `width` channels into panels that lie `panel_stride` floats apart, 16 channels each.
template <class T>
WINNOW_INLINE void copy_row(const T* row, std::int64_t width, float* out,
                            std::int64_t panel_stride) {
  for (std::int64_t c = 0; c < width; c += kPanel, out += panel_stride) {
    store(out, load_columns(row + c, width - c));
  }
}

// Slots [s, s + n) as panels [channels / 16][kSlotBlock][16], kValuePanel floats apart.
template <class T>
void copy_slots(const KeyRows<T>& values, const Slots& slots, std::int64_t s, std::int64_t n,
                std::int64_t channels, float* out) {
  for (std::int64_t i = 0; i < n; ++i) {
    copy_row(values[slots.key(s + i)], channels, out + i * kPanel, kValuePanel);
  }
}

// Prefetches the rows of slots [s, s + 16).
template <class T>
Prefetcher rows_ahead(const KeyRows<T>& keys, const Slots& slots, std::int64_t s,
                      std::int64_t channels) {
  Prefetcher ahead(channels * static_cast<std::int64_t>(sizeof(T)));
  for (std::int64_t i = s; i < min64(s + kPanel, slots.count); ++i) ahead.add(keys[slots.key(i)]);
  return ahead;
}

// Prefetches the rows of a block, those of slots [s, s + 64): four cursors in turn.
struct BlockPrefetcher {
  Prefetcher part[kSlotBlock / kPanel];
  int turn = 0;
  template <class T>
  BlockPrefetcher(const KeyRows<T>& keys, const Slots& slots, std::int64_t s, std::int64_t channels)
      : part{rows_ahead(keys, slots, s, channels), rows_ahead(keys, slots, s + kPanel, channels),
             rows_ahead(keys, slots, s + 2 * kPanel, channels),
             rows_ahead(keys, slots, s + 3 * kPanel, channels)} {}
  WINNOW_INLINE void step(int lines) { part[turn++ % (kSlotBlock / kPanel)].step(lines); }
};

// Whether some pair of the tile sees slot s.
WINNOW_INLINE bool tile_sees(const std::int32_t* visible, int rows, std::int64_t s) {
  for (int r = 0; r < rows; ++r) {
    if (visible[r] > s) return true;
  }
  return false;
}

// dots[pair][0..16) = pair . panel over `depth` channels, for tiles that see slot s. `lines` cache
// lines are prefetched per 32 channels and tile.
inline __attribute__((noinline)) void dot_pairs(const float* packed, const Tiles& tiles,
                                                const std::int32_t* visible, std::int64_t s,
                                                std::int64_t depth, const float* panel, float* dots,
                                                std::int64_t stride, Prefetcher& ahead, int lines) {
  for (std::int64_t d = 0; d < depth; d += kDepthStep) {
    const std::int64_t step = min64(kDepthStep, depth - d);
    for (int t = 0; t < tiles.count; ++t) {
      const int mr = tiles.rows(t), first = tiles.first(t);
      if (!tile_sees(visible + first, mr, s)) continue;
      const float* a = packed + first * depth + d * mr;
      float* out = dots + first * stride;
      with_rows(
          mr, [&]<int MR>() __attribute__((always_inline)) {
            Wide acc[MR];
#pragma GCC unroll 16
            for (int r = 0; r < MR; ++r) acc[r] = d == 0 ? zero16() : load16(out + r * stride);
            for (std::int64_t x = 0; x < step; x += 32) {
              ahead.step(lines);
              multiply_tile<MR>(a + x * MR, MR, 1, panel + (d + x) * kPanel, min64(32, step - x),
                                acc);
            }
#pragma GCC unroll 16
            for (int r = 0; r < MR; ++r) store(out + r * stride, acc[r]);
          });
    }
  }
}

// sums[panel][pair][16] = factor[pair] * sums + sum over the slots s .. of one block that the pair
// sees: weights[pair][slot] * values[panel][slot][16]. Without `factor` there is no product.
// `lines` cache lines are prefetched per tile.
template <class Ahead>
__attribute__((noinline)) void add_weighted(const float* weights, std::int64_t stride,
                                            const Tiles& tiles, int pairs,
                                            const std::int32_t* visible, std::int64_t s,
                                            const float* factor, const float* values,
                                            std::int64_t channels, float* sums, Ahead& ahead,
                                            int lines) {
  std::int64_t all = kSlotBlock;  // slots that every pair sees
  for (int p = 0; p < pairs; ++p) all = min64(all, visible[p] - s);
  for (std::int64_t c = 0; c < channels; c += kPanel) {
    const float* panel = values + c / kPanel * kValuePanel;
    for (int t = 0; t < tiles.count; ++t) {
      const int mr = tiles.rows(t), first = tiles.first(t);
      std::int64_t n[kTileRows], fewest = kSlotBlock, most = all < kSlotBlock ? 0 : kSlotBlock;
      for (int r = 0; all < kSlotBlock && r < mr; ++r) {
        n[r] = max64(0, min64(kSlotBlock, visible[first + r] - s));
        fewest = min64(fewest, n[r]);
        most = max64(most, n[r]);
      }
      if (most == 0) continue;
      ahead.step(lines);
      float* sum = sums + (c / kPanel * pairs + first) * kPanel;
      const float* w = weights + first * stride;
      with_rows(
          mr, [&]<int MR>() __attribute__((always_inline)) {
            Wide acc[MR];
#pragma GCC unroll 16
            for (int r = 0; r < MR; ++r) {
              acc[r] = load16(sum + r * kPanel);
              if (factor != nullptr) acc[r] = multiply(splat16(factor[first + r]), acc[r]);
            }
            multiply_tile<MR>(w, 1, stride, panel, fewest, acc);
#pragma GCC unroll 16
            for (int r = 0; r < MR; ++r) store(sum + r * kPanel, acc[r]);
          });
      if (most == fewest) continue;
      for (int r = 0; r < mr; ++r) {  // the rest of those that see more: the last block of a row
        Wide acc[1] = {load16(sum + r * kPanel)};
        multiply_tile<1>(w + r * stride + fewest, 1, 0, panel + fewest * kPanel, n[r] - fewest,
                         acc);
        store(sum + r * kPanel, acc[0]);
      }
    }
  }
}

// Why no kernel here takes these tensors; "" if one does.
inline const char* refuse_layout(const Tensor& query, std::initializer_list<Tensor> rows) {
  if (query.dtype == DType::kF64) return "f64 is left to the reference";
  for (const Tensor& t : rows) {
    if (!has_unit_stride(t)) {
      return "channels must have stride 1";
    }
  }
  return "";
}

// Rows without lists that form one run: consecutive, of one start; empty rows fit anywhere.
// visible[r] is set for each. Returns how many of the at most `most` rows from `row` belong.
inline int dense_run(const Tensor& starts, const Tensor& ends, std::int64_t keys, std::int64_t row,
                     int most, std::int32_t* visible, Slots& slots) {
  slots = {};
  int n = 0;
  for (; n < most; ++n) {
    const RowRange range = row_range(starts, ends, row + n, keys);
    if (range.length() > 0) {
      if (slots.count > 0 && range.start != slots.first) break;
      slots.first = range.start;
      slots.count = max64(slots.count, range.length());
    }
    visible[n] = static_cast<std::int32_t>(range.length());
  }
  return n;
}

// The extents of a call, and how its rows become runs.
struct AttentionShape {
  std::int64_t rows, keys, kv_heads, dim_qk, dim_v, topk;
  bool dense;           // without lists, the keys in one piece
  int group, run_rows;  // most rows of a run: enough to make packing cheap
  std::int64_t pairs;   // of such a run
  AttentionShape(const Tensor& query, const KeyView& key, const Tensor& topk_indices,
                 std::int64_t value_channels)
      : rows(query.shape[0]),
        keys(key.keys()),
        kv_heads(key.data.shape[key.paged() ? 2 : 1]),
        dim_qk(query.shape[2]),
        dim_v(value_channels),
        topk(topk_indices.empty() ? 0 : topk_indices.shape[1]),
        dense(topk_indices.empty() && !key.paged()),
        group(static_cast<int>(query.shape[1] / kv_heads)),
        run_rows(dense ? static_cast<int>(max64(1, min64(64 / group, rows))) : 1),
        pairs(std::int64_t{group} * run_rows) {}
  std::int64_t key_panels() const { return (dim_qk + kPanel - 1) / kPanel; }
  std::int64_t value_panels() const { return (dim_v + kPanel - 1) / kPanel; }
};

}  // namespace winnow::cpu::WINNOW_ISA
