// dense_index_loss on CPUs.
//
// Algorithm: runs of 8 to 64 rows. For one run at a time, t and the scores of every key that a row
// of the run can see are held as [run rows, keys]; every other product is recomputed where it is
// used.
//   1, tasks are blocks of 64 keys: their panels are packed once for all rows of the run;
//      tiles of 6 (row, head) pairs run against an attention panel, exp of the accumulators is
//      added to t;
//      the scorer's score_panel gives the scores.
//   2, reduce_target sees t of the run as one tile, from the calling thread.
//   3, tasks are rows: row_loss of kl.h gives kl and turns the scores into their gradient g.
//   4, tasks are 8 lanes, lane l the blocks of 64 keys whose number is l modulo 8:
//      dots again, gated by g;
//      d_index_key of a block has one owner, and d_index_query is summed per lane.
//   5, tasks are rows: the 8 partial sums of d_index_query and d_index_weights, lanes ascending.
// Order: t adds heads ascending; d_index_key is one FMA chain over rows and heads ascending;
//   a lane's d_index_query one FMA chain over its keys ascending.
//   Blocks and lanes are places in the key space,
//   so neither the run, nor the threads, nor the other rows can change a bit of a row.
// FLOPs per row and key: 2 heads dim_qk + 8 index_heads index_dim, of which 2 index_heads index_dim
//   recompute the dots. Bound by the FMA units; t and g cost 8 bytes each way per row and key.
#include "winnow/dense_index_loss.h"

#include "base/callback.h"
#include "base/cpu_features.h"
#include "base/implementation.h"
#include "cpu/attention.h"
#include "cpu/index_backward.h"
#include "cpu/kl.h"
#include "cpu/scorer.h"

namespace winnow::cpu::WINNOW_ISA {
namespace {

constexpr std::int64_t kLanes = 8;
constexpr std::int64_t kMaxRun = 64, kMinRun = 8;  // rows
constexpr std::int64_t kRunBytes = 16 << 20;       // aim for the memory of a run

struct Plan {
  std::int64_t rows, keys, width;           // width: keys up to a whole block
  std::int64_t index_heads, dim, channels;  // channels: dim up to a whole panel
  std::int64_t heads, kv_heads, group, dim_qk;
  std::int64_t run;

  // Of a row's indexer tiles. Rows are packed in any order, each with its own slack (pack_tile).
  std::int64_t tile_floats() const { return index_heads * dim + 8; }

  // Of a key head's attention tiles, with their slack likewise.
  std::int64_t attention_floats() const { return run * group * dim_qk + 8; }

  explicit Plan(const DenseIndexLossArgs& a)
      : rows(a.index_query.shape[0]),
        keys(a.index_key.shape[0]),
        width((keys + kKeyBlock - 1) / kKeyBlock * kKeyBlock),
        index_heads(a.index_query.shape[1]),
        dim(a.index_query.shape[2]),
        channels(padded16(dim)),
        heads(a.query.shape[1]),
        kv_heads(a.key.shape[1]),
        group(heads / kv_heads),
        dim_qk(a.query.shape[2]) {
    const std::int64_t row_bytes =
        4 * (2 * width + index_heads * ((kLanes + 2) * channels + 8 * kLanes) + heads * dim_qk);
    run = min64(rows, min64(max64(kRunBytes / row_bytes, kMinRun), kMaxRun));
  }
};

// The run: what its tasks share.
struct Run {
  std::int64_t first_row = 0, rows = 0;
  std::int64_t begin = 0, stride = 0;  // keys [begin, begin + stride) hold all ranges; whole blocks
  RowRange range[kMaxRun];

  float *target, *score;              // [rows][stride]; score becomes g
  float *tiles, *weights, *weighted;  // [run][tile_floats], [run][index_heads],
                                      // [run][channels / 16][index_heads][16]
  float *attention_tiles, *lse;       // per key head: [attention_floats], [run * group]
  float *d_query, *d_weights;         // [lanes][run][index_heads][channels], [..][index_heads][8]

