// What dense_index_loss holds while it works on a run of rows, and the products of a block of keys.
//
// The rows of a run see keys from the same start on. A tile is 1024 keys, counted from there, a
// block 64 keys of a tile. They are places in a row's range: neither the run, nor the other rows,
// nor the place of a sequence in the key space can change a bit of a row by them.
#pragma once

#include "cpu/attention.h"
#include "cpu/index_backward.h"
#include "cpu/kl.h"
#include "cpu/scorer.h"
#include "winnow/dense_index_loss.h"

namespace winnow::cpu::WINNOW_ISA {

struct DenseLossPlan {
  static constexpr std::int64_t kTileKeys = 1024;
  static constexpr std::int64_t kTileBlocks = kTileKeys / kKeyBlock;
  static constexpr std::int64_t kMostRows = 64;        // of a run
  static constexpr std::int64_t kFewestRows = 8;       // that there is memory for
  static constexpr std::int64_t kKeptKeys = 16384;     // per row of a full run,
  static constexpr std::int64_t kKeptRows = 16;        // and this many rows of them at least
  static constexpr std::int64_t kRunBytes = 16 << 20;  // aim for the memory of a run

  std::int64_t rows, keys, index_heads, dim, channels;  // channels: dim up to a whole panel
  std::int64_t heads, kv_heads, group, dim_qk;
  std::int64_t run;  // rows of a run at most

  explicit DenseLossPlan(const DenseIndexLossArgs& a)
      : rows(a.index_query.shape[0]),
        keys(a.index_key.shape[0]),
        index_heads(a.index_query.shape[1]),
        dim(a.index_query.shape[2]),
        channels(padded16(dim)),
        heads(a.query.shape[1]),
        kv_heads(a.key.shape[1]),
        group(heads / kv_heads),
        dim_qk(a.query.shape[2]) {
    const std::int64_t row_floats = kKeptKeys + 2 * kTileKeys + heads * dim_qk +
                                    index_heads * (kTileKeys + 3 * channels + 8 * kTileBlocks);
    run = min64(rows, min64(max64(kRunBytes / 4 / row_floats, kFewestRows), kMostRows));
  }

  // Of a row's indexer tiles. Rows are packed in any order, each with its own slack (pack_tile).
  std::int64_t tile_floats() const { return index_heads * dim + kTileSlack; }
  // Of a key head's attention tiles, with their slack likewise.
  std::int64_t attention_floats() const { return run * group * dim_qk + kTileSlack; }
  std::int64_t kept_floats() const { return max64(run, kKeptRows) * kKeptKeys; }
  // Rows that fill a tile of pairs, so that a packed key is worth its price: a run has as many,
  // even where its targets then cannot all be kept.
  std::int64_t enough_rows() const { return min64(run, ceil_div(kMostRows, heads)); }
};

// A run of rows and what its tasks share.
struct DenseLossRun {
  using Plan = DenseLossPlan;

  std::int64_t first_row = 0, rows = 0;
  std::int64_t begin = 0, end = 0;  // whole blocks of keys that hold all ranges
  RowRange range[Plan::kMostRows];
  RowSums sums[Plan::kMostRows];
  RowTerms terms[Plan::kMostRows];
  double kl[Plan::kMostRows];

  float *kept, *spare, *score;   // targets of the tiles that are kept; of one tile [rows][keys]
  float *tiles, *weights;        // [run][tile_floats], [run][index_heads]
  float* weighted;               // [run][channels / 16][index_heads][16]
  float *attention_tiles, *lse;  // per key head: [attention_floats], [run * group]
  // Of the blocks of a tile: rows of the keys [channels / 16][64][16]; per row and block the gated
  // gradients [4][index_heads][16], parts of d_index_weights [index_heads][8] and of kl.
  float *key_rows, *gated, *weight_parts, *kl_parts;
  float *d_query, *d_weights;  // [run][index_heads][channels], [run][index_heads][8]

  DenseLossRun(Carve& carve, const Plan& p)
      : kept(carve.take<float>(p.kept_floats())),
        spare(carve.take<float>(p.run * Plan::kTileKeys)),
        score(carve.take<float>(p.run * Plan::kTileKeys)),
        tiles(carve.take<float>(p.run * p.tile_floats())),
        weights(carve.take<float>(p.run * p.index_heads)),
        weighted(carve.take<float>(p.run * p.index_heads * p.channels)),
        attention_tiles(carve.take<float>(p.kv_heads * p.attention_floats())),
        lse(carve.take<float>(p.run * p.heads)),
        key_rows(carve.take<float>(Plan::kTileKeys * p.channels)),
        gated(carve.take<float>(p.run * Plan::kTileKeys * p.index_heads)),
        weight_parts(carve.take<float>(p.run * Plan::kTileBlocks * p.index_heads * 8)),
        kl_parts(carve.take<float>(p.run * Plan::kTileBlocks)),
        d_query(carve.take<float>(p.run * p.index_heads * p.channels)),
        d_weights(carve.take<float>(p.run * p.index_heads * 8)) {}

