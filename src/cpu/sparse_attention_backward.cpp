// sparse_attention_backward on a CPU, in two phases over chunks of rows. attention.h says what a
// run is.
//
// Phase 1, parallel over runs: logits and dp of all slots by the register tile, kept for the chunk
// as weights [pair][2][slot]; p = exp(logit - lse), delta = sum p dp, dz = p (dp - delta) scale;
// d_query from dz and 64 keys at a time, as the forward's values.
// Phase 2, parallel over owners of key ranges: sparse_attention_backward_keys.h.
//
// delta comes from p and dp, as the contract defines it, not from d_output . output, which is the
// same number only if output was not rounded: with bf16 outputs that would cost 2^-9 of
// |d_output| |output|, far more than all sums here. The price is a second pass over the keys of a
// row, which are in cache.
//
// Order: dot products are FMA chains over channels; delta = 8 lane chains (slots i, i + 8, ...) and
// a fixed tree; d_query an FMA chain over slots. Chunks, runs and threads leave no trace.
//
// Bound by the FMA pipes: 2 (3 dim_qk + 2 dim_v) FLOPs per pair and slot. Measured as in
// sparse_attention.cpp: 64 heads, 576/512, 2048 slots 48 to 51 GFLOP/s, three times the time of the
// forward; 4 heads, 80/64, without lists 41 to 60, with 128 slots 15 to 18: a key's gradient is
// read and written back for 8 products.
#include "winnow/sparse_attention_backward.h"

#include "base/implementation.h"
#include "base/parallel.h"
#include "cpu/owners.h"
#include "cpu/sparse_attention_backward_keys.h"

