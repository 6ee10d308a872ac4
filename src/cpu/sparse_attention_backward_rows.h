// The gradient by query, and the weights that the gradients by key and value are made of.
//
// A run goes through its slots twice, 64 at a time. First, while the keys are packed, logits, p and
// dp, and p dp is added to delta; p and dp are kept, rows of 64 slots. Then, as delta is known,
// dz = p (dp - delta) scale and d_query, as the forward's sums of values; dz and p take the place
// of dp and p, turned, so that each slot has its own side by side for what comes after.
#pragma once

#include "cpu/sparse_attention_backward_keys.h"
#include "winnow/sparse_attention_backward.h"

namespace winnow::cpu::WINNOW_ISA {

// Floats of a row of slots in a worker's block: an odd number of cache lines per pair of rows.
inline constexpr std::int64_t kBlockRow = kSlotBlock + 8;

// What one worker needs.
struct RowBuffers {
  float *query, *d_output, *panel, *keys, *sums, *block, *delta;
  std::int32_t* visible;
  std::int64_t bytes;
  RowBuffers(const AttentionShape& s, void* memory) {
    Carve carve(memory);
    query = carve.take<float>(s.pairs * s.dim_qk + kTileSlack);
    d_output = carve.take<float>(s.pairs * s.dim_v + kTileSlack);
    panel = carve.take<float>(max64(s.dim_qk, s.dim_v) * kPanel);
    keys = carve.take<float>(s.key_panels() * kValuePanel);
    sums = carve.take<float>(s.key_panels() * s.pairs * kPanel);
    block = carve.take<float>(2 * s.pairs * kBlockRow);
    delta = carve.take<float>(s.pairs * 8);
    visible = carve.take<std::int32_t>(s.pairs);
    bytes = carve.used();
  }
};

// Of one pair over the n slots of a block that it sees: dp and logits to dp and p, which are kept,
// and their products, added to the eight lanes of delta.
inline void weigh(const float* dp, const float* logit, std::int64_t n, float scale, float lse,
                  float* kept_dp, float* kept_p, float* delta) {
  const F8 scales = splat(scale), offset = splat(lse);
  const bool weightless = lse == -__builtin_inff();
  F8 sum = load(delta);
  for (std::int64_t i = 0; i < n; i += 8) {
    const I8 seen = splat(static_cast<std::int32_t>(weightless ? 0 : n - i)) > iota8();
    const F8 weight = seen ? exp8(scales * load(logit + i) - offset) : zero8();
    const F8 gradient = seen ? load(dp + i) : zero8();
    store(kept_p + i, weight);
    store(kept_dp + i, gradient);
    sum = fma(weight, gradient, sum);
  }
  store(delta, sum);
}

// ... and those that were kept to dz * scale and p.
inline void differentiate(const float* kept_dp, const float* kept_p, std::int64_t n, float scale,
                          float delta, float* dz, float* p) {
  for (std::int64_t i = 0; i < n; i += 8) {
    const F8 weight = load(kept_p + i);
    store(dz + i, splat(scale) * (weight * (load(kept_dp + i) - splat(delta))));
    store(p + i, weight);
  }
}

// block [rows][kBlockRow] -> [slots][rows], for at least n slots and at most the next 8th.
inline void turn_block(const float* block, std::int64_t rows, std::int64_t n, float* out) {
  for (std::int64_t s = 0; s < n; s += 8) {
    for (std::int64_t r = 0; r < rows; r += 8) {
      const std::int64_t width = min64(8, rows - r);
      F8 x[8];
      for (std::int64_t i = 0; i < 8; ++i)
        x[i] = i < width ? load(block + (r + i) * kBlockRow + s) : zero8();
      transpose8(x);
      for (std::int64_t i = 0; i < 8; ++i) {
        float* to = out + (s + i) * rows + r;
        if (width == 8) {
          store(to, x[i]);
        } else {
          for (std::int64_t k = 0; k < width; ++k) to[k] = x[i][k];
        }
      }
    }
  }
}

// The rows that phase 2 multiplies, as panels; the layout is BackwardRun's.
template <class T, class Out>
void copy_operands(const AttentionShape& shape, bool shared, int pairs, const PairRows<const T>& q,
                   const PairRows<const Out>& d_output, float* out) {
  const std::int64_t single = static_cast<std::int64_t>(pairs) * kPanel;
  const std::int64_t both = shared ? min64(shape.dim_qk, shape.value_panels() * kPanel) : 0;
  float* rest = out + (shared ? 2 * shape.value_panels() * single : 0);
  float* values = out + (shared ? kPanel : shape.key_panels() * single);
  for (int p = 0; p < pairs; ++p) {
    copy_row(q[p], both, out + 2 * p * kPanel, 2 * single);
    copy_row(q[p] + both, shape.dim_qk - both, rest + p * kPanel, single);
    copy_row(d_output[p], shape.dim_v, values + (shared ? 2 : 1) * p * kPanel,
             shared ? 2 * single : single);
  }
}

template <class T, class Out>
void differentiate_run(const SparseAttentionBackwardArgs& a, const AttentionShape& shape,
                       const RowBuffers& b, const BackwardRun& run, std::int64_t g) {
  const bool shared = a.value.empty();
  const Tiles tiles(run.pairs);
  const Slots& slots = run.slots;
  const std::int64_t head = g * shape.group, rows = 2 * run.pairs;
  const KeyRows<T> keys(a.key, g), values(shared ? a.key : a.value, g);
  const PairRows<const T> query(a.query, run.row, head, shape.group);
  const PairRows<const Out> d_output(a.d_output, run.row, head, shape.group);
  const PairRows<const float> lse(a.lse, run.row, head, shape.group);
  const auto scale = static_cast<float>(a.softmax_scale);
  float* weights = run.weights + g * run.weights_per_head();
  pack_pairs(query, tiles, shape.dim_qk, b.query);
  pack_pairs(d_output, tiles, shape.dim_v, b.d_output);
  for (int i = 0; i < run.pairs; ++i) b.visible[i] = run.visible[i / shape.group];
  for (int i = 0; i < run.pairs; ++i) store(b.delta + i * 8, zero8());
  auto seen = [&](int i, std::int64_t s) { return min64(kSlotBlock, b.visible[i] - s); };
  auto dz_row = [&](int i) { return b.block + 2 * i * kBlockRow; };
  auto p_row = [&](int i) { return dz_row(i) + kBlockRow; };

  const int lines = 1 + static_cast<int>(sizeof(T)) / 4;
  for (std::int64_t s = 0; s < slots.count; s += kSlotBlock) {
    const std::int64_t n = min64(kSlotBlock, slots.count - s);
    for (std::int64_t t = 0; t < n; t += kPanel) {
      Prefetcher ahead = rows_ahead(keys, slots, s + t + kPanel, shape.dim_qk);
      pack_slots(keys, slots, s + t, shape.dim_qk, b.panel);
      dot_pairs(b.query, tiles, b.visible, s + t, shape.dim_qk, b.panel, p_row(0) + t,
                2 * kBlockRow, ahead, lines);
      if (!shared) {
        pack_slots(values, slots, s + t, shape.dim_v, b.panel);
        ahead = rows_ahead(values, slots, s + t + kPanel, shape.dim_v);
      }
      dot_pairs(b.d_output, tiles, b.visible, s + t, shape.dim_v, b.panel, dz_row(0) + t,
                2 * kBlockRow, ahead, lines);
    }
    for (int i = 0; i < run.pairs; ++i) {
      float* kept = weights + s * rows + 2 * i * kSlotBlock;
      weigh(dz_row(i), p_row(i), seen(i, s), scale, *lse[i], kept, kept + kSlotBlock,
            b.delta + i * 8);
    }
  }
  for (int i = 0; i < run.pairs; ++i) b.delta[i] = sum8(load(b.delta + i * 8));
  for (std::int64_t i = 0; i < shape.key_panels() * run.pairs * kPanel; ++i) b.sums[i] = 0;
  for (std::int64_t s = 0; s < slots.count; s += kSlotBlock) {
    const std::int64_t n = min64(kSlotBlock, slots.count - s);
    copy_slots(keys, slots, s, n, shape.dim_qk, b.keys);
    for (int i = 0; i < run.pairs; ++i) {
      const float* kept = weights + s * rows + 2 * i * kSlotBlock;
      differentiate(kept, kept + kSlotBlock, seen(i, s), scale, b.delta[i], dz_row(i), p_row(i));
    }
    BlockPrefetcher ahead(keys, slots, s + kSlotBlock, shape.dim_qk);
    add_weighted(b.block, 2 * kBlockRow, tiles, run.pairs, b.visible, s, nullptr, b.keys,
                 shape.dim_qk, b.sums, ahead, 3 * lines);
    turn_block(b.block, rows, n, weights + s * rows);
  }
  const PairRows<float> d_query(a.d_query, run.row, head, shape.group);
  for (int i = 0; i < run.pairs; ++i) {
    for (std::int64_t c = 0; c < shape.dim_qk; c += kPanel) {
      const float* sum = b.sums + (c / kPanel * run.pairs + i) * kPanel;
      store_columns(d_query[i] + c, shape.dim_qk - c, load16(sum));
    }
  }
  const std::int64_t panels = shape.key_panels() + shape.value_panels();
  copy_operands(shape, shared, run.pairs, query, d_output,
                run.operands + g * run.pairs * panels * kPanel);
}

}  // namespace winnow::cpu::WINNOW_ISA