  // How many of the keys [key, key + count) row r sees: the first ones.
  std::int64_t visible(std::int64_t r, std::int64_t key, std::int64_t count) const {
    return max64(0, min64(range[r].end - key, count));
  }
  bool seen(std::int64_t key, std::int64_t count) const {
    for (std::int64_t r = 0; r < rows; ++r) {
      if (visible(r, key, count) > 0) return true;
    }
    return false;
  }
};

// A tile: keys [key, key + count), and its targets [rows][count].
struct DenseLossTile {
  std::int64_t key, count;
  float* target;
};

struct DenseLossWorker {
  float *panel, *attention_panel, *dots, *d_key;

  DenseLossWorker(Carve& carve, const DenseLossPlan& p)
      : panel(carve.take<float>(kKeyBlock * p.dim)),
        attention_panel(carve.take<float>(kPanel * p.dim_qk)),
        dots(carve.take<float>(kPanel * p.index_heads)),
        d_key(carve.take<float>(kKeyBlock * p.channels)) {}
};

// Row r of the run: indexer tiles, weights, weighted queries.
template <class T>
void pack_row(const DenseIndexLossArgs& a, const DenseLossPlan& p, const DenseLossRun& run,
              std::int64_t r) {
  const std::int64_t i = run.first_row + r, head_stride = a.index_query.strides[1];
  const T* query = a.index_query.as<T>() + i * a.index_query.strides[0];
  float* own = run.weights + r * p.index_heads;
  pack_weights(a.index_weights, i, own);
  pack_heads(a.index_query, i, Tiles(static_cast<int>(p.index_heads)),
             run.tiles + r * p.tile_floats());
  for (std::int64_t h = 0; h < p.index_heads; ++h) {
    const T* head = query + h * head_stride;
    copy_rows(&head, own + h, 1, p.dim, p.index_heads * kPanel,
              run.weighted + r * p.index_heads * p.channels + h * kPanel);
  }
}

// What one key head's products need of the attention: its pairs' queries as tiles, and their lse.
template <class T>
void pack_attention(const DenseIndexLossArgs& a, const DenseLossPlan& p, const DenseLossRun& run,
                    std::int64_t g) {
  const int group = static_cast<int>(p.group), pairs = static_cast<int>(run.rows) * group;
  pack_pairs(PairRows<const T>(a.query, run.first_row, g * p.group, group), Tiles(pairs), p.dim_qk,
             run.attention_tiles + g * p.attention_floats());
  const PairRows<const float> lse(a.lse, run.first_row, g * p.group, group);
  for (int m = 0; m < pairs; ++m) run.lse[g * pairs + m] = *lse[m];
}

// target += exp(scale * query . key - lse) of all pairs of one key head, for the panel of keys at
// `at` of the tile.
__attribute__((noinline)) inline void add_target(const DenseLossPlan& p, const DenseLossRun& run,
                                                 const DenseLossTile& tile, std::int64_t g,
                                                 std::int64_t at, float scale, const float* panel) {
  const std::int64_t pairs = run.rows * p.group;
  const Tiles tiles(static_cast<int>(pairs));
  for (int t = 0; t < tiles.count; ++t) {
    const std::int64_t first = tiles.first(t), last = first + tiles.rows(t) - 1;
    bool seen = false;
    for (std::int64_t r = first / p.group; r <= last / p.group; ++r) {
      seen = seen || run.visible(r, tile.key + at, kPanel) > 0;
    }
    if (!seen) continue;
    const float* queries = run.attention_tiles + g * p.attention_floats() + first * p.dim_qk;
    const float* lse = run.lse + g * pairs + first;
    with_rows(
        tiles.rows(t), [&]<int kPairs>() __attribute__((always_inline)) {
          Wide dot[kPairs];
#pragma GCC unroll 16
          for (int n = 0; n < kPairs; ++n) dot[n] = zero16();
          multiply_tile<kPairs>(queries, kPairs, 1, panel, p.dim_qk, dot);
          float dots[kPairs][kPanel];
#pragma GCC unroll 16
          for (int n = 0; n < kPairs; ++n) store(dots[n], dot[n]);
          for (int n = 0; n < kPairs; ++n) {
            const std::int64_t m = first + n;
            float* out = tile.target + m / p.group * tile.count + at;
            const bool fresh = g == 0 && m % p.group == 0, blind = lse[n] == -__builtin_inff();
            for (int v = 0; v < kPanel; v += 8) {
              const F8 before = fresh ? zero8() : load(out + v);
              const F8 x = fma(load(dots[n] + v), splat(scale), splat(-lse[n]));
              store(out + v, blind ? before : before + exp8(x));  // blind: the head saw no key
            }
          }
        });
  }
}

// The targets of the block at `at` of the tile, for all rows that see it.
template <class T>
void target_block(const DenseIndexLossArgs& a, const DenseLossPlan& p, const DenseLossRun& run,
                  const DenseLossTile& tile, std::int64_t at, const DenseLossWorker& own) {
  for (const std::int64_t end = at + kKeyBlock; at < end; at += kPanel) {
    if (!run.seen(tile.key + at, kPanel)) continue;
    for (std::int64_t g = 0; g < p.kv_heads; ++g) {
      const T* row[kPanel];
      slot_rows(KeyRows<T>(a.key, g), {nullptr, 0, p.keys}, tile.key + at, row);
      pack_key_panel(row, p.dim_qk, own.attention_panel);
      add_target(p, run, tile, g, at, static_cast<float>(a.softmax_scale), own.attention_panel);
    }
  }
}

// The scores of the block at `at` of the tile.
template <class T>
void score_block(const DenseIndexLossArgs& a, const DenseLossPlan& p, const DenseLossRun& run,
                 const DenseLossTile& tile, std::int64_t at, const DenseLossWorker& own) {
  const Tiles tiles(static_cast<int>(p.index_heads));
  for (const std::int64_t end = at + kKeyBlock; at < end; at += kPanel) {
    if (!run.seen(tile.key + at, kPanel)) continue;
    const T* row[kPanel];
    slot_rows(KeyRows<T>(a.index_key), {nullptr, 0, p.keys}, tile.key + at, row);
    pack_key_panel(row, p.dim, own.panel);
    for (std::int64_t r = 0; r < run.rows; ++r) {
      if (run.visible(r, tile.key + at, kPanel) == 0) continue;
      Prefetcher nothing(0);
      score_panel(run.tiles + r * p.tile_floats(), run.weights + r * p.index_heads, tiles,
                  Activation(a.relu), p.dim, own.panel, nothing, 0,
                  run.score + r * tile.count + at);
    }
  }
}

// Dots [heads][16] of one row with 16 keys, and the score that they make, as score_panel has it.
__attribute__((noinline)) inline Wide dots_and_score(const float* tile, const float* weights,
                                                     Tiles tiles, float floor, std::int64_t dim,
                                                     const float* panel, float* dots) {
  Wide score = zero16();
  const Wide least = splat16(floor);
  Prefetcher nothing(0);
  for_head_dots(
      tile, tiles, dim, panel, nothing,
      0, [&]<int kHeads>(std::int64_t first, Wide(&dot)[kHeads]) __attribute__((always_inline)) {
#pragma GCC unroll 16
        for (int h = 0; h < kHeads; ++h) {
          store(dots + (first + h) * kPanel, dot[h]);
          score = fma(splat16(weights[first + h]), max16(least, dot[h]), score);
        }
      });
  return score;
}

// One row and 16 keys, `at` of the tile: kl is added to block_kl lane by lane, the gradient by the
// scores goes through the gates of the heads.
inline void gate_panel(const DenseIndexLossArgs& a, const DenseLossPlan& p, const DenseLossRun& run,
                       const DenseLossTile& tile, std::int64_t r, std::int64_t at,
                       const float* panel, float* dots, F8& block_kl, float* gated,
                       float* d_weights) {
  F8 gradient[2];
  const Wide score = dots_and_score(
      run.tiles + r * p.tile_floats(), run.weights + r * p.index_heads,
      Tiles(static_cast<int>(p.index_heads)), a.relu ? 0.f : -__builtin_inff(), p.dim, panel, dots);
  const auto visible = static_cast<std::int32_t>(run.visible(r, tile.key + at, kPanel));
  const RowTerms& terms = run.terms[r];
  I8 seen[2];
  for (int v = 0; v < 2; ++v) {
    seen[v] = iota8() < splat(visible - 8 * v);
    const F8 kl = terms.kl(load(tile.target + r * tile.count + at + 8 * v),
                           v == 0 ? low8(score) : high8(score), gradient[v]);
    block_kl += bits_as_float(bits_as_int(kl) & seen[v]);
  }
  const Gate gate(a.relu, gradient, seen);
  for (std::int64_t h = 0; h < p.index_heads; ++h) {
    gate.pass(load16(dots + h * kPanel), gated + h * kPanel, d_weights + h * 8);
  }
}

}  // namespace winnow::cpu::WINNOW_ISA
