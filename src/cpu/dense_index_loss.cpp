// dense_index_loss on CPUs, in memory that does not depend on the number of keys.
//
// Algorithm: runs of up to 64 rows with the same start, in two passes over tiles of 1024 keys.
//   1, tasks are blocks of 64 keys of a tile: their panels are packed once for all rows of the run;
//      tiles of 6 (row, head) pairs against an attention panel, exp of the accumulators is added to
//      the target; the scorer's score_panel gives the scores;
//      reduce_target sees the tile's targets, from the calling thread;
//      tasks are rows: RowSums of kl.h. The scores are then dropped, the targets kept while there
//      is room for them.
//   2, targets of tiles that were not kept are computed, and reduced, again;
//      tasks are blocks, each the owner of its keys' d_index_key: dots and scores again, kl, the
//      gradient by the scores, and through the gates of the heads the gradient by the keys;
//      tasks are rows: d_index_query and d_index_weights from the gated gradients of the tile.
// A run grows while its targets can be kept: 16384 keys times the rows of a full run. At more keys
// runs are shorter, down to 64 pairs of row and head (64 heads: to one row and 400,000 keys); only
// beyond are targets computed twice.
// Order: the target adds heads ascending; d_index_key is one FMA chain over rows and heads
//   ascending, d_index_query one over keys ascending; kl and d_index_weights are summed in eight
//   lanes within a block, then over blocks ascending, kl in double. Blocks and tiles are places in
//   a row's range, so neither the run, nor the threads, nor the other rows can change a bit of a
//   row.
// FLOPs per row and key: 2 heads dim_qk + 8 index_heads index_dim, of which 2 index_heads index_dim
//   recompute the dots; 2 heads dim_qk more where targets are not kept. Bound by the FMA units.
#include "winnow/dense_index_loss.h"

#include "base/callback.h"
#include "base/implementation.h"
#include "cpu/dense_index_loss_run.h"

