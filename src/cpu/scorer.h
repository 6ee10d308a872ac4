// I[i, j] = sum_h w[i, h] * relu(q[i, h, :] . k[j, :]) for a few rows and a span of keys.
//
// Algorithm (in f32; scorer_amx.h has the one on AMX): the heads of each row are packed into tiles
//   [dim][<= kTileRows], 16 keys at a time into a panel [dim][16]. All head tiles of a row run
//   against the panel while it is in L1; ReLU and weight are applied to the accumulators in
//   registers, and the sum over heads stays in two registers: no [heads, keys] product exists in
//   memory. Rows whose ranges overlap share the packed keys, in blocks of 256 keys: with a group of
//   rows (128 KiB of tiles) they stay in L2.
// E4M3: codes become f32 at packing, and with MXFP8 their scales are multiplied in there, which is
//   exact. FP8's scale of a key multiplies its finished scores.
// Order: dot = one FMA chain over d ascending from +0; score = one FMA chain over h ascending from
//   +0 of (w[h], relu(dot[h])). Nothing else enters: neither the place of a row or key in a block,
//   nor the other rows, nor the split into tasks can change a bit. ReLU keeps NaN.
// Bound by the FMA units: heads * dim FMAs per score. Lost: a packed panel costs as much as about 8
//   heads of one row; ReLU and weight cost 12 FMAs per tile of dim * 12.
// Measured on one core of a shared Zen 3 (bare tile 77-96 GFLOP/s meanwhile), 64 heads of 128,
//   32768 keys, bf16: 73-75 GFLOP/s with 16 rows, 70 with 4, 68-78 with 1; index_topk takes 1.02
//   times as long with 16 rows, at most 1.06 with 1. Few heads leave the FMA units waiting: 57
//   with 4 heads, 20 with 1.
#pragma once

#include "base/parallel.h"
#include "base/row_range.h"
#include "cpu/key_locator.h"
#include "cpu/scorer_scales.h"
#if defined(__AMX_TILE__)
#include "cpu/scorer_amx.h"
#else
#include "cpu/scorer_tile.h"
#endif

namespace winnow::cpu::WINNOW_ISA {

inline RowRange overlap(RowRange a, RowRange b) {
  const std::int64_t start = max64(a.start, b.start), end = min64(a.end, b.end);
  return start < end ? RowRange{start, end} : RowRange{};
}

// The arguments that index_scores and index_topk share.
struct ScorerInputs {
  Tensor query;
  KeyView key;
  Tensor weights, starts, ends;
  bool relu;
  Tensor query_scale{}, key_scale{};  // index_scores.h
  double dot_scale = 1;

  bool mxfp8() const { return !query_scale.empty(); }
  bool fp8() const { return !key_scale.empty() && query_scale.empty(); }

  RowRange range(std::int64_t row) const { return row_range(starts, ends, row, key.keys()); }

  template <class Args>  // IndexScoresArgs or IndexTopkArgs
  static ScorerInputs of(const Args& a) {
    return {a.index_query, a.index_key,         a.index_weights,   a.starts,   a.ends,
            a.relu,        a.index_query_scale, a.index_key_scale, a.dot_scale};
  }
};

// "" if the scorer takes these inputs.
inline const char* refuse_scorer(const ScorerInputs& in) {
  if (in.query.dtype == DType::kF64) return "f64 is left to the reference";
  if (!has_unit_stride(in.query) || !has_unit_stride(in.key.data)) {
    return "index_query and index_key must have stride 1 on their last axis";
  }
  if (in.mxfp8() && !(has_unit_stride(in.query_scale) && has_unit_stride(in.key_scale))) {
    return "scales of MXFP8 must have stride 1 on their last axis";
  }
  return refuse_product(in.query.dtype);
}

struct ScorerPlan {
  static constexpr std::int64_t kMaxRows = 64;  // rows of a task at most
  static constexpr std::int64_t kBlock = 256;   // keys per block

  std::int64_t heads, dim;
  std::int64_t group;  // rows whose tiles stay in L2 beside a key block
  std::int64_t rows;   // rows of a task