  Run(Carve& carve, const Plan& p)
      : target(carve.take<float>(p.run * p.width)),
        score(carve.take<float>(p.run * p.width)),
        tiles(carve.take<float>(p.run * p.tile_floats())),
        weights(carve.take<float>(p.run * p.index_heads)),
        weighted(carve.take<float>(p.run * p.index_heads * p.channels)),
        attention_tiles(carve.take<float>(p.kv_heads * p.attention_floats())),
        lse(carve.take<float>(p.run * p.heads)),
        d_query(carve.take<float>(kLanes * p.run * p.index_heads * p.channels)),
        d_weights(carve.take<float>(kLanes * p.run * p.index_heads * 8)) {}

  // The keys of row r in [key, key + count), counted from `key`; empty: first == last.
  struct Part {
    std::int64_t first, last;
  };
  Part part(std::int64_t r, std::int64_t key, std::int64_t count) const {
    const std::int64_t first = max64(range[r].start - key, 0);
    return {first, max64(first, min64(range[r].end - key, count))};
  }
  bool sees(std::int64_t r, std::int64_t key, std::int64_t count) const {
    return range[r].start < key + count && range[r].end > key;
  }
};

struct Worker {
  float *panels, *attention_panel, *rows, *gated, *d_key;

  Worker(Carve& carve, const Plan& p)
      : panels(carve.take<float>(kKeyBlock * p.dim)),
        attention_panel(carve.take<float>(kPanel * p.dim_qk)),
        rows(carve.take<float>(kKeyBlock * p.channels)),
        gated(carve.take<float>(kKeyBlock * p.index_heads)),
        d_key(carve.take<float>(kKeyBlock * p.channels)) {}
};

std::int64_t worker_bytes(const Plan& plan) {
  Carve carve(nullptr);
  const Worker worker(carve, plan);
  return carve.used();
}

Refusal refuse(const DenseIndexLossArgs& a) {
  Refusal refusal = refuse_instruction_set(WINNOW_STRING(WINNOW_ISA));
  if (!refusal.empty()) return refusal;
  if (a.index_query.dtype == DType::kF64) return "f64 is left to the reference";
  if (!has_unit_stride(a.index_query) || !has_unit_stride(a.index_key) ||
      !has_unit_stride(a.query) || !has_unit_stride(a.key) || !has_unit_stride(a.d_index_query) ||
      !has_unit_stride(a.d_index_key)) {
    return "queries, keys and their gradients must have stride 1 on their last axis";
  }
  return refusal;
}

std::int64_t workspace_bytes(const DenseIndexLossArgs& a) {
  const Plan plan(a);
  Carve carve(nullptr);
  const Run run(carve, plan);
  return carve.used() + worker_bytes(plan) * num_threads() + 63;
}

// What one key head's products need of the attention: its pairs' queries as tiles, and their lse.
template <class T>
void pack_attention(const DenseIndexLossArgs& a, const Plan& p, const Run& run, std::int64_t g) {
  const int group = static_cast<int>(p.group), pairs = static_cast<int>(run.rows) * group;
  pack_pairs(PairRows<const T>(a.query, run.first_row, g * p.group, group), Tiles(pairs), p.dim_qk,
             run.attention_tiles + g * p.attention_floats());
  const PairRows<const float> lse(a.lse, run.first_row, g * p.group, group);
  for (int m = 0; m < pairs; ++m) run.lse[g * pairs + m] = *lse[m];
}

// Row r of the run: indexer tiles, weights, weighted queries.
template <class T>
void pack_row(const DenseIndexLossArgs& a, const Plan& p, const Run& run, std::int64_t r) {
  const std::int64_t i = run.first_row + r, head_stride = a.index_query.strides[1];
  const T* query = a.index_query.as<T>() + i * a.index_query.strides[0];
  const float* weights = a.index_weights.as<float>() + i * a.index_weights.strides[0];
  float* own = run.weights + r * p.index_heads;
  for (std::int64_t h = 0; h < p.index_heads; ++h) own[h] = weights[h * a.index_weights.strides[1]];
  pack_heads(a.index_query, i, Tiles(static_cast<int>(p.index_heads)),
             run.tiles + r * p.tile_floats());
  for (std::int64_t h = 0; h < p.index_heads; ++h) {
    const T* head = query + h * head_stride;
    copy_rows(&head, own + h, 1, p.dim, p.index_heads * kPanel,
              run.weighted + r * p.index_heads * p.channels + h * kPanel);
  }
}

// t += exp(scale * query . key - lse) of all pairs of one key head, for the panel of keys at `key`.
__attribute__((noinline)) void add_target(const Plan& p, const Run& run, std::int64_t g,
                                          std::int64_t key, float scale, const float* panel) {
  const std::int64_t pairs = run.rows * p.group;
  const Tiles tiles(static_cast<int>(pairs));
  for (int t = 0; t < tiles.count; ++t) {
    const std::int64_t first = tiles.first(t), last = first + tiles.rows(t) - 1;
    bool seen = false;
    for (std::int64_t r = first / p.group; r <= last / p.group; ++r) {
      seen = seen || run.sees(r, key, kPanel);
    }
    if (!seen) continue;
    const float* tile = run.attention_tiles + g * p.attention_floats() + first * p.dim_qk;
    const float* lse = run.lse + g * pairs + first;
    with_rows(
        tiles.rows(t), [&]<int kPairs>() __attribute__((always_inline)) {
          F8 dot[kPairs][2];
#pragma GCC unroll 8
          for (int n = 0; n < kPairs; ++n) dot[n][0] = dot[n][1] = zero8();
          multiply_tile<kPairs>(tile, kPairs, 1, panel, p.dim_qk, dot);
          float dots[kPairs][kPanel];
#pragma GCC unroll 8
          for (int n = 0; n < kPairs; ++n) {
            store(dots[n], dot[n][0]);
            store(dots[n] + 8, dot[n][1]);
          }
          for (int n = 0; n < kPairs; ++n) {
            const std::int64_t m = first + n;
            float* out = run.target + m / p.group * run.stride + key - run.begin;
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

// Phase 1 of the block of keys at `key`.
template <class T>
void score_block(const DenseIndexLossArgs& a, const Plan& p, const Run& run, std::int64_t key,
                 const Worker& own) {
  const Tiles tiles(static_cast<int>(p.index_heads));
  const Slots all = {nullptr, 0, p.keys};
  for (std::int64_t at = key; at < key + kKeyBlock; at += kPanel) {
    bool seen = false;
    for (std::int64_t r = 0; r < run.rows; ++r) seen = seen || run.sees(r, at, kPanel);
    if (!seen) continue;
    const T* row[kPanel];
    for (std::int64_t g = 0; g < p.kv_heads; ++g) {
      slot_rows(KeyRows<T>(a.key, g), all, at, row);
      pack_key_panel(row, p.dim_qk, own.attention_panel);
      add_target(p, run, g, at, static_cast<float>(a.softmax_scale), own.attention_panel);
    }
    slot_rows(KeyRows<T>(a.index_key), all, at, row);
    pack_key_panel(row, p.dim, own.panels);
    for (std::int64_t r = 0; r < run.rows; ++r) {
      if (!run.sees(r, at, kPanel)) continue;
      Prefetcher nothing(0);
      const float* tile = run.tiles + r * p.tile_floats();
      const float* weights = run.weights + r * p.index_heads;
      float* out = run.score + r * run.stride + at - run.begin;
      score_panel(tile, weights, tiles, a.relu ? 0.f : -__builtin_inff(), p.dim, own.panels,
                  nothing, 0, out);
    }
  }
}

// Phase 3 of row r: kl, and g in place of the scores; g is 0 beside the range, in its panels.
void row_gradient(const DenseIndexLossArgs& a, const Run& run, std::int64_t r) {
  const RowRange range = run.range[r];
  float* g = run.score + r * run.stride - run.begin;
  const float* target = run.target + r * run.stride - run.begin;
  a.kl.as<float>()[(run.first_row + r) * a.kl.strides[0]] =
      row_loss(target + range.start, g + range.start, range.length(), static_cast<float>(a.d_kl),
               g + range.start);
  for (std::int64_t j = range.start / kPanel * kPanel; j < range.start; ++j) g[j] = 0;
  for (std::int64_t j = range.end; j < padded16(range.end); ++j) g[j] = 0;
}

// Phase 4 of the block of keys at `key`, in its lane.
template <class T>
void block_gradient(const DenseIndexLossArgs& a, const Plan& p, const Run& run, std::int64_t key,
                    std::int64_t lane, const Worker& own) {
  std::int64_t r = 0;
  while (r < run.rows && !run.sees(r, key, kKeyBlock)) ++r;
  if (r == run.rows) return;
  const std::int64_t count = min64(kKeyBlock, p.keys - key);
  float* d_index_key = a.d_index_key.as<float>() + key * a.d_index_key.strides[0];
  for (std::int64_t at = 0; at < count; at += kPanel) {
    const T* row[kPanel];
    slot_rows(KeyRows<T>(a.index_key), {nullptr, 0, p.keys}, key + at, row);
    pack_key_panel(row, p.dim, own.panels + at * p.dim);
    copy_rows(row, nullptr, min64(kPanel, count - at), p.dim, kKeyBlock * kPanel,
              own.rows + at * kPanel);
  }
  float* d_key[kKeyBlock];
  for (std::int64_t n = 0; n < count; ++n) {
    d_key[n] = own.d_key + n * p.channels;
    __builtin_memcpy(d_key[n], d_index_key + n * a.d_index_key.strides[0],
                     static_cast<std::size_t>(p.dim) * sizeof(float));
    for (std::int64_t c = p.dim; c < p.channels; ++c) d_key[n][c] = 0;
  }

  const Tiles tiles(static_cast<int>(p.index_heads));
  for (; r < run.rows; ++r) {
    const Run::Part part = run.part(r, key, count);
    if (part.first == part.last) continue;
    const std::int64_t place = lane * p.run + r;
    const float* g = run.score + r * run.stride + key - run.begin;
    const float* weighted = run.weighted + r * p.index_heads * p.channels;
    for (std::int64_t at = part.first / kPanel * kPanel; at < part.last; at += kPanel) {
      const I8 n = iota8() + splat(static_cast<std::int32_t>(at));
      const I8 first = splat(static_cast<std::int32_t>(part.first));
      const I8 last = splat(static_cast<std::int32_t>(part.last)), eight = splat(8);
      float* gated = own.gated + at * p.index_heads;
      gate_keys(run.tiles + r * p.tile_floats(), tiles, p.dim, own.panels + at * p.dim, a.relu,
                {load(g + at), load(g + at + 8)},
                {(n >= first) & (n < last), (n + eight >= first) & (n + eight < last)}, gated,
                run.d_weights + place * p.index_heads * 8);
      add_key_gradient(gated, p.index_heads, weighted, max64(part.first - at, 0),
                       min64(part.last - at, kPanel), p.channels, d_key + at);
    }
    add_query_gradient(own.gated, tiles, p.index_heads, own.rows, part.first, part.last, p.channels,
                       run.d_query + place * p.index_heads * p.channels);
  }
  for (std::int64_t n = 0; n < count; ++n) {
    __builtin_memcpy(d_index_key + n * a.d_index_key.strides[0], d_key[n],
                     static_cast<std::size_t>(p.dim) * sizeof(float));
  }
}

// Phase 5 of row r: the lanes, ascending.
void reduce_row(const DenseIndexLossArgs& a, const Plan& p, const Run& run, std::int64_t r) {
  const std::int64_t i = run.first_row + r;
  float* d_query = a.d_index_query.as<float>() + i * a.d_index_query.strides[0];
  float* d_weights = a.d_index_weights.as<float>() + i * a.d_index_weights.strides[0];
  for (std::int64_t h = 0; h < p.index_heads; ++h) {
    F8 weight = zero8();
    for (std::int64_t lane = 0; lane < kLanes; ++lane) {
      weight += load(run.d_weights + ((lane * p.run + r) * p.index_heads + h) * 8);
    }
    d_weights[h * a.d_index_weights.strides[1]] = sum8(weight);
    const F8 w = splat(run.weights[r * p.index_heads + h]);
    for (std::int64_t c = 0; c < p.dim; c += 8) {
      F8 sum = zero8();
      for (std::int64_t lane = 0; lane < kLanes; ++lane) {
        sum += load(run.d_query + ((lane * p.run + r) * p.index_heads + h) * p.channels + c);
      }
      store_part(d_query + h * a.d_index_query.strides[1] + c, p.dim - c, w * sum);
    }
  }
}

template <class T>
void process(const DenseIndexLossArgs& a, const Plan& p, Run& run, unsigned char* memory) {
  const std::int64_t own_bytes = worker_bytes(p);
  std::int64_t begin = p.keys, end = 0;
  for (std::int64_t r = 0; r < run.rows; ++r) {
    run.range[r] = row_range(a.starts, a.ends, run.first_row + r, p.keys);
    if (run.range[r].length() == 0) continue;
    begin = min64(begin, run.range[r].start);
    end = max64(end, run.range[r].end);
  }
  run.begin = begin / kKeyBlock * kKeyBlock;
  const std::int64_t blocks = end > begin ? ceil_div(end - run.begin, kKeyBlock) : 0;
  run.stride = blocks * kKeyBlock;

  parallel_for(run.rows, [&](std::int64_t r, int) { pack_row<T>(a, p, run, r); });
  parallel_for(p.kv_heads, [&](std::int64_t g, int) { pack_attention<T>(a, p, run, g); });
  parallel_for(blocks, [&](std::int64_t block, int worker) {
    Carve carve(memory + worker * own_bytes);
    score_block<T>(a, p, run, run.begin + block * kKeyBlock, Worker(carve, p));
  });
  if (blocks > 0 && has_callback(a.reduce_target)) {
    for (std::int64_t r = 0; r < run.rows; ++r) {  // what no range holds is 0
      float* target = run.target + r * run.stride;
      const Run::Part part = run.part(r, run.begin, run.stride);
      for (std::int64_t n = 0; n < part.first && n < run.stride; ++n) target[n] = 0;
      for (std::int64_t n = part.last; n < run.stride; ++n) target[n] = 0;
    }
    call_back(a.reduce_target, make_tensor(run.target, DType::kF32, {run.rows, run.stride}));
  }
  parallel_for(run.rows, [&](std::int64_t r, int) { row_gradient(a, run, r); });
  parallel_for(kLanes, [&](std::int64_t lane, int worker) {
    Carve carve(memory + worker * own_bytes);
    const Worker own(carve, p);
    const std::int64_t size = run.rows * p.index_heads;
    float* d_query = run.d_query + lane * p.run * p.index_heads * p.channels;
    float* d_weights = run.d_weights + lane * p.run * p.index_heads * 8;
    for (std::int64_t x = 0; x < size * p.channels; ++x) d_query[x] = 0;
    for (std::int64_t x = 0; x < size * 8; ++x) d_weights[x] = 0;
    for (std::int64_t block = 0; block < blocks; ++block) {
      const std::int64_t number = run.begin / kKeyBlock + block;
      if (number % kLanes == lane) block_gradient<T>(a, p, run, number * kKeyBlock, lane, own);
    }
  });
  parallel_for(run.rows, [&](std::int64_t r, int) { reduce_row(a, p, run, r); });
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
    for (run.first_row = 0; run.first_row < plan.rows; run.first_row += plan.run) {
      run.rows = min64(plan.run, plan.rows - run.first_row);
      process<T>(a, plan, run, memory);
    }
  });
}

}  // namespace

extern const Implementation<DenseIndexLossArgs> dense_index_loss_implementation;
const Implementation<DenseIndexLossArgs> dense_index_loss_implementation = {
    WINNOW_IMPLEMENTATION_NAME, refuse, workspace_bytes, run_all};

}  // namespace winnow::cpu::WINNOW_ISA