namespace winnow::cpu::WINNOW_ISA {
namespace {

using Plan = DenseLossPlan;
using Run = DenseLossRun;
using Tile = DenseLossTile;
using Worker = DenseLossWorker;

std::int64_t worker_bytes(const Plan& plan) {
  Carve carve(nullptr);
  const Worker worker(carve, plan);
  return carve.used();
}

Refusal refuse(const DenseIndexLossArgs& a) {
  if (a.index_query.dtype == DType::kF64) return "f64 is left to the reference";
  if (!has_unit_stride(a.index_query) || !has_unit_stride(a.index_key) ||
      !has_unit_stride(a.query) || !has_unit_stride(a.key) || !has_unit_stride(a.d_index_query) ||
      !has_unit_stride(a.d_index_key)) {
    return "queries, keys and their gradients must have stride 1 on their last axis";
  }
  return {};
}

std::int64_t workspace_bytes(const DenseIndexLossArgs& a) {
  const Plan plan(a);
  Carve carve(nullptr);
  const Run run(carve, plan);
  return carve.used() + worker_bytes(plan) * num_threads() + 63;
}

// The rows from first_row on that make a run: of one start, and as many as can keep their targets.
// Empty rows fit anywhere.
void gather_run(const DenseIndexLossArgs& a, const Plan& p, Run& run) {
  run.begin = run.end = 0;
  for (run.rows = 0; run.rows < min64(p.run, p.rows - run.first_row); ++run.rows) {
    const RowRange range = row_range(a.starts, a.ends, run.first_row + run.rows, p.keys);
    if (range.length() > 0) {
      const bool first = run.begin == run.end;
      if (!first && range.start != run.begin) return;
      const std::int64_t end =
          max64(run.end, range.start + ceil_div(range.length(), kKeyBlock) * kKeyBlock);
      const bool kept = (run.rows + 1) * (end - range.start) <= p.kept_floats();
      if (!kept && run.rows >= p.enough_rows()) return;
      run.begin = range.start;
      run.end = end;
    }
    run.range[run.rows] = range;
    run.sums[run.rows] = {};
    run.kl[run.rows] = 0;
  }
}

// Calls work(tile, kept) for the tiles of the run, ascending.
template <class Work>
void for_each_tile(const Plan& p, const Run& run, Work&& work) {
  for (std::int64_t key = run.begin; key < run.end;) {
    const std::int64_t end = min64(run.end, key + Plan::kTileKeys);
    const bool kept = run.rows * (end - run.begin) <= p.kept_floats();
    work(Tile{key, end - key, kept ? run.kept + run.rows * (key - run.begin) : run.spare}, kept);
    key = end;
  }
}

// What no range holds is 0; then the caller's reduction.
void reduce_target(const DenseIndexLossArgs& a, const Run& run, const Tile& tile) {
  if (!has_callback(a.reduce_target)) return;
  for (std::int64_t r = 0; r < run.rows; ++r) {
    float* target = tile.target + r * tile.count;
    for (std::int64_t n = run.visible(r, tile.key, tile.count); n < tile.count; ++n) target[n] = 0;
  }
  call_back(a.reduce_target, make_tensor(tile.target, DType::kF32, {run.rows, tile.count}));
}

// Pass 2 of the block at `at` of the tile.
template <class T>
void block_gradient(const DenseIndexLossArgs& a, const Plan& p, const Run& run, const Tile& tile,
                    std::int64_t at, const Worker& own) {
  const std::int64_t key = tile.key + at, count = min64(kKeyBlock, p.keys - key);
  if (!run.seen(key, kKeyBlock)) return;
  float* d_index_key = a.d_index_key.as<float>() + key * a.d_index_key.strides[0];
  for (std::int64_t s = 0; s < count; s += kPanel) {
    const T* row[kPanel];
    slot_rows(KeyRows<T>(a.index_key), {nullptr, 0, p.keys}, key + s, row);
    pack_key_panel(row, p.dim, own.panel + s * p.dim);
    copy_rows(row, nullptr, min64(kPanel, count - s), p.dim, kKeyBlock * kPanel,
              run.key_rows + at * p.channels + s * kPanel);
  }
  float* d_key[kKeyBlock];
  for (std::int64_t n = 0; n < count; ++n) {
    d_key[n] = own.d_key + n * p.channels;
    __builtin_memcpy(d_key[n], d_index_key + n * a.d_index_key.strides[0],
                     static_cast<std::size_t>(p.dim) * sizeof(float));
    for (std::int64_t c = p.dim; c < p.channels; ++c) d_key[n][c] = 0;
  }
  for (std::int64_t r = 0; r < run.rows; ++r) {
    const std::int64_t visible = run.visible(r, key, count);
    if (visible == 0 || run.sums[r].weightless()) continue;
    const std::int64_t place = r * Plan::kTileBlocks + at / kKeyBlock;
    const float* weighted = run.weighted + r * p.index_heads * p.channels;
    float* d_weights = run.weight_parts + place * p.index_heads * 8;
    for (std::int64_t x = 0; x < p.index_heads * 8; ++x) d_weights[x] = 0;
    F8 kl = zero8();
    for (std::int64_t s = 0; s < visible; s += kPanel) {
      float* gated = run.gated + (place * kKeyBlock + s) * p.index_heads;
      gate_panel(a, p, run, tile, r, at + s, own.panel + s * p.dim, own.dots, kl, gated, d_weights);
      add_key_gradient(gated, p.index_heads, weighted, 0, min64(visible - s, kPanel), p.channels,
                       d_key + s);
    }
    run.kl_parts[place] = sum8(kl);
  }
  for (std::int64_t n = 0; n < count; ++n) {
    __builtin_memcpy(d_index_key + n * a.d_index_key.strides[0], d_key[n],
                     static_cast<std::size_t>(p.dim) * sizeof(float));
  }
}

// Pass 2 of row r: what the blocks at [from, to) of the tile have for it, ascending.
void row_gradient(const Plan& p, Run& run, const Tile& tile, std::int64_t from, std::int64_t to,
                  std::int64_t r) {
  if (run.sums[r].weightless()) return;
  const Tiles tiles(static_cast<int>(p.index_heads));
  float* d_query = run.d_query + r * p.index_heads * p.channels;
  float* d_weights = run.d_weights + r * p.index_heads * 8;
  for (std::int64_t at = from; at < to; at += kKeyBlock) {
    const std::int64_t visible = run.visible(r, tile.key + at, kKeyBlock);
    if (visible == 0) return;
    const std::int64_t place = r * Plan::kTileBlocks + at / kKeyBlock;
    add_query_gradient(run.gated + place * kKeyBlock * p.index_heads, tiles, p.index_heads,
                       run.key_rows + at * p.channels, 0, visible, p.channels, d_query);
    const float* parts = run.weight_parts + place * p.index_heads * 8;
    for (std::int64_t x = 0; x < p.index_heads * 8; x += 8)
      store(d_weights + x, load(d_weights + x) + load(parts + x));
    run.kl[r] += static_cast<double>(run.kl_parts[place]);
  }
}

// The results of row r.
void finish_row(const DenseIndexLossArgs& a, const Plan& p, const Run& run, std::int64_t r) {
  const std::int64_t i = run.first_row + r;
  a.kl.as<float>()[i * a.kl.strides[0]] = static_cast<float>(run.kl[r]);
  float* d_query = a.d_index_query.as<float>() + i * a.d_index_query.strides[0];
  float* d_weights = a.d_index_weights.as<float>() + i * a.d_index_weights.strides[0];
  for (std::int64_t h = 0; h < p.index_heads; ++h) {
    const std::int64_t head = r * p.index_heads + h;
    d_weights[h * a.d_index_weights.strides[1]] = sum8(load(run.d_weights + head * 8));
    // Without a weight in the sum there is no gradient, whatever the row's weights hold.
    const F8 w = splat(run.sums[r].weightless() ? 0 : run.weights[head]);
    for (std::int64_t c = 0; c < p.dim; c += 8) {
      store_part(d_query + h * a.d_index_query.strides[1] + c, p.dim - c,
                 w * load(run.d_query + head * p.channels + c));
    }
  }
}

template <class T>
void process(const DenseIndexLossArgs& a, const Plan& p, Run& run, unsigned char* memory) {
  const std::int64_t own_bytes = worker_bytes(p);
  // work(at, scratch) for the blocks at [from, to) of a tile
  auto for_each_block = [&](std::int64_t from, std::int64_t to, auto&& work) {
    parallel_for((to - from) / kKeyBlock, [&](std::int64_t block, int worker) {
      Carve carve(memory + worker * own_bytes);
      work(from + block * kKeyBlock, Worker(carve, p));
    });
  };
  parallel_for(run.rows, [&](std::int64_t r, int) {
    pack_row<T>(a, p, run, r);
    const std::int64_t heads = p.index_heads;
    for (std::int64_t x = 0; x < heads * p.channels; ++x)
      run.d_query[r * heads * p.channels + x] = 0;
    for (std::int64_t x = 0; x < heads * 8; ++x) run.d_weights[r * heads * 8 + x] = 0;
  });
  parallel_for(p.kv_heads, [&](std::int64_t g, int) { pack_attention<T>(a, p, run, g); });
  for_each_tile(p, run, [&](const Tile& tile, bool) {
    for_each_block(0, tile.count, [&](std::int64_t at, const Worker& own) {
      target_block<T>(a, p, run, tile, at, own);
      score_block<T>(a, p, run, tile, at, own);
    });
    reduce_target(a, run, tile);
    parallel_for(run.rows, [&](std::int64_t r, int) {
      run.sums[r].add(tile.target + r * tile.count, run.score + r * tile.count,
                      run.visible(r, tile.key, tile.count));
    });
  });
  for (std::int64_t r = 0; r < run.rows; ++r)
    run.terms[r] = RowTerms(run.sums[r], static_cast<float>(a.d_kl));
  for_each_tile(p, run, [&](const Tile& tile, bool kept) {
    if (!kept) {
      for_each_block(0, tile.count, [&](std::int64_t at, const Worker& own) {
        target_block<T>(a, p, run, tile, at, own);
      });
      reduce_target(a, run, tile);
    }
    // A single thread goes block by block: the gated gradients are used while they are in cache.
    const std::int64_t step = num_threads() == 1 ? kKeyBlock : tile.count;
    for (std::int64_t from = 0; from < tile.count; from += step) {
      for_each_block(from, from + step, [&](std::int64_t at, const Worker& own) {
        block_gradient<T>(a, p, run, tile, at, own);
      });
      parallel_for(run.rows,
                   [&](std::int64_t r, int) { row_gradient(p, run, tile, from, from + step, r); });
    }
  });
  parallel_for(run.rows, [&](std::int64_t r, int) { finish_row(a, p, run, r); });
}

void run_all(const DenseIndexLossArgs& a, Workspace workspace) {
  const Plan plan(a);
  Carve carve(workspace.data);
  Run run(carve, plan);
  auto* memory = carve.take<unsigned char>(worker_bytes(plan) * num_threads());
  parallel_for(ceil_div(plan.keys, kKeyBlock), [&](std::int64_t block, int) {
    for (std::int64_t j = block * kKeyBlock; j < min64(plan.keys, (block + 1) * kKeyBlock); ++j) {
      float* d_key = a.d_index_key.as<float>() + j * a.d_index_key.strides[0];
      for (std::int64_t d = 0; d < plan.dim; ++d) d_key[d] = 0;
    }
  });
  with_element(a.index_query.dtype, [&]<class T>(const T*) {
    for (; run.first_row < plan.rows; run.first_row += run.rows) {
      gather_run(a, plan, run);
      process<T>(a, plan, run, memory);
    }
  });
}

}  // namespace

extern const Implementation<DenseIndexLossArgs> dense_index_loss_implementation;
const Implementation<DenseIndexLossArgs> dense_index_loss_implementation = {
    WINNOW_IMPLEMENTATION_NAME, refuse, workspace_bytes, run_all};

}  // namespace winnow::cpu::WINNOW_ISA