namespace winnow::cpu::WINNOW_ISA {
namespace {

using Args = SparseAttentionBackwardArgs;

// What a chunk keeps stays near the caches: this much per thread and once more. Yet there is room
// for one run of any size per thread, as long as these do not exceed the second number.
constexpr std::int64_t kChunkFloats = 1 << 18;
constexpr std::int64_t kMostFloats = 1 << 26;
constexpr std::int64_t kChunkRows = 2048;
constexpr std::int64_t kDenseRange = 96;  // keys of an owner without lists: 16 tiles of 6

AttentionShape shape_of(const Args& a) {
  return AttentionShape(a.query, a.key, a.topk_indices, a.d_output.shape[2]);
}

// Keys of one owner. With lists: some 32 slots of a row per owner, as an owner reads all of a
// row's operands; yet at least 16 owners, to share the work between.
std::int64_t range_keys(const AttentionShape& shape) {
  if (shape.dense) return kDenseRange;
  return max64(16, ceil_div(shape.keys, max64(16, shape.topk / 32)));
}

// Floats that a run of `pairs` pairs over at most `slots` slots keeps for the chunk.
std::int64_t run_floats(const AttentionShape& shape, std::int64_t pairs, std::int64_t slots) {
  return shape.kv_heads * pairs *
         (2 * weights_stride(slots) + kPanel * (shape.key_panels() + shape.value_panels()));
}

// The whole workspace: what the chunk keeps, then what each worker needs.
struct Memory {
  std::int64_t chunk_rows, floats, owners;
  BackwardRun* runs;
  std::int32_t *visible, *ids, *order, *buckets;
  float* pool;
  char* workers;
  std::int64_t bytes;
  Memory(const AttentionShape& shape, std::int64_t worker_bytes, void* memory)
      : owners(ceil_div(shape.keys, range_keys(shape))) {
    const std::int64_t most = shape.dense ? shape.keys : shape.topk;
    const std::int64_t runs_in_all = ceil_div(shape.rows, shape.run_rows);
    const std::int64_t largest = run_floats(shape, shape.pairs, most);
    floats = max64(kChunkFloats * (num_threads() + 1), min64(kMostFloats, num_threads() * largest));
    floats = max64(largest, min64(floats, runs_in_all * largest));
    chunk_rows = min64(shape.rows, kChunkRows);
    if (!shape.dense) chunk_rows = max64(1, min64(chunk_rows, floats / largest));
    const std::int64_t listed = shape.dense ? 0 : chunk_rows;
    Carve carve(memory);
    runs = carve.take<BackwardRun>(chunk_rows);
    visible = carve.take<std::int32_t>(chunk_rows);
    ids = carve.take<std::int32_t>(listed * shape.topk);
    order = carve.take<std::int32_t>(listed * shape.topk);
    buckets = carve.take<std::int32_t>(listed * (owners + 1));
    pool = carve.take<float>(floats);
    workers = carve.take<char>(num_threads() * worker_bytes);
    bytes = carve.bytes_to_ask();
  }
};

struct Buffers {
  float *query, *d_output, *panel, *keys, *sums;
  std::int32_t* visible;
  std::int64_t bytes;
  Buffers(const AttentionShape& s, void* memory) {
    Carve carve(memory);
    query = carve.take<float>(s.pairs * s.dim_qk + kTileSlack);
    d_output = carve.take<float>(s.pairs * s.dim_v + kTileSlack);
    panel = carve.take<float>(max64(s.dim_qk, s.dim_v) * kPanel);
    keys = carve.take<float>(s.key_panels() * kSlotBlock * kPanel);
    sums = carve.take<float>(s.key_panels() * s.pairs * kPanel);
    visible = carve.take<std::int32_t>(s.pairs);
    bytes = carve.used();
  }
};

// Of one pair over n slots: logits to probabilities p, and dp to dz * scale, both in place.
void differentiate(float* p, float* dp, std::int64_t n, float scale, float lse) {
  const F8 scales = splat(scale), offset = splat(lse);
  const bool weightless = lse == -__builtin_inff();
  F8 sum = zero8();
  for (std::int64_t i = 0; i < n; i += 8) {
    const I8 seen = splat(static_cast<std::int32_t>(weightless ? 0 : n - i)) > iota8();
    const F8 weight = seen ? exp8(scales * load(p + i) - offset) : zero8();
    const F8 gradient = seen ? load(dp + i) : zero8();
    store(p + i, weight);
    store(dp + i, gradient);
    sum = fma(weight, gradient, sum);
  }
  const F8 delta = splat(sum8(sum));
  for (std::int64_t i = 0; i < n; i += 8)
    store(dp + i, scales * (load(p + i) * (load(dp + i) - delta)));
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
void differentiate_run(const Args& a, const AttentionShape& shape, const Buffers& b,
                       const BackwardRun& run, std::int64_t g) {
  const bool shared = a.value.empty();
  const Tiles tiles(run.pairs);
  const Slots& slots = run.slots;
  const std::int64_t head = g * shape.group, stride = 2 * run.stride;
  const KeyRows<T> keys(a.key, g), values(shared ? a.key : a.value, g);
  const PairRows<const T> query(a.query, run.row, head, shape.group);
  const PairRows<const Out> d_output(a.d_output, run.row, head, shape.group);
  float* dz = run.weights + g * run.weights_per_head();
  float* p = dz + run.stride;
  pack_pairs(query, tiles, shape.dim_qk, b.query);
  pack_pairs(d_output, tiles, shape.dim_v, b.d_output);
  for (int i = 0; i < run.pairs; ++i) b.visible[i] = run.visible[i / shape.group];

  const int lines = 1 + static_cast<int>(sizeof(T)) / 4;
  for (std::int64_t s = 0; s < slots.count; s += kPanel) {
    Prefetcher ahead = rows_ahead(keys, slots, s + kPanel, shape.dim_qk);
    pack_slots(keys, slots, s, shape.dim_qk, b.panel);
    dot_pairs(b.query, tiles, b.visible, s, shape.dim_qk, b.panel, p + s, stride, ahead, lines);
    if (!shared) {
      pack_slots(values, slots, s, shape.dim_v, b.panel);
      ahead = rows_ahead(values, slots, s + kPanel, shape.dim_v);
    }
    dot_pairs(b.d_output, tiles, b.visible, s, shape.dim_v, b.panel, dz + s, stride, ahead, lines);
  }
  const PairRows<const float> lse(a.lse, run.row, head, shape.group);
  for (int i = 0; i < run.pairs; ++i) {
    differentiate(p + i * stride, dz + i * stride, b.visible[i],
                  static_cast<float>(a.softmax_scale), *lse[i]);
  }
  for (std::int64_t i = 0; i < shape.key_panels() * run.pairs * kPanel; ++i) b.sums[i] = 0;
  for (std::int64_t s = 0; s < slots.count; s += kSlotBlock) {
    copy_slots(keys, slots, s, min64(kSlotBlock, slots.count - s), shape.dim_qk, b.keys);
    Prefetcher ahead = rows_ahead(keys, slots, s + kSlotBlock, shape.dim_qk);
    add_weighted(dz + s, stride, tiles, run.pairs, b.visible, s, nullptr, b.keys, shape.dim_qk,
                 b.sums, ahead);
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

// The slots of one row, and which owner each belongs to.
void list_slots(const Args& a, const AttentionShape& shape, const Memory& m, std::int64_t row,
                std::int64_t at) {
  std::int32_t* ids = m.ids + at * shape.topk;
  const RowRange range = row_range(a.starts, a.ends, row, shape.keys);
  const std::int64_t count =
      keep_slots(a.topk_indices, row, 0, list_length(a.topk_indices, a.topk_lengths, row), range,
                 nullptr, ids);
  m.visible[at] = static_cast<std::int32_t>(count);
  order_by_owner(ids, count, range_keys(shape), m.owners, m.buckets + at * (m.owners + 1),
                 m.order + at * shape.topk);
}

// Cuts rows from `row` on into the runs of one chunk. Returns how many.
std::int64_t make_runs(const Args& a, const AttentionShape& shape, const Memory& m,
                       std::int64_t row) {
  std::int64_t runs = 0, rows = 0, used = 0;
  while (row + rows < shape.rows && rows < m.chunk_rows) {
    BackwardRun& run = m.runs[runs];
    run = {};
    run.row = row + rows;
    run.rows = 1;
    run.visible = m.visible + rows;
    std::int64_t slots = shape.topk;
    if (shape.dense) {
      const std::int64_t most =
          min64(shape.run_rows, min64(shape.rows - run.row, m.chunk_rows - rows));
      run.rows = dense_run(a.starts, a.ends, shape.keys, run.row, static_cast<int>(most),
                           m.visible + rows, run.slots);
      slots = run.slots.count;
    } else {
      run.slots.ids = m.ids + rows * shape.topk;
      run.order = m.order + rows * shape.topk;
      run.buckets = m.buckets + rows * (m.owners + 1);
    }
    run.pairs = run.rows * shape.group;
    run.stride = weights_stride(slots);
    const std::int64_t need = run_floats(shape, run.pairs, slots);
    if (used + need > m.floats) break;
    run.weights = m.pool + used;
    run.operands = run.weights + shape.kv_heads * run.weights_per_head();
    used += need;
    rows += run.rows;
    ++runs;
  }
  return runs;
}

Target target_of(const Tensor& t, std::int64_t g) {
  return {t.as<float>() + g * t.strides[1], t.strides[0], t.shape[2]};
}

void zero_rows(const Target& target, std::int64_t first, std::int64_t last) {
  for (std::int64_t j = first; j < last; ++j) {
    for (std::int64_t c = 0; c < target.channels; ++c) target.data[j * target.stride + c] = 0;
  }
}

template <class T, class Out>
void run_typed(const Args& a, Workspace workspace) {
  const AttentionShape shape = shape_of(a);
  const std::int64_t worker_bytes = Buffers(shape, nullptr).bytes;
  const Memory m(shape, worker_bytes, workspace.data);
  const std::int64_t size = range_keys(shape), heads = shape.kv_heads;
  // work(g, owner, first key, end of keys, targets)
  auto for_each_owner = [&](auto&& work) {
    parallel_for(m.owners * heads, [&](std::int64_t task, int) {
      const std::int64_t g = task % heads, owner = task / heads, first = owner * size;
      const Target d_key = target_of(a.d_key, g);
      if (a.value.empty()) {
        work(g, owner, first, min64(shape.keys, first + size), d_key, nullptr);
      } else {
        const Target d_value = target_of(a.d_value, g);
        work(g, owner, first, min64(shape.keys, first + size), d_key, &d_value);
      }
    });
  };
  for_each_owner([](std::int64_t, std::int64_t, std::int64_t first, std::int64_t last,
                    const Target& d_key, const Target* d_value) {
    zero_rows(d_key, first, last);
    if (d_value != nullptr) zero_rows(*d_value, first, last);
  });
  for (std::int64_t row = 0; row < shape.rows;) {
    const std::int64_t runs = make_runs(a, shape, m, row);
    if (!shape.dense) {
      parallel_for(runs, [&](std::int64_t i, int) {
        list_slots(a, shape, m, row + i, i);
        m.runs[i].slots.count = m.visible[i];
      });
    }
    parallel_for(runs * heads, [&](std::int64_t task, int worker) {
      const Buffers b(shape, m.workers + worker * worker_bytes);
      differentiate_run<T, Out>(a, shape, b, m.runs[task / heads], task % heads);
    });
    for_each_owner([&](std::int64_t g, std::int64_t owner, std::int64_t first, std::int64_t last,
                       const Target& d_key, const Target* d_value) {
      for (std::int64_t i = 0; i < runs; ++i)
        add_run(shape, m.runs[i], g, d_key, d_value, owner, first, last);
    });
    row = m.runs[runs - 1].row + m.runs[runs - 1].rows;
  }
}

Refusal refuse(const Args& a) {
  return refuse_layout(a.query,
                       {a.query, a.key, a.value, a.d_output, a.d_query, a.d_key, a.d_value});
}

std::int64_t workspace_bytes(const Args& a) {
  const AttentionShape shape = shape_of(a);
  return Memory(shape, Buffers(shape, nullptr).bytes, nullptr).bytes;
}

void run(const Args& a, Workspace workspace) {
  with_element(a.query.dtype, [&]<class T>(const T*) {
    if (a.d_output.dtype == DType::kF32) {
      run_typed<T, float>(a, workspace);
    } else {
      run_typed<T, T>(a, workspace);
    }
  });
}

}  // namespace

extern const Implementation<Args> sparse_attention_backward_implementation;
const Implementation<Args> sparse_attention_backward_implementation = {
    WINNOW_IMPLEMENTATION_NAME, refuse, workspace_bytes, run};

}  // namespace winnow::cpu::WINNOW_ISA