  ScorerPlan(const ScorerInputs& in, std::int64_t most_rows)
      : heads(in.query.shape[1]), dim(in.query.shape[2]) {
    group = min64(max64(1, kGroupBytes / (row_floats() * 4)), 16);
    rows = min64(min64(max64(4 * group, 16), kMaxRows), most_rows);
    group = min64(group, rows);
  }
  std::int64_t row_floats() const { return heads_floats(heads, dim); }
  std::int64_t panel_floats() const { return key_panel_floats(dim); }
};

// Scratch of one worker.
struct ScorerScratch {
  float* tiles;    // [rows][row_floats], and the slack of pack_tile
  float* weights;  // [rows][heads]
  float* panels;   // [16 panels][panel_floats]
  float* scores;   // [group][256]

  ScorerScratch(Carve& carve, const ScorerPlan& plan)
      : tiles(carve.take<float>(plan.rows * plan.row_floats() + kTileSlack)),
        weights(carve.take<float>(plan.rows * plan.heads)),
        panels(carve.take<float>(ScorerPlan::kBlock / kPanel * plan.panel_floats())),
        scores(carve.take<float>(plan.group * ScorerPlan::kBlock)) {}
};

// The weights of one row, f32 or bf16.
inline void pack_weights(const Tensor& weights, std::int64_t row, float* out) {
  const std::int64_t heads = weights.shape[1], stride = weights.strides[1];
  with_element(weights.dtype, [&]<class T>(const T*) {
    const T* w = weights.as<T>() + row * weights.strides[0];
    for (std::int64_t h = 0; h < heads; ++h) out[h] = to_float(w[h * stride]);
  });
}

// `count` (1 to 16) keys as a panel. Returns the lanes whose keys are missing; they hold any
// numbers.
__attribute__((noinline)) inline unsigned pack_keys(const KeyLocator& keys, DType dtype,
                                                    std::int64_t first, std::int64_t count,
                                                    std::int64_t dim, float* out) {
  const char* address[kPanel];
  keys.locate(first, count, address);
  unsigned missing = 0;
  const char* there = nullptr;
  for (std::int64_t i = 0; i < count; ++i) {
    if (address[i] != nullptr) there = address[i];
    if (address[i] == nullptr) missing |= 1u << i;
  }
  if (there == nullptr) return missing;
  for (std::int64_t i = 0; i < kPanel; ++i) {
    if (i >= count || address[i] == nullptr) address[i] = there;
  }
  pack_key_rows(address, dtype, dim, out);
  return missing;
}

// Scales of `count` keys: of MXFP8 into their panel, of FP8 into `factor`. Missing keys have some.
inline void apply_key_scales(const ScorerInputs& in, const KeyLocator& scales, std::int64_t first,
                             std::int64_t count, std::int64_t dim, float* panel, float* factor) {
  const char* address[kPanel];
  scales.locate(first, count, address);
  if (in.fp8()) {
    for (std::int64_t i = 0; i < count; ++i) {
      factor[i] = address[i] != nullptr ? *reinterpret_cast<const float*>(address[i]) : 0;
    }
    return;
  }
  const char* there = nullptr;
  for (std::int64_t i = 0; i < count; ++i) there = address[i] != nullptr ? address[i] : there;
  if (there == nullptr) return;
  const E8M0* scale[kPanel];
  for (std::int64_t i = 0; i < kPanel; ++i) {
    const char* own = i < count && address[i] != nullptr ? address[i] : there;
    scale[i] = reinterpret_cast<const E8M0*>(own);
  }
  scale_panel(scale, dim, panel);
}

// Scores rows [first, last) of a task, all of one request, against the keys of `visible`.
template <class Sink>
void score_run(const ScorerInputs& in, const ScorerPlan& plan, const ScorerScratch& scratch,
               const KeyLocator& keys, const KeyLocator& scales, std::int64_t first,
               std::int64_t last, const RowRange* visible, Sink&& sink) {
  constexpr std::int64_t kBlock = ScorerPlan::kBlock;
  const std::int64_t dim = plan.dim, key_count = in.key.keys();
  const DType dtype = in.key.data.dtype;
  const std::int64_t key_bytes = dim * dtype_bytes(dtype);
  const Activation activation(in.relu, in.dot_scale);
  const Tiles tiles(static_cast<int>(plan.heads));

  // The next key that any row sees, then the rows that see a key of its block.
  for (std::int64_t position = 0;;) {
    std::int64_t begin = key_count, end = 0;
    for (std::int64_t r = first; r < last; ++r) {
      if (visible[r].end > position) begin = min64(begin, max64(position, visible[r].start));
    }
    if (begin == key_count) return;
    std::int64_t row_of[ScorerPlan::kMaxRows], active = 0;
    for (std::int64_t r = first; r < last; ++r) {
      if (visible[r].end <= begin || visible[r].start >= begin + kBlock) continue;
      row_of[active++] = r;
      end = max64(end, min64(visible[r].end, begin + kBlock));
    }

    unsigned missing[kBlock / kPanel], any_missing = 0;  // lanes of the block's panels
    float factor[kBlock];                                // FP8: of the block's keys
    for (std::int64_t g = 0; g < active; g += plan.group) {
      const std::int64_t group_end = min64(active, g + plan.group);
      // One group: each panel is used at once and written over. More: the block is kept.
      const std::int64_t panel_floats = active > plan.group ? plan.panel_floats() : 0;
      const auto lines =
          static_cast<int>(kPanel * key_bytes / 64 / ((group_end - g) * tiles.count) + 1);
      for (std::int64_t key = begin, p = 0; key < end; key += kPanel, ++p) {
        float* panel = scratch.panels + p * panel_floats;
        Prefetcher ahead(key_bytes);
        if (g == 0) {
          missing[p] = pack_keys(keys, dtype, key, min64(kPanel, end - key), dim, panel);
          any_missing |= missing[p];
          if (!in.key_scale.empty()) {
            apply_key_scales(in, scales, key, min64(kPanel, end - key), dim, panel,
                             factor + p * kPanel);
          }
          const char* next[kPanel];
          const std::int64_t next_count = min64(kPanel, key_count - key - kPanel);
          if (next_count > 0) keys.locate(key + kPanel, next_count, next);
          for (std::int64_t i = 0; i < next_count; ++i) {
            if (next[i] != nullptr) ahead.add(next[i]);
          }
        }
        for (std::int64_t a = g; a < group_end; ++a) {
          const std::int64_t r = row_of[a];
          if (visible[r].end <= key || visible[r].start >= key + kPanel) continue;
          score_panel(scratch.tiles + r * plan.row_floats(), scratch.weights + r * plan.heads,
                      tiles, activation, dim, panel, ahead, lines,
                      scratch.scores + (a - g) * kBlock + p * kPanel);
        }
      }
      for (std::int64_t a = g; a < group_end; ++a) {
        const std::int64_t r = row_of[a];
        const std::int64_t from = max64(begin, visible[r].start);
        float* scores = scratch.scores + (a - g) * kBlock;
        for (std::int64_t i = 0; in.fp8() && i < end - begin; ++i) scores[i] *= factor[i];
        for (std::int64_t i = 0; any_missing != 0 && i < end - begin; ++i) {
          if ((missing[i / kPanel] >> (i % kPanel) & 1u) != 0) scores[i] = __builtin_nanf("");
        }
        sink(r, from, min64(end, visible[r].end) - from, scores + (from - begin));
      }
    }
    position = end;
  }
}

// Scores rows [first_row, first_row + row_count) against the keys of `visible`, one range per row.
// sink(row, key, n, scores): n <= 256 scores of row first_row + row, for key, key + 1, ...; the
// runs of a row come with ascending keys. A missing key scores NaN.
template <class Sink>
void score_rows(const ScorerInputs& in, const ScorerPlan& plan, const ScorerScratch& scratch,
                std::int64_t first_row, std::int64_t row_count, const RowRange* visible,
                Sink&& sink) {
  [[maybe_unused]] const ProductState state;
  const Tiles tiles(static_cast<int>(plan.heads));
  for (std::int64_t r = 0; r < row_count; ++r) {
    if (visible[r].length() == 0) continue;
    const std::int64_t row = first_row + r;
    pack_heads(in.query, row, tiles, scratch.tiles + r * plan.row_floats(), in.query_scale);
    pack_weights(in.weights, row, scratch.weights + r * plan.heads);
  }
  // Key tiles are shared by rows of one request.
  for (std::int64_t first = 0, last = 0; first < row_count; first = last) {
    const std::int64_t request = request_of(in.key, first_row + first);
    while (last < row_count && request_of(in.key, first_row + last) == request) ++last;
    const KeyLocator keys(in.key, first_row + first);
    const KeyLocator scales(in.key, in.key_scale, first_row + first);
    score_run(in, plan, scratch, keys, scales, first, last, visible, sink);
  }
}

}  // namespace winnow::cpu::WINNOW_ISA
